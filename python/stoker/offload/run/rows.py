"""Rows of the ledger: what a session tells it of each call and of each step."""

from __future__ import annotations

from typing import Any

from stoker import _core
from stoker.offload.observe.heap import Trimmer
from stoker.offload.observe.ledger import Ledger
from stoker.offload.paging.order import Recorder
from stoker.offload.run.counters import Counters
from stoker.offload.run.step_record import StepRecord
from stoker.offload.storage.volumes import Shares


class Rows:
    """Those of one session. Called under its lock by the thread that runs the loop."""

    def __init__(
        self,
        ledger: Ledger,
        counters: Counters,
        record: StepRecord,
        recorder: Recorder,
        trimmer: Trimmer,
        store: _core.Store,
    ) -> None:
        self._ledger, self._counters, self._record = ledger, counters, record
        self._recorder, self._trimmer, self._store = recorder, trimmer, store
        self._volumes: Shares | None = None  # from begin() on
        self._departures = 0  # from the recorded order, that the ledger knows of

    def begin(self) -> None:
        """Sets the zero point: what moved until now belongs to no step."""
        self._volumes = Shares(self._store)
        self._ledger.start(self._counters())
        self._ledger.leave(self._counters)  # until the first call that trains

    def note_departures(self) -> None:
        """Before a call, which begins another order."""
        if self._recorder.departures != self._departures:
            self._departures = self._recorder.departures
            self._ledger.event("order", step=self._record.step, call=self._recorder.key)

    def close(self, policy: str, reason: str, committed: int) -> dict[str, Any]:
        """The row of the step that was decided under this policy, which was chosen for that
        reason."""
        ledger, step = self._ledger, self._record.step
        if ledger.last is not None and policy != ledger.last["policy"]:
            ledger.event("policy", step=step, policy=policy, reason=reason)
        volume_bytes, told = self._volumes.step()
        if told is not None:
            ledger.event("volumes", step=step, **told)
        return ledger.close_step(
            step,
            self._counters(),
            **self._record.loaders(),
            policy=policy,
            committed=committed,
            volume_bytes=volume_bytes,
            process_bytes_peak=self._trimmer.end_step(),
        )
