"""Steps: when updates run, and how a step becomes one atomic commit.

``sync`` updates every unit in step(); ``speculate`` updates a unit out of place as soon as its
gradients are forecast final, during backward. step() then compares: a unit is kept if its gradients
(by hash), hyperparameters and parameters are still those that were consumed. Any other is redone
from the committed state and p.grad as it is now. ``lazy`` decides without updating: each unit is
updated just before the next use of its block (late.py). So all give the same bits, and a step that
is skipped costs nothing but the work. ``auto`` speculates. Once that was wasted in 3 of 20 steps it
is lazy for the next 20. It is sync instead if the loop keeps gradients over step() or the model is
sharded (shared_steps.py).

A step's writes live in one transaction. step() decides it, and the next forward reads it. That
forward, or flush(), closes it with the record of everything else that belongs to the step. The
store commits it while training goes on.
"""

from __future__ import annotations

import contextlib
import math
from collections import deque
from itertools import islice
from typing import Any, Callable, Container, Iterable, Iterator

import torch

from stoker import _core
from stoker.errors import StokerError
from stoker.offload.gradients.finiteness import Finiteness
from stoker.offload.gradients.gradients import Gradients
from stoker.offload.gradients.segment import DTYPES, Segment
from stoker.offload.model.blocks import Block, Param, Unit
from stoker.offload.observe.context import Context
from stoker.offload.paging.pager import Pager
from stoker.offload.paging.slot import Slot
from stoker.offload.steps.late import Late
from stoker.offload.steps.update import Update
from stoker.offload.storage.planes import Planes, put

PAUSE_STEPS = 20  # and as many are looked back at
# A step whose updates have to be done again takes longer by all of them; one whose updates hold is
# quicker than under lazy by what of them backward hides that forward would not, which is a sixth of
# that or so. So speculation pays until it fails in one step of seven: 3 of 20.
IN_VAIN_MOST = 3
PASSED = "the gradient norm passed the limit before the last update"
SCALED = (
    "the gradient norm passed the limit during backward, where gradients were still scaled, as by a"
    " GradScaler, and not behind it"
)


def _nothing(_txn: Any) -> None:
    pass


