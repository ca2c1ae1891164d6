"""Steps that several ranks make together: decided by all of them or by none, committed by all of
them or taken back by all.

A rank on which something fails must not raise while the others run on: they would wait for it in
the next collective, or go on with weights of different steps. So what fails outside of step() and
flush() is kept, and told where all ranks meet.
"""

from __future__ import annotations

import contextlib
from typing import Any, Callable, Iterator

from stoker.errors import RankLost, StokerError
from stoker.offload.model.blocks import Unit
from stoker.offload.ranks.agreement import Agreement
from stoker.offload.ranks.ranks import telling
from stoker.offload.steps.steps import Steps
from stoker.offload.storage.planes import put


class Failed:
    """The future of a commit that could not begin."""

    def __init__(self, error: StokerError) -> None:
        self._error = error

    def ready(self) -> bool:
        return True

    def wait(self) -> None:
        raise self._error


class SharedSteps(Steps):
    """become(record): everything is as in the record of another step, which the store went to."""

    def __init__(
        self, *args: Any, agreement: Agreement, become: Callable[[dict[str, Any]], None]
    ) -> None:
        super().__init__(*args)
        self._agreement = agreement
        self._become = become
        self._failure: StokerError | None = None  # of the decided or closed step, on this rank
        self._waited = False  # for the closing step's commit on this rank

    @property
    def active_policy(self) -> str:
        policy = super().active_policy
        return "sync" if policy == "lazy" else policy  # fully_shard gathers ahead of a block's use

    # -- backward: this rank alone -----------------------------------------------------------------

    def on_final(self, unit: Unit) -> None:
        with self._deferring():
            super().on_final(unit)

    def backward_ends(self) -> None:
        with self._deferring():
            super().backward_ends()

    @contextlib.contextmanager
    def _deferring(self) -> Iterator[None]:
        """What fails in backward is met again in step(), which does it all anew."""
        try:
            yield
        except StokerError:
            with self.lock:
                self.abandon()
                self._stopped = "something failed in backward"  # no more of it in this one

    def _transaction(self) -> Any:
        if self._txn is None:
            if (failure := self._own_commit()) is not None:
                raise failure
            self._txn = self.planes.store.begin()
        return self._txn

    # -- step() ------------------------------------------------------------------------------------

    def decide(self) -> set[Unit]:
        self.settle()
        return self._agreement.ranks.guard(self._point, super().decide)

    @property
    def _point(self) -> str:
        return f"decision of step {self._agreement.step + 1}"

    def _computed(self) -> None:
        self._transaction()
        with self.waiting("commit"):
            self._agreement.ranks.exchange(self._point)

    def _make_current(self, changed: set[Unit]) -> None:
        try:
            super()._make_current(changed)
        except Exception as error:  # the others have decided
            if self.decided is None:
                raise  # there is no step that a failure could be told of
            self._failure = telling(error)

    def interrupted(self, before: Any) -> None:
        if self.decided is not None and self.decided is not before:  # the others have that step
            self._agreement.ranks.leave(
                f"rank {self._agreement.ranks.rank} was interrupted behind the {self._point}"
            )
        super().interrupted(before)

    # -- commit ------------------------------------------------------------------------------------

    def close(self, records: Callable[[], dict[str, bytes]], stage: Callable[[Any], None]) -> None:
        txn, self.decided, self._waited = self.decided, None, False
        self.closing = (txn, Failed(StokerError("the commit was interrupted")))
        try:
            if self._failure is not None:
                raise self._failure
            self._agreement.kept()
            for key, data in records().items():
                put(txn, key, data)
            stage(txn)
            self.closing = (txn, txn.commit("durable"))
        except Exception as error:
            self.closing = (txn, Failed(telling(error)))
        except BaseException:  # whether the commit has begun is not known
            self._agreement.ranks.leave(
                f"rank {self._agreement.ranks.rank} was interrupted while it committed"
            )
            raise

    def poll(self) -> bool:
        """A closed step is committed when every rank has told so, which they do in settle()."""
        return self.closing is None

    def _own_commit(self) -> StokerError | None:
        """Waits for this rank's commit of the closed step. Why it failed, if it did."""
        if self.closing is None or self._waited:
            return self._failure
        txn, future = self.closing
        self._wait_written()
        try:
            self.timed("commit", future.wait)
            if self.read_point is txn:
                self.read_point = None
        except StokerError as error:
            self._failure = error
        self._waited = True
        return self._failure

    def settle(self) -> None:
        """Until every rank has committed the closed step. If one of them cannot, all go back to the
        step before, and raise."""
        self._agreement.ranks.check()
        if self.closing is None:
            return
        failure = self._own_commit()
        try:
            with self.waiting("commit"):
                self._agreement.committed(self._agreement.step + 1, failure)
        except RankLost:
            raise
        except StokerError:
            self._take_back(failure is None)
            raise
        self.closing = None
        self._let_go_of_decided()

    def _take_back(self, committed: bool) -> None:
        self._failure = None
        try:
            if not committed:
                self.lose()
                return
            self.closing = self.read_point = None
            self._let_go_of_decided()
            self.abandon()  # what was speculated since
            self._become(self._agreement.go_back())
        except BaseException:
            self._agreement.ranks.leave(
                f"rank {self._agreement.ranks.rank} could not go back to step"
                f" {self._agreement.step}"
            )
            raise
