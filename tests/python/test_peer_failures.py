"""bench/peers/failures.py in a small form: what a peer gets wrong without a word ends in a
sentence, or in the right losses."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

import reference
from faults import COMMAND, small_disk
from scripts import load_script

if not COMMAND.exists():
    pytest.skip(
        "the stoker command is not installed beside this Python: run `make build`",
        allow_module_level=True,
    )

failures = load_script(Path(__file__).parents[2] / "bench" / "peers" / "failures.py")

LAYERS, HIDDEN, STEPS = 2, 64, 6


@pytest.fixture(scope="module")
def script(module_one_thread):
    return failures.Script(LAYERS, HIDDEN, STEPS, "16MiB")


@pytest.fixture(scope="module")
def module_one_thread():
    with pytest.MonkeyPatch.context() as patch:
        # as this process has, whose losses those of the script are compared with
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


@pytest.fixture(scope="module")
def right() -> dict[int, str]:
    """The losses of the same model in memory."""
    model, opt = failures.make(LAYERS, HIDDEN)
    losses = failures.loop(model, reference.ReferenceOptimizer(opt), 1, STEPS)
    assert len(set(losses)) == STEPS
    return {step: repr(loss) for step, loss in enumerate(losses, 1)}


def test_a_slightly_too_small_disk(script, tmp_path):
    with small_disk(tmp_path, 200) as disk:
        told = failures.too_small_a_disk(script, disk)
    assert "cannot reserve" in told["says"] and told["steps"] == 0


def test_a_disk_that_fills_while_it_trains(script, right, tmp_path):
    with small_disk(tmp_path, 256) as disk:
        failures.disk_that_fills(script, disk, right)
        assert (disk / "ballast").stat().st_size > 0


def test_a_kill_in_the_step(script, right, tmp_path):
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    failures.killed_in_the_step(script, tmp_path / "run", right, 1, seed)


def test_a_resume(script, right, tmp_path):
    failures.stopped_and_resumed(script, tmp_path / "run", right)


class Told:
    """A script that says what the peer's would."""

    steps = 4

    def __init__(self, *runs: tuple) -> None:
        self._runs = list(runs)

    def run(self, store: Path, steps: int | None = None) -> tuple:
        return self._runs.pop(0)


def test_the_checks_can_fail(tmp_path):
    losses = {1: "9.19", 2: "9.1", 3: "9.0", 4: "8.9"}
    half = {1: "9.19", 2: "9.1"}
    failures.stopped_and_resumed(
        Told((0, 0, half, ""), (0, 2, {3: "9.0", 4: "8.9"}, "")), tmp_path, losses
    )
    with pytest.raises(AssertionError, match="resumed, the losses became"):
        failures.stopped_and_resumed(
            Told((0, 0, half, ""), (0, 2, {3: "9.0", 4: "8.8"}, "")), tmp_path, losses
        )
    with pytest.raises(AssertionError, match="it went on from step 0, not 2"):
        failures.stopped_and_resumed(Told((0, 0, half, ""), (0, 0, losses, "")), tmp_path, losses)
    with pytest.raises(AssertionError, match="ended with status 0 after 1 steps"):
        failures.too_small_a_disk(Told((0, 0, {1: "38.57"}, "")), tmp_path)
    with pytest.raises(AssertionError, match="did not say that the disk is too small"):
        failures.too_small_a_disk(Told((1, 0, {}, "Killed")), tmp_path)
