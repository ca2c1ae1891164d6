"""Compressed shards, read as they are: tar files and MDS, whole orders, damage, memory."""

from __future__ import annotations

import gzip
import json

import numpy as np
import pytest

import stoker
from stoker import _core
from stoker.data import Indexed, Loader, Mds, Tar
from stoker.dataset.cli import main
from stoker.errors import Corruption, InvalidArgument, OverBudget
import tars

SHARDS, SAMPLES = 6, 20


def tar_of(shard: int) -> bytes:
    return tars.tar_of(
        {
            f"{shard}-{number:03}": {
                "txt": f"sample {shard * SAMPLES + number}".encode(),
                "bin": bytes([shard]) * (100 + number),
            }
            for number in range(SAMPLES)
        }
    )


@pytest.fixture
def folder(tmp_path):
    """Half of the shards with gzip, in both spellings of the name; one of them is plain."""
    made = tmp_path / "shards"
    made.mkdir()
    for shard in range(SHARDS):
        data, ending = tar_of(shard), (".tar.gz", ".tgz", ".tar")[shard % 3]
        packed = data if ending == ".tar" else gzip.compress(data)
        (made / f"{shard}{ending}").write_bytes(packed)
    return made


def texts(batches) -> list[str]:
    return [bytes(each["txt"].numpy()).decode() for batch in batches for each in batch]


WANTED = [f"sample {number}" for number in range(SHARDS * SAMPLES)]


@pytest.mark.parametrize("shuffle", [False, True, "window"])
def test_all_orders_give_each_sample_once(folder, shuffle):
    with stoker.open_store(f"dir:{folder}") as store:
        keys = [each["key"] for each in store.list()]
        loader = Loader(Tar(store, keys), batch=8, seed=1, shuffle=shuffle)
        got = texts(loader)
        assert (got == WANTED) == (shuffle is False)
        assert sorted(got) == sorted(WANTED)
        assert "compressed shards" in loader.order
        # Each compressed shard was fetched once; the plain ones by ranges.
        packed = sum(each["bytes"] for each in store.list() if not each["key"].endswith(".tar"))
        assert packed < loader.read_bytes < packed + 2 * len(tar_of(0))
        work = loader.account.take()["work_seconds"]
        assert work["unpack"] > 0
        loader.close()


def test_an_index_of_compressed_shards_is_checked_and_shown(folder, tmp_path, capsys):
    out = tmp_path / "index"
    assert main(["index", f"dir:{folder}", "--out", str(out), "--crc"]) == 0
    assert f"{SHARDS * SAMPLES} samples" in capsys.readouterr().out
    with stoker.open_store(f"dir:{folder}") as store:
        loader = Loader(Indexed(store, out), batch=7, shuffle=False)
        assert texts(loader) == WANTED
        loader.close()
        # A shard with another text of the same size: gzip is content, the index is not.
        path = folder / "0.tar.gz"
        wrong = gzip.decompress(path.read_bytes()).replace(b"sample 3", b"sample 9")
        found = stoker.data.index.read(out)
        found.objects[0].update(bytes=path.write_bytes(gzip.compress(wrong)))
        with pytest.raises(Corruption, match="sample 3 is damaged.*0.tar.gz"):
            Indexed(store, found).batch(np.arange(5, dtype=np.uint64))


def test_windows_fetch_each_shard_once_with_memory_for_one(folder):
    """In an exact order the same memory makes a fetch of nearly every sample."""
    sizes = [path.stat().st_size for path in folder.iterdir() if path.suffix != ".tar"]
    room = len(tar_of(0)) + max(sizes)
    with stoker.open_store(f"dir:{folder}") as store:
        source = Tar(store, [each["key"] for each in store.list()])
        loader = Loader(
            source, batch=4, seed=1, shuffle="window", window_bytes=1, unpacked_bytes=room
        )
        assert sorted(texts(loader)) == sorted(WANTED)
        assert loader.read_ranges <= 2 * SHARDS
        exact = Loader(source, batch=4, seed=1, unpacked_bytes=room)
        assert sorted(texts(exact)) == sorted(WANTED)
        assert exact.read_ranges > 4 * SHARDS and "shuffle='window'" in exact.order
        tight = Loader(source, batch=4, unpacked_bytes=1000)
        with pytest.raises(OverBudget, match="unpacked_bytes allows 1000"):
            next(iter(tight))
        for each in (loader, exact, tight):
            each.close()


