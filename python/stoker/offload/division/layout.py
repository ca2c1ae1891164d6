"""How the bytes of a run are divided: planes and chunks in the store, the arena in memory."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from stoker.offload.division.spill import choose, least, memory
from stoker.offload.model.algorithm import Algorithm
from stoker.offload.model.blocks import Block, Unit

MIB = 1 << 20
PIECE = MIB // 4  # in which parts of chunks are written
TILES_MIN = 2
TILE_ELEMENTS_MAX = 1 << 19  # chunks of 1 and 2 MiB
# of gradients that torch has just made: so little is not worth a part of the cap
PASSING_FREE = 4 * MIB
# tiles get a 20th of the arena and a quarter of what is left over, at most six 20ths
TILES_FIRST, TILES_SHARE, TILES_MOST = 20, 4, 6


def plane_bytes(blocks: list[Block], algorithm: Algorithm) -> dict[str, int]:
    """Bytes on disk by class, one version."""
    total = {"weights": 0, "remainder": 0, "m": 0, "v": 0}
    for block in blocks:
        total["weights"] += block.slot_bytes
        for unit in block.updated_units:
            for name, size in algorithm.state_bytes(unit).items():
                total[name] += size
    return total


def changing_bytes(blocks: list[Block], algorithm: Algorithm, buffers: int = 0) -> int:
    """What of a version a step makes anew: all but the frozen weights. `buffers`: bytes of the
    model's buffers."""
    frozen = sum(unit.weight_bytes for block in blocks for unit in block.units if not unit.updated)
    return sum(plane_bytes(blocks, algorithm).values()) - frozen + buffers


def store_capacity(
    blocks: list[Block], algorithm: Algorithm, snapshots: int = 0, buffers: int = 0
) -> int:
    """Space for two versions of everything that changes (the committed and the staged one), for
    snapshots, and room for metadata."""
    total, changing = (
        sum(plane_bytes(blocks, algorithm).values()) + buffers,
        changing_bytes(blocks, algorithm, buffers),
    )
    return total + changing + snapshots * (changing + MIB) + total // 20 + 96 * MIB


@dataclass(frozen=True)
class Layout:
    """How the memory budget is divided (bytes)."""

    gradients: int  # what has a place of its own, and the places that spilled ones share
    pinned: int  # resident copies of pinned blocks, and their updated copies
    working: int  # the least the pager needs for the blocks in use at one moment
    staging: int  # what tile buffers are made of
    staging_first: int  # what of it comes before gradients find room
    staging_least: int  # what of it there must be
    tile_elements: int  # of one tile buffer
    tile: int  # its bytes
    retained: list[Unit]  # units whose optimizer state stays in memory
    spilled: list[Unit]  # units whose gradients go to the disk (spill.py)
    gradients_least: int  # what gradients can do with
    passing: int = 0  # not of the arena: what torch itself has of gradients at one moment

    @property
    def tiles(self) -> int:
        return self.staging // self.tile

    @property
    def idle(self) -> int:
        """What is left of the staging, less than a tile. Nobody gets it: weights that had found
        room there would lose it to the next tile."""
        return self.staging % self.tile

    @property
    def needed(self) -> int:
        """With these gradients in memory."""
        return self.gradients + self.pinned + self.working + self.staging_first + self.passing

    @property
    def smallest(self) -> int:
        return self.gradients_least + self.pinned + self.working + self.staging_least + self.passing

    @property
    def lookahead(self) -> int:
        """Bytes of weights that are fetched ahead of their use, at most."""
        return max(self.working, 32 * MIB)

    @property
    def device_least(self) -> int:
        """Where the model computes on another device: the least of its memory that does for
        weights, those of the blocks in use at one time."""
        return self.working + self.pinned // 2

    @property
    def device_weights(self) -> int:
        """What weights take there unless the caller caps them: as many ahead."""
        return self.device_least + self.lookahead

    @property
    def spilled_bytes(self) -> int:
        return sum(unit.weight_bytes for unit in self.spilled)


