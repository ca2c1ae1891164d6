"""The process's memory as the cap is tested: anonymous, shared and huge pages."""

from __future__ import annotations

import threading

from stoker.offload.observe.heap import resident_bytes


class MemoryPeak:
    """Samples resident_bytes() from a thread of its own while entered; `bytes` is the largest value
    seen."""

    def __init__(self, every_seconds: float = 0.01) -> None:
        self.bytes = resident_bytes()
        self._every = every_seconds
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="stoker-memory", daemon=True)

    def __enter__(self) -> MemoryPeak:
        self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        self._stop.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._stop.wait(self._every):
            self.bytes = max(self.bytes, resident_bytes())
