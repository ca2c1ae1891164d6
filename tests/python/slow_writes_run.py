"""Every weight is edited while the step that made it is still being written: `python
slow_writes_run.py FOLDER` with faulty_disk.c preloaded, which holds each write back for 20 ms.
Prints a line of JSON for each policy and type: how many writes were slow, and in what the run
differs from one in memory."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

import stoker
from faulty_disk_run import WRITES_ARE_SLOW, Disk
from test_offload_features import adamw
from test_weights import EDITS, POLICIES, Control, make, train


def edits(model, step: int) -> None:
    for at, param in enumerate(model.parameters()):
        EDITS[(at + step) % len(EDITS)](param, step)


def run(policy: str, dtype: torch.dtype, folder: Path) -> dict:
    control, disk, steps = make(dtype, layers=1), Disk(), range(3)
    expected = train(control, Control(adamw(control)), edits, steps=steps)
    told = {"policy": policy, "dtype": str(dtype)}
    model = make(dtype, layers=1)
    options = {"store": str(folder), "dram": "16MiB", "policy": policy}
    model, opt = stoker.offload(model, adamw(model), **options)
    disk.misbehave(WRITES_ARE_SLOW, folder)
    told["losses"] = train(model, opt, edits, steps=steps) == expected
    opt.close()
    told["met"] = disk.behave()
    model = make(dtype, layers=1)
    model, opt = stoker.offload(model, adamw(model), **options, resume=True)
    ours, theirs = model.state_dict(), control.state_dict()
    told["differ"] = [name for name, value in theirs.items() if not torch.equal(ours[name], value)]
    opt.close()
    return told


if __name__ == "__main__":
    torch.set_num_threads(1)
    for policy in POLICIES:
        for dtype in (torch.float32, torch.bfloat16):
            told = run(policy, dtype, Path(sys.argv[1]) / f"{policy}-{dtype}")
            print(json.dumps(told), flush=True)
