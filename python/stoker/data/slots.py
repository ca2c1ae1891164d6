"""Memory of batches that CUDA knows, so that copies to a GPU run beside the computation.

It is an arena: large pages, drawn on the memory of the store (`dram=`), in which the loader lays
its batches. A batch for which there is no room lies elsewhere, and is not pinned. A process that
was forked does not have this memory. It is used again as soon as nobody has the batch: torch does
not hold it for a copy that is still under way.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence as Several
from typing import Any

import torch

from stoker import _core
from stoker.errors import StokerError

from .images import Jpeg

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
        weakref.finalize(loader, _gone, registered).atexit = False  # memory ends with the process


def batch_bytes(sources: Several[Any], batch: int, decode: Jpeg | None) -> int:
    """Of a batch in memory, as far as that is known before."""
    if decode is not None:
        depth = 1 if decode.normalise is None else 4
        return batch * decode.height * decode.width * 3 * depth
    return int(batch * max(each.slot_bytes for each in sources))


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

    def release(self) -> bool:
        """Unless somebody has a batch in it."""
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
