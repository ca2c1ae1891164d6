"""Batches of windows in a permuted order, assembled ahead of time by one thread."""

from __future__ import annotations

import queue
import threading
import time
from typing import Any

import numpy as np

from .order import sample_at
from .token_file import Windows


class Loader:
    """Batch b holds the samples at positions [b * batch, (b + 1) * batch) of the endless permuted order.

    The trainer calls current() for the batch to train on and advance() once its step is decided. state_dict()
    therefore names the first batch whose step is *not* decided, whenever it is called: a resume neither
    skips nor repeats one. (A plain iterator cannot know whether the batch it gave out was trained on.)

    One thread of the loader's own reads ahead at most `ahead` batches. All methods belong to one thread.
    An error of the reading thread is raised by current().
    """

    def __init__(self, windows: Windows, batch: int, seed: int, ahead: int = 4) -> None:
        if len(windows) < 1:
            raise ValueError("a loader needs at least one window")
        self.windows, self.batch, self.seed = windows, batch, seed
        self.waited_seconds = 0.0  # time current() spent waiting for the reading thread
        self._ahead = ahead
        self._index = 0  # batches whose step is decided
        self._current: np.ndarray | None = None
        self._queue: queue.Queue | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def current(self) -> np.ndarray:
        """The batch to train on now, int64 [batch, window + 1]; the same one until advance()."""
        if self._current is None:
            if self._thread is None:
                self._start()
            began = time.perf_counter()
            item = self._queue.get()
            self.waited_seconds += time.perf_counter() - began
            if isinstance(item, BaseException):
                self._join()
                raise item
            self._current = item
        return self._current

    def advance(self) -> None:
        """The step on the current batch is decided: go on to the next one."""
        self.current()
        self._current = None
        self._index += 1

    def state_dict(self) -> dict[str, Any]:
        return {"position": self._index * self.batch, "batch": self.batch, "seed": self.seed,
                "windows": len(self.windows)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a saved position. Raises ValueError if the order there was another one."""
        mine = self.state_dict()
        for key in ("batch", "seed", "windows"):
            if state[key] != mine[key]:
                raise ValueError(f"the saved data position belongs to {key} {state[key]}, this run has {mine[key]}")
        self._join()
        self._index = state["position"] // self.batch

    def close(self) -> None:
        """Stop the reading thread. The loader can be used again; it then starts anew."""
        self._join()

    def _start(self) -> None:
        self._stop.clear()
        self._queue = queue.Queue(self._ahead)
        self._thread = threading.Thread(target=self._read_ahead, args=(self._index, self._queue),
                                        name="stoker-loader", daemon=True)
        self._thread.start()

    def _join(self) -> None:
        self._current = None
        if self._thread is None:
            return
        self._stop.set()
        self._thread.join()
        self._thread = None

    def _read_ahead(self, index: int, out: queue.Queue) -> None:
        try:
            while not self._stop.is_set():
                self._put(out, self._assemble(index))
                index += 1
        except BaseException as error:  # handed to the thread that asks for batches
            self._put(out, error)

    def _put(self, out: queue.Queue, item: Any) -> None:
        while not self._stop.is_set():
            try:
                return out.put(item, timeout=0.1)
            except queue.Full:
                continue

    def _assemble(self, index: int) -> np.ndarray:
        count = len(self.windows)
        positions = range(index * self.batch, (index + 1) * self.batch)
        return np.stack([self.windows[sample_at(p, count, self.seed)] for p in positions])
