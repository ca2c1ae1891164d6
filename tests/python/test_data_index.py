"""Indexes of data sets: what `stoker data index` writes is what sources read."""

from __future__ import annotations

import json
import os
import re
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import stoker
from stoker import _core
from stoker.data import Files, Indexed, Loader, Tar
from stoker.data.index import TAR, WHOLE, Index, read, write
from stoker.data.indexing import build, of_objects
from stoker.dataset.cli import main
from stoker.errors import Corruption, InvalidArgument, Mismatch, NotFound
from tars import tar_of

PAGE = Path(__file__).resolve().parents[2] / "docs/formats/data_index.md"
SEED = 20261123


@pytest.fixture
def shards(tmp_path):
    """A folder of three tar files, 60 samples of odd sizes, some of them empty."""
    random = np.random.default_rng(SEED)
    folder = tmp_path / "shards"
    folder.mkdir()
    for shard in range(3):
        samples = {
            f"{shard}-{i}": {
                "jpg": random.bytes(int(random.integers(0, 5000))),
                **({"cls": b"%d" % i} if i % 2 else {}),
            }
            for i in range(20)
        }
        (folder / f"{shard}.tar").write_bytes(tar_of(samples))
    return folder


def same(ours, theirs) -> bool:
    return all(
        one.keys() == other.keys()
        and one["__key__"] == other["__key__"]
        and all(torch.equal(one[key], other[key]) for key in one if key != "__key__")
        for one, other in zip(ours, theirs, strict=True)
    )


