"""Session: ties a model and its optimizer to the store. One object holds the parts; each part is in
a file of its own.

A training step, seen from here:
  forward   hooks.py -> Pager.use(block): fetch by the recorded order, point parameters at the slot
  backward  hooks.py (unpack) -> Pager.use; gradients.py -> Steps.on_final(unit): speculative update
  step()    Steps.decide(): keep or redo each update, make the new weights current
  next forward (or flush())  close the step: RNG, scheduler, loader... as they are now go into its
  transaction; commit
"""

from __future__ import annotations

import contextlib
import threading
from typing import Any, Iterator

import torch
from torch import nn

from stoker.errors import InvalidArgument, StokerError
from stoker.offload.activations.activations import Activations
from stoker.offload.gradients.finiteness import Finiteness
from stoker.offload.gradients.make import make_gradients
from stoker.offload.model.algorithm import Algorithm
from stoker.offload.model.blocks import Block, Param, Unit
from stoker.offload.model.compiled import plain
from stoker.offload.observe.context import Context, Gate
from stoker.offload.observe.ledger import Ledger
from stoker.offload.paging.make import make_pager
from stoker.offload.paging.shown import Shown
from stoker.offload.ranks.ranks import sharded_modules
from stoker.offload.ranks.shared_steps import SharedSteps
from stoker.offload.run import lifetime
from stoker.offload.run.changes import Changes
from stoker.offload.run.choices import Choices
from stoker.offload.run.counters import Counters
from stoker.offload.run.durability import Durability
from stoker.offload.run.installed import Installed
from stoker.offload.run.loading import Loading
from stoker.offload.run.reads import Reads
from stoker.offload.run.replacing import Replacing
from stoker.offload.run.rows import Rows
from stoker.offload.run.snapshots import Snapshots
from stoker.offload.run.step_record import StepRecord
from stoker.offload.run.stored_state import StoredState
from stoker.offload.run.trace import Tracing
from stoker.offload.run.weights import Weights
from stoker.offload.steps.steps import Steps
from stoker.offload.storage.buffers import Buffers
from stoker.offload.storage.open_store import OpenStore
from stoker.offload.storage.planes import Planes
from stoker.offload.storage.record import META_STATE, load


