"""Transforms of Python in spawned workers: seeds, names of samples, kill -9, Ctrl-C."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest
import torch

from stoker.data import Loader, TransformError
from stoker.errors import InvalidArgument

from test_loader import Numbers


def drawn(sample: torch.Tensor) -> dict:
    """The sample, and a number of each generator."""
    return {
        "sample": sample,
        "random": random.random(),
        "numpy": np.random.rand(),
        "torch": torch.rand(3, dtype=torch.bfloat16),
        "pid": os.getpid(),
    }


def breaks_at_nine(sample: torch.Tensor) -> torch.Tensor:
    if sample == 9:
        raise ValueError("nine is not wanted")
    return sample


def sleeps(sample: torch.Tensor) -> torch.Tensor:
    time.sleep(0.01 if sample < 8 else 600)
    return sample


def by_sample(batches: list[dict]) -> dict[int, tuple]:
    return {
        int(n): (float(r), float(p), tuple(t.tolist()))
        for batch in batches
        for n, r, p, t in zip(
            batch["sample"], batch["random"], batch["numpy"], batch["torch"], strict=True
        )
    }


def test_random_numbers_belong_to_the_sample_and_the_epoch():
    loader = Loader(Numbers(24), batch=4, seed=3, transform=drawn, workers=2)
    first = list(loader)
    assert {int(n) for batch in first for n in batch["sample"]} == set(range(24))
    assert len({int(each) for batch in first for each in batch["pid"]}) == 2
    assert os.getpid() not in first[0]["pid"]
    account = loader.account.take()
    assert account["work_seconds"]["transform"] > 0 and "transform" in account["wait_seconds"]
    loader.set_epoch(1)  # the same workers go on
    second = list(loader)
    assert {int(p) for b in second for p in b["pid"]} <= {int(p) for b in first for p in b["pid"]}
    loader.close()
    other = Loader(Numbers(24), batch=2, rank=1, ranks=2, seed=3, transform=drawn)
    again = by_sample(list(other))
    other.close()
    mine = by_sample(first)
    assert len(mine) == 24 and len({each[0] for each in mine.values()}) == 24
    assert len(again) == 12 and all(mine[n] == each for n, each in again.items())
    assert all(mine[n] != each for n, each in by_sample(second).items())


def as_pair(sample: torch.Tensor) -> tuple[dict, str, list]:
    return {"x": sample.float().repeat(2, 3)}, str(int(sample)), [1.5, (sample, b"raw")]


@pytest.mark.parametrize("whole", [4, 0])
def test_a_rank_whose_rest_is_empty_goes_on_beside_the_others(whole):
    """Before, default_collate raised IndexError there: an evaluation ended on some ranks only."""
    for rank in range(4):
        numbers = Numbers(whole + 1)  # the last one is rank 3's
        loader = Loader(numbers, 1, rank=rank, ranks=4, transform=as_pair, shuffle=False)
        batches = list(loader)
        loader.close()
        assert len(batches) == len(loader) == (2 if whole else 1)
        if rank == 3:
            assert list(batches[-1][1]) == [str(whole)]
        elif not whole:
            assert batches == [[]]
        else:
            made, names, (numbers, pairs) = batches[-1]
            assert made["x"].shape == (0, 2, 3) and made["x"].dtype == torch.float32
            assert list(names) == [] and numbers.shape == (0,) and numbers.dtype == torch.float64
            assert pairs[0].shape == (0,) and list(pairs[1]) == []


def test_a_transform_that_raises_names_the_sample():
    loader = Loader(Numbers(12), batch=4, shuffle=False, transform=breaks_at_nine, workers=1)
    batches = iter(loader)
    assert next(batches).tolist() == [0, 1, 2, 3] and next(batches).tolist() == [4, 5, 6, 7]
    with pytest.raises(TransformError) as raised:
        next(batches)
    told = str(raised.value)
    assert "raised at sample 9 (number 9 of source 0, epoch 0, seed 0)" in told
    assert "ValueError: nine is not wanted" in told and "breaks_at_nine" in told
    loader.close()


def test_kill_9_of_a_worker_is_an_error_and_the_loop_goes_on():
    loader = Loader(Numbers(16), batch=4, shuffle=False, transform=drawn, workers=1, ahead=1)
    batches = iter(loader)
    (pid,) = {int(each) for each in next(batches)["pid"]}
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(TransformError, match=rf"pid {pid}\) ended with SIGKILL"):
        list(batches)
    state = loader.state_dict()["position"]
    rest = [int(n) for batch in loader for n in batch["sample"]]
    assert rest == list(range(state, 16)) and state >= 4
    loader.close()


def test_a_transform_that_cannot_be_sent_is_a_sentence():
    loader = Loader(Numbers(4), batch=2, transform=lambda sample: sample)
    with pytest.raises(InvalidArgument, match="cannot be sent to another process"):
        list(loader)
    loader.close()


class Held(Numbers):
    """Batches from sample 4 on wait until they are let go."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.asked, self.let_go = threading.Event(), threading.Event()

    def batch(self, samples: np.ndarray) -> torch.Tensor:
        if samples[0] >= 4:
            self.asked.set()
            self.let_go.wait()
        return super().batch(samples)


def test_close_ends_while_a_batch_is_not_yet_at_a_worker():
    source = Held(8)
    loader = Loader(source, batch=4, shuffle=False, transform=drawn, workers=1)
    assert next(iter(loader))["sample"].tolist() == [0, 1, 2, 3]
    source.asked.wait()
    closing = threading.Thread(target=loader.close, daemon=True)
    closing.start()
    time.sleep(0.3)  # it has ended the worker, and waits for the thread
    source.let_go.set()
    closing.join(60)
    assert not closing.is_alive()
    assert [int(n) for batch in loader for n in batch["sample"]] == [4, 5, 6, 7]
    loader.close()


def nothing() -> None:
    pass


def test_the_end_of_a_forked_child_leaves_the_workers_alone():
    loader = Loader(Numbers(16), batch=4, shuffle=False, transform=drawn, workers=1)
    batches = iter(loader)
    seen = [int(n) for n in next(batches)["sample"]]
    child = get_context("fork").Process(target=nothing)
    child.start()
    child.join()
    assert child.exitcode == 0
    assert seen + [int(n) for batch in batches for n in batch["sample"]] == list(range(16))
    loader.close()


SCRIPT = """
import sys, time
from stoker.data import Loader
from test_loader import Numbers
from test_transforms import sleeps

if __name__ == "__main__":
    loader = Loader(Numbers(16), batch=8, shuffle=False, transform=sleeps, workers=1)
    try:
        for batch in loader:
            print(loader._batches._workers._all[0]._process.pid, flush=True)
            time.sleep(float(sys.argv[1]))
    except KeyboardInterrupt:
        print("interrupted", flush=True)
"""


@pytest.mark.parametrize("step", [0, 600], ids=["waits for a batch", "in the body of the loop"])
def test_ctrl_c_ends_the_workers(tmp_path, step):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    here = str(Path(__file__).parent)
    process = subprocess.Popen(
        [sys.executable, str(script), str(step)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": here},
    )
    worker = int(process.stdout.readline())
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    assert process.communicate(timeout=60)[0] == "interrupted\n" and process.returncode == 0
    with pytest.raises(ProcessLookupError):
        os.kill(worker, 0)
