"""Which weights stay in memory: of blocks that are used in an order that repeats, as few are read
as the best choice of what to evict must read that has each of them on its way one block before its
use; and with more memory never more. Reads are counted, with the real Pager over a disk that is
only thought of.
"""

from __future__ import annotations

import random

import pytest
from stoker.offload.paging.pager import LATENCY_BYTES, Pager
from stoker.offload.planning.planner import NOMINAL, Setting
from stoker.offload.planning.rehearsal import Course, Rehearsal
from stoker.plan.outlook import ADAMW
from stoker.plan.shapes import describe
from test_more_memory import MODELS, UNEVEN, blocks_of, layouts

CALLS = 5


def segments(count: int) -> list[int]:
    """Checkpointed segments of three blocks, which backward runs once more."""
    parts = [[*range(start, min(start + 3, count))] for start in range(0, count, 3)]
    return [
        *range(count),
        *(block for part in reversed(parts) for block in (*part, *reversed(part))),
    ]


def shuffled(count: int) -> list[int]:
    return random.Random(count).choices(range(count), k=3 * count)


ORDERS = {
    "round": lambda count: [*range(count)],  # generate(), evaluation
    "there and back": lambda count: [*range(count), *reversed(range(count))],
    # an embedding needs no weights in backward
    "there and not all the way back": lambda count: [*range(count), *reversed(range(1, count))],
    "segments": segments,
    "shuffled": shuffled,
}


def order_of(name: str, count: int) -> list[int]:
    """Without a block twice in a row: that is one use."""
    uses = ORDERS[name](count)
    return [block for at, block in enumerate(uses) if not at or uses[at - 1] != block]


def fewest(uses: list[int], calls: int, places: int, held: set[int], ahead: int) -> int:
    """How many blocks so many calls have to read at least, with that many places and those in them
    at first, where each block is there when the use before the next `ahead` begins (0: when its own
    does). Belady's choice: what goes is what is used last of all that is not needed now.
    """
    future, held, reads = uses * (calls + 1), set(held), 0
    for call in range(calls):
        for at in range(-1, len(uses)):
            now = call * len(uses) + at + 1  # the next use
            needed = uses[max(at, 0) : at + 1 + ahead]
            for block in dict.fromkeys(needed):
                if block in held:
                    continue
                reads += 1
                if len(held) == places:
                    held.remove(
                        max(held.difference(needed), key=lambda other: future.index(other, now))
                    )
                held.add(block)
    return reads


class Calls:
    """Calls of a model that train nothing and use its blocks in this order. `room`: bytes that are
    left for weights; else what there is."""

    def __init__(self, setting: Setting, uses: list[int], room: int | None = None) -> None:
        self._uses = uses
        self._made = Rehearsal(
            setting.blocks,
            setting.algorithm,
            setting.layout,
            setting.arena_bytes,
            Course(uses, []),
            "sync",
            NOMINAL,
        )
        arena = self._made.arena
        self._taken = arena.take(arena.largest_free - room) if room is not None else None

    @property
    def pager(self) -> Pager:
        return self._made.pager

    def read(self, calls: int) -> int:
        """Bytes that so many of them read."""
        before = self._made.session.read["weights"]
        for _ in range(calls):
            self.pager.recorder.begin(("", False, False))
            self.pager.current = None
            self.pager.prefetch()
            for block in self._uses:
                self.pager.use(self._made.blocks[block])
        return self._made.session.read["weights"] - before


@pytest.mark.parametrize("parameters, ahead", [("1M", 1), ("200k", 3)])
@pytest.mark.parametrize("order", ORDERS)
def test_no_more_blocks_are_read_than_must_be(order, parameters, ahead):
    """Small ones are fetched further ahead: so many that what the disk does meanwhile hides that it
    takes a while to answer."""
    for count in (3, 4, 7, 12):
        uses, blocks = (
            order_of(order, count),
            describe(f"layer={parameters}*{count}", "bfloat16").blocks,
        )
        size, before = blocks[0].slot_bytes, None
        assert (ahead - 1) * size < LATENCY_BYTES <= ahead * size
        setting = Setting.of(blocks, ADAMW, 1 << 30)
        for places in range(2, count + 1):
            calls = Calls(setting, uses, places * size)
            calls.read(1)  # makes the record
            held = {block.index for block in calls.pager.slots}
            reads = calls.read(CALLS) // size
            where = f"{count} blocks in {places} places, {uses}"
            assert reads == fewest(uses, CALLS, places, held, min(ahead, places - 1)), where
            assert reads >= fewest(uses, CALLS, places, held, 0), where
            assert before is None or reads <= before, where
            before = reads
        assert before == 0


def test_round_and_round_a_fixed_part_stays():
    """Of n blocks in k places n(n - k)/(n - 2) are read each time round: a block that stays takes
    its place for all n uses, one that goes for two."""
    blocks = describe("layer=4M*12", "bfloat16").blocks
    for places in range(3, 13):
        calls = Calls(
            Setting.of(blocks, ADAMW, 2 << 30), order_of("round", 12), places * blocks[0].slot_bytes
        )
        calls.read(4)
        assert calls.read(10) / blocks[0].slot_bytes == pytest.approx(
            10 * 12 * (12 - places) / 10, abs=3
        )


@pytest.mark.parametrize("order", ["round", "there and back"])
@pytest.mark.parametrize("model", MODELS)
def test_with_more_memory_calls_that_train_nothing_read_no_more(model, order):
    """Where gradients are not spilled: memory that takes these in is no memory for weights."""
    blocks, best = blocks_of(model), None
    for mib, (arena, layout) in [*layouts(blocks, "exact", spills=False).items()][::4]:
        calls = Calls(Setting(blocks, ADAMW, layout, arena), order_of(order, len(blocks)))
        calls.read(1)
        read = calls.read(CALLS)
        if best is not None:
            assert read <= best * (1 + UNEVEN.get(model, 0)), (
                f"with {mib} MiB {(read - best) / 1e6:.1f} MB more than with less"
            )
        best = min(best or read, read)
    assert best == 0
