"""torch.distributed.checkpoint with Stoker's writer and reader: one process, and ranks of FSDP2."""

from __future__ import annotations

import io
import os
import pickle
import threading

import pytest
import torch
import torch.distributed.checkpoint as dcp

import dcp_run
from fsdp_run import Group
from stoker import errors
from stoker.checkpoint import Edited, parts
from stoker.ckpt import cli as ckpt_cli
from stoker.integrations import dcp as integration
from stoker.integrations.dcp import Reader, Writer


class Blob:
    """An object that only pickle can write; DCP gives it as bytes."""

    def __init__(self, value: int) -> None:
        self.value = value


def state_of(seed: int) -> dict:
    torch.manual_seed(seed)
    return {
        "weights": {
            "a": torch.randn(70, 300),
            "turned": torch.randn(40, 30).t(),
            "bf16": torch.randn(5).bfloat16(),
            "scalar": torch.tensor(seed),
            "empty": torch.empty(0, 3),
        },
        "list": [torch.randn(3), {"b": torch.randn(2, 2, 2)}],
        "number": seed,
        "text": "x" * seed,
    }


def same(a, b) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b) and a.dtype == b.dtype
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


def save(state, where, **options) -> None:
    writer = Writer(staging="16MiB", **options)
    dcp.save(state, checkpoint_id=where, storage_writer=writer, no_dist=True)
    writer.close()


def load(where, state) -> dict:
    dcp.load(state, checkpoint_id=where, storage_reader=Reader(staging="16MiB"), no_dist=True)
    return state


def test_what_is_saved_comes_back_from_any_name(tmp_path):
    folder = tmp_path / "run"
    for step in (1, 2):
        save(state_of(step), f"{folder}/step-{step}")
    save(state_of(3), folder / "step-2")  # once more: nothing is overwritten
    names = sorted(os.listdir(folder))
    assert [name[:18] for name in names] == [
        "step-000001-000001", "step-000002-000002", "step-000002-000003",
    ]  # fmt: skip
    for where, seed in ((folder, 3), (f"{folder}/step-1", 1), (folder / names[1], 2)):
        assert same(load(where, state_of(9)), state_of(seed))
    assert ckpt_cli.main(["verify", "--all", str(folder)]) == 0
    with pytest.raises(dcp.CheckpointException) as raised:
        load(f"{folder}/step-5", state_of(9))
    assert "no intact checkpoint of step 5" in str(raised.value)
    with pytest.raises(errors.InvalidArgument, match="names no step to save"):
        save(state_of(1), folder)


def test_a_part_of_the_state_is_all_that_is_read(tmp_path, monkeypatch):
    save({"large": torch.randn(1 << 22), "small": torch.arange(4)}, tmp_path / "run" / "step-1")
    wanted = []
    from stoker.checkpoint.reading import Reader as Checkpoint

    copy = Checkpoint.copy
    monkeypatch.setattr(
        Checkpoint, "copy", lambda self, file, w, *a: (wanted.extend(w), copy(self, file, w, *a))
    )
    loaded = load(tmp_path / "run", {"small": torch.zeros(4, dtype=torch.int64)})
    assert loaded["small"].tolist() == [0, 1, 2, 3]
    assert sum(each.bytes for each in wanted) == 32


def test_damage_is_found_and_an_unfinished_save_is_none(tmp_path, monkeypatch):
    folder = tmp_path / "run"
    save(state_of(1), folder / "step-1")
    with monkeypatch.context() as patch:
        patch.setattr(Writer, "finish", lambda *_: (_ for _ in ()).throw(OSError("no more")))
        with pytest.raises(dcp.CheckpointException):
            save(state_of(2), folder / "step-2")
    assert same(load(folder, state_of(9)), state_of(1))
    (pack,) = folder.glob("step-000001*/state-00000.pack")
    data = bytearray(pack.read_bytes())
    data[5000] ^= 1
    pack.write_bytes(data)
    with pytest.raises(dcp.CheckpointException) as raised:
        load(folder, state_of(9))
    assert "state-00000.pack between byte 0" in str(raised.value)


def test_bytes_stay_as_dcp_gives_them(tmp_path):
    class Stateful:
        def __init__(self, value):
            self.blob = Blob(value)

        def state_dict(self):
            return {"blob": self.blob}

        def load_state_dict(self, state):
            self.blob = state["blob"]

    torch.serialization.add_safe_globals([Blob])
    save({"thing": Stateful(4)}, tmp_path / "run" / "step-1")
    thing = Stateful(0)
    load(tmp_path / "run", {"thing": thing})
    assert thing.blob.value == 4
    (pack,) = (tmp_path / "run").glob("step-*/*.pack")
    given = torch.load(io.BytesIO(pack.read_bytes()), weights_only=True)
    assert given.value == 4


@pytest.fixture
def held(monkeypatch):
    """No byte leaves memory until the event is set."""
    begin, read = threading.Event(), parts.Tensor.read

    def wait(self, *args):
        assert begin.wait(60)
        read(self, *args)

    monkeypatch.setattr(parts.Tensor, "read", wait)
    yield begin
    begin.set()


def test_async_save_copies_nothing_large_and_holds_step(tmp_path, held, monkeypatch):
    model = torch.nn.Linear(300, 200)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(2, 300)).sum().backward()
    writer = Writer(staging="16MiB")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = {"model": model.state_dict()}
    future = dcp.async_save(
        state, checkpoint_id=tmp_path / "run/step-1", storage_writer=writer, no_dist=True
    )
    stepped = threading.Thread(target=opt.step)
    stepped.start()
    stepped.join(0.2)
    assert stepped.is_alive() and torch.equal(model.weight, before["weight"])
    held.set()
    stepped.join(60)
    future.result()
    assert not torch.equal(model.weight, before["weight"])
    loaded = {"model": {name: torch.zeros_like(value) for name, value in before.items()}}
    assert same(load(tmp_path / "run", loaded)["model"], before)
    with pytest.raises(errors.Unsupported, match="AsyncCheckpointerType.THREAD"):
        pickle.dumps(writer)  # as AsyncCheckpointerType.PROCESS does
    monkeypatch.setattr(integration, "TAKEN_WITHIN", 0.1)
    writer.stage(state)
    opt.step()  # nothing waits for a save that never began


def test_an_edit_during_async_save_fails_the_save(tmp_path, held):
    state = {"weight": torch.ones(300, 200)}
    writer = Writer(staging="16MiB")
    future = dcp.async_save(
        state, checkpoint_id=tmp_path / "run/step-1", storage_writer=writer, no_dist=True
    )
    state["weight"].add_(1)
    held.set()
    with pytest.raises(dcp.CheckpointException) as raised:
        future.result()
    assert any(isinstance(each[0], Edited) for each in raised.value.failures.values())
    torch.optim.SGD([torch.ones(1, requires_grad=True)]).step()


@pytest.mark.parametrize(
    ("saving", "loading", "asynchronously"), [(2, 1, True), (1, 2, False), (2, 3, False)]
)
def test_ranks_of_fsdp2(tmp_path, saving, loading, asynchronously):
    folder = str(tmp_path / "run")
    told = Group(
        tmp_path, saving, dcp_run.save, where=folder, asynchronously=asynchronously
    ).finish()
    assert all("state" in lines[-1] for lines in told), told
    loaded = Group(tmp_path, loading, dcp_run.load, where=folder).finish()
    for lines in loaded:
        assert lines[-1] == told[0][-1]
    (made,) = (tmp_path / "run").glob("step-*")
    assert len(list(made.glob("state-*.pack"))) == saving
    assert ckpt_cli.main(["verify", folder]) == 0