class Steps:
    """Makes steps. `hyper(param)` gives the kernel's hyperparameters of the step that is being
    made."""

    def __init__(
        self,
        planes: Planes,
        pager: Pager,
        gradients: Gradients,
        hyper: Callable[[Param], _core.Hyper],
        policy: str,
        lost: Callable[[set[Unit]], None],
        finiteness: Finiteness,
        context: Context,
    ) -> None:
        self.planes, self.pager, self.gradients, self.hyper = planes, pager, gradients, hyper
        self.policy, self.finiteness = policy, finiteness
        # a decided step could not be committed: these units are at the step before again
        self.lost = lost
        self._gate, self.waiting = context.gate, context.waiting
        self.paused_for = 0  # steps that `auto` still does not speculate in
        # whether speculation was, in each step since the last pause
        self._in_vain: deque[bool] = deque(maxlen=PAUSE_STEPS)
        # the loop was seen to set them to None after step(); who zeroes them in place takes them
        # from lazy updates
        self.drops_gradients = False
        self._step_made = False
        self.reason = ""  # of auto's last change
        # the norm to which this step's gradients are expected to be clipped
        self.clip_limit: float | None = None
        self._clipped = False  # whether somebody said so of this step
        self.in_flight: dict[Unit, Update] = {}
        self.sequence: list[Unit] = []  # the order in which units became final in the last step
        self.units = [unit for block in planes.blocks for unit in block.updated_units]
        self.kept = self.redone = self.wasted = 0
        self._wasted = 0  # in the step that is being made
        self.decided: Any = None  # transaction of a decided step that is not closed yet
        # the decided transaction that is not committed yet: who reads weights or state reads it
        self.read_point: Any = None
        # (transaction, future) of a closed step on its way to the disk
        self.closing: tuple[Any, Any] | None = None
        # of the decided step; their writes may be under way
        self._decided_updates: list[Update] = []
        # whose weights the loop itself changed as a part of the decided step
        self._edited: set[Unit] = set()
        self._running: deque[Update] = deque()  # not known to be computed; the oldest first
        self._holding: list[Update] = []  # with memory of new weights; the oldest first
        self._backward: int | None = None  # torch's number of the one whose end was asked for
        self._txn: Any = None
        self.late = Late(self)  # what the decided step still owes
        # final in this backward, on their way to where updates read them
        self._landing: list[Unit] = []
        self._norm2 = 0.0
        self._stopped = ""  # why nothing more of this step is speculated; empty: it may be
        for unit in planes.layout.retained:
            planes.session.retain(unit.session_id)
        pager.register(self)

    # -- speculation -------------------------------------------------------------------------------

    @property
    def speculating(self) -> bool:
        return self.active_policy == "speculate"

    @property
    def active_policy(self) -> str:
        if self.policy != "auto":
            return self.policy
        return "speculate" if not self.paused_for else "lazy" if self.drops_gradients else "sync"

    @property
    def lock(self) -> Any:
        return self._gate.lock

    def edit(self, units: set[Unit]) -> None:
        """The loop itself changes their weights, as a part of the decided step."""
        self._edited |= units

    def skip(self) -> None:
        """The gradients are cleared. Where that is not behind step(), there is none for them."""
        self._clipped = False
        self._waste()

    def _waste(self) -> None:
        """What was speculated was for nothing: no step() came."""
        if self.in_flight:
            self._wasted += len(self.in_flight)
            self.wasted += len(self.in_flight)
            self.abandon()

    def call_begins(self) -> None:
        """A forward that records gradients begins. If the backward after it is the step's last,
        state can be read ahead."""
        self._landing = []  # of a backward that broke off
        if self._step_made:
            self._step_made = False
            self.saw_gradients(
                dropped=all(
                    param.tensor.grad is None for unit in self.units for param in unit.params
                )
            )
        self._waste()
        self._norm2, self._stopped = 0.0, ""
        if self.speculating and self.gradients.last_call and not self.late:
            self.gradients.lend(self.sequence)
            self._prefetch_state(self.sequence)

    def on_final(self, unit: Unit) -> None:
        """From within backward: the unit's gradients are forecast final."""
        with self.lock:
            if not self.speculating or self._stopped or unit in self.in_flight:
                return
            if (backward := torch._C._current_graph_task_id()) != self._backward or backward == -1:
                self._when_backward_ends(self.backward_ends)
                self._backward = backward
            self.gradients.land(unit)
            self._landing.append(unit)
            self._speculate(self.gradients.in_flight)

    def _speculate(self, keep: int) -> None:
        """Starts the updates of final units, but for the last `keep`, whose gradients are still on
        their way."""
        while len(self._landing) > keep:
            # first: what a step still owes is made for it, of gradients that may take these ones'
            # place
            self._transaction()
            segments = self._segments(unit := self._landing.pop(0))
            if self.clip_limit is not None and self._over_limit(segments):
                self._stopped = PASSED
                self._landing.clear()
                return
            self._launch(unit, segments)
            self._prefetch_state(self.sequence[len(self.in_flight) : len(self.in_flight) + 2])
            # running on would keep weights in memory that the next forward's could take the place
            # of
            while self.reclaim(keep=1):
                pass

    def backward_ends(self) -> None:
        with self.lock:
            self._speculate(0)
            for update in self._uncomputed():
                self.timed("state", update.wait_computed)

    def _uncomputed(self) -> Iterator[Update]:
        """The oldest update under way, again and again: wait for it before you ask for the next."""
        while self._running:
            if self._running[0].computed:
                self._running.popleft()
            else:
                yield self._running[0]

    def clips(self, limit: float, norm: float | None = None) -> None:
        """The gradients of this step are clipped to that norm: now that theirs is `norm`, or before
        step() as who drives the loop knows. The next steps' are expected to be, too, until a step
        is made without."""
        # a second clip finds what the first one left
        if norm is not None and norm <= limit and self._stopped == PASSED and not self._clipped:
            self._stopped = SCALED
        self.clip_limit, self._clipped = limit, True

    @staticmethod
    def _when_backward_ends(callback: Callable[[], None]) -> None:
        torch.autograd.Variable._execution_engine.queue_callback(callback)

    def _over_limit(self, segments: list[Segment]) -> bool:
        self._norm2 += self._squares(segments)
        return not self._norm2 <= self.clip_limit**2

    def _squares(self, segments: list[Segment]) -> float:
        """The sum of their gradients' squares; NaN where it has no value."""
        grads = [(s.grad.data_ptr(), s.grad.numel(), DTYPES[s.grad.dtype]) for s in segments]
        squares = self.planes.session.sum_of_squares(grads)
        return math.fsum(squares) if all(map(math.isfinite, squares)) else math.nan

    def _prefetch_state(self, units: list[Unit]) -> None:
        """Reads ahead in this order, as tile memory is, and becomes, free."""
        for unit in units:
            # what those will write is not there to be read yet
            if unit not in self.in_flight and not self.late.has(unit):
                self.planes.session.prefetch_state(unit.session_id, self.read_point)

    # -- one unit ----------------------------------------------------------------------------------

    @staticmethod
    def _has_gradients(unit: Unit) -> bool:
        return any(param.tensor.grad is not None and param.numel for param in unit.params)

    def _landed(self, units: list[Unit]) -> Iterator[tuple[Unit, list[Segment]]]:
        """Each unit with what its update consumes as p.grad is now; as many of those that follow as
        may be are on their way."""
        ahead = self.gradients.in_flight
        for i in range(len(units) + ahead):
            if i < len(units):
                self.gradients.land(units[i], self.in_flight.get(units[i]))
            if i >= ahead:
                yield units[i - ahead], self._segments(units[i - ahead])

    def _segments(self, unit: Unit, later: bool = False) -> list[Segment]:
        """The gradients have landed. `later`: it is not now that they are consumed."""
        grads = (
            [(param, self.gradients.kept(param)) for param in unit.params]
            if later
            else self.gradients.consumed(unit)
        )
        return [
            Segment(param, grad, self.hyper(param))
            for param, grad in grads
            if grad is not None and param.numel
        ]

    def _launch(self, unit: Unit, segments: list[Segment]) -> None:
        if segments:
            recorder, block = self.pager.recorder, unit.block
            # its next weights are used in the next forward
            first = recorder.order.first(block.index)
            distance = -1 if block.pinned else len(recorder.order.uses) - recorder.position + first
            self.in_flight[unit] = self._start(
                unit, segments, self._transaction(), block.updated_units, self.in_flight, distance
            )

    def start(
        self, unit: Unit, segments: list[Segment], along: list[Unit], distance: int
    ) -> Update:
        """An update that the decided step owes. `along`: units of its block that are owed theirs
        now, too."""
        segments = self.gradients.landed(unit, segments)
        begun = self.late.begun
        return self._start(unit, segments, self.decided, along, begun, distance, hashes=False)

    def _start(
        self,
        unit: Unit,
        segments: list[Segment],
        txn: Any,
        along: list[Unit],
        begun: Container[Unit],
        distance: int,
        hashes: bool = True,
    ) -> Update:
        staged = self._staged(unit.block, along, begun, distance)
        weights, address = self.pager.old_weights(unit, staged)
        self.gradients.check(unit, segments)
        job = self.planes.session.update(
            unit.session_id,
            [segment.core() for segment in segments],
            address,
            staged.address + unit.slot_offset if staged else 0,
            txn,
            hashes=hashes,
        )
        self.gradients.read_by(unit, job)
        update = Update(unit, segments, job, weights, staged, self._marks(unit))
        self._running.append(update)
        if staged is not None:
            self._holding.append(update)
        self.pager.updating(unit.block)
        return update

    def _staged(
        self, block: Block, along: list[Unit], begun: Container[Unit], distance: int
    ) -> Slot | None:
        """Memory for the block's next weights, if there is some that nothing needs sooner. Units
        that are not updated `along` keep theirs."""
        pager = self.pager
        staged = pager.staged.get(block)
        if staged is not None:
            return staged
        if any(unit in begun for unit in block.updated_units):
            return None  # a part went to the disk only; half a block is of no use
        current = pager.slots.get(block)
        others = [] if pager.resident else [unit for unit in block.units if unit not in along]
        if others and (current is None or current.loading):
            return None
        staged = pager.take(block, pager.versions[block.index] + 1, distance)
        while staged is None and self.reclaim(keep=1):  # one more keeps the disk at work meanwhile
            staged = pager.take(block, pager.versions[block.index] + 1, distance)
        if staged is not None:
            for unit in others:
                self._carry_over(unit, current, staged)
            pager.staged[block] = staged
        return staged

    @staticmethod
    def _carry_over(unit: Unit, current: Slot, staged: Slot) -> None:
        part = slice(unit.slot_offset, unit.slot_offset + unit.weight_bytes)
        staged.bytes[part].copy_(current.bytes[part])

    def _transaction(self) -> Any:
        if self._txn is None:
            self.late.complete()
            self.settle()
            self._txn = self.planes.store.begin()
        return self._txn

    # -- the step ----------------------------------------------------------------------------------

    def decide(self) -> set[Unit]:
        """Makes every unit's update what p.grad says now, and makes it current. Returns the units
        that changed.

        On an error everything of this step is abandoned, the step before is intact, and step() may
        be called again.
        """
        self.late.complete()  # it wants gradients, which may land where those of this step do
        if self.active_policy == "lazy":
            return self._owe()
        launched = list(self.in_flight)
        try:
            redone = self._settle_updates()
            for update in self._uncomputed():
                self.timed("state", update.wait_computed)
            self._check_finite()
            self._computed()
        except BaseException:
            self.abandon()
            raise
        changed = set(self.in_flight)
        self._reconsider(redone)
        if launched:
            others = changed.difference(launched)
            self.sequence = launched + [unit for unit in self.units if unit in others]
        elif not self.sequence or set(self.sequence) != changed:
            self.sequence = [unit for unit in reversed(self.units) if unit in changed]
        self._make_current(changed)
        return changed

    def _check_finite(self) -> None:
        """Of the gradients that the updates of this step consumed."""
        bad = [unit for unit, update in self.in_flight.items() if not update.job.finite()]
        if bad:
            self.finiteness.missed(bad)

    def _check_owed(self, owed: dict[Unit, list[Segment]]) -> None:
        """Of those that are consumed later, if they are in memory. The others' updates tell."""
        bad = []
        for unit, segments in owed.items():
            there = [each for each, mark in zip(segments, self.marks_of(segments)) if mark is None]
            if not math.isfinite(self._squares(there)):
                bad.append(unit)
        if bad:
            self.finiteness.missed(bad)

    def _computed(self) -> None:
        """All is done that the step asks for; from here on it is decided."""

    def _owe(self) -> set[Unit]:
        """decide() of ``lazy``: only pinned blocks, which may be read at any time, are updated
        now."""
        if self.in_flight:
            self.abandon()
        self._transaction()
        changed = [unit for unit in self.units if self._has_gradients(unit)]
        order = self.pager.recorder.order
        changed.sort(key=lambda unit: order.first(unit.block.index))
        owed = {
            unit: self._segments(unit, later=True)
            for unit in changed
            if self.gradients.spills(unit) and not unit.block.pinned
        }
        try:
            for unit, segments in self._landed([unit for unit in changed if unit not in owed]):
                if unit.block.pinned:
                    self._launch(unit, segments)
                else:
                    owed[unit] = segments
            if self.finiteness.refuses:  # else the updates tell
                self._check_owed(owed)
            for unit in [unit for unit in changed if unit in owed]:
                self.late.take(unit, owed[unit])
            for update in self._uncomputed():
                self.timed("state", update.wait_computed)
            self._check_finite()
        except BaseException:
            self.late.clear()
            self.abandon()
            raise
        for block in dict.fromkeys(unit.block for unit in changed if unit in owed):
            self.pager.outdate(block)
        self._reconsider(redone=0)
        self._make_current({unit for unit in changed if unit.block.pinned})
        return set(changed)

    def bytes_of(self, segments: list[Segment]) -> tuple:
        """What tells the gradients' bytes, as they are now, from any others."""
        marks = self.marks_of(segments)
        return marks, self.hashes(
            [segment for segment, mark in zip(segments, marks) if mark is None]
        )

    def marks_of(self, segments: list[Segment]) -> list[tuple | None]:
        return [self.gradients.mark(segment.grad) for segment in segments]

    def hashes(self, segments: list[Segment]) -> list[bytes]:
        """Of the gradients' bytes as they are now."""
        return self.planes.session.hash_many(
            [(s.grad.data_ptr(), s.grad.numel() * s.grad.dtype.itemsize) for s in segments]
        )

    def _reconsider(self, redone: int) -> None:
        """`auto`: whether to speculate in the next step, after one in which so many updates had to
        be done again."""
        if self.policy != "auto":
            return
        if self.paused_for:
            self.paused_for -= 1
            if not self.paused_for:
                self.reason = f"{PAUSE_STEPS} steps have passed"
            return
        why = self._in_vain_because(redone)
        self._in_vain.append(bool(why))
        if (times := sum(self._in_vain)) >= IN_VAIN_MOST:
            self.reason = (
                f"{times} of the last {len(self._in_vain)} steps speculated in vain: {why}"
            )
            self.paused_for = PAUSE_STEPS
            self._in_vain.clear()

    def _in_vain_because(self, redone: int) -> str:
        """Why the speculation of the step that is being made was in vain; empty if it was not."""
        if redone:
            return f"{redone} of {len(self.in_flight)} updates had to be done again"
        # without the clip that was expected, its updates would have held
        if self._stopped and (self._clipped or self._stopped != PASSED):
            return self._stopped
        return f"{self._wasted} updates were made, and no step() followed" if self._wasted else ""

    def saw_gradients(self, dropped: bool) -> None:
        """What the loop was seen to do to its gradients behind step(): only those that it sets to
        None may be read by later updates."""
        # at its first step the pause has a better reason
        if dropped != self.drops_gradients and 0 < self.paused_for < PAUSE_STEPS:
            self.reason = (
                "the loop sets its gradients to None behind step()"
                if dropped
                else "the loop keeps its gradients over step()"
            )
        self.drops_gradients = dropped

    def _settle_updates(self) -> int:
        """Keeps or redoes what was speculated, and starts what was not. How many updates it
        redid."""
        redone = 0
        if not all(self._has_gradients(unit) for unit in self.in_flight):
            redone = sum(self._has_gradients(unit) for unit in self.in_flight)
            # a unit was updated that has no gradient any more: its writes must not be committed
            self.abandon()
        untouched = {unit for unit, update in self.in_flight.items() if self._untouched(update)}
        self.kept += len(untouched)
        # those computed last come last
        order = [*self.in_flight, *(unit for unit in self.units if unit not in self.in_flight)]
        for unit, segments in self._landed([unit for unit in order if unit not in untouched]):
            update = self.in_flight.get(unit)
            if update is not None and self._consumed(update, segments):
                self.kept += 1
                continue
            if update is not None:
                redone += 1
                self._forget(update)
            self._launch(unit, segments)
        self.redone += redone
        return redone

    def _marks(self, unit: Unit) -> list[tuple | None]:
        return [
            self.gradients.mark(param.tensor.grad)
            for param in unit.params
            if param.tensor.grad is not None and param.numel
        ]

    def _untouched(self, update: Update) -> bool:
        """Whether it is known, without a look at their bytes, that the update consumed exactly
        these gradients with these hyperparameters."""
        marks = self._marks(update.unit)
        if None in marks or marks != update.marks:
            return False
        now = [
            (param, self.hyper(param))
            for param in update.unit.params
            if param.tensor.grad is not None and param.numel
        ]
        return [(s.param, s.hyper) for s in update.segments] == now

    def _consumed(self, update: Update, segments: list[Segment]) -> bool:
        """Whether the update consumed exactly these gradients with these hyperparameters."""
        before = update.segments
        if [(s.param, s.hyper) for s in before] != [(s.param, s.hyper) for s in segments]:
            return False
        self.timed("state", update.wait_computed)
        return self.hashes(segments) == update.job.hashes()

    def _forget(self, update: Update) -> None:
        update.wait_computed()
        # it is written from the memory that the next one computes into
        self.timed("writing", update.job.wait_written)
        self.planes.session.invalidate(update.unit.session_id)
        update.staged = None
        del self.in_flight[update.unit]

    def _make_current(self, changed: set[Unit]) -> None:
        blocks = [
            block
            for block in self.planes.blocks
            if any(unit in changed for unit in block.updated_units)
        ]
        for block in blocks:
            staged, current = self.pager.staged.get(block), self.pager.slots.get(block)
            for unit in block.updated_units:
                if staged is None or unit in changed or self.pager.resident:
                    continue
                if current is None or current.loading:
                    staged = self.pager.staged.pop(block) and None
                else:
                    self._carry_over(unit, current, staged)
        # also a step without updates has a record
        self.decided, self._txn = self._transaction(), None
        self.read_point = self.decided
        self._decided_updates = list(self.in_flight.values())
        for update in self._decided_updates:
            update.segments = []  # lets go of the gradients: the next backward reuses their memory
        self.in_flight, self._landing, self._step_made = {}, [], True
        self._norm2, self._stopped, self._wasted = 0.0, "", 0
        self.clip_limit, self._clipped = self.clip_limit if self._clipped else None, False
        self.gradients.decided()
        self.pager.decide(blocks)
        self._prefetch_owed()
        self.pager.restart()

    def _prefetch_owed(self) -> None:
        """Reads ahead the state of what this step owes, in the order of use."""
        for unit in self.late.owed:
            self.planes.session.prefetch_state(unit.session_id, None)

    def computed(self, update: Update) -> None:
        """A late update is done: like those of the others, its memory is being written from."""
        update.segments = []
        self._decided_updates.append(update)

    def abandon(self) -> None:
        """Forgets the step that is being made: nothing of it becomes visible."""
        for update in list(self.in_flight.values()):
            try:
                update.wait_computed()
            except Exception:
                # the step is given up anyway; its cause was or will be reported by whoever gave it
                # up
                pass
            self.planes.session.invalidate(update.unit.session_id)
        abandoned, self.in_flight = self.in_flight, {}
        self._running.clear()
        if self._txn is not None:
            # waits for its writes: the next transaction may want the same objects
            self._txn.abandon()
            self._txn = None
        self._let_go(abandoned.values())
        self.pager.abandon()
        self._landing = []
        self._norm2, self._stopped = 0.0, ""
        self.gradients.recall()
        self.planes.session.drop_prefetched()

    # -- commit ------------------------------------------------------------------------------------

    def close(
        self, records: Callable[[], dict[str, bytes]], stage: Callable[[Any], None] = _nothing
    ) -> None:
        """Puts the step's records into its transaction and starts the durable commit, once nothing
        is owed any more. `stage` writes into the transaction what of the step is neither a record
        nor an update."""
        made = records()
        txn = self.decided
        try:
            stage(txn)
            if self.late:
                self.late.commit_with(made)
                return
            for key, data in made.items():
                put(txn, key, data)
            future = txn.commit("durable")
        except BaseException:
            del txn
            self.lose()
            raise
        self.decided, self.closing = None, (txn, future)
        self.late.committed()

    def poll(self) -> bool:
        """Whether the closed step is committed; then forward reads the store itself again."""
        if self.closing is None:
            return True
        if not self.closing[1].ready():
            return False
        self.settle()
        return True

    def settle(self) -> None:
        """Waits for the closed step's commit; raises what went wrong with it, and then the step is
        as if it had never been made."""
        if self.closing is None:
            return
        txn, future = self.closing
        self._wait_written()
        try:
            self.timed("commit", future.wait)
        except StokerError:
            del txn, future
            self.lose()
            raise
        self.closing = None
        self._let_go_of_decided()
        if self.read_point is txn:
            self.read_point = None

    def _let_go(self, updates: Iterable[Update]) -> None:
        """Nothing writes from their memory any more."""
        for update in updates:
            update.staged = None
        self._holding = [update for update in self._holding if update.staged is not None]

    def _let_go_of_decided(self) -> None:
        self._let_go(self._decided_updates)
        self._decided_updates, self._edited = [], set()

    def _wait_written(self) -> None:
        self.wait_written({update.unit for update in self._decided_updates})

    def wait_written(self, units: set[Unit]) -> None:
        """Until nothing of the decided step's updates of these units is on its way to the disk."""
        for update in (update for update in self._decided_updates if update.unit in units):
            with contextlib.suppress(StokerError):  # the commit fails with it, and says so
                self.timed("writing", update.job.wait_written)

    @property
    def decided_units(self) -> set[Unit]:
        """Those that the decided step has changed by now."""
        return {update.unit for update in self._decided_updates}

    def interrupted(self, before: Any) -> None:
        """Ctrl-C came to step(). If a step was decided since `before`, it cannot be committed: it
        has no number."""
        if self.decided is not None and self.decided is not before:
            self.lose()

    def lose(self) -> None:
        """The last decided step cannot be committed: goes back to the one before, which is in the
        store whole."""
        under_way = self.late.updates  # their memory is read and written until abandon() returns
        units = self.decided_units | self.late.units | self._edited
        self.late.clear()
        for txn in (self.decided, *(self.closing or ())[:1]):
            if txn is not None:
                txn.abandon()
        self.decided = self.closing = self.read_point = None
        self._let_go_of_decided()
        self.abandon()
        self._let_go(under_way)
        for unit in units:
            self.planes.session.invalidate(unit.session_id)
        self.lost(units)

    def release(self) -> None:
        """Lets go of transactions and memory, whatever state they are in. The end of the
        session."""
        self.in_flight, self._decided_updates, self._holding = {}, [], []
        self._running.clear()
        self.late.clear()
        self._txn = self.decided = self.closing = None

    # -- what the pager asks -----------------------------------------------------------------------

    def _update_of(self, unit: Unit) -> Update | None:
        """The unit's update of the step that is being made, or that the decided one owes."""
        return self.in_flight.get(unit) or self.late.begun_of(unit)

    def written(self, block: Block) -> bool:
        """Whether the block's staged weights are on the disk (in the transaction), so that the copy
        may go."""
        updates = map(self._update_of, block.updated_units)
        return all(update is None or update.job.written() for update in updates)

    def superseded(self, block: Block) -> bool:
        """Whether nothing needs the block's current weights any more: all its updates have consumed
        them."""
        updates = map(self._update_of, block.updated_units)
        computed = (update is not None and update.job.computed() for update in updates)
        return bool(block.updated_units) and all(computed)

    def reclaim(self, keep: int = 0) -> bool:
        """Waits for the oldest update under way to be done with its memory; False if no more than
        `keep` are under way."""
        first = next(self._uncomputed(), None)
        under_way = (update for update in self._running if not update.computed)
        if first is None or sum(1 for _ in islice(under_way, keep + 1)) <= keep:
            return False
        self.timed("state", first.wait_computed)
        return True

    def release_written(self, wait: bool = False) -> bool:
        """Lets go of memory of new weights that is on the disk by now, or (`wait`) of the oldest
        that is not. False if there is none."""
        if wait and self._holding:
            # the commit fails for the same reason, and says so
            with contextlib.suppress(StokerError):
                self.timed("writing", self._holding[0].job.wait_written)
        written = [update for update in self._holding if update.job.written()]
        if written:
            self._let_go(written)
        return bool(written)

    def timed(self, cause: str, wait: Callable[[], Any]) -> None:
        try:
            with self.waiting(cause):
                wait()
        finally:
            del wait  # a traceback would keep what it waited for, and with that the store, open
