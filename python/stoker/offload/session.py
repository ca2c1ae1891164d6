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
import os
import secrets
import threading
import warnings
from dataclasses import dataclass, replace
from typing import Any, Callable, Iterator

import torch
from torch import nn

from stoker import _core
from stoker.errors import InvalidArgument, Mismatch, StokerError, Unsupported
from stoker.offload import optimizer as front
from stoker.offload import lifetime, planner, record
from stoker.offload.access import refuse_state_dict
from stoker.offload.activations import MODES, Activations
from stoker.offload.agreement import Agreement
from stoker.offload.away import away_of
from stoker.offload.blocks import Block, Param, Unit, difference, like, local, signature
from stoker.offload.buffers import Buffers
from stoker.offload.compiled import plain
from stoker.offload.device import DeviceGradients, DevicePager
from stoker.offload.finiteness import MODES as ON_NAN
from stoker.offload.finiteness import Finiteness
from stoker.offload.forms import FORMS
from stoker.offload.gradients import Gradients
from stoker.offload.heap import resident_bytes
from stoker.offload.hooks import Hooks
from stoker.offload.ledger import Ledger
from stoker.offload.link import Link
from stoker.offload.machine import Machine
from stoker.offload.pager import Pager
from stoker.offload.planes import Algorithm, Planes, Runtime, put
from stoker.offload.planner import Setting
from stoker.offload.ranks import sharded_modules
from stoker.offload.recompute import Auto, Recomputed, layers_of
from stoker.offload.shards import Calls, ShardPager
from stoker.offload.shared import SharedSteps
from stoker.offload.shown import Place, Shown
from stoker.offload.snapshots import Snapshots
from stoker.offload.spilling import SpillingGradients
from stoker.offload.steps import Steps
from stoker.offload.trace import StepTrace
from stoker.offload.volumes import Shares, room_of

FORMAT = 2  # 1 has the buffers in a JSON object, and goes on as 2
META_MODEL, META_STATE = "meta/model", "meta/state"
POLICIES = ("auto", "sync", "speculate", "lazy")


def _is_source(thing: Any) -> bool:
    """Whether an attached object hands out batches (a loader, a sampler) rather than following the
    optimizer."""
    return hasattr(thing, "__iter__") or hasattr(thing, "__next__")


def check_stored(runtime: Runtime, blocks: list[Block], algorithm: Algorithm) -> Algorithm:
    """The algorithm with the stored run's seed. Mismatch unless that run is of this model and
    optimizer."""
    stored = record.load(runtime.store.read_bytes(META_MODEL))
    if stored["format"] not in (1, FORMAT):
        raise Mismatch(
            f"the store was written by a Stoker with format {stored['format']}; this one reads"
            f" formats 1 and {FORMAT}"
        )
    kept = stored.get("moments", "exact")
    if kept != algorithm.moments.name:
        raise Mismatch(
            f'the run in {runtime.path} keeps its moments as "{kept}", not'
            f' "{algorithm.moments.name}"; resume it with moments="{kept}"'
        )
    problem = difference(stored, signature(blocks))
    if problem:
        raise Mismatch(
            f"the store at {runtime.path} holds another model: {problem}; give the right model, or"
            " another store"
        )
    if stored["algorithm"] != algorithm.name:
        raise Mismatch(
            f"the store at {runtime.path} holds {stored['algorithm']} state, but the optimizer is"
            f" {algorithm.name}"
        )
    if stored["momentum"] != algorithm.momentum:
        had, has = ("with", "none") if stored["momentum"] else ("without", "some")
        raise Mismatch(
            f"the run in {runtime.path} was trained {had} momentum, and this optimizer has {has};"
            " make it as then"
        )
    return replace(algorithm, seed=stored.get("seed", 0))


@dataclass(frozen=True)
class Choices:
    """What the caller of stoker.offload() chose, beyond model, optimizer and store."""

    policy: str
    accumulate: int | None = None  # backwards a step, if known
    snapshots: int = 0  # how many earlier steps may be kept
    # the way to the device on which the model computes, if that is not the CPU
    link: Link | None = None
    device_memory: int | None = None  # cap on weights there, bytes
    activations: str = "keep"  # where what autograd saves goes (activations.py)
    activations_form: str = "exact"  # and how (forms.py)
    agreement: Agreement | None = None  # with the other processes that have shards of the model
    on_nan: str = "warn"  # or "raise": what becomes of a step whose gradients are not finite


