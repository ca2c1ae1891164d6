"""What lies where in a tar file of a store."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from stoker import _core

from ..errors import Corruption, InvalidArgument
from .packed import Unpacked


@dataclass
class Member:
    """One sample: its name and where its parts lie."""

    name: str
    parts: dict[str, tuple[int, int]] = field(default_factory=dict)  # extension: offset, bytes


class _Reading(io.RawIOBase):
    """An object as a file that can be read, for tarfile."""

    def __init__(self, store: _core.Store | Unpacked, key: str, size: int) -> None:
        self._store, self._key, self._size, self._at = store, key, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, into: Any) -> int:
        many = max(0, min(len(into), self._size - self._at))
        into[:many] = self._store.read_bytes(self._key, self._at, many) if many else b""
        self._at += many
        return many


def members(store: _core.Store | Unpacked, key: str, size: int) -> Iterator[Member]:
    """The samples of a tar file, in its order. Corruption: it is cut, or headers are damaged."""
    file = io.BufferedReader(_Reading(store, key, size), 128 << 10)
    sample: Member | None = None
    seen: set[str] = set()
    try:
        with tarfile.open(fileobj=file, mode="r:") as tar:
            for member in tar:
                if not member.isfile():
                    continue
                if member.offset_data + member.size > size:
                    raise Corruption(
                        f"{key} is cut inside of '{member.name}': fetch or write it again"
                    )
                folder, _, base = member.name.rpartition("/")
                stem, _, extension = base.partition(".")
                name = f"{folder}/{stem}" if folder else stem
                if not stem or not extension:
                    # As in WebDataset: such names are no part of a sample.
                    continue
                if sample is None or sample.name != name:
                    if sample is not None:
                        yield sample
                    if name in seen:
                        raise InvalidArgument(
                            f"the parts of sample '{name}' are not next to each other in {key}: "
                            f"sort its members by name"
                        )
                    seen.add(name)
                    sample = Member(name)
                if extension in sample.parts:
                    raise InvalidArgument(
                        f"{key} has '{member.name}' twice: a sample needs each part once"
                    )
                sample.parts[extension] = member.offset_data, member.size
            # tarfile takes a damaged header for the end: the end has a block of zeros.
            end = tar.offset
        if end + 512 > size or store.read_bytes(key, end, 512).strip(b"\0"):
            raise Corruption(
                f"{key} is cut or damaged at byte {end} of {size}: fetch or write it again"
            )
    except tarfile.TarError as error:
        raise Corruption(
            f"{key} is not a whole tar file ({error}): fetch or write it again"
        ) from error
    if sample is not None:
        yield sample
