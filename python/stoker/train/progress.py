"""What the user sees while it runs, on stderr: a bar on a terminal, else a line now and then."""

from __future__ import annotations

import sys
import time

from tqdm import tqdm

_LINE_EVERY_SECONDS = 15.0


class TrainingProgress:
    """Step, loss, tokens a second, share of time spent waiting by cause, time left."""

    def __init__(self, first_step: int, steps: int) -> None:
        self._steps, self._first, self._done = steps, first_step, first_step
        self._began = self._last_line = time.monotonic()
        self._tokens = 0
        self._stalled: dict[str, float] = {}
        self._seconds = 0.0
        self._bar = None
        if sys.stderr.isatty():
            self._bar = tqdm(
                total=steps, initial=first_step, desc="training", unit="step", dynamic_ncols=True
            )

    def step(self, done: int, loss: float, tokens: int) -> None:
        """A step is decided."""
        self._done = done
        self._tokens += tokens
        rate = self._tokens / (time.monotonic() - self._began)
        shown = f"loss {loss:.3f}, {rate:.0f} tokens/s, {self._waits()}"
        if self._bar is not None:
            self._bar.set_postfix_str(shown, refresh=False)
            self._bar.update(done - self._bar.n)
            return
        now = time.monotonic()
        if now - self._last_line >= _LINE_EVERY_SECONDS or done in (self._first + 1, self._steps):
            self._last_line = now
            left = (now - self._began) / (done - self._first) * (self._steps - done)
            print(
                f"step {done}/{self._steps}: {shown}, {left:.0f} s left",
                file=sys.stderr,
                flush=True,
            )

    def measured(self, seconds: float, stalled: dict[str, float]) -> None:
        """The ledger closed a step that took `seconds`, of which it waited `stalled` seconds by
        cause."""
        self._seconds += seconds
        for cause, waited in stalled.items():
            self._stalled[cause] = self._stalled.get(cause, 0.0) + waited

    def tell(self, lines: list[str]) -> None:
        """What happened beside the steps."""
        for line in lines:
            tqdm.write(line, file=sys.stderr)

    def _waits(self) -> str:
        """Shares of the time: "12% waiting (state 9%, commit 3%)"."""
        shares = (
            {cause: waited / self._seconds for cause, waited in self._stalled.items()}
            if self._seconds
            else {}
        )
        parts = [
            f"{cause} {share:.0%}"
            for cause, share in sorted(shares.items(), key=lambda item: -item[1])
            if share >= 0.005
        ]
        return f"{sum(shares.values()):.0%} waiting" + (f" ({', '.join(parts)})" if parts else "")

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


def clock(seconds: float) -> str:
    """5025 -> "1:24": hours and minutes, rounded up."""
    minutes = -int(-seconds // 60)
    return f"{minutes // 60}:{minutes % 60:02}"


def counting_bar(total: int, what: str) -> tqdm:
    """A plain bar for the phases before and after the training; silent where stderr is no
    terminal."""
    return tqdm(total=total, desc=what, leave=False, disable=None, dynamic_ncols=True)


def say(text: str) -> None:
    """A line to the user, on stderr so that stdout stays machine-readable."""
    print(text, file=sys.stderr, flush=True)
