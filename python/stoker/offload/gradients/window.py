"""Window: the memory through which spilled gradients pass. What of them is not here lies in scratch
space (scratch.py).

Where memory cannot hold the gradients of all units, some keep a place of their own, as ever, and
the others share a few (`PLACES`). The spilled gradients of a unit come and go together, as one
piece of scratch space: each time another unit needs the place they are written, if the disk does
not have them as they are. Each time they are needed they are read.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import Any, Callable

from stoker.errors import StokerError
from stoker.offload.model.blocks import Unit
from stoker.offload.observe.ledger import Waits


@dataclass(eq=False)
class Home:
    """Where a unit's spilled gradients are: in a place, on the disk, or in both. `live`: whether
    anybody has use for their bytes."""

    unit: Unit
    live: Callable[[], bool]
    place: Place | None = None
    piece: Any = None  # of scratch space; its write may be under way
    dirty: bool = False  # the place has what the disk has not

    @property
    def size(self) -> int:
        return self.unit.weight_bytes


@dataclass(eq=False)
class Place:
    address: int
    owner: Any  # keeps the memory
    home: Home | None = None
    readers: list = field(default_factory=list)  # updates that may still be reading it
    reading: Any = None  # the future of a read into it


class Window:
    """Used under the session's lock. On any error, and on Ctrl-C, all bytes are where they were
    before, and the call may be made again."""

    def __init__(self, places: list[Place], scratch: Any, waiting: Waits) -> None:
        self.waiting = waiting
        self.read_bytes = self.written_bytes = 0
        self.scratch = scratch
        self._places = places  # by use, the newest last
        self.addresses = frozenset(place.address for place in places)

    def bring(self, home: Home, keep: tuple[Home, ...] = ()) -> Place:
        """The home's bytes, in memory until another is brought. `keep`: homes that do not give way
        to it; fewer than PLACES."""
        place = home.place
        if place is None:
            if not home.live():
                self._forget(home)  # of an earlier step
            place = self._make_room(keep)
            if home.piece is not None:
                self._read(home, place)
            place.home, home.place = home, place
        self._places.remove(place)
        self._places.append(place)
        return place

    def write(self, home: Home) -> None:
        """Starts to write what the disk has not. The bytes must stay as they are until still()."""
        if home.place is None or not home.dirty:
            return
        self._forget(home)
        home.piece = self.scratch.write(home.place.address, home.size)
        home.dirty = False
        self.written_bytes += home.size

    def still(self, home: Home) -> StokerError | None:
        """Waits until nothing of it is being written. Why the write failed, if it did: then the
        place has the only copy, and keeps it."""
        if home.piece is None:
            return None
        with self.waiting("gradients"):
            try:
                home.piece.written.wait()
                return None
            except StokerError as error:
                failed = error
        piece, home.piece, home.dirty = home.piece, None, True
        self.scratch.free(piece)
        return failed

    def unread(self, home: Home) -> None:
        """Waits until no update is reading its bytes."""
        for job in home.place.readers:
            # whoever made it hears of it
            with self.waiting("gradients"), contextlib.suppress(StokerError):
                job.wait()
        home.place.readers.clear()

    def _make_room(self, keep: tuple[Home, ...]) -> Place:
        place = next((each for each in self._places if each.home is None), None)
        if place is None:
            place = next(each for each in self._places if each.home not in keep)
            self._vacate(place)
        if place.reading is not None:  # it was interrupted
            with contextlib.suppress(StokerError):
                place.reading.wait()
            place.reading = None
        return place

    def _vacate(self, place: Place) -> None:
        home = place.home
        failed = self.still(home)
        if home.live():
            if failed is not None:
                raise self._told(failed, home, "written")
            if home.dirty:
                try:
                    self.write(home)
                except StokerError as error:
                    raise self._told(error, home, "written") from error
                if (failed := self.still(home)) is not None:
                    raise self._told(failed, home, "written")
        self.unread(home)
        place.home = home.place = None

    def _read(self, home: Home, place: Place) -> None:
        try:
            place.reading = self.scratch.read(home.piece, place.address, "demand")
            with self.waiting("gradients"):
                place.reading.wait()
        except StokerError as error:
            place.reading = None
            raise self._told(error, home, "read back") from error
        place.reading = None
        self.read_bytes += home.size

    def _forget(self, home: Home) -> None:
        """What of it is on the disk is of no use any more."""
        if home.piece is not None:
            self.still(home)
        if home.piece is not None:
            piece, home.piece = home.piece, None
            self.scratch.free(piece)

    @staticmethod
    def _told(error: StokerError, home: Home, what: str) -> StokerError:
        told = type(error)(
            f"spilled gradients of block {home.unit.block.name} could not be {what}: {error}"
        )
        told.errno = error.errno
        return told

    def close(self) -> None:
        """Waits for what is under way, and lets go of memory and scratch space."""
        for place in self._places:
            futures = [place.reading, place.home and place.home.piece and place.home.piece.written]
            for future in (*futures, *place.readers):
                if future is not None:
                    with contextlib.suppress(StokerError):
                        future.wait()
            if place.home is not None:
                place.home.place = None
        self._places.clear()
        self.scratch.close()
