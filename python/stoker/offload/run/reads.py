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
        self._under_way: list[threading.Event] = []  # each is set when the reader is done

    def until(self, done: threading.Event) -> None:
        """Somebody reads the store until then."""
        self._under_way = [*(each for each in self._under_way if not each.is_set()), done]

    def wait(self) -> None:
        for done in self._under_way:
            done.wait()

    def end(self) -> None:
        """Waits for them. What they read has lost its name, which the next commit carries."""
        self.wait()
        if self._under_way:
            with contextlib.suppress(StokerError):  # the next save drops it
                self._store.begin().commit("durable").wait()