def divide(
    blocks: list[Block],
    algorithm: Algorithm,
    arena_bytes: int,
    spills: bool = True,
    stored: int = 0,
) -> Layout:
    """Divides the arena. Gradients, tile buffers and pinned blocks first; then all weights; what is
    left retains state. `spills`: what of the gradients has no room may go to the disk. A byte of
    memory spares a step at least two of gradients, two of weights, one of state.

    Tiles grow with the memory without jumps, and larger ones are made of what they have: at no
    budget do they cost the others what a smaller one gave them.
    `stored`: elements of a tile in the store that the run goes on from, whatever memory it had then
    (`OpenStore.stored_tile`).
    """
    page = 4096
    # on another device, and of shards, they are not in the cap
    passing = passing_bytes(blocks) if spills else 0
    arena_bytes = max(0, arena_bytes - passing)
    updated = [unit for block in blocks for unit in block.updated_units]
    pinned = sum(2 * block.slot_bytes for block in blocks if block.pinned)
    largest = max((block.slot_bytes for block in blocks if not block.pinned), default=0)
    nested = _nested_bytes(blocks)
    working = max(2 * largest, nested + largest) + page
    tiles_least, tiles_first = (
        TILES_MIN * algorithm.tile_bytes(elements)
        for elements in (stored or algorithm.moments.cell, TILE_ELEMENTS_MAX)
    )
    first = max(tiles_least, min(tiles_first, arena_bytes // TILES_FIRST))
    spilled = choose(blocks, arena_bytes - pinned - working - first) if spills else []
    gradients = memory(updated, spilled)
    spare = arena_bytes - gradients - pinned - working
    staging = max(
        tiles_least,
        min(spare, first + (spare - first) // TILES_SHARE, TILES_MOST * first) // page * page,
    )
    elements = stored or fitting_tile(blocks, algorithm, arena_bytes, min(staging, first))
    spare -= staging
    # all weights resident saves two reads an element; state only one
    spare -= sum(block.slot_bytes for block in blocks if not block.pinned)
    retained = []
    for block in blocks:
        for unit in block.updated_units:
            state = algorithm.state_bytes(unit)  # none for plain SGD over float32
            need = sum(-(-size // page) * page for size in state.values()) + (1 << 16)
            if state and need <= spare:
                spare -= need
                retained.append(unit)
    return Layout(
        gradients=gradients,
        gradients_least=least(blocks) if spills else gradients,
        spilled=spilled,
        pinned=pinned,
        working=working,
        staging=staging,
        staging_first=first,
        staging_least=tiles_least,
        tile_elements=elements,
        tile=algorithm.tile_bytes(elements),
        retained=retained,
        passing=passing,
    )


def passing_bytes(blocks: list[Block]) -> int:
    """What torch has of gradients beside their memory in the arena: the largest while it is copied
    there, and from their first use in backward to their last those of weights that are used in
    several places."""
    sizes = [
        (block, param.numel * unit.dtype.itemsize)
        for block in blocks
        for unit in block.updated_units
        for param in unit.params
    ]
    most = max((size for _, size in sizes), default=0) + sum(
        size for block, size in sizes if block.pinned
    )
    return -(-max(0, most - PASSING_FREE) // (2 * MIB)) * (2 * MIB)


def fitting_tile(blocks: list[Block], algorithm: Algorithm, arena_bytes: int, staging: int) -> int:
    """Elements of the largest tile that is there often enough in `staging`, and whose chunks can be
    copied in what the arena leaves."""
    copied = left_beside(arena_bytes)
    elements = TILE_ELEMENTS_MAX
    while elements > algorithm.moments.cell and (
        TILES_MIN * algorithm.tile_bytes(elements) > staging
        or copying_bytes(blocks, elements) > copied
    ):
        elements //= 2
    return elements


def copying_bytes(blocks: list[Block], elements: int) -> int:
    """What it takes to copy chunks of tiles of so many elements: the chunk of which parts are
    written, one that is read meanwhile, a piece, and one for the map of the store."""
    widest = max((4, *(unit.dtype.itemsize for block in blocks for unit in block.units)))
    return 2 * widest * elements + 2 * PIECE


def _nested_bytes(blocks: list[Block]) -> int:
    """The most that blocks in use at the same moment need: a block and those whose modules enclose
    it."""
    around: dict[nn.Module, set[Block]] = {}  # module -> the blocks whose modules enclose it
    for block in blocks:
        for module in () if block.pinned else block.modules:
            for inner in module.modules():
                around.setdefault(inner, set()).add(block)
    most = 0
    for block in blocks:
        chain = set().union(*(around.get(module, ()) for module in block.modules)) - {block}
        most = max(most, block.slot_bytes + sum(other.slot_bytes for other in chain))
    return most


def arena_bytes_for(dram_bytes: int, used: int, copying: int = 0) -> int:
    """What of the budget the arena takes: the store's map, of which `used` bytes are there already,
    grows a little with the model. `copying`: what chunks that are there already need
    (`copying_bytes`)."""
    return (dram_bytes - used - max(left_beside(dram_bytes), copying)) // (2 * MIB) * (2 * MIB)


def left_beside(memory_bytes: int) -> int:
    """What of the memory is for the map of the store, and for what is copied (`read_range`)."""
    return max(2 * MIB, min(3 * MIB, memory_bytes // 24), memory_bytes // 64)


def smallest_mib(
    blocks: list[Block], algorithm: Algorithm, used: int, spills: bool = True, stored: int = 0
) -> int:
    """The smallest budget that the model can be trained in. `stored`: see divide()."""
    copying = copying_bytes(blocks, stored) if stored else 0
    smallest = divide(blocks, algorithm, 0, spills, stored).smallest  # the same at every budget
    mib = (smallest + used) // MIB
    while arena_bytes_for(mib * MIB, used, copying) < smallest:
        mib += 1
    return mib
