"""Planes: the C++ half as the Python front sees it: one memory budget, one arena, the store and the
session on it."""

from __future__ import annotations

import contextlib
import operator
import os
import sys
from dataclasses import dataclass
from typing import Any, Callable, Iterator

import torch
from torch import nn

from stoker import _core
from stoker.errors import InvalidArgument, NotFound, OverBudget, Unsupported, saying
from stoker.offload.blocks import Block, Unit
from stoker.offload.moments import EXACT, Moments
from stoker.offload.rooms import has_volumes, rooms
from stoker.offload.window import choose, least, memory

MIB = 1 << 20
Hasher = Callable[[list[tuple[int, int]]], list[bytes]]  # of the bytes at (address, size)
PIECE = MIB // 4  # in which parts of chunks are written
TILES_MIN = 2
TILE_ELEMENTS_MAX = 1 << 19  # chunks of 1 and 2 MiB
# of gradients that torch has just made: so little is not worth a part of the cap
PASSING_FREE = 4 * MIB
# tiles get a 20th of the arena and a quarter of what is left over, at most six 20ths
TILES_FIRST, TILES_SHARE, TILES_MOST = 20, 4, 6


@dataclass(frozen=True)
class Algorithm:
    """An optimizer as the kernels know it: its name, which state planes it keeps, and how."""

    name: str
    momentum: bool  # plane m
    variance: bool  # plane v
    moments: Moments = EXACT
    seed: int = 0  # of the draws that round lossy moments

    @property
    def planes(self) -> str:
        return ("m" if self.momentum else "") + ("v" if self.variance else "")

    def state_bytes(self, unit: Unit) -> dict[str, int]:
        """Bytes of each state plane of an updated unit."""
        planes = {"remainder": 2 * unit.elements} if unit.dtype == torch.bfloat16 else {}
        return planes | {plane: self.moments.plane_bytes(unit.elements) for plane in self.planes}

    def tile_bytes(self, elements: int) -> int:
        """Bytes of one tile buffer: weights and remainder (or float32 weights), m and v of any
        unit."""
        return 4 * elements + 2 * self.moments.plane_bytes(elements)


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
    spilled: list[Unit]  # units whose gradients go to the disk (window.py)
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
    (`Runtime.stored_tile`).
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


def holder() -> str:
    """Who has the store open, for those who find it in use: the module or script that runs, and its
    process."""
    # of `python -m package`, where the script is only __main__.py
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return f"{spec and spec.parent or os.path.basename(sys.argv[0]) or 'python'}, pid {os.getpid()}"


def folders_of(store: str) -> list[str]:
    """The folders of a local store, one a volume; none of one in memory. InvalidArgument for a
    coded one, Unsupported for one without transactions."""
    if store.startswith("coded("):
        raise InvalidArgument(
            f"a run's state lies in a local store, not in {store}; give one folder, or several with"
            " commas between them"
        )
    if store.startswith(("dir:", "s3:")):
        raise Unsupported(
            f"training needs a store that changes many objects at once, and {store} changes one at"
            " a time; give a folder, or several with commas between them"
        )
    return [] if store.startswith("memory:") else store.removeprefix("local:").split(",")


