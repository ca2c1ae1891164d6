"""A save under way, as the loop sees it."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from stoker.checkpoint.commits import composition_of
from stoker.errors import InvalidArgument, NotFound


@dataclass
class Handle:
    """A save under way."""

    step: int
    folder: str
    _tiers: list[str]
    _error: BaseException | None = None
    _events: dict[str, threading.Event] = field(default_factory=dict)
    _reached: set[str] = field(default_factory=set)
    _passed: set[str] = field(default_factory=set)  # tiers that do not get it
    hurry: threading.Event = field(default_factory=threading.Event)  # somebody waits for it

    def __post_init__(self) -> None:
        self._events = {name: threading.Event() for name in ("copied", "durable", *self._tiers)}

    def done(self, what: str = "durable") -> bool:
        """Whether wait(what) would return, or raise, at once."""
        return self.event(what).is_set()

    def wait(self, what: str = "durable", timeout: float | None = None) -> None:
        """Until the state may change ("copied"), the checkpoint would survive a power loss
        ("durable"), or another tier has it whole (its composition, or its path). Raises what the
        save raised before it came so far. The copy of an offloaded run then rests no more; done()
        only looks."""
        what = self._name(what)
        if what != "copied":
            self.hurry.set()
        if not self._events[what].wait(timeout):
            said = f"the checkpoint of step {self.step} was not {what} after {timeout:g} s"
            raise TimeoutError(said)
        if what in self._reached or what == "copied":
            return
        if self._error is not None:
            raise self._error
        if what in self._passed:
            raise NotFound(
                f'step {self.step} was not copied to {what}: with every="auto" a store gets only'
                " as many copies as are worth their cost; close() copies the newest"
            )

    def event(self, what: str) -> threading.Event:
        return self._events[self._name(what)]

    def _name(self, what: str) -> str:
        for each in (what, composition_of(what)):
            if each in self._events:
                return each
        raise InvalidArgument(
            f"wait() takes one of {', '.join(map(repr, self._events))}, not {what!r}"
        )

    def reached(self, what: str) -> None:
        self._reached.add(what)
        self._events[what].set()

    def passes(self, tier: str) -> None:
        self._passed.add(tier)
        self._events[tier].set()

    def outcome(self) -> dict[str, list[int]]:
        """Which tiers have it and which do not get it, by their places."""
        places = list(enumerate(self._tiers))
        return {
            "reached": [i for i, each in places if each in self._reached],
            "passed": [i for i, each in places if each in self._passed],
        }

    def hears(self, outcome: dict[str, list[int]]) -> None:
        """Of another rank, which copied it."""
        for i, each in enumerate(self._tiers):
            if i in outcome["passed"]:
                self.passes(each)
            elif i in outcome["reached"]:
                self.reached(each)

    def ends(self, error: BaseException | None) -> None:
        self._error = self._error or error
        for event in self._events.values():
            event.set()
