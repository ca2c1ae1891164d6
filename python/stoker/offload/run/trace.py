"""A Chrome trace of one step: what the disk, the kernels and the training thread did when.

The core keeps spans of the Loop and the pool while a trace is on. The training thread adds its
waits (ledger.py) and the moments at which it turns to another block (order.py). Nothing is kept,
and nothing but a branch is paid, while no trace is on.
"""

from __future__ import annotations

import json
import os
import time
from typing import Any, Iterable

from stoker import _core
from stoker.errors import InvalidArgument, naming
from stoker.offload.observe.ledger import Waits
from stoker.offload.paging.order import Recorder

COMPUTING, WAITING, KERNELS, DISK = 1, 10, 100, 1000  # the first row of each kind
NS = 1e9
SHORTEST = 5e-6  # seconds; what is waited for less was there already


class Tracing:
    """Traces a session's next step when asked. Called under its lock."""

    def __init__(
        self, waiting: Waits, recorder: Recorder, names: list[str], core: _core.Runtime
    ) -> None:
        """`names`: of the blocks."""
        self._waiting, self._recorder, self._names, self._core = waiting, recorder, names, core
        self._path: str | os.PathLike | None = None  # where the trace under way will be written
        self._marks: list[tuple[str, int]] = []
        self._began = 0

    @property
    def on(self) -> bool:
        return self._path is not None

    def begin(self, path: str | os.PathLike) -> None:
        """From now on until the next step is decided."""
        if self.on:
            raise InvalidArgument(
                "a step is being traced already; its trace is written when that step is decided"
            )
        self._path, self._marks, self._began = path, [], time.perf_counter_ns()
        self._waiting.trace()
        self._recorder.tell(lambda block: self.mark(self._names[block]))
        self._core.start_trace()

    def mark(self, name: str) -> None:
        """The training thread turns to `name`."""
        if self.on:
            self._marks.append((name, time.perf_counter_ns()))

    def end(self, row: dict[str, Any]) -> None:
        """The step has this row: stops and writes, if a trace is on."""
        if self._path is None:
            return
        path, marks, self._path, self._marks = self._path, self._marks, None, []
        ended = time.perf_counter_ns()
        spans, dropped = self._core.stop_trace()
        waits = self._waiting.traced()
        self._recorder.tell(None)
        events = [
            *_computing(marks, ended),
            *_waiting(waits),
            *_kernels(spans),
            *_disk(spans),
        ]
        for event in events:
            event["ts"] = (event["ts"] - self._began) / 1e3
            event["pid"] = 1
        content = {
            "traceEvents": [*_names(events), *events],
            "displayTimeUnit": "ms",
            "otherData": {"step": row["step"], "policy": row["policy"], "dropped_spans": dropped},
        }
        with naming(path), open(path, "w", encoding="utf-8") as out:
            json.dump(content, out)


def _span(row: int, name: str, begin_ns: int, end_ns: int, **args: Any) -> dict[str, Any]:
    return {
        "ph": "X",
        "tid": row,
        "name": name,
        "ts": begin_ns,
        "dur": max(0, end_ns - begin_ns) / 1e3,
        "args": args,
    }


def _computing(marks: list[tuple[str, int]], ended: int) -> Iterable[dict]:
    for (name, begin), (_, end) in zip(marks, [*marks[1:], ("", ended)]):
        yield _span(COMPUTING, name, begin, end)


def _waiting(waits: list[tuple[str, float, float]]) -> Iterable[dict]:
    for cause, begin, end in waits:
        if end - begin >= SHORTEST:
            yield _span(WAITING, f"waiting: {cause}", int(begin * NS), int(end * NS))


def _kernels(spans: list[tuple]) -> Iterable[dict]:
    threads: dict[int, int] = {}
    for track, name, begin, end, _, thread in spans:
        if track == "kernels":
            yield _span(KERNELS + threads.setdefault(thread, len(threads)), name, begin, end)


def _disk(spans: list[tuple]) -> Iterable[dict]:
    """Operations in service, each in the first row that is free, and how many wait and are in
    service."""
    busy: list[int] = []  # until when each row is taken
    changes: list[tuple[int, str, int]] = []
    for track, name, begin, end, size, _ in sorted(spans, key=lambda span: span[2]):
        if track not in ("disk", "queue"):
            continue
        changes += [(begin, track, 1), (end, track, -1)]
        if track == "disk":
            row = next((i for i, until in enumerate(busy) if until <= begin), len(busy))
            busy[row : row + 1] = [end]
            yield _span(DISK + row, name, begin, end, bytes=size)
    depth = {"queue": 0, "disk": 0}
    for at, track, change in sorted(changes):
        depth[track] += change
        yield {
            "ph": "C",
            "tid": DISK,
            "name": "disk operations",
            "ts": at,
            "args": {"waiting": depth["queue"], "in service": depth["disk"]},
        }


def _names(events: list[dict]) -> Iterable[dict]:
    for row in sorted({event["tid"] for event in events}):
        name = (
            f"disk, operation {row - DISK}"
            if row >= DISK
            else (
                f"kernel thread {row - KERNELS}"
                if row >= KERNELS
                else (
                    "training thread, waiting"
                    if row == WAITING
                    else "training thread, block at work"
                )
            )
        )
        yield {"ph": "M", "pid": 1, "tid": row, "name": "thread_name", "args": {"name": name}}
        yield {
            "ph": "M",
            "pid": 1,
            "tid": row,
            "name": "thread_sort_index",
            "args": {"sort_index": row},
        }