class Runtime:
    """Threads, the budget and the open store of one process."""

    def __init__(
        self, store: str, dram_bytes: int, capacity_bytes: int, stall_seconds: int, sharers: int = 1
    ) -> None:
        """Opens the store, or makes one with `capacity_bytes` (over several disks more, if they
        have it: rooms.py) where there is none. `sharers`: how many processes do the same on these
        disks."""
        patience = whole(
            "stall_seconds",
            stall_seconds,
            "is no time to wait for a disk; give a whole number of seconds, at least 1",
        )
        if not store:
            raise InvalidArgument("store: an empty name is no place for a run; give a folder")
        if dram_bytes > (there := memory_bytes()):
            raise InvalidArgument(
                f"dram: {_core.human_bytes(dram_bytes)} is more than the memory of this machine, "
                f"{_core.human_bytes(there)}; leave some of that to torch and activations"
            )
        self.path = store
        self.dram_bytes = dram_bytes
        self.directories = folders_of(store)
        self.directory = self.directories[0] if self.directories else None
        for directory in self.directories:
            with saying(f"use the folder '{directory}' for the store"):
                try:
                    os.stat(directory)
                except FileNotFoundError:
                    os.makedirs(directory, exist_ok=True)
        self.core = _core.Runtime(
            threads=torch.get_num_threads(), budget_bytes=dram_bytes, stall_seconds=patience
        )
        self.store = self._open(capacity_bytes, sharers)

        self.session: _core.Session | None = None  # that Planes opened

    def _open(self, capacity_bytes: int, sharers: int) -> _core.Store:
        shares: list[int] = []
        if len(self.directories) > 1:
            if has_volumes(self.directories):
                with contextlib.suppress(NotFound):  # its making was cut off
                    return self.core.open_store(self.path, holder=holder())
            shares = rooms(self.directories, capacity_bytes, sharers)
        return self.core.open_store(
            self.path,
            create=True,
            capacity_bytes=max(sum(shares), capacity_bytes),
            volume_weights=shares,
            holder=holder(),
        )

    def holds(self, key: str) -> bool:
        return bool(self.store.list(key))

    def stored_tile(self, blocks: list[Block]) -> int:
        """Elements of a tile of the run that the store holds, whose chunks keep their size; 0 where
        it holds none."""
        for unit in (unit for block in blocks for unit in block.units):
            with contextlib.suppress(NotFound):
                return self.store.stat(f"w/{unit.name}")["chunk_bytes"] // unit.dtype.itemsize
        return 0

    def divided(
        self, blocks: list[Block], algorithm: Algorithm, spills: bool
    ) -> tuple[int, Layout]:
        """What the arena takes of what is left of the budget, and how it is divided. OverBudget
        names the smallest budget that works."""
        used, stored = self.core.budget_used, self.stored_tile(blocks)
        arena_bytes = arena_bytes_for(
            self.dram_bytes, used, copying_bytes(blocks, stored) if stored else 0
        )
        layout = divide(blocks, algorithm, arena_bytes, spills, stored)
        if layout.smallest <= arena_bytes:
            return arena_bytes, layout
        smallest = smallest_mib(blocks, algorithm, used, spills, stored)
        spilling = (
            "those at work alone"
            if spills
            else (
                "which are not spilled to the disk where the model computes on another device or is"
                " sharded"
            )
        )
        raise OverBudget(
            f"the memory budget of {_core.human_bytes(self.dram_bytes)} is too small for this"
            f" model: gradients ({spilling}) take "
            f"{(layout.gradients_least + layout.passing) / MIB:.1f} MiB, the "
            f"largest blocks in use together {(layout.working + layout.pinned) / MIB:.1f} MiB, two"
            f" tiles of optimizer state {layout.staging_least / MIB:.1f} MiB; "
            f'the smallest budget that works is dram="{smallest}MiB"'
        )

    def close(self) -> None:
        """Waits for what is in flight and gives back the store's lock, whoever still has planes of
        it."""
        if self.session is not None:
            self.session.close()
            self.session = None  # it holds the store open
        self.store.close()


class Planes:
    """The arena and the session over a model's planes."""

    def __init__(
        self, runtime: Runtime, blocks: list[Block], algorithm: Algorithm, spills: bool = True
    ) -> None:
        self.runtime, self.blocks, self.algorithm = runtime, blocks, algorithm
        self.dram_bytes = runtime.dram_bytes
        self.store = runtime.store
        arena_bytes, self.layout = runtime.divided(blocks, algorithm, spills)
        layout = self.layout
        self.arena = runtime.core.arena(arena_bytes - layout.passing)
        self._idle = self.arena.take(layout.idle) if layout.idle else None
        self.session = runtime.session = _core.Session(
            runtime.core,
            self.store,
            self.arena,
            tile_elements=layout.tile_elements,
            tiles=layout.tiles,
            moments=algorithm.moments.name,
            seed=algorithm.seed,
        )
        for block in blocks:
            for unit in block.updated_units:
                dtype = "bf16" if unit.dtype == torch.bfloat16 else "f32"
                unit.session_id = self.session.add_block(
                    unit.name, unit.elements, dtype, algorithm.planes
                )
            for unit in block.units:
                if not unit.updated:
                    unit.session_id = self.session.add_frozen(
                        unit.name, unit.elements, unit.dtype.itemsize
                    )
        self.source = None  # the decided transaction that is not committed yet: forward reads it

    def fetch(
        self, block: Block, address: int, priority: str, units: list[Unit] | None = None
    ) -> list:
        """Starts reading the block's weights (or those of some of its units) into the memory at
        `address`; futures."""
        units = block.units if units is None else units
        return [
            self.session.fetch_weights(
                unit.session_id, address + unit.slot_offset, priority, self.source
            )
            for unit in units
        ]

    def read(self, where, key: str, offset: int, size: int) -> bytearray:
        """Bytes of a plane, of the store or as a transaction sees them."""
        stat = self.store.stat(key)
        return read_range(where, key, offset, size, stat["bytes"], stat["chunk_bytes"])

    def write(self, txn, key: str, offset: int, data: bytes) -> None:
        """Stages bytes of a plane."""
        write_range(txn, key, offset, data, self.store.stat(key)["chunk_bytes"])

    @staticmethod
    def storage(buffer: _core.Buffer) -> torch.Tensor:
        """The bytes of a Buffer of the arena; its memory goes back with the last tensor over that
        storage."""
        return torch.from_dlpack(buffer)

    def close(self) -> None:
        """Waits for what is in flight; gives back the tile buffers and the store's lock."""
        self.source = self._idle = self.session = None
        self.runtime.close()


