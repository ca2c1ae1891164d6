"""Measuring a Machine: its disk (by `stoker probe`), its kernels, checksums and
copies, and what updates get of the disk."""

from __future__ import annotations

import statistics
import tempfile
import time
from dataclasses import replace

import torch
from torch import nn

from stoker import _core
from stoker.offload import offload
from stoker.offload.division.machine import Machine
from stoker.offload.model.moments import MODES
from stoker.offload.planning.products import BOUND, core_seconds, repeated
from stoker.offload.planning.rehearsal import Course, Rehearsal
from stoker.offload.storage.probe import by_disk, disk_rates

SHARE_SECONDS = 1.0  # for what updates get of the disk
COMMIT_SECONDS = 0.005  # two barriers and a journal record


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
        hyper=_core.Hyper(algorithm="adamw", lr=1e-3, step=2),
        moments=moments,
        m_scales=m_scales.data_ptr(),
        v_scales=v_scales.data_ptr(),
    )
    return core_seconds(update) / count


def checksum_seconds(size: int = 256 << 20) -> float:
    """Core-seconds a byte of CRC32C over `size` bytes in memory."""
    data = torch.zeros(size, dtype=torch.uint8, device="cpu")
    return core_seconds(lambda: _core.crc32c(data.data_ptr(), size)) / size


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
