"""Moments: how m and v are kept in their planes. docs/formats/planes.md is the specification,
src/stoker/optim/moments.h the arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Iterator

import torch

from stoker import _core
from stoker.errors import InvalidArgument

BLOCK = 4096  # bytes; planes are whole blocks, and so are their cells
SCALE_BYTES = 4


@dataclass(frozen=True)
class Moments:
    """One way to keep m and v: bytes of an element, and how many elements share a scale (0: no
    scales).

    With scales a plane is cut into cells of `cell` elements: their codes, their scales, zeros up to
    a block.
    """

    name: str
    element_bytes: int
    group: int = 0
    cell: int = 1 << 16  # elements; a tile has at least as many

    def plane_bytes(self, elements: int) -> int:
        if not self.group:
            return elements * self.element_bytes
        cells, rest = divmod(elements, self.cell)
        return cells * self._cell_bytes(self.cell) + self._cell_bytes(rest)

    def _cell_bytes(self, elements: int) -> int:
        return -(-(elements * self.element_bytes + self._scale_bytes(elements)) // BLOCK) * BLOCK

    def _scale_bytes(self, elements: int) -> int:
        return -(-elements // self.group) * SCALE_BYTES if self.group else 0

    def runs(self, plane_elements: int, first: int, count: int) -> Iterator[Run]:
        """Where elements `first` to `first + count` of a plane lie, cell by cell. `first` begins a
        group."""
        end = first + count
        while first < end:
            begin = first // self.cell * self.cell
            codes = min(self.cell, plane_elements - begin)
            some = min(end, begin + codes) - first
            at, inside = self.plane_bytes(begin), first - begin
            scales_at = at + codes * self.element_bytes + self._scale_bytes(inside)
            yield Run(
                some,
                at + inside * self.element_bytes,
                some * self.element_bytes,
                scales_at,
                self._scale_bytes(some),
            )
            first += some

    def decode(self, which: str, count: int, data: bytearray, scales: bytearray) -> torch.Tensor:
        """m or v ("m", "v") as kept -> float32."""
        out = torch.empty(count, dtype=torch.float32, device="cpu")
        _core.optim_decode_moment(
            self.name, which, _address(data), _address(scales), out.data_ptr(), count
        )
        return out

    def encode(self, which: str, values: torch.Tensor) -> tuple[bytes, bytes]:
        """float32 -> (elements, scales), to the nearest."""
        values = values.contiguous()
        count = values.numel()
        data = bytearray(count * self.element_bytes)
        scales = bytearray(self._scale_bytes(count))
        _core.optim_encode_moment(
            self.name, which, values.data_ptr(), _address(data), _address(scales), count
        )
        return bytes(data), bytes(scales)


@dataclass(frozen=True)
class Run:
    """Elements of one cell: how many, and the byte ranges of the elements and of their scales in
    the plane."""

    count: int
    data_at: int
    data_bytes: int
    scales_at: int
    scales_bytes: int


def _address(data: bytearray) -> int:
    return torch.frombuffer(data, dtype=torch.uint8).data_ptr() if data else 0


EXACT = Moments("exact", 4)
MODES = {
    mode.name: mode
    for mode in (EXACT, Moments("bf16", 2), Moments("8bit", 1, group=256, cell=1 << 17))
}


def moments_of(name: str) -> Moments:
    if name not in MODES:
        raise InvalidArgument(f"moments {name!r} is not one of {', '.join(MODES)}")
    return MODES[name]
