"""Which checkpoint is taken: the newest that is sound, on all ranks the same."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from typing import Any

from stoker.checkpoint.manifest import Name
from stoker.checkpoint.reading import Reader
from stoker.checkpoint.workspace import Ring, Tier
from stoker.errors import Corruption, Mismatch, NotFound, StokerError
from stoker.offload.ranks.ranks import Ranks


class Candidates:
    """The checkpoints of some tiers, as those find them now."""

    def __init__(self, tiers: list[Tier], ring: Ring) -> None:
        self._tiers, self._ring = tiers, ring
        self._newer: Mismatch | None = None  # a checkpoint that only a newer Stoker reads

    def readers(self, step: int | None = None) -> Iterator[Reader]:
        """The checkpoints, the newest first, each from the first tier that has it sound. Steps that
        the run went back from come by their number only."""
        self._newer = None
        tried: set[Name] = set()
        # listed anew each time: another process may save, and remove what was listed
        while tiers_of := self._tiers_of(step, tried):
            name = max(tiers_of)
            newer = {each for each in tried if each > name}
            left = step is None and _left_behind(name, newer)
            tried.add(name)
            if left:
                continue
            for i, tier in enumerate(tiers_of[name]):
                others = tiers_of[name][:i] + tiers_of[name][i + 1 :]
                try:
                    yield Reader(tier, name, self._ring, others)
                    break
                except (Corruption, NotFound, Mismatch) as error:
                    if isinstance(error, Mismatch):
                        self._newer = error
                    skipped(error)

    def _tiers_of(self, step: int | None, tried: set[Name]) -> dict[Name, list[Tier]]:
        """The checkpoints that were not tried yet, and who has them."""
        found: dict[Name, list[Tier]] = {}
        for tier in self._tiers:
            for name in tier.names():
                if name not in tried and (step is None or name.step == step):
                    found.setdefault(name, []).append(tier)
        return found

    def reader_of(self, name: Name, rank: int) -> Reader:
        """Of the first tier that has it sound."""
        if all(name not in tier.folders() for tier in self._tiers):
            where = ", ".join(tier.composition for tier in self._tiers)
            raise NotFound(
                f"rank {rank} does not find {name} in {where}, and rank 0 does; give all ranks one"
                " folder or bucket that they share"
            )
        error: StokerError | None = None
        for i, tier in enumerate(self._tiers):
            try:
                others = self._tiers[:i] + self._tiers[i + 1 :]
                return Reader(tier, name, self._ring, others)
            except (Corruption, NotFound) as caught:
                error = error or caught
        raise error

    def none_was_sound(self, step: int | None, passed: str | None = None) -> None:
        """Raises where there were checkpoints: to begin anew would lose them. `passed`: why ranks
        passed over the last that one of them found sound."""
        if passed is not None:
            raise Corruption(
                f"no checkpoint can be read by all ranks. The last that was tried: {passed}"
            )
        if step is not None:
            raise NotFound(
                f"no tier has an intact checkpoint of step {step}; `stoker ckpt ls` shows what"
                " there is"
            )
        if any(tier.names() for tier in self._tiers):
            if self._newer is not None:
                raise self._newer
            raise Corruption(
                f"none of the checkpoints in {', '.join(tier.composition for tier in self._tiers)}"
                " is intact, and a failed restore may have changed some values; `stoker ckpt "
                "verify --all` names the damage"
            )

    def none_for_all(self, line: Ranks, step: int | None, passed: str | None) -> None:
        """Raises on all ranks where one of them finds that there were checkpoints."""
        error: StokerError | None = None
        try:
            self.none_was_sound(step, passed)
        except StokerError as caught:
            error = caught
        line.exchange("none", error)

    def agreed(
        self, line: Ranks, step: int | None, found: Reader | None, said: Any = None
    ) -> tuple[str | None, Any]:
        """Which checkpoint rank 0 has found, and what it says of it. Mismatch if the ranks want
        different steps."""
        mine = {"step": step, "name": found and str(found.manifest.name), "said": said}
        told = line.exchange("restore", facts=mine)
        if any(each["step"] != told[0]["step"] for each in told):
            wanted = ", ".join(str(each["step"] or "the newest") for each in told)
            raise Mismatch(
                f"the ranks ask for checkpoints of different steps ({wanted}); give all of them"
                " the same"
            )
        return told[0]["name"], told[0]["said"]


def _left_behind(name: Name, newer: set[Name]) -> bool:
    """Whether the run went back from this step: later it saved a lower one, or the same one once
    more behind a higher one."""
    lowest = min((each.step for each in newer), default=name.step)
    highest = max((each.step for each in newer if each < max(newer)), default=0)
    return lowest < name.step or lowest == name.step < highest


def skipped(error: BaseException) -> None:
    """Warns whoever called Stoker, at the line of that call."""
    frame, level = sys._getframe(1), 2
    while frame.f_back and frame.f_globals.get("__name__", "").startswith("stoker."):
        frame, level = frame.f_back, level + 1
    warnings.warn(f"skipped a checkpoint: {error}", stacklevel=level)


def first_of(errors: list[str | None]) -> str:
    """The first of what ranks told, with its rank."""
    return next(f"rank {rank}: {each}" for rank, each in enumerate(errors) if each)
