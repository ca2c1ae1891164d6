"""kill -9 at random moments of a training run; each resumed, and the end compared bit for bit with
the uninterrupted run."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time

import pytest

HERE = os.path.dirname(__file__)


def start(
    store: str, steps: int, policy: str, moments: str, dram: str = "7MiB"
) -> subprocess.Popen:
    return subprocess.Popen(
        [
            sys.executable,
            os.path.join(HERE, "kill_run.py"),
            store,
            str(steps),
            policy,
            moments,
            dram,
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=HERE,
    )


def finish(process: subprocess.Popen) -> tuple[dict[int, str], str, int]:
    out, err = process.communicate(timeout=300)
    assert process.returncode in (0, -signal.SIGKILL), err[-2000:]
    losses = {int(step): loss for step, loss in re.findall(r"^step (\d+) (\S+)$", out, re.M)}
    digest = re.search(r"^digest (\w+)$", out, re.M)
    at = re.search(r"^at (\d+)$", out, re.M)
    return losses, digest.group(1) if digest else "", int(at.group(1)) if at else -1


@pytest.mark.parametrize(
    ("policy", "moments", "steps", "kills", "dram"),
    [
        *(
            ("speculate", "exact", 160, 20, "7MiB"),
            ("sync", "exact", 160, 5, "7MiB"),
            ("lazy", "exact", 80, 8, "7MiB"),
            ("auto", "exact", 40, 3, "7MiB"),
        ),
        *(("speculate", "bf16", 40, 3, "7MiB"), ("speculate", "8bit", 40, 3, "7MiB")),
        # with spilled gradients
        *(("speculate", "exact", 40, 4, "5MiB"), ("lazy", "exact", 40, 4, "5MiB")),
    ],
)
def test_killed_runs_end_like_the_uninterrupted_one(tmp_path, policy, moments, steps, kills, dram):
    losses, digest, _ = finish(start(f"{tmp_path}/whole", steps, policy, moments))
    assert len(losses) == steps and digest
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    rng = random.Random(seed)
    seen: dict[int, str] = {}
    reached, killed = 0, 0
    while True:
        process = start(f"{tmp_path}/killed", steps, policy, moments, dram)
        if killed < kills:
            # wait until it trains, then kill it some steps on, at a random moment of a step
            target = reached + rng.randrange(1, max(2, (steps - reached) // (kills - killed) * 2))
            lines = []
            for line in process.stdout:
                lines.append(line)
                if line.startswith("step") and int(line.split()[1]) >= target:
                    break
            time.sleep(rng.random() * 0.02)
            process.kill()
            killed += 1
            part, end, at = finish(process)
            for step, loss in re.findall(r"^step (\d+) (\S+)$", "".join(lines), re.M):
                part[int(step)] = loss
            at = next((int(line.split()[1]) for line in lines if line.startswith("at")), at)
        else:
            part, end, at = finish(process)
        # at most one step behind what it had printed, never ahead
        assert max(0, reached - 1) <= at <= reached + 1, f"resumed at {at}, had reached {reached}"
        for step, loss in part.items():
            assert loss == losses[step], f"step {step} after a kill"
            seen[step] = loss
        reached = max([reached, *part])
        if end:
            break
    assert killed == kills
    assert seen == losses
    assert end == digest
