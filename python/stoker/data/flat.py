"""Reading FlatBuffers, the encoding of Arrow's metadata: tables of numbered fields.

Every offset is checked: ValueError for bytes that cannot be, whatever they are.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


class Table:
    """A table at byte `at`. Fields are numbered as in the schema."""

    def __init__(self, data: bytes, at: int) -> None:
        self._data, self._at = data, at
        self._fields = at - self._read("<i", at)
        self._count = max(0, (self._read("<H", self._fields) - 4) // 2)

    @classmethod
    def root(cls, data: bytes) -> Table:
        return cls(data, _read(data, "<I", 0))

    def _read(self, kind: str, at: int) -> int:
        return _read(self._data, kind, at)

    def _place(self, field: int) -> int:
        """0: the field is not there."""
        if field >= self._count:
            return 0
        offset = self._read("<H", self._fields + 4 + 2 * field)
        return self._at + offset if offset else 0

    def number(self, field: int, kind: str, default: int = 0) -> int:
        """kind: as struct has it."""
        place = self._place(field)
        return self._read(kind, place) if place else default

    def table(self, field: int) -> Table | None:
        place = self._place(field)
        return Table(self._data, place + self._read("<I", place)) if place else None

    def text(self, field: int) -> str:
        place = self._place(field)
        if not place:
            return ""
        at = place + self._read("<I", place)
        size = self._read("<I", at)
        if size > len(self._data) - at - 4:
            raise ValueError("a text that is cut")
        return self._data[at + 4 : at + 4 + size].decode()

    def _vector(self, field: int, width: int, item: Callable[[int], T]) -> list[T]:
        place = self._place(field)
        if not place:
            return []
        at = place + self._read("<I", place)
        count = self._read("<I", at)
        if count * width > len(self._data) - at - 4:
            raise ValueError("a list that is cut")
        return [item(at + 4 + width * number) for number in range(count)]

    def tables(self, field: int) -> list[Table]:
        return self._vector(field, 4, lambda at: Table(self._data, at + self._read("<I", at)))

    def structs(self, field: int, kind: str) -> list[tuple[Any, ...]]:
        """A list of structs without padding. kind: as struct has it."""
        form = struct.Struct(kind)
        return self._vector(field, form.size, lambda at: form.unpack_from(self._data, at))


def _read(data: bytes, kind: str, at: int) -> int:
    if at < 0 or at + struct.calcsize(kind) > len(data):
        raise ValueError("an offset out of bounds")
    return struct.unpack_from(kind, data, at)[0]
