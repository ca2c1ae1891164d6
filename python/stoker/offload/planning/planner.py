"""The planner: what a step will move, how long it will take and who will wait for whom, from sizes
alone.

A plan has the items of a ledger row (ledger.py), so that prediction and measurement stand side by
side: bytes by class, seconds, stall_seconds by cause. It comes from a rehearsal (rehearsal.py) of
the recorded order, or before there is one of the order in which the blocks are defined.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from torch import nn

from stoker.errors import OverBudget
from stoker.offload.activations.traffic import ActivationTraffic
from stoker.offload.division.layout import (
    MIB,
    Layout,
    arena_bytes_for,
    divide,
    plane_bytes,
    smallest_mib,
)
from stoker.offload.division.machine import CAUSES, Machine
from stoker.offload.model.algorithm import Algorithm
from stoker.offload.model.blocks import Block, Param, Unit
from stoker.offload.model.moments import moments_of
from stoker.offload.planning.rehearsal import Course, Rehearsal

# When updates run. A new policy of Steps is planned by its name alone: the rehearsal runs the code
# of Steps itself.
TIE = 0.02  # of a step: what predictions differ by less is the same
POLICIES = ("sync", "speculate", "lazy")
# Only for the order of what depends on it, where nothing was measured; no second of it is shown.
NOMINAL = Machine(
    read=3e9, write=3e9, flops=1e12, update_seconds=1e-9, byte_seconds=1e-10, commit_seconds=0.005
)


@dataclass(frozen=True)
class Setting:
    """What is planned: a model cut into blocks, and the memory it trains in."""

    blocks: list[Block]
    algorithm: Algorithm
    layout: Layout
    arena_bytes: int

    @staticmethod
    def of(
        blocks: list[Block], algorithm: Algorithm, dram_bytes: int, spills: bool = True
    ) -> Setting:
        """As Planes will divide `dram_bytes`. `spills`: whether gradients may go to the disk.
        OverBudget names the smallest that works."""
        used = map_bytes(blocks, algorithm)
        arena = arena_bytes_for(dram_bytes, used)
        layout = divide(blocks, algorithm, arena, spills)
        if layout.smallest > arena:
            raise OverBudget(
                f"{dram_bytes >> 20} MiB are too small for this model; the smallest budget that"
                f' works is dram="{smallest_mib(blocks, algorithm, used, spills)}MiB"'
            )
        return Setting(blocks, algorithm, layout, arena - layout.passing)

    @property
    def parameters(self) -> int:
        return sum(
            sum(p.numel for p in unit.params) or unit.elements
            for block in self.blocks
            for unit in block.units
        )


def map_bytes(blocks: list[Block], algorithm: Algorithm) -> int:
    """About what the store's map takes of the budget: 32 bytes a chunk of a megabyte, in two
    versions."""
    return (1 << 16) + sum(plane_bytes(blocks, algorithm).values()) * 64 // (1 << 20)


_EMBEDDINGS = (
    "embed",
    "embed_tokens",
    "embed_positions",
    "wte",
    "wpe",
    "word_embeddings",
    "position_embeddings",
    "token_type_embeddings",
    "embeddings",
)


def forward_only(block: Block) -> bool:
    """Whether backward does without the weights: an embedding's gradient needs the tokens alone."""
    if block.pinned:
        return False
    own = [
        module
        for module in block.modules
        if next(module.parameters(recurse=False), None) is not None
    ]
    if own:
        return all(isinstance(module, (nn.Embedding, nn.EmbeddingBag)) for module in own)
    return block.name.rpartition(".")[2] in _EMBEDDINGS


def expected_uses(blocks: list[Block]) -> list[int]:
    """Forward through the blocks as they are defined, backward the other way round."""
    forward = [block.index for block in blocks]
    uses = forward + [block.index for block in reversed(blocks) if not forward_only(block)]
    return [block for i, block in enumerate(uses) if not i or uses[i - 1] != block]


def of_expert(param: Param) -> bool:
    """Whether it belongs to the experts of a mixture, of which a token goes through a few."""
    return "experts" in param.name.split(".")


def flops(blocks: list[Block], tokens: int, experts: float = 1.0) -> float:
    """Of forward and backward: the products with weights, which are nearly all of it. `experts`:
    the part of a mixture's that a token goes through."""
    passed = (1 - experts) * sum(
        param.numel for block in blocks for param in block.params if of_expert(param)
    )
    return (
        6.0
        * tokens
        * (
            sum(
                unit.elements for block in blocks if not forward_only(block) for unit in block.units
            )
            - passed
        )
    )


