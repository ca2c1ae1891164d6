"""Machine: how fast a machine moves bytes and computes. Clock: how long it takes over work that is
handed to it, as fluid flow.

Three things run beside each other: the disk (reads before writes, as the Loop orders them), the
cores (torch and the pool share them), and the thread that trains, which computes or waits. Nothing
here sleeps or measures; see python/stoker/plan/measure.py for that.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Callable

# what a training thread waits for
CAUSES = ("weights", "state", "gradients", "writing", "commit", "checkpoint", "data", "activations")
DEMAND, WEIGHTS, STATE, WRITES = range(4)  # the disk's queues, in order of urgency
LINK = 20e9  # bytes a second between memory and an accelerator, assumed where nobody says
_FOREVER = float("inf")


@dataclass(frozen=True)
class Machine:
    """Rates in bytes a second, costs in core-seconds."""

    read: float
    write: float
    mixed: float = 0.0  # half reads, half writes; 0: not known, taken as one after the other
    cores: int = 2
    # of forward and backward, at the size of this model's products; 0: not known
    flops: float = 0.0
    update_seconds: float = 0.0  # an element, the optimizer's kernel
    byte_seconds: float = 0.0  # a byte that moves: its checksum
    copy_seconds: float = 0.0  # a byte of a gradient that is moved into its place, on all cores
    # what of the disk's rates is left beside kernels and checksums, which want the same cores and
    # memory
    share: float = 1.0
    commit_seconds: float = 0.0  # flush and journal, once the data is written
    link: float = 0.0  # bytes a second between memory and the accelerator; 0: the cores compute

    @property
    def duplex(self) -> float:
        """How much more reads and writes move together than one after the other: 1 to 2."""
        if not self.mixed:
            return 1.0
        return min(2.0, max(0.5, self.mixed * (1 / self.read + 1 / self.write) / 2))


class Task:
    """Work under way; `done` once it is through."""

    __slots__ = ("left", "then", "done")

    def __init__(self, left: float, then: Callable[[], None] | None) -> None:
        self.left, self.then, self.done = left, then, False

    def end(self) -> None:
        self.done = True
        if self.then is not None:
            self.then()


class Clock:
    """Time on a Machine. The caller is the thread that trains."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.now = 0.0
        self.waited = dict.fromkeys(CAUSES, 0.0)
        # seconds of each at work
        self.busy = {"read": 0.0, "write": 0.0, "cores": 0.0, "accelerator": 0.0}
        self._disk: tuple[deque[Task], ...] = tuple(deque() for _ in range(4))
        self._pool: deque[Task] = deque()
        self._duplex = machine.duplex

    def transfer(self, queue: int, size: int, then: Callable[[], None] | None = None) -> Task:
        return self._begin(
            self._disk[queue],
            size
            / self.machine.share
            / (self.machine.write if queue == WRITES else self.machine.read),
            then,
        )

    def work(self, core_seconds: float, then: Callable[[], None] | None = None) -> Task:
        """A task of the pool."""
        return self._begin(self._pool, core_seconds, then)

    @staticmethod
    def _begin(queue: deque[Task], seconds: float, then: Callable[[], None] | None) -> Task:
        task = Task(seconds, then)
        if seconds > 0:
            queue.append(task)
        else:
            task.end()
        return task

    def compute(self, seconds: float) -> None:
        """Forward or backward that takes `seconds` with nothing beside it."""
        while seconds > 1e-12:
            seconds -= self._advance(seconds, computing=True)

    def wait(self, done: Callable[[], bool], cause: str) -> None:
        """Until done(). While pool tasks run, that share of the cores is computing, not waiting."""
        started, worked = self.now, self.busy["cores"]
        while not done():
            if self._advance(_FOREVER, computing=False) == 0.0:
                raise RuntimeError(
                    f"the rehearsal of a step waits for {cause}, which no task will bring; this is"
                    " a bug in Stoker: please report it"
                )
        waited = self.now - started
        self.waited[cause] += max(0.0, waited - (self.busy["cores"] - worked) / self.machine.cores)

    def _advance(self, limit: float, computing: bool) -> float:
        """To the next end of a task, or until `limit` seconds of the caller's work are done. How
        many were, or passed."""
        machine, busy, pool = self.machine, self.busy, self._pool
        on_cores = computing and not machine.link
        read = next((queue for queue in self._disk[:WRITES] if queue), None)
        write = self._disk[WRITES]
        read_rate, write_rate = (
            (min(1.0, self._duplex), max(0.0, self._duplex - 1)) if read and write else (1.0, 1.0)
        )
        running = min(len(pool), machine.cores)
        threads = running + (machine.cores if on_cores else 0)
        pool_rate = min(1.0, machine.cores / threads) if threads else 0.0  # of one task
        own_rate = machine.cores / threads if on_cores else 1.0
        passed = limit / own_rate
        if read:
            passed = min(passed, read[0].left / read_rate)
        if write and write_rate:
            passed = min(passed, write[0].left / write_rate)
        tasks = [pool[i] for i in range(running)]
        for task in tasks:
            passed = min(passed, task.left / pool_rate)
        if passed == _FOREVER:
            return 0.0
        self.now += passed
        busy["cores"] += passed * (
            running * pool_rate + (machine.cores * own_rate if on_cores else 0.0)
        )
        if computing and machine.link:
            busy["accelerator"] += passed
        for task in tasks:
            task.left -= passed * pool_rate
            if task.left <= 1e-12:
                pool.remove(task)
                task.end()
        if read:
            busy["read"] += passed * read_rate
            self._progress(read, passed * read_rate)
        if write and write_rate:
            busy["write"] += passed * write_rate
            self._progress(write, passed * write_rate)
        return passed * own_rate if computing else passed

    @staticmethod
    def _progress(queue: deque[Task], amount: float) -> None:
        queue[0].left -= amount
        if queue[0].left <= 1e-12:
            queue.popleft().end()
