"""stoker ckpt import: weights that other tools wrote become a checkpoint, or a sentence says why
not."""

from __future__ import annotations

import json
import os
import pickle

import pytest
import torch
from safetensors.torch import save_file
import torch.distributed.checkpoint as dcp
from torch import nn

import stoker
from stoker import errors
from stoker.errors import Corruption, NotFound
from stoker.checkpoint import importing
from stoker.ckpt.cli import main


class Runs:
    """A pickle that would run code."""

    def __reduce__(self):
        return os.mkdir, ("it-ran",)


@pytest.fixture
def tied() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.BatchNorm1d(64))
    model[1].weight = model[0].weight
    return model


def imported(store, like: nn.Module) -> None:
    """What the store holds equals `like`, and went through a verified restore."""
    expected = {name: value.clone() for name, value in like.state_dict().items()}
    with torch.no_grad():
        for value in like.state_dict().values():
            value.zero_()
    with stoker.Checkpoints(store, staging="64MiB") as ckpt:
        assert ckpt.restore(model=like).step == 7
    for name, value in like.state_dict().items():
        assert torch.equal(value, expected[name]), name


@pytest.mark.parametrize("zipped", [True, False])
def test_a_file_of_torch_save_keeps_its_ties(tmp_path, tied, zipped):
    file, store = tmp_path / "all.pt", str(tmp_path / "store")
    whole = {"model": tied.state_dict(), "epoch": 3}
    torch.save(whole, file, _use_new_zipfile_serialization=zipped)
    assert main(["import", store, str(file), "--step", "7", "--key", "model"]) == 0
    imported(store, tied)


def test_a_folder_of_safetensors_keeps_what_lies_beside_it(tmp_path):
    model, source = nn.Linear(64, 64), tmp_path / "source"
    source.mkdir()
    save_file({"weight": model.weight.detach()}, source / "model-1.safetensors")
    save_file({"bias": model.bias.detach()}, source / "model-2.safetensors")
    (source / "config.json").write_text('{"a": 1}')
    parts = {"weight": "model-1.safetensors", "bias": "model-2.safetensors"}
    (source / importing.INDEX).write_text(json.dumps({"weight_map": parts}))
    store = tmp_path / "store"
    for _ in range(5):  # more than stoker.Checkpoints keeps by default
        assert main(["import", str(store), str(source), "--step", "7"]) == 0
    folders = list(store.glob("step-*"))
    assert len(folders) == 5
    assert all((each / "config.json").read_text() == '{"a": 1}' for each in folders)
    imported(str(store), model)


def test_what_cannot_be_taken_is_told(tmp_path):
    file = tmp_path / "all.pt"
    torch.save({"model": {"w": torch.ones(2)}, "epoch": 3}, file)
    with pytest.raises(errors.InvalidArgument, match="entries are model, epoch"):
        importing.read(file)
    with pytest.raises(errors.InvalidArgument, match="no entry 'weights'"):
        importing.read(file, "weights")
    with pytest.raises(errors.NotFound):
        importing.read(tmp_path / "nowhere")
    cut = tmp_path / "cut.safetensors"
    save_file({"w": torch.ones(2)}, cut)
    cut.write_bytes(cut.read_bytes()[:-1])
    with pytest.raises(errors.Corruption, match="is not a safetensors file"):
        importing.read(cut)


def test_no_code_of_a_file_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"w": Runs()}, "bad.pt")
    with pytest.raises(errors.InvalidArgument, match="weights_only=True"):
        importing.read("bad.pt")
    assert not os.path.exists("it-ran")


def test_a_folder_is_what_its_index_names(tmp_path):
    for name in ("a", "b", "stale"):
        save_file({name: torch.ones(3)}, tmp_path / f"{name}.safetensors")
    index = tmp_path / importing.INDEX
    index.write_text(json.dumps({"weight_map": {"a": "a.safetensors", "b": "b.safetensors"}}))
    assert importing.read(tmp_path)["model"].tensors.keys() == {"a", "b"}
    (tmp_path / "b.safetensors").unlink()
    with pytest.raises(NotFound, match="lists b.safetensors, which is not"):
        importing.read(tmp_path)
    index.write_text("[]")
    with pytest.raises(Corruption, match="damaged"):
        importing.read(tmp_path)


@pytest.mark.parametrize("alone", [True, False])
def test_a_folder_of_dcp_becomes_a_checkpoint(tmp_path, alone):
    model, source, store = nn.Linear(64, 64), tmp_path / "source", str(tmp_path / "store")
    state = model.state_dict() if alone else {"model": model.state_dict(), "step": 3}
    dcp.save(state, checkpoint_id=source, no_dist=True)
    key = [] if alone else ["--key", "model"]
    assert main(["import", store, str(source), "--step", "7", *key]) == 0
    imported(store, model)
    if not alone:
        with pytest.raises(errors.InvalidArgument, match="its entries are model, step"):
            importing.read(source)
        with pytest.raises(errors.InvalidArgument, match="no entry 'weights'"):
            importing.read(source, "weights")


def test_no_code_of_a_dcp_folder_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    source = tmp_path / "source"
    dcp.save({"w": torch.ones(3)}, checkpoint_id=source, no_dist=True)
    metadata = (source / ".metadata").read_bytes()
    for cut in range(0, len(metadata), 7):
        (source / ".metadata").write_bytes(metadata[:cut])
        with pytest.raises(Corruption):
            importing.read(source)
    for thing in (Runs(), {"a": Runs()}):
        (source / ".metadata").write_bytes(pickle.dumps(thing))
        with pytest.raises(errors.InvalidArgument, match="refers to posix.mkdir"):
            importing.read(source)
    assert not os.path.exists("it-ran")
    (source / ".metadata").write_bytes(metadata)
    (source / "__0_0.distcp").unlink()
    with stoker.Checkpoints(tmp_path / "store", staging="64MiB") as ckpt:
        handle = ckpt.save(1, **importing.read(source))
        with pytest.raises(NotFound, match="distcp, which does not exist"):
            handle.wait()
        with pytest.raises(NotFound):
            ckpt.wait()


def test_an_import_holds_no_file_in_memory(tmp_path):
    """The bytes come from the file when they are written, a chunk at a time."""
    save_file({"w": torch.zeros(1 << 20)}, tmp_path / "a.safetensors")
    what = importing.read(tmp_path / "a.safetensors")
    with open(tmp_path / "a.safetensors", "r+b") as file:
        file.seek(-4, os.SEEK_END)
        file.write(torch.tensor([2.0]).numpy().tobytes())
    with stoker.Checkpoints(tmp_path / "store", staging="64MiB") as ckpt:
        ckpt.save(7, **what).wait()
    like = nn.Module()
    like.w = nn.Parameter(torch.zeros(1 << 20))
    with stoker.Checkpoints(tmp_path / "store", staging="64MiB") as ckpt:
        ckpt.restore(model=like)
    assert like.w[-1] == 2
