"""How the copy of an offloaded step is spread in time, so that steps beside it slow by little."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

WORKS = 1 / 25  # of the time; more only where the copy would not end before the next save
BEFORE = 3 / 4  # of the time between saves: the copy should have ended then


class Spread:
    """The turns of one copy. Each copies one chunk, and a pause follows it. `wanted` is set once
    somebody waits for the copy: from then on it pauses no more."""

    def __init__(
        self,
        total: int,
        interval: float | None,
        wanted: threading.Event,
        settle: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """total: bytes. interval: seconds between saves, if known. settle: waits for transfers
        that are under way, so that none runs in a pause."""
        self._left, self._wanted, self._settle, self._clock = total, wanted, settle, clock
        self._since = clock()
        self._end = None if interval is None else self._since + BEFORE * interval

    def turn(self, size: int) -> None:
        """So many bytes were copied, or are on their way."""
        if self._wanted.is_set():
            return
        self._settle()
        now = self._clock()
        pause = (now - self._since) * (1 / WORKS - 1)
        if self._end is not None:
            share = size / max(size, self._left)
            pause = min(pause, max(0.0, (self._end - now) * share - (now - self._since)))
        self._left = max(0, self._left - size)
        if self._left > 0:
            self._wanted.wait(pause)
        self._since = self._clock()
