"""Training while faulty_disk.c, which is preloaded, makes the disk misbehave: `python
faulty_disk_run.py FOLDER`. Prints a line of JSON for each case and policy: the error that training
met, if it did, what was committed then, and a digest of the weights and the state at the end.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import hashlib
import json
import sys
from pathlib import Path

import torch

import stoker
from faults import find, volume
from models import Tiny, batch, loss_of
from stoker import _core
from stoker.errors import StokerError

STEPS, AT = 10, 4  # steps, and those before the disk begins to misbehave
WELL, READS_FAIL, READS_END, READS_ARE_SHORT, ALL_FAILS, WRITES_ARE_SLOW = range(6)
WRITES_FAIL, WRITES_ARE_SHORT, DISK_IS_FULL = range(6, 9)
CASES = (
    "well",
    "a chunk of state cannot be read",
    "the volume ends before a chunk of state",
    "reads are short",
    "one of two volumes is gone",
)
POLICIES = ("sync", "speculate", "lazy")
DRAM = "7MiB"


class Disk:
    def __init__(self) -> None:
        self._library = ctypes.CDLL(None)
        self._library.misbehave.argtypes = (
            ctypes.c_int,
            ctypes.c_char_p,
            ctypes.c_long,
            ctypes.c_long,
        )
        self._library.misbehaved.restype = ctypes.c_long

    def misbehave(self, how: int, path: Path, begin: int = 0, end: int = 1 << 62) -> None:
        self._library.misbehave(how, str(path).encode(), begin, end)

    def behave(self) -> int:
        """How many calls met the fault."""
        met = self._library.misbehaved()
        self._library.misbehave(WELL, b"", 0, 0)
        return met


def offload(store: str, policy: str):
    torch.manual_seed(0)
    model = Tiny().to(torch.bfloat16)
    return stoker.offload(
        model,
        torch.optim.AdamW(model.parameters(), lr=3e-3),
        store=store,
        dram=DRAM,
        policy=policy,
        resume="auto",
    )


def begin(case: str, disk: Disk, folders: list[Path], opt) -> str:
    """The disk misbehaves from now on. What the error has to name."""
    if case == "reads are short":
        disk.misbehave(READS_ARE_SHORT, folders[0])
    elif case == "one of two volumes is gone":
        disk.misbehave(ALL_FAILS, folders[1])
        return str(folders[1])
    elif case != "well":
        opt.flush()
        planes = opt._session.planes
        unit = next(
            unit
            for block in reversed(planes.blocks)
            for unit in block.updated_units
            if unit not in planes.layout.retained
        )
        at = find(volume(folders[0]), planes.store.read_bytes(f"m/{unit.name}", 0, 4096))[-1]
        disk.misbehave(
            READS_FAIL if case.endswith("cannot be read") else READS_END,
            volume(folders[0]),
            at,
            at + 4096,
        )
        return unit.name
    return ""


def run(case: str, policy: str, folder: Path) -> dict:
    disk, told = Disk(), {"case": case, "policy": policy, "error": None, "met": 0, "named": ""}
    folders = [
        folder / f"{policy}-{number}"
        for number in range(2 if case == "one of two volumes is gone" else 1)
    ]
    store = ",".join(map(str, folders))
    model, opt = offload(store, policy)
    misbehaves = False
    while opt.step_count < STEPS:
        if opt.step_count == AT and not misbehaves:
            misbehaves, told["named"] = True, begin(case, disk, folders, opt)
        try:
            loss_of(model, batch(opt.step_count)).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 2.0)
            opt.step()
        except StokerError as error:
            assert told["error"] is None, error
            told["error"] = type(error).__name__, errno.errorcode.get(error.errno, ""), str(error)
            told["met"] = disk.behave()
            if len(folders) > 1:  # a store that could not write its journal is to be opened again
                try:
                    opt.close()
                except StokerError:
                    pass
                model, opt = offload(store, policy)
            told["committed"] = opt.committed_step
        opt.zero_grad()
    opt.flush()
    told["met"] = told["met"] or disk.behave()
    digest = hashlib.sha256()
    for index, state in sorted(opt.state_dict(full=True)["state"].items()):
        for name, value in sorted(state.items()):
            digest.update(
                f"{index} {name}".encode()
                + value.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
            )
    opt.close()
    return {**told, "digest": digest.hexdigest()}


if __name__ == "__main__":
    _core.Runtime = functools.partial(_core.Runtime, engine="posix")
    for index, case in enumerate(CASES):
        for policy in POLICIES:
            print(json.dumps(run(case, policy, Path(sys.argv[1]) / str(index))), flush=True)
