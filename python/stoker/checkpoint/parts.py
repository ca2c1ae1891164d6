"""What a checkpoint's files are made of: bytes, tensors in memory, and planes in a store.

A part gives any range of its bytes to memory at an address. Parts of one file never overlap.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from stoker.checkpoint.manifest import CHUNK
from stoker.errors import StokerError


PAGE, LARGE_PAGE = 4 << 10, 2 << 20
_LIBC, _MADV_HUGEPAGE = ctypes.CDLL(None), 14


class Source(Protocol):
    def read(self, at: int, size: int, address: int) -> None:
        """Writes `size` bytes from `at` on to memory at `address`."""

    def place(self, at: int) -> int | None:
        """Where the bytes from `at` on lie in host memory, all of them one behind the other; None:
        read() brings them, in order. Who has copied them calls check()."""

    def check(self) -> None:
        """Raises if what was copied from its place may not be believed."""


class Brought:
    """A source that has no place in memory."""

    def place(self, at: int) -> int | None:
        return None

    def check(self) -> None:
        pass


class Edited(StokerError, RuntimeError):
    """A tensor was changed while a background save still copied it. The save failed; the older
    checkpoints stand."""


class Bytes:
    def __init__(self, data: bytes) -> None:
        self._data = data
        self._address = ctypes.cast(data, ctypes.c_void_p).value

    def read(self, at: int, size: int, address: int) -> None:
        ctypes.memmove(address, self._address + at, size)

    def place(self, at: int) -> int | None:
        return self._address + at

    def check(self) -> None:
        pass


class Tensor:
    """The elements of a tensor in row-major order. Edited if torch counted a write to it since."""

    def __init__(self, name: str, tensor: torch.Tensor) -> None:
        tensor = tensor.detach()
        self._name, self._of, self._version = name, tensor, tensor._version
        self._flat = tensor if tensor.is_contiguous() else tensor.contiguous()

    def read(self, at: int, size: int, address: int) -> None:
        flat = self._flat
        if flat.device.type == "cpu":
            ctypes.memmove(address, flat.data_ptr() + at, size)  # without the GIL
        else:
            into = memory(address, size)
            into.copy_(flat.reshape(-1).view(torch.uint8)[at : at + size])
        self.check()

    def place(self, at: int) -> int | None:
        return self._flat.data_ptr() + at if self._flat.device.type == "cpu" else None

    def check(self) -> None:
        if self._of._version != self._version:
            raise Edited(
                f"{self._name} was changed while it was being saved; change tensors between "
                'handle.wait("copied") and the next save, or pass staging="full"'
            )


class Plane(Brought):
    """An object of a store, as it was at a snapshot. It is read a chunk at a time."""

    def __init__(self, store: Any, key: str, snapshot: str, buffer: Any) -> None:
        info = store.stat(key, snapshot=snapshot)
        self.bytes, self.chunk_bytes = info["bytes"], info["chunk_bytes"]
        self._store, self._key, self._snapshot = store, key, snapshot
        self._buffer, self._held = buffer, (None, -1)

    def read(self, at: int, size: int, address: int) -> None:
        end = at + size
        while at < end:
            chunk, within = divmod(at, self.chunk_bytes)
            part = min(end - at, self.chunk_bytes - within)
            self._fetch(chunk)
            ctypes.memmove(address, self._buffer.address + within, part)
            at, address = at + part, address + part

    def _fetch(self, chunk: int) -> None:
        # No two saves share a snapshot's name; two runs in one save do, and may share keys.
        wanted = (self._snapshot, id(self), chunk)
        if self._buffer.holds == wanted:
            return
        self._buffer.holds = None
        begin = chunk * self.chunk_bytes
        length = min(self.chunk_bytes, self.bytes - begin)
        key, snapshot = self._key, self._snapshot
        done = self._store.read(
            key, begin, self._buffer.address, length, priority="checkpoint", snapshot=snapshot
        )
        done.wait()
        self._buffer.holds = wanted


class Slice(Brought):
    """A part of a source."""

    def __init__(self, source: Source, begin: int) -> None:
        self._source, self._begin = source, begin

    def read(self, at: int, size: int, address: int) -> None:
        self._source.read(self._begin + at, size, address)


class Strided(Brought):
    """A tensor that a plane holds in the order of its memory, given in row-major order. All of it
    is brought to memory for that."""

    def __init__(self, source: Source, size: tuple, stride: tuple, dtype: torch.dtype) -> None:
        self._source, self._size, self._stride, self._dtype = source, size, stride, dtype
        self._tensor: torch.Tensor | None = None

    def read(self, at: int, size: int, address: int) -> None:
        if self._tensor is None:
            flat = torch.empty(self._size, dtype=self._dtype, device="cpu").reshape(-1)
            self._source.read(0, flat.numel() * flat.element_size(), flat.data_ptr())
            self._tensor = torch.as_strided(flat, self._size, self._stride).contiguous()
        ctypes.memmove(address, self._tensor.data_ptr() + at, size)
        if at + size == self._tensor.numel() * self._tensor.element_size():
            self._tensor = None


@dataclass(frozen=True)
class Part:
    offset: int  # in the file
    bytes: int
    source: Source


@dataclass(frozen=True)
class Whole:
    """A file that is to be written."""

    name: str
    bytes: int
    parts: list[Part]  # by offset
    frozen: bool = False  # holds what training does not change

    def chunks(self) -> Iterator[list[tuple[Part, int, int, int]]]:
        """For each chunk: the parts in it, where in the part, where in the chunk, and how much."""
        first = 0
        for begin in range(0, self.bytes, CHUNK):
            end = min(begin + CHUNK, self.bytes)
            within = []
            while first < len(self.parts) and _end(self.parts[first]) <= begin:
                first += 1
            for part in self.parts[first:]:
                if part.offset >= end:
                    break
                start, stop = max(begin, part.offset), min(end, _end(part))
                if start < stop:
                    within.append((part, start - part.offset, start - begin, stop - start))
            yield within


def _end(part: Part) -> int:
    return part.offset + part.bytes


def memory(address: int, size: int) -> torch.Tensor:
    """Memory at an address as a uint8 tensor, which does not own it."""
    return torch.frombuffer((ctypes.c_char * max(size, 1)).from_address(address), dtype=torch.uint8)


def room(size: Any, dtype: torch.dtype) -> torch.Tensor:
    """A new tensor in host memory. What is large lies in large pages, if the kernel has such: the
    first touch of each page is a fault, and of small ones there are 512 times as many."""
    made = torch.empty(size, dtype=dtype, device="cpu")
    begin = made.data_ptr() // PAGE * PAGE
    length = made.data_ptr() + made.numel() * made.element_size() - begin
    if length >= LARGE_PAGE:
        _LIBC.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(length), _MADV_HUGEPAGE)
    return made


def packed(name: str, sources: Iterable[tuple[int, Source]], align: int) -> tuple[Whole, list[int]]:
    """A pack of (bytes, source), and where each begins."""
    at, parts, places = 0, [], []
    for size, source in sources:
        places.append(at)
        parts.append(Part(at, size, source))
        at = -(-(at + size) // align) * align
    end = _end(parts[-1]) if parts else 0
    return Whole(name, end, parts), places
