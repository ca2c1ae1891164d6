"""What a loop waited for, by stage and tier: the account of a loader, and rows of the ledger."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch

import stoker
from stoker.data import Loader, Rows
from stoker.data.account import HAND_OVER, Account, slow_of, tier_of

from test_loader import Numbers, npy, put


def account_of(*stages: tuple[str, int, int], began: int, ended: int) -> dict[str, float]:
    account = Account(4)
    account.waited(began, ended, stages)
    return {name: round(1e9 * each) for name, each in account.seconds.items() if each}


def test_a_wait_is_split_among_the_stages_that_it_overlaps():
    stages = ("verify", 0, 100), ("decode", 100, 400), ("assemble", 400, 500)
    assert account_of(*stages, began=0, ended=500) == {
        "verify": 100,
        "decode": 300,
        "assemble": 100,
    }
    # what was over before the loop asked costs nothing; the rest is the hand-over
    assert account_of(*stages, began=350, ended=520) == {
        "decode": 50,
        "assemble": 100,
        HAND_OVER: 20,
    }
    assert account_of(*stages, began=600, ended=610) == {HAND_OVER: 10}


def test_stages_beside_each_other_count_once():
    stages = ("verify", 0, 100), ("queue", 20, 60), ("collate", 60, 200)
    assert account_of(*stages, began=0, ended=200) == {"verify": 100, "collate": 100}


def test_tiers_have_the_names_of_the_stores():
    assert tier_of("s3://bucket/a") == "s3" and tier_of("coded(2+1, a{0..2})") == "coded"


class Slow(Numbers):
    def batch(self, samples):
        time.sleep(0.02)
        return super().batch(samples)


def test_a_source_in_python_and_collate_are_told_apart():
    def collate(batch):
        time.sleep(0.02)
        return batch + 1

    loader = Loader(Slow(64), batch=8, collate=collate, ahead=1)
    assert [len(each) for each in loader] == [8] * 8
    row = loader.account.take()
    assert row["batches"] == 8 and row["samples"] == 64 and row["ahead"] == 1
    assert set(row["wait_seconds"]) <= {"source", "collate", HAND_OVER}
    assert {"source", "collate"} <= set(row["wait_seconds"])
    assert row["bytes"] == {} and "caches" not in row
    assert loader.account.take()["batches"] == 0  # since the last time
    loader.close()


def test_bytes_and_reads_have_their_tier_and_object(tmp_path):
    with stoker.open_store(f"dir:{tmp_path / 'data'}", create=True) as store:
        for name in ("a.npy", "b.npy"):
            put(store, name, npy(np.zeros((32, 1000), np.float32)))
        loader = Loader(Rows(store, ["a.npy", "b.npy"]), batch=16, seed=1, ahead=1)
        list(loader)
        row = loader.account.take()
        assert row["bytes"] == {"dir": 2 * 32 * 4000}
        waits = row["wait_seconds"]
        assert set(waits) <= {"read dir", "queue", "assemble", "verify", HAND_OVER}
        assert set(row["objects"]) <= {"dir a.npy", "dir b.npy"}
        loader.close()


def test_a_batch_that_is_there_is_no_wait(tmp_path):
    with stoker.open_store(f"dir:{tmp_path / 'data'}", create=True) as store:
        put(store, "a.npy", npy(np.zeros((32, 10), np.float32)))
        loader = Loader(Rows(store, "a.npy"), batch=4, endless=True)
        batches = iter(loader)
        next(batches)
        loader.account.take()
        for _ in range(5):
            for _, _, begun, _ in loader._window:
                begun._batch.wait()
            next(batches)
        row = loader.account.take()
        assert row["batches"] == 5 and row["late"] == 0
        assert row["wait_seconds"] == {} and row["objects"] == {}
        loader.close()


def test_a_cache_is_a_tier_of_its_own(tmp_path):
    with stoker.open_store(f"dir:{tmp_path / 'slow'}", create=True) as slow:
        put(slow, "a.npy", npy(np.arange(64 * 1024, dtype=np.float32).reshape(64, 1024)))
    where = f"cached(local:{tmp_path}/fast, dir:{tmp_path}/slow, disk=3MiB, dram=2MiB, block=64KiB)"
    with stoker.open_store(where, create=True) as store:
        loader = Loader(Rows(store, "a.npy"), batch=16, seed=1)
        rows = []
        for epoch in range(2):
            loader.set_epoch(epoch)
            assert sum(len(each) for each in loader) == 64
            rows.append(loader.account.take())
        first, second = rows
        (cache,) = second["caches"].values()
        # the first epoch fetches (all but the block of the header), the second one nothing
        assert first["bytes"]["dir"] >= 2 * (64 << 10)
        assert second["bytes"] == {"cache": 64 * 4096}
        assert cache["hit_bytes"] == 64 * 4096 and cache["fetched_bytes"] == 0
        assert not any(name.startswith("dir ") for name in second["objects"])
        loader.close()


def test_the_rows_of_the_ledger_have_the_account(tmp_path):
    model = torch.nn.Linear(1, 1)
    opt = torch.optim.SGD(model.parameters(), lr=1e-4)
    model, opt = stoker.offload(model, opt, store=str(tmp_path / "store"), dram="64MiB")
    loader = Loader(Numbers(64), batch=8)
    opt.attach(loader=loader)
    rows = []
    opt.ledger.on_step(rows.append)
    for batch in loader:
        model(batch[:, None].float()).sum().backward()
        opt.step()
        opt.zero_grad()
    opt.close()
    loader.close()
    assert [row["loaders"]["loader"]["batches"] for row in rows] == [1] * 8


@pytest.mark.parametrize(
    "composition, slow",
    [
        ("cached(local:/a, s3://x/y, disk=1MiB)", "s3://x/y"),
        ("cached(local:/a,/b,dir:/c, disk=1MiB)", "dir:/c"),
        ("cached(local:/a, coded(2+1, /d{0,1,2}), disk=1MiB)", "coded(2+1, /d{0,1,2})"),
    ],
)
def test_the_slow_part_of_a_composition(composition, slow):
    assert slow_of(composition) == slow
