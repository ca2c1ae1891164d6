"""Reads of a run's store that go on beside training: a checkpoint's, of a step that it named."""

from __future__ import annotations

import contextlib
import threading

from stoker import _core
from stoker.errors import StokerError


class Reads:
    """Those of one store."""

    def __init__(self, store: _core.Store) -> None:
        self._store = store
        self._under_way: list[tuple[threading.Event, threading.Event]] = []  # (done, hurry)

    def until(self, done: threading.Event, hurry: threading.Event) -> None:
        """Somebody reads the store until `done` is set, and works without rests once `hurry` is."""
        left = [each for each in self._under_way if not each[0].is_set()]
        self._under_way = [*left, (done, hurry)]

    def wait(self) -> None:
        for done, hurry in self._under_way:
            hurry.set()
            done.wait()

    def end(self) -> None:
        """Waits for them. What they read has lost its name, which the next commit carries."""
        self.wait()
        if self._under_way:
            with contextlib.suppress(StokerError):  # the next save drops it
                self._store.begin().commit("durable").wait()
