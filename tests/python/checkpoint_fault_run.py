"""Saving and restoring while faulty_disk.c, which is preloaded, makes the disk misbehave: `python
checkpoint_fault_run.py FOLDER`. Prints a line of JSON for each case."""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path

import torch

import stoker
from checkpoint_run import made, train
from faulty_disk_run import (
    DISK_IS_FULL,
    READS_ARE_SHORT,
    READS_FAIL,
    WRITES_ARE_SHORT,
    WRITES_FAIL,
    Disk,
)
from stoker.errors import StokerError

SAVING = {
    "writes fail": WRITES_FAIL,
    "writes are short": WRITES_ARE_SHORT,
    "the disk is full": DISK_IS_FULL,
}
RESTORING = {"reads fail": READS_FAIL, "reads are short": READS_ARE_SHORT}


def saving(how: int, folder: Path, disk: Disk) -> dict:
    """Step 2 is saved on the disk that misbehaves, step 3 on one that is well again."""
    told: dict = {}
    model, opt = made()
    with stoker.Checkpoints(folder, staging="16MiB", keep=9) as ckpt:
        for step in (1, 2, 3):
            train(model, opt, step)
            if step == 2:
                disk.misbehave(how, folder)
            try:
                ckpt.save(step, model=model, optimizer=opt).wait()
            except StokerError as error:
                told["error"], told["text"] = type(error).__name__, str(error)
                ckpt._failed = None  # the next call would say it again
            if step == 2:
                told["met"] = disk.behave()
                told["newest"] = ckpt.restore(model=made()[0]).step
        other, _ = made()
        told["last"] = ckpt.restore(model=other).step
        for name, value in other.state_dict().items():
            assert torch.equal(value, model.state_dict()[name]), name
    # an empty folder is nothing to any reader
    told["folders"] = sorted({each.parent.name[:11] for each in folder.glob("step-*/*")})
    return told


def restoring(how: int, folder: Path, disk: Disk) -> dict:
    """The newest checkpoint lies where the disk misbehaves."""
    model, opt = made()
    with stoker.Checkpoints(folder, staging="16MiB") as ckpt:
        for step in (1, 2):
            train(model, opt, step)
            handle = ckpt.save(step, model=model, optimizer=opt)
            handle.wait()
            ckpt.wait()
        disk.misbehave(how, folder / handle.folder)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            step = ckpt.restore(model=made()[0]).step
    return {"met": disk.behave(), "step": step, "said": [str(each.message) for each in said]}


if __name__ == "__main__":
    torch.set_num_threads(1)
    disk = Disk()
    for cases, run in ((SAVING, saving), (RESTORING, restoring)):
        for case, how in cases.items():
            told = run(how, Path(sys.argv[1]) / case.replace(" ", "-"), disk)
            print(json.dumps({"case": case, **told}), flush=True)
