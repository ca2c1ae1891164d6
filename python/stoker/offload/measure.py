"""Measuring a Machine: its disk (by `stoker probe`), its kernels and checksums, and products of matrices as a model makes them."""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from typing import Callable

import torch
from torch import nn

from stoker import _core
from stoker.errors import StokerError
from stoker.offload.machine import Machine
from stoker.offload.moments import MODES

COMMIT_SECONDS = 0.005  # two barriers and a journal record


def core_seconds(run: Callable[[], object], times: int = 5) -> float:
    """The median processor time of run(), after one that does not count."""
    run()
    taken = []
    for _ in range(times):
        started = time.process_time()
        run()
        taken.append(time.process_time() - started)
    return statistics.median(taken)


def disk_rates(directory: str, seconds: float = 8.0) -> dict[str, float]:
    """Bytes a second, reading, writing and both, at the best block size and depth, by `stoker probe`."""
    command = shutil.which("stoker", path=os.path.dirname(sys.executable)) or "stoker"
    try:
        done = subprocess.run([command, "probe", directory, "--json", "--seconds", str(seconds)], capture_output=True, text=True)
    except OSError as error:
        raise StokerError(f"the disk cannot be measured: the command `stoker` is not beside this Python ({error.strerror})") from error
    if done.returncode != 0:
        raise StokerError(f"stoker probe {directory} failed: {done.stderr.strip().removeprefix('stoker: ')}")
    return json.loads(done.stdout)["best_bytes_per_second"]


def kernel_seconds(count: int = 16 << 20, moments: str = "exact") -> float:
    """Core-seconds an element of the fused AdamW kernel over `count` bfloat16 parameters in memory, its moments kept so."""
    weight, rest, grad = (torch.zeros(count, dtype=torch.int16, device="cpu") for _ in range(3))
    m, v = (torch.zeros(count * MODES[moments].element_bytes, dtype=torch.uint8, device="cpu") for _ in range(2))
    m_scales, v_scales = (torch.zeros(count // 256 + 1, device="cpu") for _ in range(2))
    update = lambda: _core.optim_update(
        count, weight_type="bf16", grad_type="bf16", weight_in=weight.data_ptr(), weight_out=weight.data_ptr(), grad=grad.data_ptr(),
        remainder=rest.data_ptr(), m=m.data_ptr(), v=v.data_ptr(), algorithm="adamw", step=2,
        moments=moments, m_scales=m_scales.data_ptr(), v_scales=v_scales.data_ptr(),
    )  # fmt: skip
    return core_seconds(update) / count


def checksum_seconds(size: int = 256 << 20) -> float:
    """Core-seconds a byte of CRC32C over `size` bytes in memory."""
    data = torch.zeros(size, dtype=torch.uint8, device="cpu")
    return core_seconds(lambda: _core.crc32c(data.data_ptr(), size)) / size


def product_flops(tokens: int, width: int, dtype: torch.dtype = torch.bfloat16) -> float:
    """Floating-point operations a second of forward and backward through one linear layer of width x width."""
    layer, x = nn.Linear(width, width, bias=False, dtype=dtype), torch.ones(tokens, width, dtype=dtype, requires_grad=True)
    times = []
    for _ in range(4):
        started = time.perf_counter()
        layer(x).backward(x)
        times.append(time.perf_counter() - started)
    return 6.0 * tokens * width * width / min(times)


def copy_seconds(size: int = 64 << 20) -> float:
    """Seconds a byte of moving a gradient to where it stays, on all cores."""
    source, target = torch.ones(size // 2, dtype=torch.bfloat16), torch.zeros(size // 2, dtype=torch.bfloat16)
    taken = []
    for _ in range(5):
        started = time.perf_counter()
        target.copy_(source)
        taken.append(time.perf_counter() - started)
    return min(taken) / size


def disk_share(directory: str, machine: Machine) -> float:
    """What updates get of the disk's rates: those of a small model, out of a store in `directory`, beside what the rehearsal makes of them."""
    from stoker.offload import offload  # the package is made of modules like this one
    from stoker.offload.rehearsal import Course, Rehearsal

    model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False, dtype=torch.bfloat16) for _ in range(6)))
    gradients = [torch.ones_like(param) for param in model.parameters()]
    with tempfile.TemporaryDirectory(dir=directory, prefix="stoker-probe-") as store:
        model, opt = offload(model, torch.optim.AdamW(model.parameters()), store=store, dram="64MiB", policy="sync")
        try:
            for param, gradient in zip(model.parameters(), gradients):
                param.grad = gradient
            taken = []
            for _ in range(12):
                opt.step()
                taken.append(opt.ledger.last["seconds"])
            setting = opt.setting()
        finally:
            opt.close()
    course = Course([], [unit for block in setting.blocks for unit in block.updated_units])
    planned = Rehearsal(setting.blocks, setting.algorithm, setting.layout, setting.arena_bytes, course, "sync", machine).steady().seconds
    return min(1.0, max(0.1, planned / statistics.median(taken[4:])))


def file_system(directory: str) -> int:
    return os.stat(directory).st_dev


def by_disk(directories: list[str]) -> list[list[str]]:
    """Those of several directories that are on one file system together: they share its rates and its room."""
    together: dict[int, list[str]] = {}
    for directory in directories:
        together.setdefault(file_system(directory), []).append(directory)
    return list(together.values())


def measure_machine(directories: list[str], seconds: float, sample_bytes: int = 256 << 20, moments: str = "exact") -> Machine:
    """The machine under this process, with the disks of `directories`, one a volume, striped over; none: a store in memory.
    `sample_bytes`: memory to measure with."""
    disks = [disk_rates(those[0], seconds) for those in by_disk(directories)]
    disk = {kind: sum(each[kind] for each in disks) or 1e12 for kind in ("read", "write", "mixed")}
    machine = Machine(
        read=disk["read"], write=disk["write"], mixed=disk["mixed"], cores=torch.get_num_threads(),
        update_seconds=kernel_seconds(sample_bytes // 16, moments), byte_seconds=checksum_seconds(sample_bytes), commit_seconds=COMMIT_SECONDS, copy_seconds=copy_seconds(sample_bytes // 4),
    )  # fmt: skip
    return replace(machine, share=disk_share(directories[0], machine)) if directories else machine
