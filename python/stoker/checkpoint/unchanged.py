"""Files that are in the checkpoint before already: the store takes them over, and no byte moves."""

from __future__ import annotations

import logging

from dataclasses import dataclass

from stoker import _core
from stoker.checkpoint.manifest import (
    CHUNK,
    REDUCED,
    Name,
    Stored,
    parse_reduced,
    parse_table,
)
from stoker.checkpoint.parts import Whole
from stoker.checkpoint.workspace import Ring, Tier, fill
from stoker.errors import Conflict, Corruption, Mismatch, NotFound

log = logging.getLogger("stoker")


@dataclass(frozen=True)
class Taken:
    """A file that was taken over. `stored`: where its chunks are, if it is reduced."""

    bytes: int
    stored: list[Stored] | None


class Before:
    """The files of a tier's newest checkpoint, by the hashes of their chunks."""

    def __init__(self, tier: Tier) -> None:
        self._tier = tier
        self._files: dict[tuple[int, tuple[bytes, ...]], tuple[str, Taken]] = {}
        for name in tier.names():
            try:
                manifest, where = tier.manifest(name), tier.where(name)
                read = lambda table: tier.store.read_bytes(f"{name}/{table.name}")
                entries = parse_table(read(manifest.tables[0]), manifest, where)
                reduced = {}
                for table in manifest.tables[1:]:
                    reduced = parse_reduced(read(table), manifest, where)
            except (Corruption, NotFound, Mismatch):
                continue  # an older one may be sound
            for file in manifest.files:
                hashes = tuple(entry.hash for entry in entries[file.name])
                there, size = manifest.object_of(file.name)
                taken = Taken(size, reduced.get(file.name))
                self._files[file.bytes, hashes] = f"{name}/{there}", taken
            return

    def has_as_long(self, size: int) -> bool:
        """Whether a file here has so many bytes."""
        return any(length == size for length, _ in self._files)

    def hashes_of(self, whole: Whole, ring: Ring, to_the_end: bool = False) -> list[bytes] | None:
        """The hashes of a file's chunks, if one of the files here has the same. It is read only as
        long as one may, or `to_the_end`."""
        left = [hashes for size, hashes in self._files if size == whole.bytes]
        found: list[bytes] = []
        if not left:
            return None
        for i, within in enumerate(whole.chunks()):
            size = min(CHUNK, whole.bytes - i * CHUNK)
            buffer = ring.take()
            try:
                fill(buffer.address, size, within)
                found.append(_core.xxh3_128(buffer.address, size))
            finally:
                ring.give(buffer)
            left = [hashes for hashes in left if hashes[i] == found[i]]
            if not left and not to_the_end:
                return None
        return found if left else None

    def take(
        self, name: Name, file: str, size: int, hashes: list[bytes], reduced: bool = False
    ) -> Taken | None:
        """Makes the file of the checkpoint `name` what one of these is, if there is one. `reduced`:
        it may be one that is."""
        there, taken = self._files.get((size, tuple(hashes)), ("", None))
        if taken is None or (taken.stored is not None and not reduced):
            return None
        to = file if taken.stored is None else file + REDUCED
        try:
            self._tier.store.copy(there, f"{name}/{to}")
        except (Conflict, NotFound) as error:  # somebody removes the checkpoint before
            log.info("%s is written again: %s", file, error)
            return None
        return taken
