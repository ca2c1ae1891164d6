"""What `stoker plan` says beyond the plan of a step: resources, the accelerator's memory, space and
wear of the disk, what else would do."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

from ..errors import OverBudget
from ..offload.planning import planner
from ..offload.model.blocks import Block, Param
from ..offload.division.machine import Machine
from ..offload.model.moments import MODES
from ..offload.model.algorithm import Algorithm
from ..offload.division.layout import divide, plane_bytes, smallest_mib, store_capacity
from ..offload.storage.scratch import scratch_bytes
from ..offload.planning.planner import Setting
from ..train.settings import human_bytes

HIDDEN = 0.05  # the storage is hidden where less than this part of a step is spent waiting for it
ADAMW = Algorithm("adamw", momentum=True, variance=True)


@dataclass(frozen=True)
class Wish:
    """What is asked for."""

    blocks: list[Block]
    dram_bytes: int
    machine: Machine
    tokens: int
    moments: str = "exact"
    gpu_bytes: int = 0
    # on the disk for the store: what is free and what it has already; None: not known
    space_bytes: int | None = None
    held_bytes: int = 0  # of it, what it has already
    endurance_bytes: float = 0.0
    snapshots: int = 0  # steps that stay on the disk beside the current one
    experts: float = 1.0  # the part of a mixture's experts that a token goes through
    memory_bytes: int = 0  # of the machine, all of it; 0: not known
    # of the other byte modes, as machine.update_seconds is of `moments`
    update_seconds: dict[str, float] = field(default_factory=dict)
    dram_text: str = ""  # the memory as it was written


def outlook(wish: Wish) -> dict[str, Any]:
    """All of it as a dictionary that JSON can hold. `problems` are sentences: what does not fit,
    and what would."""
    setting = _setting(wish, wish.moments)
    space = _space(wish, setting)
    result: dict[str, Any] = {
        "tokens": wish.tokens,
        "moments": wish.moments,
        "problems": _disk_problems(wish, space),
        "disk_space": space,
    }
    result["gpu"] = gpu = (
        gpu_memory(wish.blocks, wish.tokens, wish.gpu_bytes, wish.experts)
        if wish.gpu_bytes
        else None
    )
    if gpu and gpu["problem"]:
        result["problems"].append(gpu["problem"])
    if setting is None:
        result["problems"].append(_too_little_memory(wish))
        return {**result, "fits": False}
    compute = (
        planner.flops(wish.blocks, wish.tokens, wish.experts)
        / wish.machine.flops
        * (4 / 3 if gpu and gpu["recompute"] else 1.0)
    )
    plan = planner.plan(setting, wish.machine, compute)
    plan["step"] = row = plan["steps"][plan["policy"]]
    plan["dram"]["cap"] = wish.dram_bytes
    plan["dram"]["activations"] = activations = activation_bytes(wish) if not wish.gpu_bytes else 0
    whole = plan["state_bytes"] + plan["classes"]["gradients"] + activations
    resources = planner.limits(row, wish.machine)
    written = sum(row["written_bytes"].values())
    return {
        **result,
        **plan,
        "fits": not result["problems"],
        "whole_in_memory": whole,
        "memory_is_enough": not wish.gpu_bytes and whole <= wish.memory_bytes,
        "compute_alone_seconds": compute,
        "resource_seconds": resources,
        "bottleneck": max(resources, key=lambda name: resources[name]),
        "tokens_hidden": tokens_hidden(
            wish, setting, plan["policy"], compute / wish.tokens, resources["disk"]
        ),
        "byte_modes": byte_modes(wish, compute, plan),
        "wear": {
            "bytes_per_1000_steps": 1000 * written,
            "endurance_bytes": wish.endurance_bytes or None,
            "share_per_1000_steps": (
                1000 * written / wish.endurance_bytes if wish.endurance_bytes else None
            ),
            "steps_to_endurance": (
                int(wish.endurance_bytes / written) if wish.endurance_bytes else None
            ),
        },
    }


def activation_bytes(wish: Wish) -> int:
    """What autograd keeps in memory of a step of so many tokens, about, where the cores compute.
    The cap does not count it."""
    full, _, logits = _activation_bytes(wish.blocks, wish.experts)
    width = max(unit.dtype.itemsize for block in wish.blocks for unit in block.units)
    return (full * width // 2 + logits) * wish.tokens


def tokens_hidden(
    wish: Wish, setting: Setting, policy: str, seconds_a_token: float, disk_seconds: float
) -> int | None:
    """The tokens a step from which on less than HIDDEN of it waits for the storage, to within an
    eighth; None: none do.

    Computing must last at least as long as the disk is busy; from there on it is tried by
    rehearsal.
    """
    least = max(1.0, disk_seconds / seconds_a_token)
    tried = [_round(least * 1.125**each) for each in range(12)]

    def hides(tokens: int) -> bool:
        row = planner.predict(setting, wish.machine, tokens * seconds_a_token, policy)
        return sum(row["stall_seconds"].values()) <= HIDDEN * row["seconds"]

    return next(iter(tried[bisect_left(tried, True, key=hides) :]), None)


def _round(tokens: float) -> int:
    """Two digits that matter, upwards."""
    step = 10 ** max(0, len(str(int(tokens))) - 2)
    return int(-(-tokens // step) * step)


def byte_modes(wish: Wish, compute: float, exact: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Each byte mode under the policy that is chosen: {mode: {policy, seconds,
    bytes_per_parameter}}."""
    modes = {}
    for mode in MODES:
        try:
            row = (
                exact["step"]
                if mode == wish.moments
                else _with_moments(wish, mode, compute, exact["policy"])
            )
        except OverBudget:
            continue
        moved = sum(row["read_bytes"].values()) + sum(row["written_bytes"].values())
        modes[mode] = {
            "policy": exact["policy"],
            "seconds": row["seconds"],
            "bytes_per_parameter": moved / exact["parameters"],
        }
    return modes