def test_a_cut_or_damaged_shard_is_named(folder):
    path = folder / "0.tar.gz"
    data = path.read_bytes()
    with stoker.open_store(f"dir:{folder}") as store:
        source = Tar(store, "0.tar.gz")
        for wrong in (data[:-1], data[:-20] + b"\0" * 20, data[:40] + b"\xff" + data[41:]):
            path.write_bytes(wrong)
            with pytest.raises(Corruption, match="0.tar.gz"):
                Tar(store, "0.tar.gz")
        path.write_bytes(data[:40] + bytes([data[40] ^ 0x55]) + data[41:])
        with pytest.raises(Corruption, match="'0.tar.gz' cannot be unpacked"):
            source.batch(np.zeros(1, np.uint64))


def test_kinds_that_are_not_unpacked_are_refused_by_name(folder):
    (folder / "9.tar.xz").write_bytes(b"any")
    with stoker.open_store(f"dir:{folder}") as store:
        with pytest.raises(InvalidArgument, match=r"9\.tar\.xz.*--unpack"):
            Tar(store, "9.tar.xz")
        with pytest.raises(InvalidArgument, match="unknown compression 'br'"):
            _core.unpack(b"", "br", 1)


def mds_shard(texts_: list[bytes]) -> bytes:
    records = [len(each).to_bytes(4, "little") + each for each in texts_]
    first = 4 + 4 * (len(records) + 1)
    ends = np.cumsum([first, *map(len, records)])
    return b"".join([np.uint32(len(records)).tobytes(), ends.astype("<u4").tobytes(), *records])


@pytest.mark.parametrize("compression", ["gz", "zstd:3"])
def test_compressed_mds_shards_are_read(tmp_path, compression):
    pack = {"gz": gzip.compress, "zstd:3": _zstd}[compression]
    shards, want = [], []
    for shard in range(3):
        some = [f"{shard} {number}".encode() for number in range(5)]
        want += [each.decode() for each in some]
        raw, name = mds_shard(some), f"shard.{shard:05}.mds"
        packed = pack(raw)
        ending = compression.partition(":")[0]
        (tmp_path / f"{name}.{ending}").write_bytes(packed)
        shards.append(
            {
                "format": "mds",
                "samples": 5,
                "column_names": ["text"],
                "column_encodings": ["str"],
                "column_sizes": [None],
                "compression": compression,
                "raw_data": {"basename": name, "bytes": len(raw), "hashes": {}},
                "zip_data": {"basename": f"{name}.{ending}", "bytes": len(packed), "hashes": {}},
            }
        )
    about = {"version": 2, "shards": shards}
    (tmp_path / "index.json").write_text(json.dumps(about))
    with stoker.open_store(f"dir:{tmp_path}") as store:
        loader = Loader(Mds(store), batch=4, shuffle=False)
        assert [each["text"] for batch in loader for each in batch] == want
        loader.close()
        shards[1]["raw_data"]["bytes"] += 1
        (tmp_path / "index.json").write_text(json.dumps(about))
        with pytest.raises(Corruption, match=r"shard\.00001\.mds.* should have"):
            Mds(store)


def _zstd(data: bytes) -> bytes:
    """A frame of zstd of raw blocks, with its size."""
    frame = b"\x28\xb5\x2f\xfd" + b"\xa0" + len(data).to_bytes(4, "little")
    return frame + ((len(data) << 3) | 1).to_bytes(3, "little") + data
