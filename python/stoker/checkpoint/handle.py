"""A save under way, as the loop sees it."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from stoker.errors import InvalidArgument


@dataclass
class Handle:
    """A save under way."""

    step: int
    folder: str
    _tiers: list[str]
    _error: BaseException | None = None
    _events: dict[str, threading.Event] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._events = {name: threading.Event() for name in ("copied", "durable", *self._tiers)}

    def done(self, what: str = "durable") -> bool:
        return self.event(what).is_set()

    def wait(self, what: str = "durable", timeout: float | None = None) -> None:
        """Until the state may change ("copied"), the checkpoint would survive a power loss
        ("durable"), or another tier has it whole (its composition). Raises what the save raised."""
        if not self.event(what).wait(timeout):
            said = f"the checkpoint of step {self.step} was not {what} after {timeout:g} s"
            raise TimeoutError(said)
        if self._error is not None and what != "copied":
            raise self._error

    def event(self, what: str) -> threading.Event:
        if what not in self._events:
            raise InvalidArgument(
                f"wait({what!r}): give one of {', '.join(map(repr, self._events))}"
            )
        return self._events[what]

    def reached(self, what: str) -> None:
        self._events[what].set()

    def ends(self, error: BaseException | None) -> None:
        self._error = self._error or error
        for event in self._events.values():
            event.set()