def _with_moments(wish: Wish, mode: str, compute: float, policy: str) -> dict[str, Any]:
    """The row of that policy. It is the one of the wish's own moments: to ask all of them for each
    mode takes seconds, and tells no more."""
    setting = Setting.of(
        wish.blocks, planner.with_moments(ADAMW, mode), wish.dram_bytes, spills=not wish.gpu_bytes
    )
    machine = replace(
        wish.machine, update_seconds=wish.update_seconds.get(mode, wish.machine.update_seconds)
    )
    return planner.predict(setting, machine, compute, policy)


def advice(result: dict[str, Any]) -> str:
    """Which byte mode, and why."""
    modes, mode = result["byte_modes"], result["moments"]
    own = modes[mode]["seconds"]
    faster = {
        name: each for name, each in modes.items() if name != mode and each["seconds"] < 0.95 * own
    }
    if not faster:
        return f"{mode} moments: the others would save less than a twentieth of the step"
    offers = ", ".join(
        f"{name} moments {each['seconds']:.3g} s ({1 - each['seconds'] / own:.0%} less)"
        for name, each in faster.items()
    )
    if mode == "exact":
        return (
            "exact moments, as nothing else gives the bits of ordinary training; if you may lose"
            f" some: {offers}"
        )
    return f"{mode} moments, as you asked; {offers}"


def gpu_memory(
    blocks: list[Block], tokens: int, gpu_bytes: int, experts: float = 1.0
) -> dict[str, Any]:
    """What an accelerator holds at its peak, about: weights of the blocks at work and of those
    fetched ahead, the gradients of a whole step, activations, logits.

    Gradients stay there until step(), whatever the policy: a micro-batch meets all of those before
    it. Activations are reckoned as the inputs and outputs of every product that a token goes
    through, two bytes each. With recomputation they are the inputs of the blocks, and all of one
    block.
    """
    layout = divide(blocks, ADAMW, 0, spills=False)  # blocks alone say what is at work
    weights = min(layout.device_weights, sum(block.slot_bytes for block in blocks))
    fixed = {
        "weights": weights,
        "gradients": sum(unit.weight_bytes for block in blocks for unit in block.updated_units),
    }
    full, lean, logits = _activation_bytes(blocks, experts)
    room = gpu_bytes - sum(fixed.values())
    recompute = (full + logits) * tokens > room
    peak = {
        **fixed,
        "activations": (lean if recompute else full) * tokens,
        "logits": logits * tokens,
    }
    most = max(0, room) // max(1, lean + logits)
    return {
        "cap": gpu_bytes,
        "peak_bytes": sum(peak.values()),
        "classes": peak,
        "recompute": recompute,
        "tokens_most": most,
        "problem": _gpu_problem(peak, tokens, most, gpu_bytes),
    }


def _activation_bytes(blocks: list[Block], experts: float) -> tuple[int, int, int]:
    """Bytes a token: of all activations, of those that recomputation keeps, of the logits."""
    rows = [
        (
            block,
            [
                p
                for p in block.params
                if len(p.size) == 2 or planner.of_expert(p) and len(p.size) == 3
            ],
        )
        for block in blocks
    ]
    apart = [(block, params[0].size) for block, params in rows if len(params) == 1]
    layers = [params for _, params in rows if len(params) > 1]
    inside = [round(2 * sum(_in_and_out(param, experts) for param in params)) for params in layers]
    # A layer's largest matrices have the model's width on one side; others are narrower on one:
    # shared keys and values, routers, ranks.
    width = max(
        (min(p.size[-2:]) for params in layers or [params for _, params in rows] for p in params),
        default=0,
    )
    # Where the logits are: the matrix that makes the vocabulary out of the width. In shapes without
    # a head nobody knows of a tied one: it is reckoned with.
    ends = [(block, size[0]) for block, size in apart if size[0] > size[-1]]
    heads = [outputs for block, outputs in ends if not planner.forward_only(block)] or [
        outputs for block, outputs in ends if not block.modules
    ]
    logits = 10 * max(heads, default=0)  # bf16, float32 and its gradient
    return sum(inside), 2 * width * max(1, len(inside)) + max(inside, default=0), logits


