"""Which order is chosen, and why: by requests and bytes of an epoch, which are counted."""

from __future__ import annotations

import gzip
import io

import numpy as np
import pytest

import stoker
from stoker.data import Files, Loader, Rows, Tar, windows
from stoker.data.planning import choose
from stoker.dataset.cli import main
from test_data_packed import SAMPLES, tar_of

FAR = "s3://bucket/data"


def put(store, key: str, data: bytes) -> None:
    change = store.begin()
    change.resize(key, len(data))
    change.write_bytes(key, 0, data)
    change.commit().wait()


@pytest.fixture
def store(tmp_path):
    with stoker.open_store(f"dir:{tmp_path / 'data'}", create=True) as opened:
        yield opened


class Elsewhere:
    """A store that says it is another one."""

    def __init__(self, store, composition: str, usable: int | None = None) -> None:
        self._store = store
        cache = None if usable is None else {"usable_bytes": usable}
        self._info = {"composition": composition, "cache": cache}

    def info(self):
        return self._info


def rows(store, count: int, width: int, composition: str = "", usable: int | None = None) -> Rows:
    out = io.BytesIO()
    np.save(out, np.zeros((count, width), np.uint8))
    put(store, "rows.npy", out.getvalue())
    source = Rows(store, "rows.npy")
    if composition:
        source.store = Elsewhere(store, composition, usable)
    return source


@pytest.mark.parametrize(
    ("width", "where", "chosen"),
    [
        (1 << 10, "", "window"),  # 16 times its bytes for each request
        (64 << 10, "", True),
        (64 << 10, FAR, "window"),
        (1 << 20, FAR, True),
    ],
)
def test_a_request_that_costs_more_than_its_bytes_decides(store, width, where, chosen):
    choice = choose(rows(store, 64, width, where), 8)
    assert choice.shuffle == chosen
    assert choice.exact.requests == 64 and choice.exact.bytes == 64 * width
    run = max(1, windows.RUN_BYTES // width)
    assert choice.window.requests == 64 / run
    assert "64 requests an epoch" in choice.why


def test_what_a_cache_holds_costs_no_request(store):
    bytes_ = 64 << 16
    cached = f"cached(local:/cache, {FAR})"
    whole = choose(rows(store, 64, 1 << 16, cached, bytes_), 8)
    assert whole.shuffle is True and whole.exact.requests == 0
    half = choose(rows(store, 64, 1 << 16, cached, bytes_ // 2), 8)
    assert half.shuffle == "window" and half.exact.requests == 32
    assert "50% of them from s3" in half.why


def test_compressed_shards_come_whole_by_windows_unless_all_fit(store):
    for shard in range(4):
        put(store, f"{shard}.tar.gz", gzip.compress(tar_of(shard)))
    source = Tar(store, [f"{shard}.tar.gz" for shard in range(4)])
    tight = choose(source, 4, unpacked_bytes=2 * len(tar_of(0)))
    assert tight.shuffle == "window" and "whole shards" in tight.why
    assert (tight.exact.requests, tight.window.requests) == (4 * SAMPLES, 4)
    assert choose(source, 4).shuffle is True


def test_there_is_no_choice_for_whole_objects_and_sources_of_python(store):
    put(store, "a", b"1")
    put(store, "b", b"2")
    assert choose(Files(store), 1).shuffle is True

    class Own:
        fingerprint = ""

        def __len__(self):
            return 3

        def batch(self, samples):
            return list(samples)

    assert choose(Own(), 1).why == "exact order: the source reads its samples by itself"
    loader = Loader(Own(), batch=1, shuffle="auto")
    assert loader.shuffle is True and "chosen:" in loader.order


def test_auto_is_the_order_that_was_chosen(store):
    source = rows(store, 1000, 1 << 10)
    auto = Loader(source, batch=10, seed=1, shuffle="auto")
    window = Loader(source, batch=10, seed=1, shuffle="window")
    assert auto.shuffle == "window" and "chosen: windows of ranges" in auto.order
    assert auto.state_dict() == window.state_dict()
    list(auto)
    assert auto.read_ranges < 100
    auto.close()


def test_the_command_tells_it(store, tmp_path, capsys):
    put(store, "0.tar", tar_of(0))
    out = str(tmp_path / "index")
    where = f"dir:{tmp_path / 'data'}"
    assert main(["index", where, "--out", out]) == 0
    capsys.readouterr()
    assert main(["plan", where, out, "--batch", "8"]) == 0
    told = capsys.readouterr().out
    assert told.startswith('Loader(..., shuffle="window"): windows of ranges')
