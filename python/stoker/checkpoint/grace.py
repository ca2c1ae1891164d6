"""SIGTERM: the run saves at the end of its step, and then ends."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from types import FrameType

from stoker.errors import InvalidArgument

log = logging.getLogger("stoker")


class Grace:
    """Handles SIGTERM from when it is made until close(). `seconds`: how long a save may take
    then."""

    def __init__(self, seconds: float) -> None:
        if not seconds > 0:
            raise InvalidArgument(
                f"grace={seconds!r}: give the seconds that a save may take after SIGTERM"
            )
        if threading.current_thread() is not threading.main_thread():
            raise InvalidArgument(
                "grace= handles SIGTERM, which only the main thread can do; make the Checkpoints "
                "there"
            )
        self._seconds = seconds
        self._until: float | None = None
        self._old = signal.signal(signal.SIGTERM, self._handle)

    @property
    def left(self) -> float | None:
        """Seconds until the run must have ended; None as long as no signal came."""
        return None if self._until is None else max(0.0, self._until - time.monotonic())

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if self._until is not None:  # the user insists; older checkpoints stand
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        self._until = time.monotonic() + self._seconds
        log.warning(
            "SIGTERM: saving at the end of this step, within %g s; a second SIGTERM ends at once",
            self._seconds,
        )

    def close(self) -> None:
        if signal.getsignal(signal.SIGTERM) == self._handle:
            signal.signal(signal.SIGTERM, self._old if self._old is not None else signal.SIG_DFL)