class Session:
    """Made by stoker.offload(); everything the OffloadedOptimizer does goes through here."""

    def __init__(
        self,
        model: nn.Module,
        original: torch.optim.Optimizer,
        runtime: OpenStore,
        blocks: list[Block],
        algorithm: Algorithm,
        how: Choices,
    ) -> None:
        link, agreement, self.how = how.link, how.agreement, how
        self.model, self.blocks, self.algorithm = model, blocks, algorithm
        self.runtime, self.agreement = runtime, agreement
        self._gate = Gate()
        self.ledger = Ledger(lambda: self.planes.arithmetic_seconds())
        context = Context(self._gate, self.ledger.waiting, self.ledger.event)
        self.left_memory = False  # the weights are in the store and not in the model
        self.closed = False
        self.trained_by: int | None = None  # the thread that called the model last
        self.installed = Installed()  # once the model trains out of the store
        self.params = sorted((p for b in blocks for p in b.params), key=lambda p: p.index)
        self.by_tensor = {p.tensor: p for p in self.params}
        # takes its memory first: planes divide the rest
        self.activations = Activations.of(
            how.activations,
            how.activations_form,
            runtime,
            blocks,
            algorithm,
            link,
            context,
            model,
        )
        self.planes = Planes(runtime, blocks, algorithm, spills=link is None)
        self.buffers = Buffers(self._buffers, lambda spans: self.planes.session.hash_many(spans))
        self.record = StepRecord(
            original,
            self.params,
            blocks,
            algorithm,
            self.buffers,
            torch.device("cpu") if link is None else link.device,
            agreement,
        )
        self.link = link
        self.shown = Shown(self)
        self.pager = make_pager(
            blocks,
            self.planes,
            context,
            self.shown,
            link,
            how.device_memory,
            sharded_modules(model) if agreement is not None else None,
        )
        self.gradients = make_gradients(
            blocks,
            self.planes,
            lambda unit: self.steps.on_final(unit),
            context,
            how.accumulate,
            link,
        )
        finiteness = Finiteness(how.on_nan, lambda: self.step_count, self.ledger.event)
        making = (
            *(self.planes, self.pager, self.gradients, self.record.hyper_of),
            *(how.policy, self._lost, finiteness, context),
        )
        self.steps = (
            Steps(*making)
            if agreement is None
            else SharedSteps(*making, agreement=agreement, become=self.become)
        )
        self.durability = Durability(
            self.steps, self.record, self.buffers, self.planes.store, agreement
        )
        self.stored = StoredState(self.planes, self.steps, self.record, self.by_tensor)
        self.weights = Weights(self.pager, self.shown, self.steps, self.stored)
        self.replacing = Replacing(
            self.planes,
            self.shown,
            self.weights,
            self.steps,
            self.record,
            self.by_tensor,
            agreement,
            self.flush,
        )
        self.loading = Loading(self.by_tensor, self.pager, self.weights, self.replacing)
        self.changes = Changes(
            self.params,
            self.pager,
            self.shown,
            self.steps,
            self.replacing.writing,
            self.durability.flush,
        )
        self.snapshots = Snapshots(
            how.snapshots,
            self.planes.store,
            self.record,
            agreement is not None,
            self.ledger.waiting,
            self.flush,
            self._settled,
            self.become,
        )
        self.reads = Reads(self.planes.store)
        self.counters = Counters(
            self.planes, self.gradients, self.steps, self.activations, self.ledger.waiting
        )
        self.rows = Rows(
            self.ledger,
            self.counters,
            self.record,
            self.pager.recorder,
            self.gradients.trimmer,
            self.planes.store,
        )
        self.tracing = Tracing(
            self.ledger.waiting,
            self.pager.recorder,
            [block.name for block in blocks],
            runtime.core,
        )
        lifetime.watch(self)

    @property
    def lock(self) -> Any:
        return self._gate.lock

    @property
    def step_count(self) -> int:
        return self.record.step

    def run(self) -> None:
        """Installs the hooks; from here on the model trains out of the store."""
        self.gradients.trimmer.begin()
        for block in self.blocks:
            if block.pinned:
                self.pager.fetch(block)
        self.installed.install(
            self.model,
            self.pager,
            self.activations,
            self.how.activations,
            self.ledger,
            self._gate,
            self._call_begins,
            self._pinned,
        )
        self.rows.begin()

    # -- training ----------------------------------------------------------------------------------

    def _call_begins(self, key: tuple) -> None:
        """A root call of the model begins (hooks.py)."""
        self.check_open()
        self.trained_by = threading.get_ident()
        self.loading.give_up()
        self.shown.settle()
        if key[1] and key[2]:
            self.ledger.come_back()
        else:
            self.steps.late.complete()  # first: these updates are a part of the training
            self.ledger.leave(self.counters)
        self.durability.close_step()
        self.steps.poll()
        self.rows.note_departures()
        self.pager.root_call(key)
        self.changes.check(grad=key[2])
        if key[2] and key[1]:
            self.installed.call(self.ledger.last)
        if key[2] and self.activations is not None:
            self.activations.call()
        if key[2] and key[1]:
            self.gradients.call()
            self.steps.call_begins()
        self.pager.prefetch()

    @contextlib.contextmanager
    def apart(self) -> Iterator[None]:
        """Around what trains nothing, as an evaluation: it is in no row of the ledger, from the
        making of its batches on."""
        if self.closed:
            yield
            return
        with self.lock:
            self.steps.late.complete()  # first: these updates are a part of the training
        with self.ledger.apart(lambda: None if self.closed else self.counters()):
            yield

    def _pinned(self, param: Param) -> None:
        self.ledger.event(
            "pinned", step=self.step_count, block=param.unit.block.name, parameter=param.name
        )

    def step(self) -> None:
        with self.lock:
            self.check_open()
            self.loading.give_up()
            self.installed.hooks.unwind()
            if self.pager.held:
                raise InvalidArgument(
                    "stoker.gather() would undo opt.step(); leave the with block first"
                )
            self.shown.settle()
            self.changes.check_in_place()
            self.shown.check_given()
            self.record.warn_of_unattached()
            self.durability.close_step()
            policy, reason = self.steps.active_policy, self.steps.reason
            self.tracing.mark("step()")
            before = self.steps.decided  # a lazy step that waits for its last updates
            sources = self.record.now()  # user code, which may raise: nothing is decided yet
            try:
                changed = self.steps.decide()
                updated = [
                    param
                    for param in self.params
                    if (param.unit in changed or not param.numel) and param.tensor.grad is not None
                ]
                self.record.decided(updated, sources)
            except BaseException:
                # Ctrl-C between deciding and counting: the step would be committed under the number
                # of the one before
                self.steps.interrupted(before)
                raise
            self.record.closed()
            if self.activations is not None:
                self.activations.sweep()
            self.tracing.end(self.rows.close(policy, reason, self.committed_step()))

    def _lost(self, units: set[Unit]) -> None:
        """The last step could not be committed: everything that belongs to a step is that of the
        step before."""
        self.ledger.event("lost", step=self.step_count)
        self.record.lost()
        self._take_back(
            {unit.block for unit in units}, load(self.planes.store.read_bytes(META_STATE))
        )

    def become(self, state: dict[str, Any]) -> None:
        """The store went to another step, whose record is `state`."""
        self.ledger.event("rolled back", step=self.step_count, to=state["step"])
        for block in self.blocks:
            for unit in block.updated_units:
                self.planes.session.invalidate(unit.session_id)
        self.record.returns_to(state["step"])
        self._take_back(set(self.blocks), state)

    def _take_back(self, blocks: set[Block], state: dict[str, Any]) -> None:
        if self.pager.resident:
            self.pager.forget_gathered()
        self.weights.refresh(blocks)
        self.record.take_back(state, self.planes.store)

    def gradients_dropped(self, kept: bool) -> None:
        """zero_grad(): what was speculated since the last step is void. `kept`: the tensors stay,
        and become zeros."""
        with self.lock:
            self.installed.hooks.unwind()
            if kept:
                self.steps.late.complete()  # it wants their bytes
            self.steps.skip()
            self.gradients.cleared()

    # -- what is durable when ----------------------------------------------------------------------

    def _buffers(self) -> dict[str, torch.Tensor]:
        return {plain(name): tensor for name, tensor in self.model.named_buffers()}

    def committed_step(self) -> int:
        lifetime.check_process(self)
        return self.durability.committed()

    def flush(self) -> None:
        with self._at_rest():
            self.durability.flush()

    def name_step(self, name: str) -> None:
        """The newest step is durable, and has a name in the store."""
        with self._at_rest():
            self.durability.name_step(name)

    @contextlib.contextmanager
    def _at_rest(self) -> Iterator[None]:
        """Under the lock, with nothing changed that the step does not know."""
        with self.lock:
            self.check_open()
            self.shown.settle()
            self.changes.check_in_place()
            yield

    @contextlib.contextmanager
    def _settled(self) -> Iterator[None]:
        """Under the lock, with the newest step durable and nothing begun behind it."""
        with self.lock:
            self.installed.hooks.unwind()
            self.steps.abandon()
            self.flush()
            yield

    def replace_locks(self, lock: Any) -> None:
        """Whoever enters from now on meets this lock."""
        self._gate.replace(lock)

    def check_open(self) -> None:
        lifetime.check_process(self)
        if self.closed:
            raise StokerError(
                "this optimizer was closed; call stoker.offload() again with resume=True to go on"
            )

    def leaves_memory(self) -> None:
        """From here on the weights are in the store only."""
        self.left_memory = True

    def ends(self) -> None:
        """From here on it is closed."""
        self.closed = True
