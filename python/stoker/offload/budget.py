"""A budget so small that not even the store, or the model under construction, fits: the error names
the smallest that works."""

from __future__ import annotations

import contextlib
from typing import Iterator

from stoker import _core
from stoker.errors import OverBudget, StokerError
from stoker.offload.blocks import Block
from stoker.offload.planes import Algorithm, Runtime, smallest_mib


def open_runtime(
    store: str,
    dram_bytes: int,
    capacity_bytes: int,
    stall_seconds: int,
    blocks: list[Block],
    algorithm: Algorithm,
    spills: bool = True,
    sharers: int = 1,
) -> Runtime:
    """The Runtime over `store`, which is made if missing. OverBudget as told above."""
    with naming_the_smallest(store, dram_bytes, blocks, algorithm, spills):
        return Runtime(store, dram_bytes, capacity_bytes, stall_seconds, sharers)


@contextlib.contextmanager
def naming_the_smallest(
    store: str, dram_bytes: int, blocks: list[Block], algorithm: Algorithm, spills: bool = True
) -> Iterator[None]:
    """An OverBudget from inside becomes one that names the smallest budget that works for
    `blocks`."""
    try:
        yield
    except OverBudget as error:
        smallest = smallest_mib(blocks, algorithm, _map_bytes(store), spills)
        raise OverBudget(
            f"the memory budget of {_core.human_bytes(dram_bytes)} is too small for this model"
            f" ({str(error).removesuffix('; give a larger budget')}); "
            f'the smallest budget that works is dram="{smallest}MiB"'
        ) from error


def _map_bytes(store: str) -> int:
    """What the store's map takes of a budget: found by opening it without one. A store that is not
    there has a small one."""
    runtime = _core.Runtime(threads=1)
    try:
        opened = runtime.open_store(store, read_only=True, holder="sizing")
    except StokerError:
        return 1 << 16
    try:
        return runtime.budget_used
    finally:
        opened.close()