def pieces(offset: int, size: int, chunk_bytes: int) -> Iterator[tuple[int, int]]:
    """Offset and size of the parts of a range, each within one chunk."""
    end = offset + size
    while offset < end:
        part = min(end, (offset // chunk_bytes + 1) * chunk_bytes) - offset
        yield offset, part
        offset += part


# The core copies what these move through scratch memory of the budget, and there is room for two
# chunks and PIECE (`fitting_tile`). So a read asks for whole chunks: of a part, the core would need
# that and the chunk. What writes parts keeps the chunk in memory, and takes small ones.


def write_range(txn, key: str, offset: int, data: bytes | memoryview, chunk_bytes: int) -> None:
    """Stages bytes of an object that has others, piece by piece."""
    view = memoryview(data)
    for start, size in pieces(offset, len(data), chunk_bytes):
        step = size if size == chunk_bytes else PIECE
        for at in range(start, start + size, step):
            txn.write_bytes(
                key, at, bytes(view[at - offset : min(at + step, start + size) - offset])
            )


def read_range(
    where, key: str, offset: int, size: int, of: int | None = None, chunk_bytes: int = MIB
) -> bytearray:
    """Bytes of an object, of a store or as a transaction sees them, as read_into() reads them."""
    data = bytearray(size)
    read_into(where, key, offset, memoryview(data), of, chunk_bytes)
    return data


def read_into(
    where, key: str, offset: int, into: memoryview, of: int | None = None, chunk_bytes: int = MIB
) -> None:
    """Fills `into` with bytes of an object of `of` bytes (default: it ends where they end), chunk
    by chunk."""
    end = offset + len(into) if of is None else of
    for start, size in pieces(offset, len(into), chunk_bytes):
        chunk_at = start // chunk_bytes * chunk_bytes
        chunk = memoryview(where.read_bytes(key, chunk_at, min(chunk_bytes, end - chunk_at)))
        into[start - offset : start - offset + size] = chunk[
            start - chunk_at : start - chunk_at + size
        ]


def put(txn, key: str, data: bytes | memoryview) -> None:
    """Stages an object whole."""
    txn.resize(key, len(data))
    view = memoryview(data)
    for start, size in pieces(0, len(data), MIB):
        txn.write_bytes(key, start, bytes(view[start : start + size]))


def parse_bytes(name: str, amount: int | str) -> int:
    """20 << 30, or "20GiB". InvalidArgument names the argument."""
    try:
        size = _core.parse_bytes(amount) if isinstance(amount, str) else amount
    except InvalidArgument as error:
        raise InvalidArgument(f"{name}: {error}") from None
    return whole(
        name,
        size,
        "is no amount of memory; give a whole number of bytes above 0, such as int(20e9), or"
        ' "20GiB"',
    )


def memory_bytes() -> int:
    """Of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def whole(name: str, value: Any, otherwise: str, least: int = 1) -> int:
    """The whole number from `least` on that `value` is; else InvalidArgument, which says so of the
    argument."""
    try:
        number = operator.index(value)
    except TypeError:
        number = least - 1
    if isinstance(value, bool) or not least <= number < 1 << 63:
        raise InvalidArgument(f"{name}: {value!r} {otherwise}")
    return number
