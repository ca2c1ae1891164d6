"""More `dram` never makes a step move more bytes: every budget from the smallest that works to one
that holds everything, rehearsed, not trained.

Two things are not the division's, and are bounded here: where blocks are of different sizes, the
places that they leave in the arena may not fit the largest of them; and under lazy, the updates of
state that stays in memory take tiles from those that were read ahead, which are then read twice.
"""

from __future__ import annotations

from itertools import pairwise

import pytest
from stoker.errors import OverBudget
from stoker.offload.planning import planner
from stoker.offload.division.layout import (
    MIB,
    TILES_MIN,
    Layout,
    arena_bytes_for,
    divide,
    smallest_mib,
)
from stoker.offload.planning.planner import POLICIES, Setting
from stoker.plan.outlook import ADAMW
from stoker.plan.shapes import describe

MODELS = {  # blocks in order, counts of parameters
    "even": "embed=1.5M,layer=1.5M*16,head=1.5M",
    "small": "embed=200k,layer=130k*8,head=200k",
    "large ends": "embed=5M,layer=400k*16,norm=1k,head=5M",
}
UNEVEN = {"large ends": 0.03}  # what a step may move more there


def blocks_of(model: str) -> list:
    return describe(MODELS[model], "bfloat16").blocks


def layouts(blocks: list, mode: str, spills: bool) -> dict[int, tuple[int, Layout]]:
    """{MiB: (arena, layout)} of every budget that works, until nothing is left that memory could be
    used for."""
    algorithm = planner.with_moments(ADAMW, mode)
    used, mib = (
        planner.map_bytes(blocks, algorithm),
        smallest_mib(blocks, algorithm, planner.map_bytes(blocks, algorithm), spills),
    )
    units = sum(len(block.updated_units) for block in blocks)
    found: dict[int, tuple[int, Layout]] = {}
    while not found or len(found[mib - 1][1].retained) < units:
        arena = arena_bytes_for(mib * MIB, used)
        found[mib] = arena, divide(blocks, algorithm, arena, spills)
        mib += 1
    return found


def weights_room(arena: int, layout: Layout) -> int:
    return arena - layout.gradients - layout.pinned - layout.staging


@pytest.mark.parametrize("spills", [True, False])
@pytest.mark.parametrize("mode", ["exact", "bf16", "8bit"])
@pytest.mark.parametrize("model", MODELS)
def test_with_more_memory_nothing_gets_less(model, mode, spills):
    found = layouts(blocks_of(model), mode, spills)
    assert len(found) > 10
    for (_, (arena, less)), (mib, (larger, more)) in pairwise(found.items()):
        assert more.smallest == less.smallest <= arena, f"{mib} MiB do not do, and less did"
        assert more.spilled_bytes <= less.spilled_bytes
        if more.spilled == less.spilled:
            assert more.staging >= less.staging and more.tile >= less.tile
            assert weights_room(larger, more) >= weights_room(arena, less)
        assert set(more.retained) >= set(less.retained) or sum(
            unit.elements for unit in more.retained
        ) > sum(unit.elements for unit in less.retained)
        assert more.tiles >= TILES_MIN and more.tiles * more.tile + more.idle == more.staging
        assert weights_room(larger, more) >= more.working


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("model", MODELS)
def test_with_more_memory_a_step_moves_no_more_bytes(model, policy):
    """Rehearsed on both sides of budgets at which the division changes, and here and there in
    between."""
    blocks = blocks_of(model)
    found = layouts(blocks, "exact", True)
    parts = lambda mib: (
        found[mib][1].tile,
        bool(found[mib][1].spilled),
        len(found[mib][1].spilled) // 4,
        len(found[mib][1].retained) // 4,
    )
    changes = [mib for mib in found if mib - 1 in found and parts(mib) != parts(mib - 1)]
    tried = sorted(
        {min(found), max(found), *changes, *(mib - 1 for mib in changes), *list(found)[::16]}
    )
    best = None
    for mib in tried:
        row = planner.predict(Setting.of(blocks, ADAMW, mib * MIB), None, 0.0, policy)
        moved = sum(row["read_bytes"].values()) + sum(row["written_bytes"].values())
        if best is not None:
            assert moved <= best * (1 + UNEVEN.get(model, 0)) + (
                2 * found[mib][1].tile if policy == "lazy" else 0
            ), f"{mib} MiB move {(moved - best) / 1e6:.1f} MB more than less does"
        best = min(best or moved, moved)
    assert best == moved


@pytest.mark.parametrize("model", MODELS)
def test_the_budget_that_is_said_to_hold_all_gradients_is_the_smallest_that_does(model):
    blocks = blocks_of(model)
    least = smallest_mib(blocks, ADAMW, planner.map_bytes(blocks, ADAMW))
    reason = planner.plan(Setting.of(blocks, ADAMW, least * MIB))["spilled_gradients"]["reason"]
    enough = int(reason.split("with ")[1].split(" MiB they would")[0])
    assert enough > least
    assert (
        not Setting.of(blocks, ADAMW, enough * MIB).layout.spilled
        and Setting.of(blocks, ADAMW, (enough - 1) * MIB).layout.spilled
    )


@pytest.mark.parametrize("mib", [60, 120, 240])
def test_no_budget_is_too_small_where_a_smaller_one_does(mib):
    """Where tiles become larger, a model whose gradients leave just room for small ones trains
    on."""
    for count in range(1, 400):
        blocks = describe(f"layer={count * mib * 1000}*8", "bfloat16").blocks
        smallest = smallest_mib(blocks, ADAMW, planner.map_bytes(blocks, ADAMW), spills=False)
        if smallest >= mib - 1:
            break
    assert mib - 1 <= smallest <= mib + 4
    for larger in range(smallest, smallest + 16):
        Setting.of(blocks, ADAMW, larger * MIB, spills=False)
    with pytest.raises(OverBudget, match=f'dram="{smallest}MiB"'):
        Setting.of(blocks, ADAMW, (smallest - 1) * MIB, spills=False)
