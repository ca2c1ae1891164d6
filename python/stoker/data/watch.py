"""Finds objects of a folder that somebody changes while a loader reads them.

A `dir:` store opens a file at each read, so another file of the same name would give other samples
without a word. To ask for a tag costs microseconds there. Other stores are left alone: `local:` and
`coded(...)` belong to one process, and `s3:` would be asked once more for each object.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from collections.abc import Sequence as Several
from contextlib import suppress
from typing import Any

from ..errors import Mismatch
from .account import tier_of
from .stored import all_stored

_EVERY = 1.0  # seconds between two looks, so that they cost less than a hundredth of the time
_AT_ONCE, _AT_AN_END = 1000, 25_000  # objects that are looked at


class Watch:
    """Of one loader. sources: `Stored` ones, with the tags of their objects."""

    def __init__(self, sources: Several[Any]) -> None:
        self._sources = {
            number: source
            for number, source in enumerate(sources)
            if source.tags is not None and tier_of(source.store.info()["composition"]) == "dir"
        }
        self._tags: dict[int, dict[str, str]] = {}
        self._read: dict[tuple[int, str], None] = {}  # since they were looked at; a set, in order
        self._last = 0.0

    @classmethod
    def of(cls, sources: Several[Any]) -> Watch | None:
        """None where no source needs one."""
        made = cls(sources) if all_stored(sources) else None
        return made if made is not None and made._sources else None

    def gave(self, objects: Iterable[tuple[int, str, int]], end: bool) -> None:
        """A batch was read from these: source, key and bytes. end: of an epoch, where all that was
        read is looked at, up to a limit. Raises Mismatch and NotFound for what was changed."""
        for source, key, _ in objects:
            if source in self._sources:
                self._read[source, key] = None
        now = time.monotonic()
        if not end and now - self._last < _EVERY:
            return
        self._last = now
        for source, key in list(self._read)[: _AT_AN_END if end else _AT_ONCE]:
            self._look_at(source, key)
            del self._read[source, key]

    def forget(self) -> None:
        """What was read so far is judged: the loader stops there, or begins elsewhere."""
        self._read.clear()

    def _look_at(self, number: int, key: str) -> None:
        source = self._sources[number]
        if number not in self._tags:
            self._tags[number] = dict(zip(source.table.keys, source.tags, strict=True))
        if source.store.stat(key)["tag"] != self._tags[number][key]:
            with suppress(KeyError):
                del self._read[number, key]
            raise Mismatch(
                f"'{key}' was changed while it was read. Batches of the last {_EVERY:.0f} s may "
                f"mix the old object and the new one. Put the old object back and go on from an "
                f"earlier state, or open the data again"
            )
