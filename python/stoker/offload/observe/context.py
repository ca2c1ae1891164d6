"""Context: what all parts of a session share."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field

from stoker.offload.observe.heap import Trimmer
from stoker.offload.observe.ledger import Waits


def _unheard(what: str, **details: object) -> None:
    pass


@dataclass(frozen=True)
class Context:
    """Made once a session, and given to every part. The defaults are those of a rehearsal, which
    nobody watches and which has one thread."""

    # held by whoever runs a part: a GPU's backward runs on a thread of torch's
    lock: contextlib.AbstractContextManager = field(default_factory=contextlib.nullcontext)
    waiting: Waits = field(default_factory=Waits)  # counts how long training waited, by cause
    event: Callable[..., None] = _unheard  # event(what, **details): a line for the ledger
    trimmer: Trimmer = field(default_factory=Trimmer)  # is told of what torch frees
