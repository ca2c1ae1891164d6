"""Buffers: a model's buffers in the store, as raw bytes in one object.

A step writes the chunks of it that changed. Its record names the buffers (`table`). Stores of
format 1 have them inside a JSON object instead: `load` reads both.
"""

from __future__ import annotations

import math
from typing import Any, Callable

import torch

from stoker.errors import Mismatch
from stoker.offload.division.layout import MIB
from stoker.offload.storage import record
from stoker.offload.storage.planes import Hasher, read_into, read_range

KEY, OLD_KEY = "b/buffers", "meta/buffers"
ALIGN = 64  # bytes
Piece = tuple[torch.Tensor, int]


def stored_bytes(buffers: dict[str, torch.Tensor]) -> int:
    """What one version of them takes of a store."""
    return _Layout(buffers).size


class _Layout:
    """Where each buffer begins in the object."""

    def __init__(self, buffers: dict[str, torch.Tensor]) -> None:
        self.places: dict[str, int] = {}
        self.size = 0
        for name, tensor in buffers.items():
            self.places[name] = self.size
            self.size += -(-tensor.numel() * tensor.element_size() // ALIGN) * ALIGN


class Buffers:
    """Used under the session's lock. `own` gives the model's buffers by name, as they are now."""

    def __init__(self, own: Callable[[], dict[str, torch.Tensor]], hashes: Hasher) -> None:
        self._own, self._hashes = own, hashes
        # Table and hashes of the chunks, as the newest transaction has them.
        self._written: tuple[list, dict[int, list[bytes]]] = ([], {})
        self._old = False  # the store has them as a JSON object

    def table(self) -> list[list]:
        """Name, type and shape of each, in the order of their bytes."""
        kind = lambda tensor: str(tensor.dtype).removeprefix("torch.")
        return [[name, kind(tensor), list(tensor.shape)] for name, tensor in self._own().items()]

    @property
    def bytes(self) -> int:
        return stored_bytes(self._own())

    def forget(self) -> None:
        """What the store has of them is not known: the next stage() writes all."""
        self._written = ([], {})

    def stage(self, txn: Any) -> None:
        """Writes what changed since the last call."""
        own, table = self._own(), self.table()
        if self._old:
            txn.remove(OLD_KEY)
            self._old = False
        layout = _Layout(own)
        if not layout.size:
            return
        known_table, known = self._written
        self.forget()  # unless all goes well
        if table != known_table:
            txn.resize(KEY, layout.size)
            known = {}
        hosts = {name: _bytes_of(tensor) for name, tensor in own.items()}
        chunks = _chunks(layout, hosts)
        every = [piece for pieces in chunks.values() for piece, _ in pieces]
        hashed = iter(self._hashes([(piece.data_ptr(), piece.numel()) for piece in every]))
        now = {at: [next(hashed) for _ in pieces] for at, pieces in chunks.items()}
        for at, pieces in chunks.items():
            if known.get(at) != now[at]:
                chunk = bytearray(min(MIB, layout.size - at))
                for piece, start in pieces:
                    chunk[start : start + piece.numel()] = memoryview(piece.numpy())
                txn.write_bytes(KEY, at, bytes(chunk))
        self._written = (table, now)

    def load(self, store: Any, table: list | bool) -> None:
        """Gives the model's buffers the values that a record's step had.

        `table`: as the record has it; a bool in format 1.
        """
        self.forget()
        self._old = table is True
        if table is True:
            written = read_range(store, OLD_KEY, 0, store.stat(OLD_KEY)["bytes"])
            for name, value in record.load(written).items():
                self._fitting(name, value.shape).data.copy_(value)
            return
        offset = 0
        for name, dtype, shape in table or []:
            value = torch.empty(shape, dtype=getattr(torch, dtype), device="cpu")
            target = self._fitting(name, value.shape)
            if value.numel():
                read_into(store, KEY, offset, memoryview(_bytes_of(value).numpy()))
            target.data.copy_(value)
            offset += -(-value.nbytes // ALIGN) * ALIGN

    def _fitting(self, name: str, shape: torch.Size) -> torch.Tensor:
        own = self._own().get(name)
        if own is None or own.shape != shape:
            has = "no buffer" if own is None else f"shape {list(own.shape)}"
            raise Mismatch(
                f"the store has buffer {name} with shape {list(shape)}, but the model has {has}"
                " there; give the model that the store was made with"
            )
        return own


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bytes in host memory, in the order of its elements; a copy only where needed."""
    here = tensor.detach().cpu().contiguous()
    return torch.as_strided(here, (here.numel(),), (1,)).view(torch.uint8)


def _chunks(layout: _Layout, hosts: dict[str, torch.Tensor]) -> dict[int, list[Piece]]:
    """The chunks by their offset: bytes of buffers, and where in the chunk they begin."""
    chunks: dict[int, list[Piece]] = {at: [] for at in range(0, layout.size, MIB)}
    for name, place in layout.places.items():
        size = hosts[name].numel()
        if not size:
            continue
        for number in range(place // MIB, math.ceil((place + size) / MIB)):
            begin, end = max(place, number * MIB), min(place + size, (number + 1) * MIB)
            bytes_of = hosts[name][begin - place : end - place]
            chunks[number * MIB].append((bytes_of, begin - number * MIB))
    return chunks
