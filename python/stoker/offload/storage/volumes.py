"""Several volumes: which of them takes how much of what is written, step by step, and why. The
store decides; this says so."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from stoker import _core

# a share, or a rate of itself, that changed by this much since it was last told
WORTH_TELLING = 0.1


@dataclass(frozen=True)
class Part:
    """A volume's part in what a step wrote."""

    share: float
    bytes_per_second: float
    free_bytes: int
    capacity_bytes: int
    full: bool  # something went to the others for want of room

    def told(self, before: Part | None) -> str:
        """What it takes, and why it is not what it took `before`."""
        rate = f"{self.bytes_per_second / 1e9:.3g} GB/s"
        why = f"moves {rate}"
        if (
            before is not None
            and before.bytes_per_second
            and abs(self.bytes_per_second - before.bytes_per_second)
            > WORTH_TELLING * before.bytes_per_second
        ):
            slower = self.bytes_per_second < before.bytes_per_second
            why = (
                f"became {'slower' if slower else 'quicker'}, {rate} instead of"
                f" {before.bytes_per_second / 1e9:.3g},"
            )
        if self.full:
            why = (
                f"is full, with {_core.human_bytes(self.free_bytes)} of"
                f" {_core.human_bytes(self.capacity_bytes)} left, {why}"
            )
        takes = (
            f"{self.share:.0%}"
            if before is None
            else f"{self.share:.0%} instead of {before.share:.0%}"
        )
        return f"{why} and takes {takes}"


class Shares:
    """The shares of a store's volumes in what a step wrote. Nothing where there is one volume."""

    def __init__(self, store: _core.Store) -> None:
        self._store = store
        self._before = store.info()["volumes"]
        self._told: dict[str, Part] = {}

    def step(self) -> tuple[dict[str, int], dict[str, Any] | None]:
        """Bytes written since the last call {volume: bytes}, and what is worth telling of it:
        volumes {path: share}, and a reason."""
        if len(self._before) < 2:
            return {}, None
        now = self._store.info()["volumes"]
        since = lambda path, what: now[path][what] - self._before[path][what]
        written = {path: since(path, "written_bytes") for path in now}
        if not any(written.values()):
            return written, None
        total = sum(written.values())
        parts = {
            path: Part(
                written[path] / total,
                volume["bytes_per_second"],
                volume["free_bytes"],
                volume["capacity_bytes"],
                since(path, "refused_bytes") > 0,
            )
            for path, volume in now.items()
        }
        self._before = now
        if self._told and not any(
            _worth_telling(part, self._told[path]) for path, part in parts.items()
        ):
            return written, None
        reason = "; ".join(
            f"{path} {part.told(self._told.get(path))}" for path, part in parts.items()
        )
        self._told = parts
        return written, {
            "volumes": {path: part.share for path, part in parts.items()},
            "reason": reason,
        }


def room_of(store: _core.Store) -> dict[str, Any] | None:
    """What is worth telling of the room that the volumes of a new store have: volumes {path:
    share}, and a reason. None where all have the same."""
    volumes = {path: volume["capacity_bytes"] for path, volume in store.info()["volumes"].items()}
    if len(set(volumes.values())) < 2:
        return None
    whole = sum(volumes.values())
    told = "; ".join(
        f"{path} has room for {_core.human_bytes(room)}, {room / whole:.0%} of the store"
        for path, room in volumes.items()
    )
    return {
        "volumes": {path: room / whole for path, room in volumes.items()},
        "reason": f"{told}, by how fast the disks are and what they had free",
    }


def _worth_telling(part: Part, told: Part) -> bool:
    return abs(part.share - told.share) >= WORTH_TELLING or (part.full and not told.full)