def course(
    setting: Setting,
    compute_seconds: float,
    uses: list[int] | None,
    finals: list[Unit] | None,
    link: float = 0.0,
    again: frozenset[int] = frozenset(),
) -> Course:
    """compute_seconds: of forward and backward through the whole model with nothing beside it.
    Where an accelerator computes, a block takes at least as long as its weights (and back, its
    gradients) take over the link. again: blocks whose forward is computed once more in backward.
    """
    blocks = setting.blocks
    weighty = {
        block.index: sum(unit.elements for unit in block.units)
        for block in blocks
        if not forward_only(block)
    }
    total = sum(weighty.values()) or 1
    compute = {}
    for block in blocks:
        share = compute_seconds * weighty.get(block.index, 0) / total
        over = block.slot_bytes / link if link else 0.0
        forward, backward = share / 3, share * (1 if block.index in again else 2 / 3)
        compute[block.index] = (max(forward, over), max(backward, 2 * over))
    updated = {unit for block in blocks for unit in block.updated_units}
    order = [unit for unit in finals or () if unit in updated]
    known = set(order)
    backward = (unit for block in reversed(blocks) for unit in block.updated_units)
    order += [unit for unit in backward if unit not in known]
    return Course(uses or expected_uses(blocks), order, compute)


def plan(
    setting: Setting,
    machine: Machine | None = None,
    compute_seconds: float = 0.0,
    uses: list[int] | None = None,
    finals: list[Unit] | None = None,
    away: ActivationTraffic | None = None,
) -> dict[str, Any]:
    """The plan as a dictionary that JSON can hold. `uses`, `finals`: the recorded order and that in
    which gradients become final.

    steps: {policy: what a ledger row has}; seconds and stall_seconds only where the machine is
    known. policy: what to choose, and why.
    """
    steps = {
        policy: predict(setting, machine, compute_seconds, policy, uses, finals, away)
        for policy in POLICIES
    }
    sizes = plane_bytes(setting.blocks, setting.algorithm)
    layout = setting.layout
    retained = sum(sum(setting.algorithm.state_bytes(unit).values()) for unit in layout.retained)
    return {
        "parameters": setting.parameters,
        "state_bytes": sum(sizes.values()),
        "classes": {
            **sizes,
            "gradients": sum(
                unit.weight_bytes for block in setting.blocks for unit in block.updated_units
            ),
        },
        "dram": {
            "gradients": layout.gradients,
            "passing": layout.passing,
            "pinned": layout.pinned,
            "tiles": layout.staging,
            "state": retained,
            "weights": min(
                sizes["weights"],
                setting.arena_bytes - layout.gradients - layout.staging - layout.pinned - retained,
            ),
            "retained_units": len(layout.retained),
            "smallest": layout.smallest,
        },
        **({"spilled_gradients": _spilled(setting)} if layout.spilled else {}),
        "steps": steps,
        **_choice(steps, machine is not None),
    }


