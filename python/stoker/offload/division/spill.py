"""Which gradients stay in memory, and the memory that the others pass through.

Which stay: gradients become final in the reverse order of the blocks. Those of the last blocks have
to wait longest for step(), and they can be written beside the rest of backward. Those of the first
blocks come last, when there is nothing left to hide a write behind. Until then their memory is lent
to what updates read ahead. So the first blocks' stay. Before them come those of pinned blocks,
which backward uses more than once. So do very large ones, as every place must hold the largest that
is spilled.
"""

from __future__ import annotations

from itertools import accumulate

from stoker.offload.model.blocks import Block, Unit

PLACES = 2  # one unit is accumulated, or consumed, while another is being written


def _in_order_of_staying(blocks: list[Block]) -> list[Unit]:
    return [
        unit
        for block in sorted(blocks, key=lambda block: not block.pinned)
        for unit in block.updated_units
    ]


def _large_ones_that_stay(sizes: list[int]) -> int:
    """How many of the largest (`sizes`: descending) cost less memory in a place of their own than
    as the measure of all places."""
    before = list(accumulate(sizes, initial=0))
    needed = lambda large: before[large] + PLACES * sizes[large]
    return min(range(len(sizes)), key=needed, default=0)


def least(blocks: list[Block]) -> int:
    """The least bytes of gradient memory that do."""
    sizes = sorted((unit.weight_bytes for unit in _in_order_of_staying(blocks)), reverse=True)
    large = _large_ones_that_stay(sizes)
    return min(sum(sizes), sum(sizes[:large]) + PLACES * (sizes[large] if sizes else 0))


def choose(blocks: list[Block], room: int) -> list[Unit]:
    """The units whose gradients are spilled, where gradients may take `room` bytes, or the least
    that does if that is more."""
    units = _in_order_of_staying(blocks)
    if sum(unit.weight_bytes for unit in units) <= room:
        return []
    by_size = sorted(units, key=lambda unit: unit.weight_bytes, reverse=True)
    large = _large_ones_that_stay([unit.weight_bytes for unit in by_size])
    always = set(by_size[:large])
    others = [unit for unit in units if unit not in always]
    staying = list(
        accumulate(
            (unit.weight_bytes for unit in others),
            initial=sum(unit.weight_bytes for unit in always),
        )
    )
    widest = list(accumulate((unit.weight_bytes for unit in reversed(others)), max, initial=0))[
        ::-1
    ]
    # As many as fit, in their order and without gaps: so more room never spills more.
    first = max(
        (i for i in range(len(others)) if staying[i] + PLACES * widest[i] <= room), default=0
    )
    return others[first:]


def place_bytes(spilled: list[Unit]) -> int:
    return max((unit.weight_bytes for unit in spilled), default=0)


def memory(units: list[Unit], spilled: list[Unit]) -> int:
    """Bytes that the gradients of `units` take if those of `spilled` share places."""
    return (
        sum(unit.weight_bytes for unit in units)
        - sum(unit.weight_bytes for unit in spilled)
        + PLACES * place_bytes(spilled)
    )
