"""The store of a run, opened or made, with its threads and budget.

A budget so small that not even the store, or the model under construction, fits is an error that
names the smallest that works."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from typing import Iterator

import torch

from stoker import _core
from stoker.errors import InvalidArgument, NotFound, OverBudget, StokerError, Unsupported, saying
from stoker.offload.division.amounts import memory_bytes, whole
from stoker.offload.division.layout import (
    MIB,
    Layout,
    arena_bytes_for,
    copying_bytes,
    divide,
    smallest_mib,
)
from stoker.offload.model.algorithm import Algorithm
from stoker.offload.model.blocks import Block
from stoker.offload.storage.volume_rooms import has_volumes, rooms


def open_runtime(
    store: str,
    dram_bytes: int,
    capacity_bytes: int,
    stall_seconds: int,
    blocks: list[Block],
    algorithm: Algorithm,
    spills: bool = True,
    sharers: int = 1,
) -> OpenStore:
    """The OpenStore over `store`, which is made if missing. OverBudget as told above."""
    with naming_the_smallest(store, dram_bytes, blocks, algorithm, spills):
        return OpenStore(store, dram_bytes, capacity_bytes, stall_seconds, sharers)


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


def holder() -> str:
    """Who has the store open, for those who find it in use: the module or script that runs, and its
    process."""
    # of `python -m package`, where the script is only __main__.py
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return f"{spec and spec.parent or os.path.basename(sys.argv[0]) or 'python'}, pid {os.getpid()}"


def is_namespace(volume: str) -> bool:
    """A volume that is no folder but an NVMe namespace."""
    return volume.startswith("nvme:")


def folders_of(store: str) -> list[str]:
    """The volumes of a local store, folders or NVMe namespaces; none of one in memory.
    InvalidArgument for a coded one, Unsupported for one without transactions."""
    if store.startswith("coded("):
        raise InvalidArgument(
            f"a run needs a local store, not {store}; give one folder, or several separated by"
            " commas"
        )
    if store.startswith(("dir:", "s3:")):
        raise Unsupported(
            f"training needs a store that changes many objects at once, but {store} changes one at"
            " a time. Give a folder, or several separated by commas"
        )
    return [] if store.startswith("memory:") else store.removeprefix("local:").split(",")


class OpenStore:
    """Threads, the budget and the open store of one process."""

    def __init__(
        self, store: str, dram_bytes: int, capacity_bytes: int, stall_seconds: int, sharers: int = 1
    ) -> None:
        """Opens the store, or makes one with `capacity_bytes` (over several disks more, if they
        have it: volume_rooms.py) where there is none. `sharers`: how many processes do the same
        on these disks."""
        patience = whole(
            "stall_seconds",
            stall_seconds,
            "is not a time to wait for a disk; give a whole number of seconds, at least 1",
        )
        if not store:
            raise InvalidArgument("store: an empty name is not a place for a run; give a folder")
        if dram_bytes > (there := memory_bytes()):
            raise InvalidArgument(
                f"dram: {_core.human_bytes(dram_bytes)} is more than this machine's memory, "
                f"{_core.human_bytes(there)}; leave some for torch and activations"
            )
        self.path = store
        self.dram_bytes = dram_bytes
        self._volumes = folders_of(store)
        # A namespace holds the store and nothing beside it: scratch files lie where temporary ones
        # do.
        self.directories = [each for each in self._volumes if not is_namespace(each)]
        if self._volumes and not self.directories:
            self.directories = [tempfile.gettempdir()]
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

        self._plane_io: _core.PlaneIo | None = None

    def _open(self, capacity_bytes: int, sharers: int) -> _core.Store:
        shares: list[int] = []
        if len(self._volumes) > 1 and self._volumes == self.directories:
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
            f" model. Gradients ({spilling}) take"
            f" {(layout.gradients_least + layout.passing) / MIB:.1f} MiB, the largest blocks in use"
            f" together {(layout.working + layout.pinned) / MIB:.1f} MiB, two tiles of optimizer"
            f" state {layout.staging_least / MIB:.1f} MiB;"
            f' the smallest budget that works is dram="{smallest}MiB"'
        )

    def plane_io(self, arena: _core.Arena, layout: Layout, algorithm: Algorithm) -> _core.PlaneIo:
        """Opens what moves planes between the store and the arena; close() ends it."""
        self._plane_io = _core.PlaneIo(
            self.core,
            self.store,
            arena,
            tile_elements=layout.tile_elements,
            tiles=layout.tiles,
            moments=algorithm.moments.name,
            seed=algorithm.seed,
        )
        return self._plane_io

    def close(self) -> None:
        """Waits for what is in flight and gives back the store's lock, whoever still has planes of
        it."""
        if self._plane_io is not None:
            self._plane_io.close()
            self._plane_io = None  # it holds the store open
        self.store.close()