class Session:
    """Made by stoker.offload(); everything the OffloadedOptimizer does goes through here."""

    def __init__(
        self,
        model: nn.Module,
        original: torch.optim.Optimizer,
        runtime: Runtime,
        blocks: list[Block],
        algorithm: Algorithm,
        how: Choices,
    ) -> None:
        policy, link, agreement, self.how = how.policy, how.link, how.agreement, how
        if policy not in POLICIES:
            raise InvalidArgument(f"policy {policy!r} is not one of {', '.join(POLICIES)}")
        if how.on_nan not in ON_NAN:
            raise InvalidArgument(f"on_nan {how.on_nan!r} is not one of {', '.join(ON_NAN)}")
        if how.activations not in MODES:
            raise InvalidArgument(
                f"activations {how.activations!r} is not one of {', '.join(MODES)}"
            )
        if how.activations_form not in FORMS:
            raise InvalidArgument(
                f"activations_form {how.activations_form!r} is not one of {', '.join(FORMS)}"
            )
        if how.activations_form != "exact" and how.activations in ("keep", "recompute"):
            raise InvalidArgument(
                f"activations_form={how.activations_form!r} is how activations are stored, and"
                f" activations={how.activations!r} stores none; choose disk, dram or auto"
            )
        if how.device_memory is not None and link is None:
            raise InvalidArgument(
                "device_memory= caps the weights on an accelerator, and this model computes on the"
                " CPU; leave it out: dram= is the cap here"
            )
        self.model, self.blocks, self.algorithm = model, blocks, algorithm
        self.runtime, self.agreement = runtime, agreement
        self.lock = threading.RLock()
        self.ledger = Ledger()
        self.step_count = 0
        self._committed = 0
        self._updates_of: dict[Param, int] = {}  # torch's per-parameter step
        self._attached: dict[str, Any] = {}
        # their states then, until a record holds later ones
        self._when_attached: dict[str, Any] = {}
        self._restored: dict[str, Any] = {}
        # until the first step: what making a scheduler anew may have overwritten
        self._resumed_groups: list[dict] = []
        # what a loop moves on before its next forward
        self._at_step: dict[str, Any] = {"rng": record.rng_state(), "attached": {}}
        self._format = FORMAT  # of the run in the store
        self._left = False  # the weights are in the store and not in the model
        self._departures = 0  # from the recorded order, that the ledger knows of
        self._closed = False
        self._reads: list[threading.Event] = []  # of the store, beside training; set at their end
        self.trained_by: int | None = None  # the thread that called the model last
        self.tracing: StepTrace | None = None
        self._run: str | None = None  # tells this run from others in the same place
        self.access: list = []  # handles of access.py's hooks
        # access.py's Loading: a load_state_dict() of the model that may be under way
        self.loading: Any = None
        self.hooks: Hooks | None = None  # once the model trains out of the store
        self.layers: list[Recomputed] = []  # those that may be computed again
        self._auto: Auto | None = None
        self.params = sorted((p for b in blocks for p in b.params), key=lambda p: p.index)
        self.by_tensor = {p.tensor: p for p in self.params}
        self._group_of = {
            param: group for group in original.param_groups for param in group["params"]
        }
        # takes its memory first: planes divide the rest
        self.activations = Activations.of(
            how.activations, how.activations_form, runtime, blocks, algorithm, link
        )
        self.planes = Planes(runtime, blocks, algorithm, spills=link is None)
        self.buffers = Buffers(self._buffers, lambda spans: self.planes.session.hash_many(spans))
        self.link = link
        on_final = lambda unit: self.steps.on_final(unit)
        if link is None:
            self.pager = Pager(blocks, self.planes)
            self.gradients = (SpillingGradients if self.planes.layout.spilled else Gradients)(
                blocks, self.planes, on_final
            )
        else:
            paging = (blocks, self.planes, link)
            self.pager = (
                DevicePager(*paging, how.device_memory)
                if agreement is None
                else ShardPager(*paging, sharded_modules(model))
            )
            self.gradients = DeviceGradients(blocks, self.planes, on_final, link)
        self.gradients.accumulate = how.accumulate
        finiteness = Finiteness(how.on_nan, lambda: self.step_count, self.ledger.event)
        parts = (self.planes, self.pager, self.gradients)
        making = (*parts, self._hyper, policy, self._lost, finiteness)
        self.steps = (
            Steps(*making)
            if agreement is None
            else SharedSteps(*making, agreement=agreement, become=self.become)
        )
        self.steps.lock = self.gradients.lock = self.lock
        self.pager.updates = self.steps
        self.ledger.waiting.arithmetic = lambda: (
            self.planes.session.arithmetic_seconds() if self.planes.session else 0.0
        )
        self.pager.waiting = self.steps.waiting = self.gradients.waiting = self.ledger.waiting
        self.gradients.event = self.ledger.event
        if self.activations is not None:
            self.activations.waiting, self.activations.event, self.activations.stays = (
                self.ledger.waiting,
                self.ledger.event,
                self._stays,
            )
            self.activations.trimmer = self.gradients.trimmer
        self.snapshots = Snapshots(self, how.snapshots)
        self._requires_grad = {p: p.tensor.requires_grad for p in self.params}
        self.shown = Shown(self)
        if not self.pager.resident:
            self.pager.shown = self.shown
        lifetime.watch(self)

    # -- start -------------------------------------------------------------------------------------

    def create(self, value_of: Callable[[Param], torch.Tensor], obsolete: list[str]) -> None:
        """Writes the model into the store that holds no run yet: the weights; m, v and remainder
        are sparse zeros.

        value_of gives each parameter's initial weights; `obsolete` objects (of stoker.build) go in
        the same commit.
        """
        store = self.planes.store
        txn = store.begin()
        for block in self.blocks:
            slot = self.pager.take(block, 0)
            slot.bytes.zero_()
            for param in block.params:
                slot.view(param).copy_(local(value_of(param)))
                self.gradients.trimmer.freed(param.numel * param.unit.dtype.itemsize)
            futures = []
            for unit in block.units:
                core = self.planes.session
                core.create_block(unit.session_id, txn)
                futures.append(
                    core.store_weights(unit.session_id, slot.address + unit.slot_offset, txn)
                )
            for future in futures:
                future.wait()
            del slot
        if (told := room_of(store)) is not None:
            self.ledger.event("volumes", step=0, **told)
        self._run = self.agreement.run if self.agreement else secrets.token_hex(8)
        put(txn, META_MODEL, record.dump(self._model_record()))
        for key, data in self._records().items():
            put(txn, key, data)
        self.buffers.stage(txn)
        for key in obsolete:
            txn.remove(key)
        txn.commit("durable").wait()
        self._leave_memory()

    def _model_record(self) -> dict[str, Any]:
        algorithm = self.algorithm
        kept = {"moments": algorithm.moments.name, "seed": algorithm.seed}
        ranks = {"ranks": self.agreement.signature()} if self.agreement else {}
        return {
            "format": FORMAT,
            "run": self._run,
            **ranks,
            "algorithm": algorithm.name,
            "momentum": algorithm.momentum,
            **kept,
            "groups": self._members(),
            **signature(self.blocks),
        }

    def adopt(self) -> None:
        """The store already holds this model's weights, those of a run that is resumed."""
        self._run = record.load(self.planes.store.read_bytes(META_MODEL)).get("run")
        self._leave_memory()
        if self.pager.resident:
            self._refresh(set(self.blocks))

    def _leave_memory(self) -> None:
        """From here on the weights are in the store only. Shards stay."""
        if self.pager.resident:
            return
        self._left = True
        places = {
            param: Place.of(param.tensor) for param in self.params if away_of(param.tensor) is None
        }
        for param in self.params:
            grad, param.tensor.grad = param.tensor.grad, None
            self.pager.hide(param)
            param.tensor._stoker_session = self
            param.tensor.grad = grad.to(self.pager.device) if grad is not None else None
        for param, place in places.items():
            self.shown.watch(param, place)

    def resume(self) -> None:
        """Takes the run up at the last committed step: counters, hyperparameters, buffers, RNG;
        attached objects on attach()."""
        state = record.load(self.planes.store.read_bytes(META_STATE))
        if len(self._groups()) != len(state["groups"]):
            raise Mismatch(
                f"the run in {self.runtime.path} has {len(state['groups'])} parameter groups, the"
                f" optimizer has {len(self._groups())}; make it as then"
            )
        self._check_members()
        self._committed = state["step"]
        self._take_up(state)
        self._resumed_groups = state["groups"]
        self._restored = state["attached"]
        here = record.environment(self.pager.device)
        changed = [
            f"{key} {state['environment'].get(key)} -> {here[key]}"
            for key in here
            if state["environment"].get(key, here[key]) != here[key]
        ]
        if changed:
            warnings.warn(
                f"this run was made under another environment ({', '.join(changed)}): it goes on,"
                " but not bit for bit as there",
                stacklevel=4,
            )

    def _check_members(self) -> None:
        """Mismatch unless each parameter is in the group that it was in: it would go on with the
        hyperparameters of another."""
        stored = record.load(self.planes.store.read_bytes(META_MODEL)).get("groups")
        if stored is None:
            return  # the run was made before this was noted
        then = {name: number for number, names in enumerate(stored) for name in names}
        for number, names in enumerate(self._members()):
            for name in names:
                if then[name] != number:
                    raise Mismatch(
                        f"the run in {self.runtime.path} has {name} in parameter group"
                        f" {then[name]}, the optimizer has it in group {number}, so it would go on"
                        " with the hyperparameters of others; give the optimizer the groups that"
                        " it had, in the same order"
                    )

    def _take_up(self, state: dict[str, Any]) -> None:
        """Counters, hyperparameters, buffers and random states become those of the record that
        closed the last committed step."""
        self.step_count = state["step"]
        names = {p.name: p for p in self.params}
        self._updates_of = {names[name]: count for name, count in state["updates"].items()}
        for group, stored in zip(self._groups(), state["groups"]):
            group.update(stored)
        self.buffers.load(self.planes.store, state["buffers"])
        self._format = 1 if isinstance(state["buffers"], bool) else FORMAT
        record.set_rng_state(state["rng"])
        self._at_step = {"rng": state["rng"], "attached": {}}

    def move(self) -> None:
        """What is not paged goes to the device that computes, and host memory is made ready for
        copies. Before anything is stored."""
        if self.link is not None:
            self.link.pin(self.planes.arena)
            if self.activations is not None and self.activations.arena is not None:
                self.link.pin(self.activations.arena)
        if self.pager.resident:
            return
        for module in self.model.modules():
            for name, buffer in module._buffers.items():
                module._buffers[name] = buffer.to(self.pager.device) if buffer is not None else None

    def run(self) -> None:
        """Installs the hooks; from here on the model trains out of the store."""
        self.gradients.trimmer.begin()
        for block in self.blocks:
            if block.pinned:
                self.pager.fetch(block)
        if self.how.activations in ("recompute", "auto"):
            self.layers = layers_of(
                self.model, self.blocks, self.ledger.waiting, on=self.activations is None
            )
            if self.activations is not None:
                self._auto = Auto(self.layers, self.activations, self.ledger.event)
        self.hooks = (
            Calls(self.model, self._call_begins)
            if self.pager.resident
            else Hooks(
                self.model, self.pager, self._call_begins, self._pinned, self.lock, self.activations
            )
        )
        for layer in self.layers:
            layer.hooks = self.hooks
        self.volumes = Shares(self.planes.store)
        self.ledger.start(self.counters())
        self.ledger.leave(self.counters)  # until the first call that trains

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
        self._close_step()
        self.steps.poll()
        recorder = self.pager.recorder
        if recorder.departures != self._departures:
            self._departures = recorder.departures
            self.ledger.event("order", step=self.step_count, call=recorder.key)
        recorder.begin(key)
        self.pager.current = None
        self._check_unchanged(grad=key[2])
        if key[2] and key[1] and self._auto is not None:
            self._auto.call(self.ledger.last)
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
        if self._closed:
            yield
            return
        with self.lock:
            self.steps.late.complete()  # first: these updates are a part of the training
        with self.ledger.apart(lambda: None if self._closed else self.counters()):
            yield

    def _stays(self, tensor: torch.Tensor) -> bool:
        """Whether the model holds this tensor's storage anyhow."""
        key = tensor.untyped_storage()._cdata
        return tensor.grad_fn is None and any(
            buffer.untyped_storage()._cdata == key for buffer in self.model.buffers()
        )

    def _pinned(self, param: Param) -> None:
        self.ledger.event(
            "pinned", step=self.step_count, block=param.unit.block.name, parameter=param.name
        )

    def _check_in_place(self) -> None:
        if (param := self.pager.changed()) is not None:
            self._refuse_change(param)

    def _refuse_change(self, param: Param) -> None:
        self.steps.abandon()  # what was speculated may have consumed the change
        advice = (
            "make it before stoker.offload()"
            if self.pager.resident
            else (
                "make it between opt.step() and the next forward, or inside `with"
                " stoker.gather(parameter, write=True):`"
            )
        )
        raise InvalidArgument(
            f"{param.name} was changed in place, which the store did not see, so the change was"
            f" dropped; {advice}"
        )

    def dropped(self, param: Param) -> None:
        """The parameter was changed where the change reaches no weight: InvalidArgument."""
        self.pager.drop_change(param)
        self._refuse_change(param)

    def edit(self, values: dict[Param, torch.Tensor]) -> None:
        """The loop gave these weights: a part of the decided step, if its record is still to be
        made; else a commit of their own."""
        steps = self.steps
        if steps.decided is None or steps.late.records is not None:
            steps.abandon()  # what was speculated consumed the old weights
            self._flush()
            writing = WeightWriting(self)
            writing.stage(values)
            writing.commit()
        else:
            units = {param.unit for param in values}
            try:
                steps.wait_written(units)
                writing = WeightWriting(self, steps.decided)
                writing.stage(values)
            except BaseException:
                steps.lose()
                raise
            steps.edited |= units
            writing.forget_state()
        for param, value in values.items():
            self.pager.rewrite(param, value)

    def _check_unchanged(self, grad: bool) -> None:
        self._check_in_place()
        self.shown.check_given()
        for param, was in self._requires_grad.items():
            if param.tensor.dtype != param.unit.dtype:
                raise InvalidArgument(
                    f"{param.name} was converted to {param.tensor.dtype} after stoker.offload(),"
                    " which changes nothing in the store; convert the model first, then offload it"
                )
            # without gradients nobody asks: adapters are switched off and on that way
            if grad and param.tensor.requires_grad != was:
                raise InvalidArgument(
                    f"requires_grad of {param.name} changed from {was} to {not was} after"
                    " stoker.offload(); freeze or unfreeze parameters before offloading"
                )

    def _hyper(self, param: Param) -> dict:
        return front.hyper(
            self._group_of[param.tensor], self.algorithm, self._updates_of.get(param, 0) + 1
        )

    def step(self) -> None:
        with self.lock:
            self.check_open()
            self.loading.give_up()
            self.hooks.unwind()
            if self.pager.held:
                raise InvalidArgument(
                    "opt.step() inside stoker.gather() would be undone by it; leave the with block"
                    " first"
                )
            self.shown.settle()
            self._check_in_place()
            self.shown.check_given()
            if self._resumed_groups and self._restored:  # the first step since
                names = sorted(self._restored)
                warnings.warn(
                    f"the run holds the state of {', '.join(names)}, and nothing of that name is"
                    f" attached: it is not kept. Call opt.attach({names[0]}=...) before the first"
                    " step",
                    stacklevel=5,
                )
            self._close_step()
            policy, reason = self.steps.active_policy, self.steps.reason
            if self.tracing is not None:
                self.tracing.mark("step()")
            before = self.steps.decided  # a lazy step that waits for its last updates
            sources = self._sources()  # user code, which may raise: nothing is decided yet
            try:
                changed = self.steps.decide()
                for param in self.params:
                    if (param.unit in changed or not param.numel) and param.tensor.grad is not None:
                        self._updates_of[param] = self._updates_of.get(param, 0) + 1
                self.step_count += 1
                self._at_step = sources
            except BaseException:
                # Ctrl-C between deciding and counting: the step would be committed under the number
                # of the one before
                if self.steps.decided is not None and self.steps.decided is not before:
                    if self.agreement is not None:  # the others have that step
                        self.agreement.ranks.leave(
                            f"rank {self.agreement.ranks.rank} was interrupted behind the decision"
                            f" of step {self.step_count + 1}"
                        )
                    self.steps.lose()
                raise
            self._resumed_groups = []
            if self.activations is not None:
                self.activations.sweep()
            if self.ledger.last is not None and policy != self.ledger.last["policy"]:
                self.ledger.event("policy", step=self.step_count, policy=policy, reason=reason)
            volume_bytes, told = self.volumes.step()
            if told is not None:
                self.ledger.event("volumes", step=self.step_count, **told)
            row = self.ledger.close_step(
                self.step_count,
                self.counters(),
                policy=policy,
                committed=self.committed_step(),
                volume_bytes=volume_bytes,
                process_bytes_peak=self.gradients.trimmer.end_step(),
            )
            if self.tracing is not None:
                tracing, self.tracing = self.tracing, None
                tracing.end(row)

    def _lost(self, units: set[Unit]) -> None:
        """The last step could not be committed: everything that belongs to a step is that of the
        step before."""
        self.ledger.event("lost", step=self.step_count)
        self.step_count -= 1
        self._take_back(
            {unit.block for unit in units}, record.load(self.planes.store.read_bytes(META_STATE))
        )

    def become(self, state: dict[str, Any]) -> None:
        """The store went to another step, whose record is `state`."""
        self.ledger.event("rolled back", step=self.step_count, to=state["step"])
        for block in self.blocks:
            for unit in block.updated_units:
                self.planes.session.invalidate(unit.session_id)
        self._committed = state["step"]
        self._take_back(set(self.blocks), state)

    def _take_back(self, blocks: set[Block], state: dict[str, Any]) -> None:
        if self.pager.resident:
            self.pager.forget_gathered()
        self._refresh(blocks)
        attached = {**self._when_attached, **state["attached"]}
        for name, thing in self._attached.items():
            thing.load_state_dict(attached[name])
        self._take_up(state)  # behind the schedulers, which may set a learning rate
        self._at_step["attached"] = {
            name: attached[name] for name, thing in self._attached.items() if _is_source(thing)
        }

    def trace(self, path: str | os.PathLike) -> None:
        with self.lock:
            self.check_open()
            if self.tracing is not None:
                raise InvalidArgument(
                    "a step is being traced already; its trace is written when that step is decided"
                )
            self.tracing = StepTrace(self, path)

    def gradients_dropped(self, kept: bool) -> None:
        """zero_grad(): what was speculated since the last step is void. `kept`: the tensors stay,
        and become zeros."""
        with self.lock:
            self.hooks.unwind()
            if kept:
                self.steps.late.complete()  # it wants their bytes
            self.steps.skip()
            self.gradients.cleared()

    def clip_grad_norm_(self, max_norm: float, error_if_nonfinite: bool) -> torch.Tensor:
        # from finding gradients in memory to reading them: another thread that looks at one may
        # take their place
        with self.lock:
            self.check_open()
            self.steps.late.complete()  # it wants gradients, which may land where these do
            norm = front.clip(
                self, [p for p in self.params if p.unit.updated], max_norm, error_if_nonfinite
            )
            self.steps.clips(max_norm, norm.item())
            return norm

    # -- what is durable when ----------------------------------------------------------------------

    def attach(self, objects: dict[str, Any]) -> None:
        for name, thing in objects.items():
            if not (hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")):
                raise InvalidArgument(
                    f"{name} cannot be attached: a {type(thing).__name__} has no"
                    " state_dict()/load_state_dict()"
                )
            # raises now what would otherwise stop the training after a step
            state = record.decode(record.encode(thing.state_dict(), name))
            self._attached[name] = thing
            if name in self._restored:
                state = self._restored.pop(name)
                thing.load_state_dict(state)
                for group, stored in zip(self._groups(), self._resumed_groups):
                    # a scheduler's constructor set the learning rate of step 0
                    group.update(stored)
            self._when_attached[name] = state
            if _is_source(thing):
                self._at_step["attached"][name] = thing.state_dict()

    def _sources(self) -> dict[str, Any]:
        """What draws the next batch moves on between step() and the next forward, so its state is
        taken at step()."""
        sources = {
            name: thing.state_dict() for name, thing in self._attached.items() if _is_source(thing)
        }
        # a copy: it may be live
        return {"rng": record.rng_state(), "attached": record.load(record.dump(sources))}

    def _buffers(self) -> dict[str, torch.Tensor]:
        return {plain(name): tensor for name, tensor in self.model.named_buffers()}

    def _groups(self) -> list[dict]:
        return list({id(group): group for group in self._group_of.values()}.values())

    def _members(self) -> list[list[str]]:
        """The names of the trained parameters of each group."""
        params = [
            [self.by_tensor[tensor] for tensor in group["params"]] for group in self._groups()
        ]
        return [[param.name for param in group if param.unit.updated] for group in params]

    def _records(self) -> dict[str, bytes]:
        """The record that closes a step, as objects to write."""
        attached = {
            name: thing.state_dict()
            for name, thing in self._attached.items()
            if not _is_source(thing)
        }
        records = {
            META_STATE: record.dump(
                {
                    "step": self.step_count,
                    "updates": {p.name: n for p, n in self._updates_of.items()},
                    "groups": [
                        {k: v for k, v in g.items() if k != "params"} for g in self._groups()
                    ],
                    "buffers": self.buffers.table(),
                    "attached": {**attached, **self._at_step["attached"]},
                    "rng": self._at_step["rng"],
                    "environment": record.environment(self.pager.device),
                    **({"timeline": self.agreement.timeline} if self.agreement else {}),
                }
            )
        }
        if self._format != FORMAT:
            records[META_MODEL] = record.dump(self._model_record())
            self._format = FORMAT
        return records

    def _close_step(self) -> None:
        """What belongs to the decided step, as it is now, goes into its record; unless that was
        done."""
        steps = self.steps
        if steps.decided is not None and (steps.late.records is None or not steps.late):
            if steps.late.records is None:
                steps.close(self._records, self.buffers.stage)
            else:
                steps.close(lambda: steps.late.records)

    def committed_step(self) -> int:
        lifetime.check_process(self)
        if self.agreement is not None:
            return self.agreement.step
        if self.steps.poll():
            self._committed = self.step_count - (self.steps.decided is not None)
        return self._committed

    def flush(self) -> None:
        with self.lock:
            self.check_open()
            self.shown.settle()
            self._check_in_place()
            self._flush()

    def _flush(self) -> None:
        self.steps.late.complete()
        self._close_step()
        self.steps.settle()

    def replace_locks(self, lock: Any) -> None:
        """Whoever enters from now on meets this lock."""
        self.lock = self.steps.lock = self.gradients.lock = lock
        if self.hooks is not None:
            self.hooks.lock = lock

    def check_open(self) -> None:
        lifetime.check_process(self)
        if self._closed:
            raise StokerError(
                "this optimizer was closed; call stoker.offload() again with resume=True to go on"
            )

    def close(self) -> None:
        if lifetime.is_forked(self):
            return  # all of it is the parent's
        with self.lock:
            if self._closed:
                return
            try:
                self.hooks.unwind()
                if self.steps.updates:
                    self.steps.abandon()
                self.flush()
            finally:
                for done in self._reads:
                    done.wait()
                for param in self.params:
                    param.tensor.grad = None
                    if not self.pager.resident:
                        self.pager.hide(param)
                self.give_up()

    def read_until(self, done: threading.Event) -> None:
        """Somebody reads the store beside training: close() waits for that."""
        self._reads = [*(each for each in self._reads if not each.is_set()), done]

    def give_up(self) -> None:
        """Lets go of the model, memory, threads and the store, as they are."""
        self._closed = True
        if self.hooks is not None:
            self.hooks.remove()
        for layer in self.layers:
            layer.remove()
        for handle in self.access:
            handle.remove()
        self.shown.clear()
        for param in self.params:
            for name in ("_stoker_session", "__deepcopy__"):
                vars(param.tensor).pop(name, None)
        try:
            self.gradients.remove()
            self.pager.clear()
            if self.activations is not None:
                self.activations.close()
            if self.link is not None:
                self.link.unpin()
        finally:  # also where the device does not answer any more
            self.steps.release()
            self.planes.close()
            if self.agreement is not None:
                self.agreement.ranks.leave("the optimizer was closed")
            if self._left:
                refuse_state_dict(self.model, self)

    # -- access to all of it -----------------------------------------------------------------------

    def reference(self) -> dict[str, Any]:
        return {
            "store": self.runtime.path,
            "run": self._run,
            "step": self.step_count,
            "version": self.planes.store.info()["committed"],
        }

    def refer(self, to: dict[str, Any]) -> None:
        """Goes to the step that a reference names. Nothing moves where nothing was committed
        since."""
        self.flush()
        now = self.reference()
        if to.get("run") != now["run"]:
            raise Mismatch(
                f"this state_dict refers to a run in {to.get('store')}, which is not the run in"
                f" {now['store']}; offload with the store that it refers to"
            )
        if to["version"] == now["version"]:
            return
        if to["step"] in self.snapshots.steps():
            self.snapshots.go_back(to["step"])
        elif to["step"] != now["step"]:
            advice = (
                ""
                if self.agreement
                else (
                    ", and keep the steps that you want to return to with"
                    " stoker.offload(snapshots=) and opt.snapshot()"
                )
            )
            raise Mismatch(
                f"this state_dict refers to step {to['step']}, but the run in {now['store']} is at"
                f" step {now['step']} and keeps no snapshot of that step; go on from step"
                f" {now['step']}{advice}"
            )

    def has_state(self, param: torch.Tensor) -> bool:
        ours = self.by_tensor[param]
        return ours.unit.updated and self._updates_of.get(ours, 0) > 0

    def current_weight(self, param: Param) -> torch.Tensor:
        """A copy, in host memory, of the parameter's weights as forward would see them now."""
        if param in self.pager.held or self.shown.has(param):
            with torch._C.DisableTorchFunction():
                return param.tensor.detach().clone().cpu()
        self.steps.late.catch_up(param.unit.block)
        slot = self.pager.slots.get(param.unit.block)
        if slot is not None and not slot.loading:
            return slot.view(param).clone()
        return self._plane_slice("w", param, param.unit.dtype)

    def restore(self, params: list[Param]) -> None:
        """Points the parameters back at their block's weights in memory, or at their
        placeholders."""
        for param in params:
            place = Place.of(param.tensor)
            self.pager.held.discard(param)
            self.pager.show(param)
            self.shown.watch(param, place)

    def _plane_slice(self, plane: str, param: Param, dtype: torch.dtype) -> torch.Tensor:
        self.steps.late.catch_up(param.unit.block)
        # a decided step is read before it is committed
        where = self.planes.source or self.planes.store
        raw = self.planes.read(
            where,
            f"{plane}/{param.unit.name}",
            param.offset * dtype.itemsize,
            param.numel * dtype.itemsize,
        )
        flat = (
            torch.frombuffer(raw, dtype=dtype) if raw else torch.empty(0, dtype=dtype, device="cpu")
        )
        return torch.as_strided(flat, param.size, param.stride)

    def _moment(self, plane: str, param: Param) -> torch.Tensor:
        """m or v of a parameter, as float32."""
        self.steps.late.catch_up(param.unit.block)
        where, key, moments = (
            self.planes.source or self.planes.store,
            f"{plane}/{param.unit.name}",
            self.algorithm.moments,
        )
        flat = torch.empty(param.numel, dtype=torch.float32, device="cpu")
        at = 0
        for run in moments.runs(param.unit.elements, param.offset, param.numel):
            data = self.planes.read(where, key, run.data_at, run.data_bytes)
            scales = self.planes.read(where, key, run.scales_at, run.scales_bytes)
            flat[at : at + run.count] = moments.decode(plane, run.count, data, scales)
            at += run.count
        return torch.as_strided(flat, param.size, param.stride)

    def full_state(self, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        """One parameter's state as the original optimizer keeps it (float32; sharded as the
        parameter is), plus `master` for bfloat16 weights."""
        param = self.by_tensor[tensor]
        count = self._updates_of.get(param, 0)
        moment = lambda plane: like(self._moment(plane, param), tensor)
        if self.algorithm.name == "sgd":
            return (
                {"momentum_buffer": moment("m")}
                if self.algorithm.momentum
                else {"momentum_buffer": None}
            )
        state = {
            "step": torch.tensor(float(count), device="cpu"),
            "exp_avg": moment("m"),
            "exp_avg_sq": moment("v"),
        }
        if param.unit.dtype == torch.bfloat16:
            state["master"] = like(self.master(tensor), tensor)
        return state

    def master(self, tensor: torch.Tensor) -> torch.Tensor:
        """The exact float32 value of a bfloat16 parameter, from its weight and remainder planes."""
        param = self.by_tensor[tensor]
        weight = self._plane_slice("w", param, torch.bfloat16)
        rest = self._plane_slice("r", param, torch.int16)
        out = torch.empty_strided(param.size, param.stride, dtype=torch.float32, device="cpu")
        _core.optim_join(weight.data_ptr(), rest.data_ptr(), out.data_ptr(), param.numel)
        return out

    def load_full_state(self, entries: dict[torch.Tensor, dict[str, Any]]) -> None:
        """Writes an ordinary optimizer's state into the planes, as one durable commit. An empty
        entry is that of a parameter before its first update; one that has no entry keeps what it
        has."""
        if self.agreement is not None and not self.agreement.opening:
            raise Unsupported(
                "a sharded run takes no state from elsewhere once it has begun; load it into the"
                " optimizer before stoker.offload(), whose load_state_dict() rounds it to the"
                " weights' type, or resume the run itself from its store, which is exact"
            )
        self.steps.abandon()  # what was speculated consumed the old state
        self.flush()
        txn = self.planes.store.begin()
        kinds = {"exp_avg": "m", "momentum_buffer": "m", "exp_avg_sq": "v"}
        for tensor, entry in entries.items():
            param = self.by_tensor.get(tensor)
            if param is None or not param.unit.updated:
                continue
            if not entry:
                self._forget_updates(txn, param)
                continue
            for key, plane in kinds.items():
                if entry.get(key) is not None:
                    self._put_moment(txn, plane, param, local(entry[key]))
            if entry.get("master") is not None and param.unit.dtype == torch.bfloat16:
                master = local(entry["master"]).detach().to(torch.float32)
                master = torch.empty_strided(
                    param.size, param.stride, dtype=torch.float32, device="cpu"
                ).copy_(master)
                weight = torch.empty_strided(
                    param.size, param.stride, dtype=torch.bfloat16, device="cpu"
                )
                rest = torch.empty_strided(
                    param.size, param.stride, dtype=torch.int16, device="cpu"
                )
                _core.optim_split(
                    master.data_ptr(), weight.data_ptr(), rest.data_ptr(), param.numel
                )
                self._put_slice(txn, "w", param, weight)
                self._put_slice(txn, "r", param, rest)
            if "step" in entry:
                self._updates_of[param] = int(entry["step"])
            elif self.algorithm.name == "sgd":
                self._updates_of[param] = max(1, self._updates_of.get(param, 0))
            self.planes.session.invalidate(param.unit.session_id)
        for key, data in self._records().items():
            put(txn, key, data)
        self.buffers.stage(txn)
        try:
            txn.commit("durable").wait()
        except BaseException:
            self.buffers.forget()
            raise
        self._refresh(
            {
                self.by_tensor[tensor].unit.block
                for tensor, entry in entries.items()
                if entry and tensor in self.by_tensor
            }
        )

    def _forget_updates(self, txn, param: Param) -> None:
        """The parameter's state is as before its first update; its weight, master included,
        stays."""
        if not self._updates_of.pop(param, 0):
            return  # its moments are zeros already
        for plane in self.algorithm.planes:
            self._put_moment(txn, plane, param, torch.zeros((), device="cpu"))
        self.planes.session.invalidate(param.unit.session_id)

    def _put_moment(self, txn, plane: str, param: Param, value: torch.Tensor) -> None:
        key, moments = f"{plane}/{param.unit.name}", self.algorithm.moments
        flat = torch.as_strided(
            torch.empty_strided(param.size, param.stride, dtype=torch.float32, device="cpu").copy_(
                value.detach()
            ),
            (param.numel,),
            (1,),
        )
        at = 0
        for run in moments.runs(param.unit.elements, param.offset, param.numel):
            data, scales = moments.encode(plane, flat[at : at + run.count])
            self.planes.write(txn, key, run.data_at, data)
            self.planes.write(txn, key, run.scales_at, scales)
            at += run.count

    def _put_slice(self, txn, plane: str, param: Param, value: torch.Tensor) -> None:
        self.planes.write(
            txn,
            f"{plane}/{param.unit.name}",
            param.offset * value.dtype.itemsize,
            laid_out(param, value),
        )

    def writing_weights(self) -> WeightWriting:
        """Begins to replace weights, as one durable commit."""
        if self.agreement is not None:
            raise Unsupported(
                "a sharded run takes no weights from elsewhere once it has begun; load them into"
                " the model before stoker.offload()"
            )
        self.steps.abandon()  # what was speculated consumed the old weights
        self.flush()
        return WeightWriting(self)

    def write_weights(self, values: dict[Param, torch.Tensor]) -> None:
        writing = self.writing_weights()
        writing.stage(values)
        writing.commit()

    def _refresh(self, blocks: set[Block]) -> None:
        for block in blocks:
            self.pager.versions[block.index] += 1
            self.pager.discard(block)

    def counters(self) -> dict[str, Any]:
        core = self.planes.session.counters()
        activations = self.activations
        moved = (
            (activations.read_bytes, activations.written_bytes)
            if activations is not None
            else (0, 0)
        )
        spilled = self.gradients.moved()
        return {
            "read_bytes": {**core["read_bytes"], "gradients": spilled[0], "activations": moved[0]},
            "written_bytes": {
                **core["written_bytes"],
                "gradients": spilled[1],
                "activations": moved[1],
            },
            "stall_seconds": dict(self.ledger.waiting.seconds),
            "kept": self.steps.kept,
            "redone": self.steps.redone,
            "wasted": self.steps.wasted,
            "dram_bytes_peak": self.runtime.core.budget_peak,
        }

    def setting(self) -> Setting:
        """What the planner plans for."""
        return Setting(self.blocks, self.algorithm, self.planes.layout, self.planes.arena.size)

    def plan(self, machine: Machine | None = None, compute_seconds: float = 0.0) -> dict[str, Any]:
        """planner.plan() of this session, by the recorded order once there is one. `policy`,
        `step`: the one in use now, and its row."""
        if self.agreement is not None:
            raise Unsupported("there is no plan of a sharded run; opt.ledger tells what it does")
        planes, setting, recorder = self.planes, self.setting(), self.pager.recorder
        recorded = max(
            (order.uses for key, order in recorder.orders.items() if key[1] and key[2]),
            key=len,
            default=None,
        )
        away = (
            self.activations.away({block.name: block.index for block in self.blocks})
            if self.activations is not None
            else planner.Away({}, 0)
        )
        away = replace(
            away, again=frozenset(layer.block.index for layer in self.layers if layer.on)
        )
        made = planner.plan(setting, machine, compute_seconds, recorded, self.steps.sequence, away)
        made |= self._policy_now(made)
        made["step"] = made["steps"][made["policy"]]
        made["buffers"] = self.buffers.bytes
        made["dram"] |= {
            "cap": planes.dram_bytes,
            "pages": planes.arena.pages,
            "process": resident_bytes(),
        }
        if self.how.activations != "keep":
            made["activations"] = (
                self.activations.told()
                if self.activations is not None
                else {"mode": self.how.activations, "bytes": {}, "choices": {}}
            )
            made["activations"]["again"] = len(away.again)
        if self.activations is not None:
            made["dram"]["activations"] = self.activations.arena_bytes
        return made

    def _policy_now(self, made: dict[str, Any]) -> dict[str, str]:
        """The policy that the next step has, whatever would be the fastest, and why."""
        steps = self.steps
        now, fastest, of_fastest = steps.active_policy, made["policy"], made["reason"]
        if steps.policy != "auto":
            return {"policy": now, "reason": "as you asked"}
        why = steps.reason or "what auto begins with"
        if "seconds" not in made["steps"][now]:
            return {"policy": now, "reason": why}
        would = f"{fastest} would be the fastest" + (
            " if its updates held" if fastest == "speculate" else ""
        )
        return {
            "policy": now,
            "reason": f"{why}; {of_fastest}" if now == fastest else f"{why}; {would}: {of_fastest}",
        }


def laid_out(param: Param, value: torch.Tensor) -> bytes:
    """The bytes of `value` in the order that the parameter's planes have."""
    data = torch.empty_strided(param.size, param.stride, dtype=value.dtype, device="cpu").copy_(
        value
    )
    return torch.as_strided(data, (param.numel,), (1,)).view(torch.uint8).numpy().tobytes()


class WeightWriting:
    """New weights on their way into the store: all of them or, if it is dropped before commit(),
    none. `txn`: of the step that they belong to."""

    def __init__(self, session: Session, txn: Any = None) -> None:
        self._session = session
        self._txn = txn or session.planes.store.begin()
        self._params: set[Param] = set()

    def stage(self, values: dict[Param, torch.Tensor]) -> None:
        """The float32 master of an element of a bfloat16 weight becomes the element itself. Those
        that have the bits that are there already are not
        written: a checkpoint that is loaded into the run that it was made of changes nothing, and
        leaves the masters as exact as they were.
        """
        session = self._session
        session.shown.wrote(values)
        read = session.planes.read
        for param, value in values.items():
            value = value.detach().to(param.unit.dtype)
            raw = laid_out(param, value)
            old = read(
                self._txn, f"w/{param.unit.name}", param.offset * value.dtype.itemsize, len(raw)
            )
            if raw == old:
                continue
            session._put_slice(self._txn, "w", param, value)
            if param.unit.updated and param.unit.dtype == torch.bfloat16:
                rest = read(self._txn, f"r/{param.unit.name}", param.offset * 2, len(raw))
                words = lambda data: torch.frombuffer(bytearray(data), dtype=torch.int16)
                kept = words(rest)
                kept[words(raw) != words(old)] = 0
                session.planes.write(
                    self._txn, f"r/{param.unit.name}", param.offset * 2, kept.numpy().tobytes()
                )
            self._params.add(param)

    def commit(self) -> None:
        if not self._params:
            self._txn.abandon()
            return
        self._txn.commit("durable").wait()
        self.forget_state()
        self._session._refresh({param.unit.block for param in self._params})

    def forget_state(self) -> None:
        """Of bfloat16 weights the rest of the masters changed as well, which may have been read
        ahead."""
        for unit in {param.unit for param in self._params}:
            if unit.updated:
                self._session.planes.session.invalidate(unit.session_id)