@pytest.mark.parametrize("crc", [[], ["--crc"]])
def test_an_indexed_data_set_is_the_one_of_its_tar_files(shards, tmp_path, crc, capsys):
    out = tmp_path / "index"
    assert main(["index", f"dir:{shards}", "--out", str(out), *crc]) == 0
    assert "60 samples" in capsys.readouterr().out
    assert (read(out).crc is not None) == bool(crc)
    assert not list(tmp_path.glob("index.*")) and not list(tmp_path.glob(".index*"))
    with stoker.open_store(f"dir:{shards}") as store:
        indexed, direct = Indexed(store, out), Tar(store, [f"{i}.tar" for i in range(3)])
        numbers = np.random.default_rng(SEED).permutation(60).astype(np.uint64)
        assert same(indexed.batch(numbers), direct.batch(numbers))
        loader = Loader(indexed, batch=7, seed=3)
        other = Loader(direct, batch=7, seed=3)
        assert loader.state_dict() == other.state_dict()  # either goes on where the other stopped
        for ours, theirs in zip(loader, other, strict=True):
            assert same(ours, theirs)
    assert main(["show", str(out), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["samples"] == 60 and facts["extensions"] == ["jpg", "cls"]


def test_the_command_indexes_a_folder_of_files(tmp_path):
    folder = tmp_path / "images"
    (folder / "b").mkdir(parents=True)
    (folder / "a.jpg").write_bytes(b"first")
    (folder / "b/c.jpg").write_bytes(b"second one")
    command = [os.path.join(os.path.dirname(sys.executable), "stoker"), "data", "index"]
    done = subprocess.run(
        [*command, f"dir:{folder}", "--out", str(tmp_path / "i")], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    with stoker.open_store(f"dir:{folder}") as store:
        got = Indexed(store, tmp_path / "i").batch(np.array([1, 0], np.uint64))
        want = Files(store).batch(np.array([1, 0], np.uint64))
        assert [name for name, _ in got] == ["b/c.jpg", "a.jpg"]
        assert all(torch.equal(a[1], b[1]) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("ending", [".tar.xz", ".tar.bz2"])
def test_other_compressed_tar_files_are_refused_by_name(shards, tmp_path, ending, capsys):
    """Before, a folder of these was indexed as files, and beside plain ones they were left out."""
    (shards / f"9{ending}").write_bytes(b"\x1f\x8b")
    assert main(["index", f"dir:{shards}", "--out", str(tmp_path / "i")]) == 1
    assert f"9{ending} is compressed" in capsys.readouterr().err
    for path in shards.glob("*.tar"):
        path.unlink()
    assert main(["index", f"dir:{shards}", "--out", str(tmp_path / "i")]) == 1
    assert f"9{ending} is compressed" in capsys.readouterr().err


def test_every_flipped_bit_of_a_sample_is_found_with_checksums(shards, tmp_path):
    out = tmp_path / "index"
    assert main(["index", f"dir:{shards}", "--out", str(out), "--crc"]) == 0
    index = read(out)
    random = np.random.default_rng(SEED)
    path = shards / "1.tar"
    stamp = path.stat()
    whole = path.read_bytes()
    for _ in range(20):
        part = int(random.choice(np.flatnonzero((index.object == 1) & (index.bytes > 0))))
        at = int(index.offset[part]) + int(random.integers(int(index.bytes[part])))
        broken = bytearray(whole)
        broken[at] ^= 1 << int(random.integers(8))
        with path.open("r+b") as file:  # in place, as a bad disk does it
            file.write(broken)
        os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
        sample = int(np.searchsorted(index.starts, part, side="right")) - 1
        with stoker.open_store(f"dir:{shards}") as store:
            source = Indexed(store, out)
            with pytest.raises(Corruption, match=rf"sample {sample} is damaged.*1\.tar"):
                source.batch(np.array([sample], np.uint64))


def test_a_build_that_was_ended_goes_on(shards, tmp_path):
    out = tmp_path / "index"
    looked = []

    def stop_at_the_second(each):
        looked.append(each["key"])
        if len(looked) == 2:
            raise KeyboardInterrupt

    with stoker.open_store(f"dir:{shards}") as store:
        found = store.list("")
        with pytest.raises(KeyboardInterrupt):
            build(store, found, TAR, out, None, stop_at_the_second)
        assert not out.exists() and len(list(tmp_path.glob("index.parts/*"))) == 2
        (shards / "0.tar").write_bytes(tar_of({"new": {"txt": b"x"}}))  # changed meanwhile
        index = build(store, store.list(""), TAR, out, None, lambda each: None)
        assert len(index) == 41 and index.name(0) == "new"
        assert [index.name(i) for i in range(len(index))] == [
            read(out).name(i) for i in range(len(index))
        ]


def test_changed_and_missing_objects_are_refused_by_name(shards, tmp_path):
    out = tmp_path / "index"
    assert main(["index", f"dir:{shards}", "--out", str(out)]) == 0
    (shards / "2.tar").write_bytes(tar_of({"a": {"txt": b"x"}}))
    with stoker.open_store(f"dir:{shards}") as store:
        with pytest.raises(Mismatch, match=r"2\.tar.*changed"):
            Indexed(store, out)
        (shards / "2.tar").unlink()
        with pytest.raises(NotFound, match=r"2\.tar"):
            Indexed(store, out)


def test_opening_lists_the_folders_of_the_data_and_no_others(tmp_path):
    """Before, the common prefix of keys in two folders was the whole store."""

    class Listed:
        def __init__(self, store):
            self.store, self.seen = store, []

        def list(self, prefix):
            found = self.store.list(prefix)
            self.seen += [each["key"] for each in found]
            return found

    names = ["a/1.tar", "a/2.tar", "b/1.tar"]
    for name in [*names, "other/1", "other/2", "top"]:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(tar_of({"x": {"txt": b"x"}}))
    with stoker.open_store(f"dir:{tmp_path}") as store:
        listed = Listed(store)
        of_objects(store, [store.stat(name) for name in names], TAR).check(listed)
        assert sorted(listed.seen) == names
        many = [f"m{number}/1" for number in range(65)]
        for name in many:
            (tmp_path / name).parent.mkdir()
            (tmp_path / name).write_bytes(b"x")
        listed = Listed(store)
        of_objects(store, [store.stat(name) for name in many], WHOLE).check(listed)
        assert sorted(listed.seen) == sorted(many)


def small(path: Path) -> Path:
    write(
        Index(
            TAR,
            [{"key": "a.tar", "bytes": 2048, "tag": "t"}],
            ["txt"],
            np.array([0, 1], "<u8"),
            np.zeros(1, "<u4"),
            np.zeros(1, "<u2"),
            np.array([512], "<u8"),
            np.array([3], "<u8"),
            None,
            np.array([1], "<u8"),
            np.frombuffer(b"x", np.uint8),
        ),
        path,
    )
    return path


def test_the_worked_example_is_what_is_written(tmp_path):
    text = re.search(r"```hex index\n(.*?)```", PAGE.read_text(), re.S).group(1)
    wanted = bytearray(small(tmp_path / "i").stat().st_size)
    for line in text.splitlines():
        at, *row = line.split()
        wanted[int(at, 16) : int(at, 16) + 16] = bytes.fromhex("".join(row))
    assert (tmp_path / "i").read_bytes() == wanted
    index = read(tmp_path / "i")
    assert (len(index), index.name(0), index.extensions_of(0)) == (1, "x", ["txt"])


def test_a_damaged_index_is_an_error_or_says_the_same(tmp_path):
    path = small(tmp_path / "i")
    whole = path.read_bytes()
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises((Corruption, InvalidArgument)):
            read(path)
    refused, threads = 0, _core.PipelineThreads(1, 1)
    for at in range(len(whole)):
        broken = bytearray(whole)
        broken[at] ^= 0x41
        path.write_bytes(broken)
        try:  # arrays have no checksum: what they say is looked at when a sample is asked for
            table = read(path).table()
            reader = _core.BatchReader([(_memory_store(), table, None, [])], 1, 1 << 20, threads)
            reader.read_samples(0, np.zeros(1, np.uint64)).wait()
        except (Corruption, InvalidArgument, Mismatch, NotFound):
            refused += 1
    assert refused >= 128 + 64  # every byte of the header, and of the text


_opened = []


def _memory_store():
    if not _opened:
        opened = stoker.open_store("memory:")
        store = opened.__enter__()
        _opened.extend([opened, store])
        change = store.begin()
        change.resize("a.tar", 2048)
        change.write_bytes("a.tar", 0, bytes(2048))
        change.commit().wait()
    return _opened[1]


def test_another_version_is_named(tmp_path):
    path = small(tmp_path / "i")
    whole = bytearray(path.read_bytes())
    whole[8:12] = struct.pack("<I", 3)
    head = np.frombuffer(bytes(whole[:124]), np.uint8)
    whole[124:128] = struct.pack("<I", _core.crc32c(head.ctypes.data, 124))
    path.write_bytes(whole)
    with pytest.raises(Mismatch, match="version 3"):
        read(path)
    path.write_bytes(b"x" * 200)
    with pytest.raises(InvalidArgument, match="is not an index"):
        read(path)


def test_opening_an_index_reads_no_object_and_no_array(tmp_path):
    count = 1_000_000  # 10^8 take the same: the arrays are mapped
    index = Index(
        WHOLE,
        [{"key": "all", "bytes": 10 * count, "tag": "t"}],
        [""],
        np.arange(count + 1, dtype="<u8"),
        np.zeros(count, "<u4"),
        np.zeros(count, "<u2"),
        np.arange(count, dtype="<u8") * np.uint64(10),
        np.full(count, 10, "<u8"),
        None,
        np.arange(1, count + 1, dtype="<u8"),
        np.full(count, ord("n"), np.uint8),
    )
    write(index, tmp_path / "i")
    table = read(tmp_path / "i").table()
    mapped = Path("/proc/self/smaps").read_text().split(str(tmp_path / "i"))[1]
    resident = int(re.search(r"Rss: +(\d+) kB", mapped).group(1))
    assert len(table) == count and resident < 4096  # of 35 MB; the kernel reads some pages ahead


def test_objects_in_memory_need_no_file(shards):
    with stoker.open_store(f"dir:{shards}") as store:
        index = of_objects(store, store.list(""), TAR)
        assert len(Indexed(store, index)) == 60
