"""What saves cost, and how often they pay."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass
class Costs:
    """What the saves of this process have cost so far."""

    saved: int = 0  # checkpoints that are durable in the first tier
    bytes: int = 0  # of those
    taken_bytes: int = 0  # of those, in files that the store took over from the one before
    seconds: float = 0.0  # that training waited for them
    processor_seconds: float = 0.0  # of the thread that saves


class Pace:
    """How often `every="auto"` saves. With C the seconds that a save costs training, M those
    between failures and R those of a restart, T = C + sqrt(2 (M + R) C + C^2) loses the least:
    J. T. Daly, A higher order estimate of the optimum checkpoint interval, FGCS 22 (2006)."""

    def __init__(self, failures_every: float) -> None:
        self.failures_every = failures_every
        self.cost = self.persist = self.restart = 0.0
        self._last: float | None = None

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
        self._last, self.cost = now, cost
