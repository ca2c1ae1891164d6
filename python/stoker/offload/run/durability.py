"""What of a run is durable, and when."""

from __future__ import annotations

from stoker import _core
from stoker.offload.ranks.agreement import Agreement
from stoker.offload.run.step_record import StepRecord
from stoker.offload.steps.steps import Steps
from stoker.offload.storage.buffers import Buffers


class Durability:
    """Closes decided steps and makes them durable. Called under the session's lock; `committed` by
    any thread."""

    def __init__(
        self,
        steps: Steps,
        record: StepRecord,
        buffers: Buffers,
        store: _core.Store,
        agreement: Agreement | None,
    ) -> None:
        self._steps, self._record, self._buffers = steps, record, buffers
        self._store, self._agreement = store, agreement

    def close_step(self) -> None:
        """What belongs to the decided step, as it is now, goes into its record; unless that was
        done."""
        steps = self._steps
        if steps.decided is not None and (steps.late.records is None or not steps.late):
            if steps.late.records is None:
                steps.close(self._record.objects, self._buffers.stage)
            else:
                steps.close(lambda: steps.late.records)

    def committed(self) -> int:
        """The step that a crash now would return to."""
        if self._agreement is not None:
            return self._agreement.step
        if self._steps.poll():
            self._record.returns_to(self._record.step - (self._steps.decided is not None))
        return self._record.committed

    def flush(self) -> None:
        """The decided step is closed and durable."""
        self._steps.late.complete()
        self.close_step()
        self._steps.settle()

    def name_step(self, name: str) -> None:
        """The newest step is durable, and has a name in the store; in its own journal record, if
        that is still to be written."""
        self._steps.late.complete()
        named = self._steps.decided is not None
        if named:
            self._steps.decided.name(name)
        self.flush()
        if not named:
            self._store.snapshot(name).wait()
