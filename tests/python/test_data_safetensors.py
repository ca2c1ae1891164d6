"""Rows of safetensors files."""

from __future__ import annotations

import json
import os
import runpy
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

import stoker
from stoker.data import Indexed, Loader, Safetensors
from stoker.data.index import SAFETENSORS, read
from stoker.dataset.cli import main
from stoker.errors import Corruption, InvalidArgument, NotFound, StokerError

TENSORS = {
    "x": torch.arange(60, dtype=torch.float32).reshape(10, 3, 2),
    "y": torch.arange(10, dtype=torch.int64),
    "half": torch.arange(10).to(torch.bfloat16).reshape(10, 1),
    "yes": torch.arange(10) % 3 == 0,
    "tiny": torch.arange(30).to(torch.float8_e4m3fn).reshape(10, 3),
}


@pytest.fixture
def store(tmp_path):
    """Two files of ten rows; those of the second follow those of the first."""
    save_file(TENSORS, tmp_path / "a.safetensors")
    save_file({name: each.flip(0) for name, each in TENSORS.items()}, tmp_path / "b.safetensors")
    with stoker.open_store(f"dir:{tmp_path}") as store:
        yield store


KEYS = ["a.safetensors", "b.safetensors"]


def everything(source):
    return source.batch(np.arange(len(source), dtype=np.uint64))


def test_rows_are_dicts_of_all_tensors(store):
    source = Safetensors(store, KEYS)
    assert len(source) == 20
    random = np.random.default_rng(3).permutation(20)
    for number, got in zip(random, source.batch(random.astype(np.uint64)), strict=True):
        row = number if number < 10 else 19 - number
        assert sorted(got) == sorted(TENSORS)
        for name, tensor in TENSORS.items():
            want = tensor[row]
            assert got[name].dtype == want.dtype and got[name].shape == want.shape
            assert torch.equal(got[name].to(torch.float64), want.to(torch.float64)), name


def test_one_tensor_comes_as_batches_of_its_rows(store):
    source = Safetensors(store, KEYS, "x")
    want = torch.cat([TENSORS["x"], TENSORS["x"].flip(0)])
    assert torch.equal(everything(source), want)
    for shuffle in (True, "window"):
        loader = Loader(source, batch=6, shuffle=shuffle)
        got = torch.cat(list(loader))
        loader.close()
        assert torch.equal(got.reshape(20, -1).sort(0).values, want.reshape(20, -1).sort(0).values)
    assert everything(Safetensors(store, KEYS, "half")).dtype == torch.bfloat16
    assert everything(Safetensors(store, KEYS, "y")).shape == (20,)
    some = everything(Safetensors(store, KEYS, ["y", "x"]))
    assert list(some[0]) == ["y", "x"] and some[11]["y"] == 8


def test_collating_gives_a_dict_of_batches(store):
    collate = torch.utils.data.default_collate
    loader = Loader(Safetensors(store, KEYS), batch=20, shuffle=False, collate=collate)
    (batch,) = list(loader)
    loader.close()
    assert torch.equal(batch["x"][:10], TENSORS["x"])


@pytest.mark.parametrize("crc", [[], ["--crc"]])
def test_an_index_gives_the_same_rows(store, tmp_path, crc, capsys):
    out = tmp_path / "i"
    assert main(["index", f"dir:{tmp_path}", "--out", str(out), *crc]) == 0
    assert "20 samples" in capsys.readouterr().out and read(out).kind == SAFETENSORS
    indexed, direct = Indexed(store, out), Safetensors(store, KEYS)
    assert indexed.fingerprint == direct.fingerprint
    for one, other in zip(everything(indexed), everything(direct), strict=True):
        assert list(one) == list(other)
        assert all(
            torch.equal(one[name].view(torch.uint8), other[name].view(torch.uint8))
            for name in one
            if one[name].dim()
        )
    if not crc:
        return
    path = tmp_path / "a.safetensors"
    whole = bytearray(path.read_bytes())
    stamp = path.stat()
    whole[-1] ^= 1
    with path.open("r+b") as file:
        file.write(whole)
    os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    with stoker.open_store(f"dir:{tmp_path}") as again:
        with pytest.raises(Corruption, match=r"sample \d+ is damaged.*a\.safetensors"):
            everything(Indexed(again, out))


