"""Ledger: for each step, how many bytes moved for what, and how long who waited for whom."""

from __future__ import annotations

import contextlib
import time
from typing import Any, Callable, Iterator

from stoker.errors import InvalidArgument
from stoker.offload.division.machine import CAUSES


class Waits:
    """How long the thread that trains waited, by cause. What is waited for inside another wait
    belongs to the outer one."""

    def __init__(self, arithmetic: Callable[[], float] = lambda: 0.0) -> None:
        self.seconds = dict.fromkeys(CAUSES, 0.0)
        # seconds the kernels have computed so far, over all cores: not waiting, but computing
        self.arithmetic = arithmetic
        # (cause, begin, end) while somebody traces
        self._spans: list[tuple[str, float, float]] | None = None
        self._inside = False

    @contextlib.contextmanager
    def __call__(self, cause: str) -> Iterator[None]:
        if cause not in self.seconds:
            raise InvalidArgument(
                f"{cause!r} is not a cause of waiting; the ledger knows {', '.join(CAUSES)}"
            )
        if self._inside:
            yield
            return
        self._inside = True
        started, computed = time.perf_counter(), self.arithmetic()
        try:
            yield
        finally:
            ended = time.perf_counter()
            self._inside = False
            self.seconds[cause] += max(0.0, ended - started - (self.arithmetic() - computed))
            if self._spans is not None:
                self._spans.append((cause, started, ended))

    def trace(self) -> None:
        """Keeps (cause, begin, end) of each wait from now on."""
        self._spans = []

    def traced(self) -> list[tuple[str, float, float]]:
        """What trace() kept, which ends."""
        spans, self._spans = self._spans or [], None
        return spans


class Ledger:
    """Rows of closed steps. `last` is the newest row, `on_step(f)` calls f(row) for each new one,
    `events` explains odd steps.

    A row: step, seconds (wall time since the last decided step), read_bytes and written_bytes
    {class: bytes}, compute_seconds and stall_seconds {cause: seconds} that together are its
    seconds, dram_bytes_peak (of Stoker's pools), process_bytes_peak (of the whole process, as far
    as it was seen: RssAnon + RssShmem + HugetlbPages), policy, kept, redone, wasted (units by their
    speculated update: it held, was done again, or no step() followed), committed (the step a crash
    would return to), volume_bytes {volume: bytes written}, where there are several, events, where
    there were any since the row before. Causes of waits for I/O: weights and state to come from
    disk; gradients to land in their memory or to come back from disk; activations to be written or
    to come back. Others: writing behind (writes of the step before); commit (its barriers); data
    (`with ledger.waiting("data")`). The cause checkpoint is state_dict(), snapshots, a Trainer's
    checkpoints, and the commit that each of them waits for. loaders: of attached loaders, what the
    waits for data were for, by stage and tier (docs/ledger.md).
    """

    def __init__(self, arithmetic: Callable[[], float] = lambda: 0.0) -> None:
        """`arithmetic`: as Waits takes it."""
        self.waiting = Waits(arithmetic)
        self.last: dict[str, Any] | None = None
        self.events: list[dict[str, Any]] = []
        self._told = 0  # of the events, those that a row has
        self._listeners: list[Callable[[dict], None]] = []
        self._before: dict[str, Any] = {}
        self._started = time.perf_counter()
        # counters and time when training was left
        self._left: tuple[dict[str, Any], float] | None = None
        self._apart = False
        self._total: dict[str, Any] = {
            "steps": 0,
            "seconds": 0.0,
            "read_bytes": {},
            "written_bytes": {},
            "stall_seconds": {},
            "compute_seconds": 0.0,
            "kept": 0,
            "redone": 0,
            "wasted": 0,
        }

    def on_step(self, listener: Callable[[dict], None]) -> None:
        self._listeners.append(listener)

    def event(self, what: str, **details: Any) -> None:
        self.events.append({"what": what, **details})

    def start(self, counters: dict[str, Any]) -> None:
        """Sets the zero point: what moved until now belongs to no step."""
        self._before, self._started, self._left = counters, time.perf_counter(), None

    def leave(self, counters: Callable[[], dict[str, Any]]) -> None:
        """A call of the model begins that trains nothing. Whether it is a part of the step is for
        restart() to say."""
        if self._left is None:
            self._left = counters(), time.perf_counter()

    def come_back(self) -> None:
        """A call begins that trains."""
        if not self._apart:
            self._left = None

    @contextlib.contextmanager
    def apart(self, counters: Callable[[], dict[str, Any] | None]) -> Iterator[None]:
        """What is read and passes inside belongs to no step, however it ends. `counters` gives None
        where no rows are kept any more."""
        if self._apart:  # inside another
            yield
            return
        self.leave(counters)
        self._apart = True
        try:
            yield
        finally:
            self._apart = False
            if (now := counters()) is not None:
                self.restart(now)

    def restart(self, counters: dict[str, Any]) -> None:
        """What was read and passed since training was left belongs to no step; where it was not
        left, all since the last row."""
        if self._apart:
            return  # its end does that
        if self._left is None:
            self.start(counters)
            return
        left, at = self._left
        for kind in ("read_bytes", "stall_seconds"):  # only training writes, behind
            before = self._before[kind]
            self._before = {
                **self._before,
                kind: {
                    name: before.get(name, 0) + value - left[kind].get(name, 0)
                    for name, value in counters[kind].items()
                },
            }
        self._started += time.perf_counter() - at
        self._left = None

    def close_step(self, step: int, counters: dict[str, Any], **facts: Any) -> dict[str, Any]:
        now = time.perf_counter()
        row: dict[str, Any] = {"step": step, "seconds": now - self._started}
        for kind in ("read_bytes", "written_bytes", "stall_seconds"):
            before = self._before.get(kind, {})
            row[kind] = {
                name: value - before.get(name, 0) for name, value in counters[kind].items()
            }
        for kind in ("kept", "redone", "wasted"):
            row[kind] = counters[kind] - self._before.get(kind, 0)
        row["compute_seconds"] = max(0.0, row["seconds"] - sum(row["stall_seconds"].values()))
        row["dram_bytes_peak"] = counters["dram_bytes_peak"]
        row.update(facts)
        if news := self.events[self._told :]:
            row["events"], self._told = news, len(self.events)
        self.start(counters)
        self._add(row)
        self.last = row
        for listener in self._listeners:
            listener(row)
        return row

    def _add(self, row: dict[str, Any]) -> None:
        total = self._total
        total["steps"] += 1
        for name in ("seconds", "compute_seconds", "kept", "redone", "wasted"):
            total[name] += row[name]
        for kind in ("read_bytes", "written_bytes", "stall_seconds"):
            for name, value in row[kind].items():
                total[kind][name] = total[kind].get(name, 0) + value
        total["dram_bytes_peak"] = row["dram_bytes_peak"]
        total["process_bytes_peak"] = max(
            total.get("process_bytes_peak", 0), row.get("process_bytes_peak", 0)
        )

    def summary(self) -> dict[str, Any]:
        """Sums over all closed steps, with stall_share = time stalled on storage / wall time."""
        total = dict(self._total)
        stalled = sum(total["stall_seconds"].values())
        total["stall_share"] = stalled / total["seconds"] if total["seconds"] else 0.0
        total["events"] = list(self.events)
        return total
