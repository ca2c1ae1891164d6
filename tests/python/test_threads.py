"""How many threads a loader has: the decision by numbers, and batches that do not depend on it."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

import stoker
from stoker import _core
from stoker.data import Loader, Rows, Tar
from stoker.data.threads import Scaling, ThreadCount, default_cpus

from test_data_packed import SHARDS, folder  # noqa: F401
from test_loader import Numbers, npy, put


def windows(count: ThreadCount, many: int, waited: float, working: float) -> int:
    """Windows of a second. waited: part of the time; working: threads on average."""
    for _ in range(many):
        count.tell(1.0, waited, working)
    return count.threads


def test_a_thread_is_added_where_the_loop_waits_and_all_are_busy():
    count = ThreadCount(most=4)
    assert count.threads == 1
    assert windows(count, 1, waited=0.3, working=0.9) == 2
    assert windows(count, 1, waited=0.1, working=1.9) == 3
    assert windows(count, 1, waited=0.005, working=2.9) == 3  # it hardly waits
    assert windows(count, 50, waited=0.5, working=4.0) == 4  # never above the budget


def test_waits_for_a_store_add_no_thread():
    count = ThreadCount(most=4)
    assert windows(count, 100, waited=0.9, working=0.3) == 1
    assert windows(ThreadCount(most=1), 100, waited=0.9, working=1.0) == 1


def test_short_batches_are_judged_together():
    count = ThreadCount(most=4)
    for _ in range(7):
        assert count.tell(0.0625, 0.03, 0.0625) == 1  # less than a window
    assert count.tell(0.0625, 0.03, 0.0625) == 2
    assert count.tell(0.0625, 0.03, 0.0625) == 2  # a new window began


def test_a_thread_is_given_back_after_a_quiet_time():
    count = ThreadCount(most=4, threads=3)
    assert windows(count, ThreadCount.PATIENCE - 1, waited=0.0, working=0.5) == 3
    assert windows(count, 1, waited=0.0, working=1.5) == 3  # the quiet time begins anew
    assert windows(count, ThreadCount.PATIENCE - 1, waited=0.0, working=0.5) == 3
    assert windows(count, 1, waited=0.0, working=0.5) == 2
    assert windows(count, 100 * ThreadCount.PATIENCE, waited=0.0, working=0.0) == 1
    # what two threads can just do, one cannot
    assert windows(ThreadCount(most=4, threads=2), 1000, waited=0.0, working=0.8) == 2


def test_who_gives_back_too_early_waits_longer_the_next_time():
    count = ThreadCount(most=2)
    given_back = []
    for _ in range(6):
        assert windows(count, 1, waited=0.1, working=1.0) == 2
        quiet = 0
        while count.threads == 2:
            windows(count, 1, waited=0.0, working=0.0)
            quiet += 1
        given_back.append(quiet)
    assert given_back == [20, 40, 80, 160, 320, 320]
    # back for good reason, long after that: no dearer
    assert windows(count, 400, waited=0.0, working=0.5) == 1
    assert windows(count, 1, waited=0.1, working=1.0) == 2 and count.patience == 320


class Counted:
    """PipelineThreads that were busy as they are told."""

    def __init__(self, most: int) -> None:
        self.threads, self.most, self.busy_ns = 1, most, 0

    def use(self, threads: int) -> None:
        self.threads = threads


def test_the_first_batch_after_a_rest_is_no_starvation():
    threads = Counted(4)
    scaling = Scaling(threads)
    second = 1_000_000_000
    for at in range(0, 40, 2):
        scaling.rest()
        threads.busy_ns += second
        scaling.gave(at * second, waited=second)
    assert threads.threads == 1
    threads.busy_ns += 2 * second
    scaling.gave(40 * second, waited=second)
    assert threads.threads == 2
    assert scaling.take() == {"threads": 2, "cpus": 4, "busy_seconds": 22.0}
    assert scaling.take()["busy_seconds"] == 0


@pytest.mark.parametrize("shuffle", [True, "window"])
def test_batches_do_not_depend_on_the_number_of_threads(folder, shuffle):  # noqa: F811
    with stoker.open_store(f"dir:{folder}") as store:
        keys = [each["key"] for each in store.list()]

        def batches(cpus: int) -> list[tuple[str, bytes]]:
            loader = Loader(Tar(store, keys), batch=8, seed=1, shuffle=shuffle, cpus=cpus)
            got = []
            for number, batch in enumerate(loader):
                loader._scaling._threads.use(1 + number % cpus)
                got += [(each["__key__"], bytes(each["bin"].numpy())) for each in batch]
            row = loader.account.take()
            assert row["cpus"] == cpus and row["busy_seconds"] > 0
            loader.close()
            return got

        assert len(batches(1)) == SHARDS * 20
        assert batches(1) == batches(3)


def test_the_loader_asks_for_more_threads(tmp_path):
    with stoker.open_store(f"dir:{tmp_path / 'data'}", create=True) as store:
        rows = np.arange(256, dtype=np.float32).reshape(64, 4)
        put(store, "a.npy", npy(rows))
        loader = Loader(Rows(store, "a.npy"), batch=8, shuffle=False, cpus=3)
        told = []
        loader._scaling._count.tell = lambda *numbers: told.append(numbers) or 3
        assert torch.equal(torch.cat(list(loader)), torch.from_numpy(rows))
        assert len(told) == 7  # all but the first
        assert all(seconds >= waited >= 0 and busy >= 0 for seconds, waited, busy in told)
        assert loader._scaling._threads.threads == 3
        loader.close()


def test_the_budget_of_cores(tmp_path):
    assert default_cpus() == max(1, len(os.sched_getaffinity(0)) // 2)
    with stoker.open_store(f"dir:{tmp_path / 'data'}", create=True) as store:
        put(store, "a.npy", npy(np.zeros((8, 4), np.float32)))
        source = Rows(store, "a.npy")
        with pytest.raises(ValueError, match="cpus=0 is less than the 1 thread.*at least cpus=1"):
            Loader(source, batch=4, cpus=0)
        with pytest.raises(
            ValueError, match=r"is less than Jpeg\(threads=3\): give at least cpus=3"
        ):
            Loader(source, batch=4, cpus=2, decode=stoker.data.Jpeg(8, threads=3))
        loader = Loader(source, batch=4)
        row = loader.account.take()
        assert (row["threads"], row["cpus"]) == (1, default_cpus())
        loader.close()
    assert "threads" not in Loader(Numbers(8), batch=4).account.take()  # a source in Python


def test_threads_of_a_pipeline_are_from_one_to_the_most():
    threads = _core.PipelineThreads(1, 2)
    threads.use(5)
    assert (threads.threads, threads.most) == (2, 2)
    with pytest.raises(stoker.errors.InvalidArgument):
        _core.PipelineThreads(0, 1)
    with pytest.raises(stoker.errors.InvalidArgument):
        _core.PipelineThreads(3, 2)
