"""Memory of batches that CUDA knows, so that copies to a GPU run beside the computation.

It is an arena: large pages, drawn on the memory of the store (`dram=`), in which the loader lays
its batches. A batch for which there is no room lies elsewhere, and is not pinned. A process that
was forked does not have this memory.

torch does not hold this memory for a copy that is under way. So when nobody has a batch any more,
an event is recorded on the stream that is current there. The memory is used again once the event
has come.
"""

from __future__ import annotations

import contextlib
import os
import sys
import weakref
from collections import deque
from typing import Any

import numpy as np
import torch

from stoker import _core
from stoker.errors import StokerError

# Of loaders that are gone, while somebody still has a batch.
_left: list[_Registered] = []


class Slots:
    """Of one loader: room for so many batches in `arena`."""

    def __init__(self, loader: Any, store: _core.Store, batch_bytes: int, batches: int) -> None:
        _sweep()
        if not torch.cuda.is_available():
            raise StokerError("pin=True needs a GPU, and torch finds none: leave it out")
        registered = _Registered(store.arena(batches * _pages(batch_bytes)))
        self.arena: _core.Arena = registered.arena
        self._copies = registered.copies
        weakref.finalize(loader, _gone, registered).atexit = False  # memory ends with the process

    def lend(self, memory: np.ndarray) -> np.ndarray:
        """The same memory; when nobody has it any more it waits for the copies of it."""
        self._copies.forget()
        return np.asarray(_Lent(memory, self._copies))


class _Copies:
    """Memory that was given back, with the events behind which nothing copies it. Any thread."""

    def __init__(self) -> None:
        self._under_way: deque[tuple[torch.cuda.Event, np.ndarray]] = deque()
        self._process = os.getpid()

    def hold(self, memory: np.ndarray) -> None:
        if os.getpid() != self._process:  # the parent's
            return
        event = torch.cuda.Event()
        event.record()
        self._under_way.append((event, memory))

    def forget(self) -> None:
        """What is over."""
        with contextlib.suppress(IndexError):  # another thread looks as well
            for _ in range(len(self._under_way)):
                event, memory = self._under_way.popleft()
                if not event.query():
                    self._under_way.append((event, memory))


class _Lent:
    def __init__(self, memory: np.ndarray, copies: _Copies) -> None:
        self.__array_interface__ = memory.__array_interface__
        self._memory, self._copies = memory, copies

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self._copies.hold(self._memory)


class _Registered:
    """An arena that CUDA knows, until it is released: before the memory goes."""

    def __init__(self, arena: _core.Arena) -> None:
        self._cuda = torch.cuda.cudart()
        status = int(self._cuda.cudaHostRegister(arena.address, arena.size, 0))
        if status:
            raise StokerError(
                f"{arena.size >> 20} MiB of host memory could not be pinned (CUDA error {status}); "
                "raise the limit that `ulimit -l` shows, or make batches smaller"
            )
        self.arena = arena
        self.copies = _Copies()

    def release(self) -> bool:
        """Unless somebody has a batch in it, or copies one."""
        self.copies.forget()
        if self.arena.used:
            return False
        self._cuda.cudaHostUnregister(self.arena.address)
        return True


def _gone(registered: _Registered) -> None:
    _left.append(registered)
    _sweep()


def _sweep() -> None:
    _left[:] = [each for each in _left if not each.release()]


def _pages(count: int) -> int:
    return -(-max(count, 1) // 4096) * 4096
