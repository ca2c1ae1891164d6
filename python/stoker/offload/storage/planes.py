"""Planes: weights and state of a run as C++ moves them between its store and its arena; and objects
read and written in pieces."""

from __future__ import annotations

from typing import Any, Callable, Iterator

import torch

from stoker import _core
from stoker.offload.division.layout import (
    MIB,
    PIECE,
)
from stoker.offload.model.algorithm import Algorithm
from stoker.offload.model.blocks import Block, Unit
from stoker.offload.storage.open_store import OpenStore

Hasher = Callable[[list[tuple[int, int]]], list[bytes]]  # of the bytes at (address, size)


class Planes:
    """The arena and the session over a model's planes."""

    def __init__(
        self, runtime: OpenStore, blocks: list[Block], algorithm: Algorithm, spills: bool = True
    ) -> None:
        self.runtime, self.blocks, self.algorithm = runtime, blocks, algorithm
        self.dram_bytes = runtime.dram_bytes
        self.store = runtime.store
        arena_bytes, self.layout = runtime.divided(blocks, algorithm, spills)
        layout = self.layout
        self.arena = runtime.core.arena(arena_bytes - layout.passing)
        self._idle = self.arena.take(layout.idle) if layout.idle else None
        self.session = runtime.plane_io(self.arena, layout, algorithm)
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

    def fetch(
        self,
        block: Block,
        address: int,
        priority: str,
        txn: Any,
        units: list[Unit] | None = None,
    ) -> list:
        """Starts reading the block's weights (or those of some of its units) into the memory at
        `address`, and returns futures. Weights are read as `txn` has them, or (None) the store."""
        units = block.units if units is None else units
        return [
            self.session.fetch_weights(unit.session_id, address + unit.slot_offset, priority, txn)
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

    def arithmetic_seconds(self) -> float:
        """How long the kernels have computed, over all cores; 0 once this is closed."""
        return self.session.arithmetic_seconds() if self.session else 0.0

    def close(self) -> None:
        """Waits for what is in flight; gives back the tile buffers and the store's lock."""
        self._idle = self.session = None
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
