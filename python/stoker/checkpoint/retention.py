"""Which checkpoints stay: the union of rules, each with its reason."""

from __future__ import annotations

import math
from dataclasses import dataclass

from stoker.checkpoint.manifest import Manifest
from stoker.errors import InvalidArgument


@dataclass(frozen=True)
class Keep:
    """The newest `last`, every one whose step is a multiple of `every_steps`, and the first of each
    `every_seconds`. Also the `best` by metric (`mode` "min" or "max"), and those that were pinned.

        stoker.Checkpoints("dir:/run", keep=stoker.Keep(last=2, every_steps=1000, best=1))
    """

    last: int = 3
    every_steps: int | None = None
    every_seconds: float | None = None
    best: int = 0
    mode: str = "min"

    def __post_init__(self) -> None:
        if self.last < 1:
            raise InvalidArgument(
                f"last={self.last}: the newest checkpoint always stays; give 1 or more"
            )
        if self.every_steps is not None and self.every_steps < 1:
            raise InvalidArgument(
                f"every_steps={self.every_steps} is not a number of steps; give 1 or more"
            )
        if self.every_seconds is not None and not self.every_seconds > 0:
            raise InvalidArgument(
                f"every_seconds={self.every_seconds} is not a time; give more than 0"
            )
        if self.best < 0 or self.mode not in ("min", "max"):
            raise InvalidArgument(
                f'best={self.best}, mode={self.mode!r}: give 0 or more, and "min" or "max"'
            )

    def reasons(self, manifests: list[Manifest]) -> dict[str, str]:
        """Why each that stays does, by folder. `manifests`: all that verify, in any order."""
        found: dict[str, str] = {}
        newest_first = sorted(manifests, key=lambda each: each.name, reverse=True)
        for i, each in enumerate(newest_first[: self.last]):
            found.setdefault(
                str(each.name), "the newest" if i == 0 else f"of the newest {self.last}"
            )
        for each in newest_first:
            if each.pinned:
                found.setdefault(str(each.name), "pinned")
            if self.every_steps and each.step % self.every_steps == 0:
                found.setdefault(str(each.name), f"every {self.every_steps} steps")
        if self.every_seconds:
            periods: set[int] = set()
            for each in reversed(newest_first):
                if (period := int(each.created // self.every_seconds)) not in periods:
                    periods.add(period)
                    found.setdefault(str(each.name), f"the first of {self.every_seconds:g} seconds")
        sign = 1 if self.mode == "min" else -1
        rated = [
            each for each in newest_first if each.metric is not None and not math.isnan(each.metric)
        ]
        for each in sorted(rated, key=lambda each: sign * each.metric)[: self.best]:
            found.setdefault(str(each.name), f"of the best {self.best} (metric {each.metric:g})")
        return found
