"""Measuring a Machine: its disk (by `stoker probe`), its kernels and checksums, and products of
matrices as a model makes them."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Callable, Iterable, Iterator

import torch
from torch import nn

from stoker import _core
from stoker.errors import StokerError
from stoker.offload.machine import Machine
from stoker.offload.moments import MODES

BOUND = 0.3  # seconds for each measurement of a kernel, beyond its first runs
SHARE_SECONDS = 1.0  # for what updates get of the disk
COMMIT_SECONDS = 0.005  # two barriers and a journal record
# in which a model may be trained; of equals, the first
TYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def repeated(run: Callable[[], float], times: int, bound: float) -> list[float]:
    """What `times` calls of run() returned, of fewer where they take more than `bound` seconds, but
    of one at least. A call before them does not count: it is the first to touch the memory."""
    begun, taken = time.perf_counter(), []
    run()
    while not taken or (len(taken) < times and time.perf_counter() - begun < bound):
        taken.append(run())
    return taken


def core_seconds(run: Callable[[], object], times: int = 5) -> float:
    """The median processor time of run()."""

    def timed() -> float:
        started = time.process_time()
        run()
        return time.process_time() - started

    return statistics.median(repeated(timed, times, BOUND))


def disk_rates(directory: str, seconds: float = 8.0) -> dict[str, float]:
    """Bytes a second, reading, writing and both, at the best block size and depth, by `stoker
    probe`."""
    command = shutil.which("stoker", path=os.path.dirname(sys.executable)) or "stoker"
    try:
        done = subprocess.run(
            [command, "probe", directory, "--json", "--seconds", str(seconds)],
            capture_output=True,
            text=True,
        )
    except OSError as error:
        raise StokerError(
            "the disk cannot be measured: the command `stoker` is not beside this Python"
            f" ({error.strerror})"
        ) from error
    if done.returncode != 0:
        raise StokerError(
            f"stoker probe {directory} failed: {done.stderr.strip().removeprefix('stoker: ')}"
        )
    return json.loads(done.stdout)["best_bytes_per_second"]


def kernel_seconds(count: int = 1 << 20, moments: str = "exact") -> float:
    """Core-seconds an element of the fused AdamW kernel over `count` bfloat16 parameters in memory,
    its moments kept so."""
    weight, rest, grad = (torch.zeros(count, dtype=torch.int16, device="cpu") for _ in range(3))
    m, v = (
        torch.zeros(count * MODES[moments].element_bytes, dtype=torch.uint8, device="cpu")
        for _ in range(2)
    )
    m_scales, v_scales = (torch.zeros(count // 256 + 1, device="cpu") for _ in range(2))
    update = lambda: _core.optim_update(
        count,
        weight_type="bf16",
        grad_type="bf16",
        weight_in=weight.data_ptr(),
        weight_out=weight.data_ptr(),
        grad=grad.data_ptr(),
        remainder=rest.data_ptr(),
        m=m.data_ptr(),
        v=v.data_ptr(),
        algorithm="adamw",
        step=2,
        moments=moments,
        m_scales=m_scales.data_ptr(),
        v_scales=v_scales.data_ptr(),
    )
    return core_seconds(update) / count


def checksum_seconds(size: int = 256 << 20) -> float:
    """Core-seconds a byte of CRC32C over `size` bytes in memory."""
    data = torch.zeros(size, dtype=torch.uint8, device="cpu")
    return core_seconds(lambda: _core.crc32c(data.data_ptr(), size)) / size


def _product(tokens: int, width: int, dtype: torch.dtype) -> Callable[[], object]:
    """Forward and backward through a linear layer. It draws no random numbers, which are the
    caller's."""
    weight = torch.ones(width, width, dtype=dtype, device="cpu", requires_grad=True)
    x = torch.ones(tokens, width, dtype=dtype, device="cpu", requires_grad=True)
    return lambda: nn.functional.linear(x, weight).backward(x)