def raw(header: object, data: bytes) -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(kind: str, shape: list, begin: int, end: int) -> dict:
    return {"dtype": kind, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    ("content", "error", "words"),
    [
        (b"", Corruption, "not a safetensors file"),
        (b"\xff" * 9, Corruption, "not a safetensors file"),
        (raw([], b""), Corruption, "not a safetensors file"),
        (raw({}, b""), InvalidArgument, "has no tensors"),
        (raw({"x": entry("F32", [2], 0, 8)}, b"1234567"), Corruption, "not a safetensors file"),
        (raw({"x": entry("F32", [2], 0, 8)}, b"123456789"), Corruption, "tensors end at"),
        (raw({"x": entry("F32", [2], 0, 4)}, b"1234"), Corruption, "not a safetensors file"),
        (raw({"x": entry("F32", [2**61], 0, 2**63)}, b"1"), Corruption, "not a safetensors file"),
        (raw({"x": entry("F32", [-1], 0, 4)}, b"1234"), Corruption, "not a safetensors file"),
        (raw({"x": entry("F4", [1], 0, 4)}, b"1234"), Corruption, "not a safetensors file"),
        (
            raw({"x": entry("U8", [2], 0, 2), "y": entry("U8", [2], 1, 3)}, b"123"),
            Corruption,
            "does not begin at byte",
        ),
        (raw({"x": entry("U8", [2], 1, 3)}, b"123"), Corruption, "does not begin at byte"),
        (raw({"x": entry("U8", [], 0, 1)}, b"1"), InvalidArgument, "has no rows"),
        (raw({"x": entry("U8", [9, 0], 0, 0)}, b""), InvalidArgument, "has no rows"),
        (
            raw({"x": entry("U8", [2], 0, 2), "y": entry("U8", [1], 2, 3)}, b"123"),
            InvalidArgument,
            "different numbers of rows",
        ),
    ],
)
def test_what_a_file_may_not_say(tmp_path, content, error, words):
    (tmp_path / "f").write_bytes(content)
    with stoker.open_store(f"dir:{tmp_path}") as store:
        with pytest.raises(error, match=words):
            Safetensors(store, "f")
        with pytest.raises(NotFound):
            Safetensors(store, "gone")


def test_tensors_that_do_not_fit(store, tmp_path):
    with pytest.raises(
        InvalidArgument, match=r"no tensor 'z': name one that it has \(half, tiny, x, y, yes"
    ):
        Safetensors(store, KEYS, "z")
    save_file({"x": torch.zeros(4, 3)}, tmp_path / "c.safetensors")
    with pytest.raises(InvalidArgument, match=r"'c\.safetensors' has other tensors"):
        Safetensors(store, [*KEYS, "c.safetensors"], "x")


def test_every_cut_is_an_error(tmp_path):
    save_file({"x": torch.zeros(5, 3), "y": torch.zeros(5)}, tmp_path / "f")
    whole = (tmp_path / "f").read_bytes()
    with stoker.open_store(f"dir:{tmp_path}") as store:
        assert len(Safetensors(store, "f")) == 5
    for size in range(len(whole)):
        (tmp_path / "f").write_bytes(whole[:size])
        with stoker.open_store(f"dir:{tmp_path}") as store, pytest.raises(Corruption):
            Safetensors(store, "f")


def test_a_hundred_million_rows_take_no_memory(tmp_path):
    """The file is a hole behind its header."""
    rows = 10**8
    header = {
        "x": entry("F32", [rows, 2], 0, 8 * rows),
        "y": entry("U8", [rows], 8 * rows, 9 * rows),
    }
    with (tmp_path / "f").open("wb") as file:
        file.write(raw(header, b""))
        file.truncate(file.tell() + 9 * rows)
    with stoker.open_store(f"dir:{tmp_path}") as store:
        source = Safetensors(store, "f")
        assert len(source) == rows
        got = source.batch(np.array([rows - 1, 0], np.uint64))
        assert [each["x"].tolist() for each in got] == [[0, 0]] * 2


@settings(max_examples=120, deadline=None)
@given(st.data())
def test_any_edit_of_a_header_is_an_error_or_rows_of_equal_size(tmp_path_factory, data):
    whole = bytearray(
        raw({"x": entry("F32", [3, 1], 0, 12), "y": entry("U8", [3], 12, 15)}, bytes(15))
    )
    at = data.draw(st.integers(0, len(whole) - 1))
    new = data.draw(st.binary(max_size=4))
    whole[at : at + len(new)] = new
    folder = tmp_path_factory.mktemp("edit")
    (folder / "f").write_bytes(whole)
    with stoker.open_store(f"dir:{folder}") as store:
        try:
            source = Safetensors(store, "f")
            got = everything(source)
        except StokerError:
            return
    sizes = {sum(part.numel() * part.element_size() for part in each.values()) for each in got}
    assert len(sizes) == 1 and sizes.pop() * len(got) == 15


def test_the_example_reads_an_epoch(store, tmp_path, monkeypatch, capsys):
    script = Path(__file__).resolve().parents[2] / "examples/read_samples.py"
    arguments = [str(script), "safetensors", f"dir:{tmp_path}", "a.safetensors"]
    monkeypatch.setattr("sys.argv", arguments)
    runpy.run_path(str(script), run_name="__main__")
    assert "10 samples" in capsys.readouterr().out
