"""Context: what all parts of a session share."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from stoker.offload.observe.heap import Trimmer
from stoker.offload.observe.ledger import Waits


def _unheard(what: str, **details: object) -> None:
    pass


class Gate:
    """The lock that all parts of a session share. They ask the gate for it each time they enter, as
    another may take its place."""

    def __init__(self, lock: contextlib.AbstractContextManager | None = None) -> None:
        self._lock = lock or threading.RLock()

    @property
    def lock(self) -> Any:
        return self._lock

    def replace(self, lock: contextlib.AbstractContextManager) -> None:
        """Whoever enters from now on meets this lock."""
        self._lock = lock


def _open_gate() -> Gate:
    return Gate(contextlib.nullcontext())


@dataclass(frozen=True)
class Context:
    """Made once a session, and given to every part. The defaults are those of a rehearsal, which
    nobody watches and which has one thread."""

    # held by whoever runs a part: a GPU's backward runs on a thread of torch's
    gate: Gate = field(default_factory=_open_gate)
    waiting: Waits = field(default_factory=Waits)  # counts how long training waited, by cause
    event: Callable[..., None] = _unheard  # event(what, **details): a line for the ledger
    trimmer: Trimmer = field(default_factory=Trimmer)  # is told of what torch frees
