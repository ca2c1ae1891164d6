"""A device that is not there: memory of its own, and copies that happen at the worst moment."""

from __future__ import annotations

import ctypes

import torch


class FakeLink:
    """Stands for link.CudaLink. Computing is the CPU's, so what a GPU does late are only the copies: `lazy` ones happen when
    somebody waits for them and not before, others at once. They go by address, as a GPU's do: memory that was given to others in
    between is read, or written to, all the same."""

    def __init__(self, lazy: bool) -> None:
        self.device = torch.device("cpu")
        self.lazy = lazy
        self.uploads = self.downloads = self.bytes = self.peak = 0
        self.pinned: tuple[int, int] | None = None

    def pin(self, address: int, size: int) -> None:
        assert self.pinned is None
        self.pinned = (address, size)

    def unpin(self) -> None:
        self.pinned = None

    def empty(self, size: int) -> torch.Tensor:
        return torch.full((size,), 0xFF, dtype=torch.uint8)  # NaN

    def upload(self, host: torch.Tensor, image: torch.Tensor) -> list:
        self.uploads += 1
        self._in_pinned(host)
        return self._copy(image.data_ptr(), host.data_ptr(), image.nbytes, keep=image)

    def download(self, source: torch.Tensor, host: torch.Tensor) -> list:
        self.downloads += 1
        self._in_pinned(host)
        assert host.dtype == source.dtype and host.is_contiguous() and source.is_contiguous() and host.nbytes == source.nbytes
        return self._copy(host.data_ptr(), source.data_ptr(), host.nbytes, keep=source.clone())  # later writes are ordered behind the copy

    def _copy(self, to: int, source: int, size: int, keep: torch.Tensor) -> list:
        source = keep.data_ptr() if to != keep.data_ptr() else source
        event = [lambda: ctypes.memmove(to, source, size), keep]
        if not self.lazy:
            self.wait(event)
        return event

    def _in_pinned(self, host: torch.Tensor) -> None:
        address, size = self.pinned
        assert address <= host.data_ptr() and host.data_ptr() + host.nbytes <= address + size

    def join(self, image: torch.Tensor, uploaded: list) -> None:
        self.wait(uploaded)

    def mark(self) -> list:
        return []

    def done(self, event: list) -> bool:
        return not event

    def wait(self, event: list) -> None:
        if event:
            event[0]()
            event.clear()
