"""Scratch: disk space that nothing outlives, for bytes that belong to no step.

Staged bytes that are never committed are scratch space. They lie in stores of their own, beside the
run's, made as they are needed: the run's store neither grows by them nor fills up, and what goes
wrong with one of them makes no commit fail. Each has one transaction, never committed, and no name:
its files are unlinked as soon as they are open, so nothing of it is there after a crash.

An object is one piece of bytes. Removing it makes its space free for the next, once no read is in
flight on it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from dataclasses import dataclass, field
from typing import Any

from stoker import _core
from stoker.errors import OutOfSpace, StokerError
from stoker.offload.division.layout import MIB
from stoker.offload.storage.open_store import holder

# of the first store, where nobody knows what is needed; each further one doubles what there is
FIRST_BYTES = 256 * MIB
CHUNK_BYTES = MIB
PAGE = 4096
SPARE = 16  # of a store's space, a part that stays free: pieces of different sizes leave gaps


@dataclass(eq=False)
class _Part:
    """One of the stores."""

    store: Any
    txn: Any
    capacity: int
    used: int = 0
    keys: list[str] = field(default_factory=list)  # that no object has
    made: int = 0

    def free(self) -> int:
        return self.capacity - self.capacity // SPARE - self.used


@dataclass(eq=False)
class Piece:
    """Bytes in scratch space; `written` is their write's future. Whoever has it gives it back
    (Scratch.free) after that."""

    part: _Part
    key: str
    size: int
    written: Any = None


class Scratch:
    """Used under the session's lock. The memory of a transfer stays the caller's to keep until the
    future is done."""

    def __init__(self, core: _core.Runtime, directories: list[str], reserved: int = 0) -> None:
        """directories: one a disk, for what is to be striped; none: memory. reserved: bytes that
        are known to be needed; a disk without room for them shows now."""
        self._core, self._directories, self._first = core, directories, reserved or FIRST_BYTES
        self._parts: list[_Part] = []
        if reserved:
            self._part_for(reserved)

    def write(self, address: int, size: int, priority: str = "write_back") -> Piece:
        """Starts writing. OutOfSpace where the disk has no room for it."""
        part = self._part_for(_rounded(size))
        if not part.keys:
            part.keys.append(str(part.made))
            part.made += 1
        piece = Piece(part, part.keys.pop(), size)
        part.used += _rounded(size)
        try:
            part.txn.resize(piece.key, size)
            piece.written = part.txn.write(piece.key, 0, address, size, priority)
        except BaseException:
            self.free(piece)
            raise
        return piece

    def read(self, piece: Piece, address: int, priority: str) -> Any:
        """Starts reading; the future."""
        return piece.part.store.read(piece.key, 0, address, piece.size, priority, piece.part.txn)

    def free(self, piece: Piece) -> None:
        """Its transfers are done."""
        part = piece.part
        with contextlib.suppress(StokerError):  # resize() had failed: there is no such object
            part.txn.remove(piece.key)
        part.used -= _rounded(piece.size)
        part.keys.append(piece.key)

    @property
    def used_bytes(self) -> int:
        return sum(part.store.info()["used_bytes"] for part in self._parts)

    def close(self) -> None:
        """No transfer is under way."""
        for part in self._parts:
            part.txn.abandon()
            part.store.close()
        self._parts.clear()

    def _part_for(self, size: int) -> _Part:
        for part in self._parts:
            if part.free() >= size:
                return part
        least = scratch_bytes(size)
        wanted = max(self._first, least, sum(part.capacity for part in self._parts))
        while True:
            try:
                part = self._make(wanted)
                break
            except OutOfSpace:
                if wanted <= least:
                    raise
                wanted = max(least, wanted // 2)
        self._parts.append(part)
        return part

    def _make(self, capacity: int) -> _Part:
        made = []
        try:
            for directory in self._directories:
                made.append(tempfile.mkdtemp(prefix=".stoker-scratch-", dir=directory))
            where = ",".join(made) or "memory:"
            store = self._core.open_store(
                where,
                create=True,
                capacity_bytes=capacity,
                holder=holder(),
                chunk_bytes=CHUNK_BYTES,
                objects_max=1 << 12,
            )
        finally:
            for directory in made:
                shutil.rmtree(directory, ignore_errors=True)  # the open files live on
        try:
            return _Part(store, store.begin(), store.info()["capacity_bytes"] or capacity)
        except BaseException:
            store.close()
            raise


def clean(directories: list[str]) -> None:
    """Removes what a crash in between making and unlinking left."""
    for directory in directories:
        with contextlib.suppress(OSError):
            for name in os.listdir(directory):
                if name.startswith(".stoker-scratch-"):
                    shutil.rmtree(os.path.join(directory, name), ignore_errors=True)


def scratch_bytes(size: int) -> int:
    """The capacity of a store that takes so many bytes."""
    return size + size // (SPARE - 1) + 2 * PAGE


def _rounded(size: int) -> int:
    return -(-size // PAGE) * PAGE