@contextlib.contextmanager
def _one_thread() -> Iterator[int]:
    """Products on one thread, so that its processor time is theirs, whatever else the machine does;
    how many threads there were."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield threads
    finally:
        torch.set_num_threads(threads)


def _thread_seconds(run: Callable[[], object]) -> float:
    started = time.thread_time()
    run()
    return time.thread_time() - started


def product_rates(
    tokens: int, width: int, dtypes: Iterable[torch.dtype], seconds: float
) -> list[float]:
    """Operations a second of forward and backward through one linear layer on all threads, by type,
    in about `seconds`: where products are slow, fewer tokens and a narrower layer must tell. Types
    are compared at the same size."""
    width, some, spent = min(width, 1024), min(tokens, 16), 0.0
    with _one_thread() as threads:
        while True:
            times = []
            for dtype in dtypes:
                run = _product(some, width, dtype)
                spent += _thread_seconds(run)  # it prepares, too
                taken = [_thread_seconds(run) for _ in range(2)]
                spent += sum(taken)
                times.append(max(min(taken), 1e-9))
            more = min(tokens, 4 * some)
            if more == some or spent + 3 * sum(times) * more / some > seconds:
                return [6.0 * some * width * width * threads / each for each in times]
            some = more


def product_flops(tokens: int, width: int, dtype: torch.dtype = torch.bfloat16) -> float:
    """Operations a second of forward and backward in this type."""
    return product_rates(tokens, width, [dtype], 0.5)[0]


@dataclass(frozen=True)
class Quickest:
    """Which type of weights the processor multiplies quickest."""

    name: str
    flops: dict[str, float]  # by name

    def __str__(self) -> str:
        own = self.flops[self.name] / 1e9
        others = ", ".join(
            f"{rate / 1e9:.3g} in {name}" for name, rate in self.flops.items() if name != self.name
        )
        return (
            f"{self.name}: this processor makes {own:.3g} GFLOP/s of products in it, and {others}"
        )


def quickest_type(tokens: int, width: int, seconds: float = 1.0) -> Quickest:
    """Measured with products of this size, forward and backward, in `seconds` at most."""
    flops = dict(zip(TYPES, product_rates(tokens, width, TYPES.values(), seconds)))
    return Quickest(max(flops, key=lambda name: flops[name]), flops)


@lru_cache(1)
def quick_look() -> Quickest:
    """The same in about 50 ms, once in a process."""
    return quickest_type(16, 512, 0.05)


def copy_seconds(size: int = 64 << 20) -> float:
    """Seconds a byte of moving a gradient to where it stays, on all cores."""
    source, target = (
        torch.ones(size // 2, dtype=torch.bfloat16),
        torch.zeros(size // 2, dtype=torch.bfloat16),
    )

    def timed() -> float:
        started = time.perf_counter()
        target.copy_(source)
        return time.perf_counter() - started

    return min(repeated(timed, 5, BOUND)) / size


def disk_share(directory: str, machine: Machine) -> float:
    """What updates get of the disk's rates: those of a small model, out of a store in `directory`,
    beside what the rehearsal makes of them, in about SHARE_SECONDS: of a slow disk by fewer steps,
    and of a slower one by a smaller model.
    """
    from stoker.offload import offload  # the package is made of modules like this one
    from stoker.offload.rehearsal import Course, Rehearsal

    # of a step: so much is read, and written
    layer_seconds = (12 << 20) * (1 / machine.read + 1 / machine.write)
    layers = max(1, min(6, int(SHARE_SECONDS / 4 / layer_seconds)))
    model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(layers)))
    gradients = [torch.ones_like(param) for param in model.parameters()]
    with tempfile.TemporaryDirectory(dir=directory, prefix="stoker-probe-") as store:
        model, opt = offload(
            model, torch.optim.AdamW(model.parameters()), store=store, dram="64MiB", policy="sync"
        )

        def step() -> float:
            opt.step()
            return opt.ledger.last["seconds"]

        try:
            for param, gradient in zip(model.parameters(), gradients):
                param.grad = gradient
            taken = repeated(step, 11, SHARE_SECONDS)
            setting = opt.setting()
        finally:
            opt.close()
    course = Course([], [unit for block in setting.blocks for unit in block.updated_units])
    planned = (
        Rehearsal(
            setting.blocks,
            setting.algorithm,
            setting.layout,
            setting.arena_bytes,
            course,
            "sync",
            machine,
        )
        .steady()
        .seconds
    )
    return min(1.0, max(0.1, planned / statistics.median(taken[len(taken) // 4 :])))


def file_system(directory: str) -> int:
    return os.stat(directory).st_dev


def by_disk(directories: list[str]) -> list[list[str]]:
    """Those of several directories that are on one file system together: they share its rates and
    its room."""
    together: dict[int, list[str]] = {}
    for directory in directories:
        together.setdefault(file_system(directory), []).append(directory)
    return list(together.values())


def measure_machine(
    directories: list[str], seconds: float, sample_bytes: int = 256 << 20, moments: str = "exact"
) -> Machine:
    """The machine under this process, with the disks of `directories`, one a volume, striped over;
    none: a store in memory.
    `sample_bytes`: memory to measure with."""
    disks = [disk_rates(those[0], seconds) for those in by_disk(directories)]
    disk = {kind: sum(each[kind] for each in disks) or 1e12 for kind in ("read", "write", "mixed")}
    machine = Machine(
        read=disk["read"],
        write=disk["write"],
        mixed=disk["mixed"],
        cores=torch.get_num_threads(),
        update_seconds=kernel_seconds(sample_bytes // 16, moments),
        byte_seconds=checksum_seconds(sample_bytes),
        commit_seconds=COMMIT_SECONDS,
        copy_seconds=copy_seconds(sample_bytes // 4),
    )
    return replace(machine, share=disk_share(directories[0], machine)) if directories else machine
