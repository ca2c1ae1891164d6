"""SIGINT and SIGTERM: the first asks the loop to end after its step, the second ends at once."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType


class Stopped(BaseException):
    """A signal came while nothing was at stake. BaseException, so that no `except Exception` eats
    it."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.exit_status = 128 + number


class StopSignals:
    """While entered, handles both signals. Main thread only.

    Outside of `with stop.stepping():` the first signal raises Stopped where the program stands.
    Inside it only sets `requested`, so that a step is decided and committed before the loop looks
    at it.
    """

    def __init__(self) -> None:
        self.requested: int | None = None
        self._deferring = False
        self._old: dict[int, object] = {}
        self._unraisable = sys.unraisablehook

    def __enter__(self) -> StopSignals:
        self._unraisable, sys.unraisablehook = sys.unraisablehook, self._not_raised
        for number in (signal.SIGINT, signal.SIGTERM):
            self._old[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)
        sys.unraisablehook = self._unraisable

    def _not_raised(self, what: sys.UnraisableHookArgs) -> None:
        """Python prints what is raised in a finaliser, as those of an import, and goes on. A signal
        is not lost by that: check() knows of it."""
        if not issubclass(what.exc_type, Stopped):
            self._unraisable(what)

    def stepping(self) -> _Deferred:
        """A context in which the first signal waits."""
        return _Deferred(self)

    def check(self) -> None:
        """Raise Stopped if a signal has come."""
        if self.requested is not None:
            raise Stopped(self.requested)

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if self.requested is not None:  # the user insists; the store holds the last committed step
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        self.requested = number
        if not self._deferring:
            raise Stopped(number)
        print(
            f"\n{signal.Signals(number).name}: finishing this step and committing it; once more"
            " ends at once",
            file=sys.stderr,
            flush=True,
        )


class _Deferred:
    def __init__(self, owner: StopSignals) -> None:
        self._owner = owner

    def __enter__(self) -> None:
        self._owner._deferring = True

    def __exit__(self, *_) -> None:
        self._owner._deferring = False
