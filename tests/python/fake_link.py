"""A device that is not there: memory of its own, and copies that happen at the worst moment."""

from __future__ import annotations

import ctypes

import torch


class FakeLink:
    """Stands for link.CudaLink. Computing is the CPU's, so what a GPU does late are only the
    copies: `lazy` ones happen when somebody waits for them (or at `finish()`) and not before,
    others at once. They go by address, as a GPU's do: memory that was given to others in between is
    read, or written to, all the same. `failing` names the call that raises, once.
    """

    def __init__(self, lazy: bool) -> None:
        self.device = torch.device("cpu")
        self.lazy = lazy
        self.uploads = self.downloads = 0
        self.pinned = None  # the arenas
        self.failing: str | None = None
        self._pending: list[list] = []

    def _may_fail(self, call: str) -> None:
        if self.failing == call:
            self.failing = None
            raise RuntimeError(f"the device failed at {call}")

    def pin(self, arena) -> None:
        self._may_fail("pin")
        self.pinned = [*(self.pinned or []), arena]

    def unpin(self) -> None:
        self.finish()
        self.pinned = None

    def finish(self) -> None:
        """The device has done all that was asked of it."""
        for event in self._pending:
            if event:
                event[0]()
                event.clear()
        self._pending.clear()

    def empty(self, size: int) -> torch.Tensor:
        return torch.full((size,), 0xFF, dtype=torch.uint8)  # NaN

    def upload(self, host: torch.Tensor, image: torch.Tensor) -> list:
        self.uploads += 1
        self._in_pinned(host)
        return self._copy(image.data_ptr(), host.data_ptr(), image.nbytes, keep=image)

    def download(self, source: torch.Tensor, host: torch.Tensor) -> list:
        self.downloads += 1
        self._may_fail("download")
        self._in_pinned(host)
        assert (
            host.dtype == source.dtype
            and host.is_contiguous()
            and source.is_contiguous()
            and host.nbytes == source.nbytes
        )
        return self._copy(host.data_ptr(), source.data_ptr(), host.nbytes, keep=source.clone())

    def _copy(self, to: int, source: int, size: int, keep: torch.Tensor) -> list:
        source = keep.data_ptr() if to != keep.data_ptr() else source
        event = [lambda: ctypes.memmove(to, source, size), keep]
        self._pending.append(event)
        if not self.lazy:
            self.finish()
        return event

    def _in_pinned(self, host: torch.Tensor) -> None:
        assert any(
            arena.address <= host.data_ptr()
            and host.data_ptr() + host.nbytes <= arena.address + arena.size
            for arena in self.pinned
        )

    def join(self, image: torch.Tensor, uploaded: list) -> None:
        self.wait(uploaded)

    def mark(self) -> list:
        return []

    def done(self, event: list) -> bool:
        return not event

    def wait(self, event: list) -> None:
        self._may_fail("wait")
        if event:
            event[0]()
            event.clear()