def _spilled(setting: Setting) -> dict[str, Any]:
    """What of the gradients goes to the disk, and why."""
    layout = setting.layout
    units = sum(len(block.updated_units) for block in setting.blocks)
    blocks, algorithm, used = (
        setting.blocks,
        setting.algorithm,
        map_bytes(setting.blocks, setting.algorithm),
    )
    # beside more than the least of tiles
    spill = lambda mib: divide(blocks, algorithm, arena_bytes_for(mib * MIB, used)).spilled
    few = smallest_mib(blocks, algorithm, used, spills=False)
    enough = few
    while spill(enough):
        enough += max(1, enough // 8)
    while enough > few and enough - few > 1:
        middle = (few + enough) // 2
        few, enough = (middle, enough) if spill(middle) else (few, middle)
    reason = (
        f"the gradients of {len(layout.spilled)} of {units} groups of parameters find no room in"
        f" memory beside the blocks at work and two tiles of state; with {enough} MiB they would"
    )
    return {"bytes": layout.spilled_bytes, "units": len(layout.spilled), "reason": reason}


def predict(
    setting: Setting,
    machine: Machine | None,
    compute_seconds: float,
    policy: str,
    uses: list[int] | None = None,
    finals: list[Unit] | None = None,
    away: ActivationTraffic | None = None,
) -> dict[str, Any]:
    """What the ledger's row of a step will be under this policy; without seconds where the machine
    is not known."""
    on = machine or NOMINAL
    seconds = compute_seconds or (0.0 if machine else flops(setting.blocks, 512) / on.flops)
    goes = course(
        setting, seconds, uses, finals, on.link, away.again if away is not None else frozenset()
    )
    if away is not None:
        goes = replace(goes, saved=away.saved, activation_memory=away.memory)
    step = Rehearsal(
        setting.blocks, setting.algorithm, setting.layout, setting.arena_bytes, goes, policy, on
    ).steady()
    row: dict[str, Any] = {"policy": policy, "read_bytes": step.read, "written_bytes": step.written}
    if machine:
        row |= {
            "seconds": step.seconds,
            "compute_seconds": step.seconds - sum(step.stalls.values()),
            "stall_seconds": step.stalls,
            "busy_seconds": step.busy,
        }
    return row


def _choice(steps: dict[str, dict], timed: bool) -> dict[str, str]:
    if not timed:
        return {
            "policy": "speculate",
            "reason": "updates hide behind backward; nothing was measured that speaks against it",
        }
    least = min(row["seconds"] for row in steps.values())
    ties = [row for row in steps.values() if row["seconds"] <= (1 + TIE) * least]
    # what "auto" begins with
    chosen = next((row for row in ties if row["policy"] == "speculate"), ties[0])
    others = ", ".join(
        f"{name} {row['seconds']:.2f} s" for name, row in steps.items() if row is not chosen
    )
    tie = f"; a difference below {TIE:.0%} is none" if len(ties) > 1 else ""
    return {
        "policy": chosen["policy"],
        "reason": f"{chosen['seconds']:.2f} s a step, against {others}{tie}",
    }


def limits(row: dict[str, Any], machine: Machine) -> dict[str, float]:
    """Seconds by resource that a step of this plan cannot go below, each alone."""
    return {
        "disk": (
            sum(row["read_bytes"].values()) / machine.read
            + sum(row["written_bytes"].values()) / machine.write
        ),
        "cores": row["busy_seconds"]["cores"] / machine.cores,
        "accelerator": row["busy_seconds"]["accelerator"],
    }


def with_moments(algorithm: Algorithm, mode: str) -> Algorithm:
    """The algorithm keeping its moments another way."""
    return replace(algorithm, moments=moments_of(mode))


def expected(plan: dict[str, Any], rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The row that the plan gives for these measured rows: where the policy changed between steps,
    the mean of what each was planned to be."""
    used = Counter(row["policy"] for row in rows)
    if not used:
        return plan["step"]
    steps = [(plan["steps"][policy], count / len(rows)) for policy, count in used.items()]
    row: dict[str, Any] = {
        "policy": ", ".join(f"{policy} {count}" for policy, count in used.items())
    }
    for item, value in plan["step"].items():
        if isinstance(value, dict):
            row[item] = {
                name: sum(step[item][name] * part for step, part in steps) for name in value
            }
        elif item != "policy":
            row[item] = sum(step[item] * part for step, part in steps)
    return row


def compare(plan: dict[str, Any], rows: list[dict[str, Any]]) -> dict[str, dict[str, float | None]]:
    """The plan beside measured ledger rows: {item: {"planned", "measured", "miss"}}, the miss as a
    part of what was measured.

    Seconds and bytes read are medians; bytes written and waits are means, as a step's may fall into
    the next one.
    """
    row = expected(plan, rows)
    mean = lambda pick: sum(map(pick, rows)) / len(rows)
    items = {
        "seconds": (row.get("seconds"), median(each["seconds"] for each in rows)),
        "read_bytes": (
            sum(row["read_bytes"].values()),
            median(sum(each["read_bytes"].values()) for each in rows),
        ),
        "written_bytes": (
            sum(row["written_bytes"].values()),
            mean(lambda each: sum(each["written_bytes"].values())),
        ),
        "compute_seconds": (row.get("compute_seconds"), mean(lambda each: each["compute_seconds"])),
    }
    for cause in CAUSES:
        planned = row["stall_seconds"][cause] if "stall_seconds" in row else None
        items[cause] = (planned, mean(lambda each: each["stall_seconds"].get(cause, 0.0)))
    return {
        name: {
            "planned": planned,
            "measured": got,
            "miss": planned / got - 1 if planned is not None and got else None,
        }
        for name, (planned, got) in items.items()
    }