def _in_and_out(param: Param, experts: float) -> float:
    """Elements a token: of the inputs and outputs of the products with this matrix, or with all
    that it holds of a mixture's experts."""
    *count, rows, columns = param.size
    return (rows + columns) * prod(count) * (experts if planner.of_expert(param) else 1.0)


def _gpu_problem(peak: dict[str, int], tokens: int, most: int, gpu_bytes: int) -> str | None:
    """Why it does not fit, and what would. `peak`: with recomputation, if that is needed. `most`:
    tokens that fit at once."""
    whole = sum(peak.values())
    if whole <= gpu_bytes:
        return None
    larger = f"an accelerator of {human_bytes(-(-whole >> 30) << 30)} ({-(-whole >> 30)} GiB) would"
    frozen = (
        "fewer weights that train (LoRA adapters: a frozen base has no gradients), or "
        if whole - peak["gradients"] <= gpu_bytes
        else ""
    )
    if most:
        return (
            f"{tokens} tokens at once do not fit the accelerator: {human_bytes(whole)} of"
            f" {human_bytes(gpu_bytes)} even with recomputation; micro-batches of {most} tokens"
            f" that accumulate would, and {larger}"
        )
    return (
        f"the accelerator's {human_bytes(gpu_bytes)} do not hold the gradients of a step"
        f" ({human_bytes(peak['gradients'])}, which stay there until step() under every policy) and"
        f" the weights of the blocks at work ({human_bytes(peak['weights'])}); {larger}, and so"
        f" would {frozen}computing on the cores, without --gpu"
    )


def _setting(wish: Wish, mode: str) -> Setting | None:
    """With the moments kept so; None where the memory is too little for it."""
    try:
        return Setting.of(
            wish.blocks,
            planner.with_moments(ADAMW, mode),
            wish.dram_bytes,
            spills=not wish.gpu_bytes,
        )
    except OverBudget:
        return None


def _space(wish: Wish, setting: Setting | None) -> dict[str, Any]:
    return {
        "needed": _space_needed(wish, wish.moments, setting),
        "one_version": sum(
            plane_bytes(wish.blocks, planner.with_moments(ADAMW, wish.moments)).values()
        ),
        "snapshots": wish.snapshots,
        "free": wish.space_bytes,
        "held": wish.held_bytes,
    }


def _space_needed(wish: Wish, mode: str, setting: Setting | None) -> int:
    spilled = scratch_bytes(setting.layout.spilled_bytes) if setting is not None else 0
    return store_capacity(wish.blocks, planner.with_moments(ADAMW, mode), wish.snapshots) + spilled


def snapshots_text(space: dict[str, Any]) -> str:
    kept = space["snapshots"]
    return f", {kept} snapshot{'s' if kept > 1 else ''}" if kept else ""


def held_text(space: dict[str, Any]) -> str:
    return (
        f" ({human_bytes(space['held'])} of it in the store that is there)" if space["held"] else ""
    )


def _disk_problems(wish: Wish, space: dict[str, Any]) -> list[str]:
    needed, free = space["needed"], space["free"]
    if free is None or free >= needed:
        return []
    return [
        f"the disk has {human_bytes(free)} free{held_text(space)}, and two versions of the"
        f" states{snapshots_text(space)}, with spilled gradients, take {human_bytes(needed)}: free"
        f" {human_bytes(needed - free)} more, or name a larger disk{_mode_that_fits(wish, free)}"
    ]


def _mode_that_fits(wish: Wish, free: int) -> str:
    """The first byte mode that there is room for, as the end of a sentence."""
    for mode in MODES:
        setting = _setting(wish, mode)
        needed = _space_needed(wish, mode, setting)
        if setting is not None and needed <= free:
            return (
                f", or, if the moments may lose some bits, --moments {mode}, with which"
                f" {human_bytes(needed)} are enough"
            )
    return ""


def _too_little_memory(wish: Wish) -> str:
    algorithm = planner.with_moments(ADAMW, wish.moments)
    smallest = smallest_mib(
        wish.blocks, algorithm, planner.map_bytes(wish.blocks, algorithm), spills=not wish.gpu_bytes
    )
    gradients = sum(unit.weight_bytes for block in wish.blocks for unit in block.updated_units)
    why = (
        f"the gradients of a step alone take {human_bytes(gradients)}"
        if wish.gpu_bytes
        else "they do not hold the blocks at work, their gradients and two tiles of state"
    )
    return (
        f"{wish.dram_text or human_bytes(wish.dram_bytes)} of memory are too little: {why}; "
        f"--dram {smallest}MiB is the least that works"
        + (f" ({smallest / 1024:.1f} GiB)" if smallest > 1024 else "")
    )
