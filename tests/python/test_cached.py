"""cached(FAST, SLOW) as users reach it: Python, the command, and kill -9."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import cached_run
import numpy as np
import pytest

import stoker
from stoker import _core
from stoker.errors import InvalidArgument

STOKER = Path(sys.executable).parent / "stoker"
KILLS = 50


@pytest.fixture
def where(tmp_path) -> str:
    with stoker.open_store(f"dir:{tmp_path}/slow", create=True) as store:
        for key in range(cached_run.OBJECTS):
            data = cached_run.content(key)
            change = store.begin()
            change.resize(str(key), len(data))
            change.write_bytes(str(key), 0, data)
            change.commit().wait()
    return f"cached(local:{tmp_path}/fast, dir:{tmp_path}/slow, disk=3MiB, dram=2MiB, block=64KiB)"


def test_the_command_copies_from_a_cache_and_to_one(where, tmp_path):
    for _ in range(2):
        listed = subprocess.run([STOKER, "ls", where], capture_output=True, text=True)
        assert listed.returncode == 0 and str(cached_run.BYTES) in listed.stdout, listed.stderr
    out = f"dir:{tmp_path}/out"
    copied = subprocess.run([STOKER, "cp", where, out], capture_output=True, text=True)
    assert copied.returncode == 0, copied.stderr
    back = subprocess.run([STOKER, "cp", out, where], capture_output=True, text=True)
    assert back.returncode == 0, back.stderr
    with stoker.open_store(where) as store:
        for key in range(cached_run.OBJECTS):
            assert store.read_bytes(str(key)) == cached_run.content(key)


def test_what_is_forgotten_is_fetched_once_more(where):
    with stoker.open_store(where) as store:
        store.read_bytes("0", 0, 1 << 18)
        before = store.info()["cache"]["fetched_bytes"]
        assert before == 1 << 18
        store.read_bytes("0", 0, 1 << 18)
        assert store.info()["cache"]["fetched_bytes"] == before
        store.forget("0", 5, 1)
        store.read_bytes("0", 0, 1 << 18)
        assert store.info()["cache"]["fetched_bytes"] == before + (1 << 16)


@pytest.mark.parametrize("ahead", [False, True])
def test_an_epoch_that_is_followed_fetches_the_least(tmp_path, ahead):
    block, blocks, kept = 1 << 16, 40, 20
    with stoker.open_store(f"dir:{tmp_path}/slow", create=True) as store:
        change = store.begin()
        change.resize("set", blocks * block)
        change.commit().wait()
    where = f"cached(local:{tmp_path}/fast, dir:{tmp_path}/slow, disk=1280KiB, block=64KiB)"
    with stoker.open_store(where) as store:
        table = np.array([[0, 0, block, blocks, block]], dtype=np.uint64)
        store.follow(table, keys=["set"], seed=7, ahead=ahead)
        for epoch in range(4):
            order = _core.Permutation(blocks, 7, epoch)
            for at in range(blocks):
                store.read_bytes("set", order.sample(at) * block, block)
        store.read_bytes("set", 0, 1)
        cache = store.info()["cache"]
        assert cache["epochs"] == 4 and cache["plans"] == 1
        assert cache["epoch_bound_bytes"] == (blocks - kept) * block
        assert cache["epoch_fetched_bytes"] == cache["epoch_bound_bytes"]
        assert cache["admitted_bytes"] == kept * block, "it fills once"
        assert (cache["prefetched_bytes"] > 0) == ahead
        assert cache["prefetched_in_vain_bytes"] == 0
        store.follow([])
        assert store.info()["cache"]["plans"] == 0
        with pytest.raises(InvalidArgument):
            store.follow([("set", 0, blocks * block + 1)])


def test_a_list_keeps_what_is_used_soonest(tmp_path):
    block = 1 << 16
    with stoker.open_store(f"dir:{tmp_path}/slow", create=True) as store:
        change = store.begin()
        change.resize("set", 400 * block)
        change.commit().wait()
    where = f"cached(local:{tmp_path}/fast, dir:{tmp_path}/slow, disk=1280KiB, block=64KiB)"
    # 20 blocks are kept; of 30 that come round again an LRU keeps none when it is their turn.
    uses = [*range(30)] * 3
    with stoker.open_store(where) as store:
        store.follow([("set", each * block, block) for each in uses])
        for each in uses:
            store.read_bytes("set", each * block, block)
        # Each round after the first misses 10 at least, and may lose a few to slots on their way.
        assert store.info()["cache"]["fetched_bytes"] <= (30 + 10 + 10 + 6) * block


def test_killed_at_any_moment_it_serves_no_wrong_byte_and_stays_warm(where):
    killed = subprocess.run(
        [sys.executable, cached_run.__file__, where, str(KILLS)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert killed.stdout == "done\n" and killed.returncode == 0, killed.stdout + killed.stderr
    with stoker.open_store(where) as store:
        assert store.info()["cache"]["held_bytes"] > 0, "it is warm"
        for _ in range(2):
            for key in range(cached_run.OBJECTS):
                assert store.read_bytes(str(key)) == cached_run.content(key)
        cache = store.info()["cache"]
        assert cache["hit_bytes"] > 0 and cache["off"] == "" and cache["damaged_blocks"] == 0


@pytest.mark.parametrize(
    "wrong",
    [
        "cached(dir:A, dir:B, disk=1MiB)",  # no transactions
        "cached(local:A, dir:B, disk=4MiB, dram=1KiB)",  # less than a block
        "cached(local:A, dir:B, disk=4MiB, dram=twice)",
        "cached(local:A)",
        "cached(local:A, dir:B, disk=4MiB",
        "cached(local:A, memory:, disk=4MiB)",
    ],
)
def test_what_is_no_cache_is_an_error(wrong, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in "AB":
        (tmp_path / name).mkdir()
    with (
        pytest.raises((InvalidArgument, stoker.errors.Unsupported)),
        stoker.open_store(wrong, create=True),
    ):
        pass
