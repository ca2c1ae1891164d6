"""How many threads a loader's pipeline has: more while the loop starves and they are busy."""

from __future__ import annotations

import os
from typing import Any

from stoker import _core


def default_cpus() -> int:
    """Half of the cores that this process may use: the others belong to training."""
    return max(1, len(os.sched_getaffinity(0)) // 2)


class ThreadCount:
    """The decision: numbers in, a number of threads out.

    It looks at windows of at least `WINDOW` seconds. Where the loop waited for `STARVED` of a
    window while the threads were `BUSY`, one thread is added, up to `most`. One is given back after
    `patience` windows of two kinds: the loop did not wait, and the others would have been at most
    `IDLE` busy with what there was to do. What was given back too early costs twice the patience
    from then on.
    """

    WINDOW = 0.5
    STARVED, QUIET = 0.01, 0.002  # parts of the time that the loop waited
    BUSY, IDLE = 0.75, 0.5  # parts of their time that the threads worked
    PATIENCE, MOST_PATIENCE = 20, 320  # windows

    def __init__(self, most: int, threads: int = 1) -> None:
        self.most, self.threads = most, threads
        self.patience = self.PATIENCE
        self._quiet = 0  # windows
        self._since_back: int | None = None  # windows since a thread was given back
        self._seconds = self._waited = self._busy = 0.0

    def tell(self, seconds: float, waited: float, busy: float) -> int:
        """So much time went by, the loop waited for so much of it, and the threads worked for so
        much, added up. How many there should be from now on."""
        self._seconds += seconds
        self._waited += waited
        self._busy += busy
        if self._seconds >= self.WINDOW:
            self._decide(self._waited / self._seconds, self._busy / self._seconds)
            self._seconds = self._waited = self._busy = 0.0
        return self.threads

    def _decide(self, waited: float, working: float) -> None:
        """waited: part of the time. working: threads, on average."""
        if self._since_back is not None:
            self._since_back += 1
        if waited >= self.STARVED and working >= self.BUSY * self.threads:
            self._quiet = 0
            if self.threads < self.most:
                self._add()
        elif (
            self.threads > 1 and waited <= self.QUIET and working <= self.IDLE * (self.threads - 1)
        ):
            self._quiet += 1
            if self._quiet >= self.patience:
                self.threads -= 1
                self._quiet, self._since_back = 0, 0
        else:
            self._quiet = 0

    def _add(self) -> None:
        self.threads += 1
        if self._since_back is not None and self._since_back < self.patience:
            self.patience = min(2 * self.patience, self.MOST_PATIENCE)
        self._since_back = None


class Scaling:
    """Gives a pipeline the threads that `ThreadCount` decides. One thread: the loop's."""

    def __init__(self, threads: _core.PipelineThreads) -> None:
        self._threads = threads
        self._count = ThreadCount(threads.most, threads.threads)
        self._last: int | None = None  # ns of the batch before
        self._busy = self._told_busy = threads.busy_ns

    def rest(self) -> None:
        """What comes next has nothing to do with what was before: the loop stopped, or begins
        elsewhere."""
        self._last = None

    def gave(self, now: int, waited: int) -> None:
        """The loop got a batch at `now` after it had waited so long, in ns. The first one after a
        rest could not be ready, however many threads there are."""
        busy = self._threads.busy_ns
        if self._last is not None:
            before = self._count.threads
            wanted = self._count.tell(
                (now - self._last) / 1e9, waited / 1e9, (busy - self._busy) / 1e9
            )
            if wanted != before:
                self._threads.use(wanted)
        self._last, self._busy = now, busy

    def take(self) -> dict[str, Any]:
        """For the ledger: threads there are, the most there may be, and seconds that they worked
        since the last call."""
        busy = self._threads.busy_ns
        row = {
            "threads": self._count.threads,
            "cpus": self._count.most,
            "busy_seconds": (busy - self._told_busy) / 1e9,
        }
        self._told_busy = busy
        return row
