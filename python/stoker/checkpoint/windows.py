"""From a checkpoint's files to a store's objects: while the store writes what is in one window of
memory, the other is filled."""

from __future__ import annotations

import contextlib
import ctypes
from typing import Any

import torch

from stoker import _core
from stoker.checkpoint.manifest import damaged
from stoker.checkpoint.parts import PAGE, memory
from stoker.checkpoint.reading import Reader, Wanted
from stoker.checkpoint.workspace import PLANE_BYTES
from stoker.errors import StokerError

WINDOW = 32 << 20  # bytes


class Windows:
    """Of one transaction of a store. room() gives memory for a piece of an object, and what is to
    be read into it is said by want(), before the next room(). At the end of `with` all of it was
    written. Of frozen objects only what the store has otherwise: it has room for them once."""

    def __init__(self, reader: Reader, store: Any, txn: Any, runtime: _core.Runtime) -> None:
        self._reader, self._store, self._txn = reader, store, txn
        self._runtime, self._there = runtime, None  # memory for what the store has
        self._memory = [runtime.arena(WINDOW).take(WINDOW) for _ in range(2)]
        self._writing: list[list[_core.Future]] = [[], []]
        self._now = self._used = 0
        self._wanted: dict[str, list[Wanted]] = {}
        # key, at, address, bytes, chunk, frozen
        self._pieces: list[tuple[str, int, int, int, int, bool]] = []

    def steps(self, size: int, chunk: int) -> range:
        """Where the pieces of an object begin: each has whole chunks, and fits a window."""
        if not isinstance(chunk, int) or not 0 < chunk <= PLANE_BYTES:
            raise damaged(
                self._reader.where,
                f"the manifest says that a plane has chunks of {chunk!r} bytes, but they have 1 to"
                f" {PLANE_BYTES}",
            )
        return range(0, size, WINDOW // chunk * chunk)

    def room(self, key: str, at: int, size: int, chunk: int, frozen: bool = False) -> int:
        """The address of memory for the piece; its bytes are written once they are there."""
        if self._used + size > WINDOW:
            self._turn()
        address = self._memory[self._now].address + self._used
        self._used += -(-size // PAGE) * PAGE
        self._pieces.append((key, at, address, size, chunk, frozen))
        return address

    def want(self, file: str, wanted: Wanted) -> None:
        self._wanted.setdefault(file, []).append(wanted)

    def put(
        self, key: str, held: torch.Tensor, size: int, chunk: int, frozen: bool = False
    ) -> None:
        """A whole object, which is in memory."""
        steps = self.steps(size, chunk)
        for at in steps:
            length = min(steps.step, size - at)
            address = self.room(key, at, length, chunk, frozen)
            ctypes.memmove(address, held.data_ptr() + at, length)

    def _turn(self) -> None:
        """Fills this window, begins to write it, and gives the other."""
        for file, wanted in self._wanted.items():
            self._reader.copy(file, wanted)
        writing = self._writing[self._now]
        for key, at, address, size, chunk, frozen in self._pieces:
            for begin in range(0, size, chunk):
                piece = key, at + begin, address + begin, min(chunk, size - begin)
                if not (frozen and self._has(*piece)):
                    writing.append(self._txn.write(*piece))
        self._wanted, self._pieces = {}, []
        self._now, self._used = 1 - self._now, 0
        self._settle(self._now)

    def _has(self, key: str, at: int, address: int, size: int) -> bool:
        """Whether the store has these bytes there."""
        if self._there is None:
            self._there = self._runtime.arena(PLANE_BYTES).take(PLANE_BYTES)
        under_way = self._writing[self._now]
        under_way.append(self._store.read(key, at, self._there.address, size))
        try:
            under_way[-1].wait()  # Ctrl-C: it is waited for at the end of `with`
        except StokerError:  # it is new, or damaged: written it is right again
            under_way.pop()
            return False
        under_way.pop()
        return torch.equal(memory(address, size), memory(self._there.address, size))

    def _settle(self, window: int) -> None:
        """Waits for its writes; raises the first error when all have ended."""
        first, writing = None, self._writing[window]
        while writing:
            try:
                writing[-1].wait()  # Ctrl-C: below it is waited for once more
            except StokerError as error:
                first = error
            writing.pop()
        if first is not None:
            raise first

    def __enter__(self) -> Windows:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        try:
            if error is None:
                self._turn()
                self._turn()
        finally:
            for window in (0, 1):
                with contextlib.suppress(StokerError):
                    self._settle(window)
