"""What saves cost, how often they pay, and how fast their copies go."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass
class Costs:
    """What the saves of this process have cost so far."""

    saved: int = 0  # checkpoints that are durable in the first tier
    bytes: int = 0  # of those
    taken_bytes: int = 0  # of those, in files that the store took over from the one before
    reduced_bytes: int = 0  # that copies did not have to write, as they were made smaller
    seconds: float = 0.0  # that training waited for them
    processor_seconds: float = 0.0  # of the thread that saves


FAILURES_EVERY = 4 * 3600.0  # seconds; what is assumed as long as nothing was learned
COPYING_AT_MOST = 4  # copies to another store take one part of so many of the time
COPY_SHARE = 1 / 12  # of the time that the copy of an offloaded run works beside training
REST_AT_MOST = 10.0  # seconds: a chunk may have waited for its store


class Rests:
    """Of a copy beside training: after each chunk it rests, so that it works COPY_SHARE of time.
    It rests less where the next save would find it at work, and no more once somebody waits."""

    def __init__(
        self,
        total: int,
        interval: float | None,
        hurry: threading.Event,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`total`: bytes of the copy. `interval`: seconds between saves, None if not known; the
        copy takes half of that at most. `hurry`: set once somebody waits."""
        self._total, self._interval = max(total, 1), interval
        self._hurry, self._clock = hurry, clock
        self._begin = self._since = clock()
        self._done = 0
        self.rested = 0.0  # seconds

    def after(self, size: int) -> None:
        """A chunk of `size` bytes is copied."""
        now = self._clock()
        worked, self._done = now - self._since, self._done + size
        pause = min(worked / COPY_SHARE - worked, REST_AT_MOST)
        if self._done >= self._total:  # it is the last
            pause = 0.0
        if self._interval is not None:
            due = self._begin + self._interval / 2 * self._done / self._total
            pause = min(pause, due - now)
        if pause > 0:
            self._hurry.wait(pause)
        self._since = self._clock()
        self.rested += self._since - now


class Pace:
    """How often `every="auto"` saves. With C the seconds that a save costs training, M those
    between failures and R those of a restart, T = C + sqrt(2 (M + R) C + C^2) loses the least:
    J. T. Daly, A higher order estimate of the optimum checkpoint interval, FGCS 22 (2006)."""

    def __init__(self, failures_every: float | None) -> None:
        """`failures_every`: None to learn it from restarts."""
        self._given = failures_every
        self._begin = time.monotonic()
        self._ran, self.restarts = 0.0, 0  # what processes before this one knew
        self.cost = self.persist = self.restart = 0.0
        self._last: float | None = None
        self.between: float | None = None  # seconds between the last two saves

    @property
    def failures_every(self) -> float:
        if self._given is not None:
            return self._given
        return (FAILURES_EVERY + self.ran) / (1 + self.restarts)

    @property
    def ran(self) -> float:
        """Seconds that the run has had, in all of its processes."""
        return self._ran + time.monotonic() - self._begin

    def restarted(self, writer: dict[str, Any]) -> None:
        """This process goes on with a run, of which a manifest says `writer`."""
        ran, restarts = writer.get("ran_seconds", 0.0), writer.get("restarts", 0)
        numbers = isinstance(ran, (int, float)) and isinstance(restarts, int)
        if numbers and 0 <= ran < 1 << 40 and 0 <= restarts < 1 << 40:
            self._ran, self.restarts = float(ran), restarts + 1

    def spent(self, seconds: float) -> None:
        """More that the newest save has cost."""
        self.cost += seconds

    @property
    def interval(self) -> float:
        cost = max(self.cost, 1e-3)
        best = cost + math.sqrt(2 * (self.failures_every + self.restart) * cost + cost * cost)
        return max(best, self.persist)

    def due(self, now: float) -> bool:
        return self._last is None or now - self._last >= self.interval

    def saved(self, now: float, cost: float) -> None:
        if self._last is not None:
            self.between = now - self._last
        self._last, self.cost = now, cost


class Restarts:
    """What the paces of a run learn from the checkpoint that it goes on from."""

    def __init__(self, saving: Pace, copying: list[Pace]) -> None:
        self._saving, self._copying, self._told = saving, copying, False

    def learn(self, writer: dict[str, Any], seconds: float) -> None:
        """That the run was restarted, and how long the restore took; once a process."""
        if not self._told:
            self._told = True
            for pace in (self._saving, *self._copying):
                pace.restarted(writer)
                pace.restart = seconds

    def took(self, seconds: float) -> None:
        self._saving.restart = seconds
