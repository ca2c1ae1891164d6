"""Several disks under a new store: how much of it each gets, by how fast it is and what it has
free.

What a volume can take of a step's writes is bounded by its room: it holds its part of the committed
version and of the one that is being written. So the room is shared out as the writes will be, by
measured rates. Where the disks have it free, a store over several gets half as much again, an equal
part for each. So shares can change while it runs. Over two disks a share can then fall or grow by a
quarter of all that is written.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass

from stoker import _core
from stoker.errors import OutOfSpace, StokerError
from stoker.offload.storage.probe import by_disk, disk_rates

PROBE_SECONDS = 1.0  # a disk
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Disk:
    """A file system, and the volumes of the store that are on it."""

    folders: tuple[str, ...]
    free: int  # bytes for data

    def __str__(self) -> str:
        return " and ".join(self.folders)


def rooms(folders: list[str], needed: int, sharers: int = 1) -> list[int]:
    """Bytes of data for each folder of a store that needs so many; none where they are on one disk,
    which needs no choice. OutOfSpace: the disks together have too little. `sharers`: how many
    processes make such a store on these disks."""
    disks = disks_of(folders, needed)
    if len(disks) < 2:
        return []
    if sum(disk.free for disk in disks) < needed:
        have = ", ".join(f"{disk} has {_core.human_bytes(disk.free)}" for disk in disks)
        raise OutOfSpace(
            f"the store over {', '.join(folders)} needs {_core.human_bytes(needed)} for data, "
            f"but after the journal its disks have too little free space: {have}. Free some "
            f"space, or add a folder on another disk to store="
        )
    rates = _rates(disks)
    shares = share_out(needed, rates, [disk.free for disk in disks], sharers)
    for disk, rate, room in zip(disks, rates, shares):
        _log.info(
            "%s moves %.3g GB/s and gets %s of the store, %.0f%%",
            disk,
            rate / 1e9,
            _core.human_bytes(room),
            100 * room / sum(shares),
        )
    of_folder = {
        folder: room // len(disk.folders)
        for disk, room in zip(disks, shares)
        for folder in disk.folders
    }
    return [of_folder[folder] for folder in folders]


def has_volumes(folders: list[str]) -> bool:
    """Whether there is a volume in each that has its size: what was cut off before that is made
    again."""
    return all(
        os.path.exists(_volume(folder)) and os.path.getsize(_volume(folder)) for folder in folders
    )


def share_out(needed: int, rates: list[float], free: list[int], sharers: int = 1) -> list[int]:
    """Bytes for each disk: `needed` by their rates, and then what they have to spare, equally. None
    gets more than it has free."""
    least = _pour(needed, rates, free)
    # A quarter of what is needed stays free, for scratch files; and what the others need who do the
    # same.
    spare = min(needed // 2, sum(free) // sharers - needed - needed // 4)
    more = _pour(
        max(0, spare),
        [1.0] * len(rates),
        [min(needed, room) - taken for room, taken in zip(free, least)],
    )
    return [max(1, int(a + b)) for a, b in zip(least, more)]


def _pour(amount: float, weights: list[float], limits: list[float]) -> list[float]:
    """Shares `amount` out by weight; what exceeds a limit goes to the others, as long as they have
    room."""
    taken, left, open_ = [0.0] * len(limits), amount, list(range(len(limits)))
    while open_ and left > 0:
        unit = left / sum(weights[i] for i in open_)
        full = [i for i in open_ if limits[i] <= weights[i] * unit]
        for i in full or open_:
            taken[i] = max(0.0, limits[i]) if full else weights[i] * unit
        left -= sum(taken[i] for i in full or open_)
        open_ = [i for i in open_ if i not in full] if full else []
    return taken


def disks_of(folders: list[str], needed: int) -> list[Disk]:
    return [
        Disk(tuple(those), max(0, _free(those) - len(those) * _journal_bytes(needed)))
        for those in by_disk(folders)
    ]


def _free(folders: list[str]) -> int:
    """All but a part that the file system's own notes take. What a making that was cut off has left
    is free: it is made again."""
    there = os.statvfs(folders[0])
    free = there.f_bavail * there.f_frsize + sum(
        512 * os.stat(_volume(folder)).st_blocks
        for folder in folders
        if os.path.exists(_volume(folder))
    )
    return free - free // 64


def _volume(folder: str) -> str:
    return os.path.join(folder, "stoker.volume")


def _journal_bytes(needed: int) -> int:
    """A copy of the journal with its two areas, of a store with half as much again: nothing on most
    disks, but none knows which it is."""
    return (48 << 20) + needed // 2048


def _rates(disks: list[Disk]) -> list[float]:
    try:
        return [measured(disk.folders[0]) for disk in disks]
    except StokerError as error:
        _log.warning("the disks get equal parts of the store: %s", error)
        return [1.0] * len(disks)


def measured(folder: str) -> float:
    """Bytes a second of reading, of writing or of both at once, whichever is least: updates do all
    of that. On a slow disk not all are measured in the time."""
    return min(
        (rate for rate in disk_rates(folder, PROBE_SECONDS).values() if rate > 0), default=1.0
    )
