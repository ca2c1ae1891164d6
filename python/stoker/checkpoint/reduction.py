"""Files that get smaller on their way to a store that is slower than the codec.

docs/formats/checkpoint.md has the format, src/stoker/codec/reduction.h the codec.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import time
from collections.abc import Generator, Iterator
from functools import partial
from typing import Any

from stoker import _core
from stoker.checkpoint.manifest import CHUNK, REDUCED, REDUCED_TABLE, File, Name, Stored
from stoker.checkpoint.workspace import Buffer, Commits, Fill, Ring, Tier
from stoker.errors import InvalidArgument, StokerError

log = logging.getLogger("stoker")
HOW = ("auto", "on", "off", "all")
_SAMPLED = 8  # chunks, to measure the codec
_GAIN = 1.02  # times smaller; what gives less is written as it is
_OLD = 10  # copies without a plain file: the next one measures the store anew


class Reduction:
    """Whether files get smaller on their way to a store. "auto" decides by rates that it measures:
    the codec's once, the store's with each copy that has plain files."""

    def __init__(self, how: str) -> None:
        if how not in HOW:
            raise InvalidArgument(f"reduce={how!r}: give one of {', '.join(map(repr, HOW))}")
        self.how = how
        self.codec: float | None = None  # bytes a second that are read and reduced
        self.ratio = 1.0  # of the state
        self.stores: dict[str, float] = {}  # bytes a second that they took plain, by composition
        self.since: dict[str, int] = {}  # copies since then
        self.saved_bytes = 0  # that were not written

    def wants(self, reader: Any, tier: Tier, file: File, ring: Ring) -> bool:
        """Whether a file of the checkpoint goes to the tier reduced."""
        names = {each.name for each in reader.manifest.files}
        if self.how == "off" or file.bytes == 0 or {file.name + REDUCED, REDUCED_TABLE} & names:
            return False  # older Stokers let files be called so
        if not file.name.endswith(".pack"):
            return self.how == "all"
        if self.how != "auto":
            return True
        rate = self.stores.get(tier.composition)
        if rate is None or self.since[tier.composition] >= _OLD or file.bytes < CHUNK:
            return False
        if self.codec is None:
            self._measure(reader, file, ring)
        # Files are read and reduced twice, as their size must be known before they are written. The
        # second time goes on beside the writing.
        return rate < self.codec * (1 - 1 / self.ratio)

    def wrote(self, name: Name, tier: Tier, file: File, stored: list[Stored] | None) -> None:
        """Tells how the file went, and why, where rates decided."""
        if self.codec is None or self.how != "auto" or not file.name.endswith(".pack"):
            return
        log.info(
            "%s of %s went to %s %s: the store takes %s/s; the codec takes %s/s, and makes it %.2f"
            " times smaller",
            file.name,
            name,
            tier.composition,
            "as it is" if stored is None else "reduced",
            _core.human_bytes(int(self.stores[tier.composition])),
            _core.human_bytes(int(self.codec)),
            self.ratio,
        )

    def _measure(self, reader: Any, file: File, ring: Ring) -> None:
        step = max(1, file.chunks // _SAMPLED)
        numbers = set(range(0, file.chunks, step)[:_SAMPLED])
        begin, total, stored = time.monotonic(), 0, 0
        for size, n, _ in _reduced(reader.stream(file, numbers), ring):
            total, stored = total + size, stored + n
        self.codec = total / max(time.monotonic() - begin, 1e-9)
        self.ratio = total / max(stored, 1)

    def took(self, tier: Tier, size: int, seconds: float) -> None:
        """In a copy the tier took so many bytes of plain files. A few tell nothing."""
        where = tier.composition
        self.since[where] = self.since.get(where, 0) + 1
        if size >= CHUNK:
            self.stores[where] = size / max(seconds, 1e-9)
            self.since[where] = 0

    def sizes(self, reader: Any, file: File, ring: Ring) -> list[tuple[int, int]] | None:
        """What each chunk takes, and the width of its elements; None if it is not worth it."""
        found = [(n, width) for _, n, width in _reduced(reader.stream(file), ring)]
        return found if sum(n for n, _ in found) * _GAIN <= file.bytes else None

    def write(
        self,
        to: Tier,
        name: Name,
        reader: Any,
        file: File,
        sizes: list[tuple[int, int]],
        ring: Ring,
        progress: Any,
    ) -> list[Stored]:
        """Writes the file reduced, durable when it returns: where its chunks are."""
        key = f"{name}/{file.name}{REDUCED}"
        made: list[Stored] = []

        def chunks() -> Generator[tuple[int, int, Fill], None, None]:
            at = 0
            with contextlib.closing(reader.stream(file)) as read:
                for (n, width), (_, theirs, size) in zip(sizes, read, strict=True):
                    yield at, n, partial(_fill, theirs, size, at, n, width, made)
                    progress(size)
                    at += n

        total = sum(n for n, _ in sizes)
        with Commits(ring) as commits:
            to.write_chunks(key, total, chunks(), ring, commits)
        self.saved_bytes += file.bytes - total
        return made


def _fill(
    theirs: Buffer, size: int, at: int, n: int, width: int, made: list[Stored], address: int
) -> None:
    """The memory of a chunk that is written, of the one that was read."""
    if width == 0:
        ctypes.memmove(address, theirs.address, n)
    elif _core.reduce(theirs.address, size, address) != (n, width):
        raise StokerError(
            f"byte {at} of a reduced file: a chunk changed its size while it was copied; copy the"
            " checkpoint again"
        )
    made.append(Stored(_core.xxh3_128(address, n), at, n, width))


def _reduced(
    chunks: Iterator[tuple[int, Buffer, int]], ring: Ring
) -> Iterator[tuple[int, int, int]]:
    """(bytes, stored bytes, width) of chunks as Reader.stream() gives them."""
    into = ring.take()
    try:
        for _, buffer, size in chunks:
            yield size, *_core.reduce(buffer.address, size, into.address)
    finally:
        ring.give(into)
