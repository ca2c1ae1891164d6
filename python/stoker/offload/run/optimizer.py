"""OffloadedOptimizer: a torch.optim.Optimizer whose state lives in the store."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Any, Iterator

import torch

from stoker.errors import InvalidArgument, Mismatch, Unsupported
from stoker.offload.run import closing, report
from stoker.offload.run.clip import clip
from stoker.offload.run.reference import refer, reference

if TYPE_CHECKING:
    from stoker.offload.division.machine import Machine
    from stoker.offload.planning.planner import Setting
    from stoker.offload.run.session import Session

CAPTURED = (
    "params",
    "initial_lr",
    "foreach",
    "fused",
    "capturable",
    "differentiable",
    "amsgrad",
    "decoupled_weight_decay",
)

HOOKS = [
    f"_optimizer_{of}_{when}_hooks"
    for of in ("step", "state_dict", "load_state_dict")
    for when in ("pre", "post")
]


class OffloadedOptimizer(torch.optim.Optimizer):
    """Takes the place of the optimizer it was made from: same param_groups (the same dictionaries),
    same step().

    Beyond torch's interface: clip_grad_norm_, accumulating(), attach(), flush(), snapshot(),
    drop_snapshot(), snapshots, committed_step, step_count, ledger, plan(), close().
    """

    def __init__(self, session: Session, original: torch.optim.Optimizer) -> None:
        self._session = session
        super().__init__(original.param_groups, original.defaults)
        for hooks in HOOKS:
            # the same dictionaries: what was registered before stoker.offload() goes on running
            setattr(self, hooks, getattr(original, hooks))
        self._original = original
        self.original_type = type(original)

    def __getstate__(self) -> dict[str, Any]:
        # Asked by copy, deepcopy and pickle alike; a copy would have no store.
        raise Unsupported(
            "an offloaded optimizer cannot be copied or pickled, since its state is in the store; "
            "keep state_dict(), or save the run with stoker.Checkpoints"
        )

    # -- torch's interface -------------------------------------------------------------------------

    def step(self, closure=None):
        """Decides the step: every parameter with a gradient is updated, exactly as the original
        optimizer would."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            self._session.step()
        self._original._opt_called = True  # for schedulers made before stoker.offload()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._session.gradients_dropped(kept=not set_to_none)
        super().zero_grad(set_to_none)

    def add_param_group(self, param_group: dict) -> None:
        if getattr(self, "_original", None) is not None:
            raise InvalidArgument(
                "parameters cannot be added after stoker.offload(); add the group first, then"
                " offload"
            )
        super().add_param_group(param_group)

    def state_dict(self, full: bool = False) -> dict[str, Any]:
        """References by default: which store and which committed step hold the state (`stoker`),
        and the param_groups. full=True materialises what the original optimizer's state_dict()
        would hold, all in memory. Of a sharded model every rank must call it.
        """
        for hook in self._optimizer_state_dict_pre_hooks.values():
            hook(self)
        with self.ledger.waiting("checkpoint"):
            state = self._state_dict(full)
        for hook in self._optimizer_state_dict_post_hooks.values():
            changed = hook(self, state)
            state = state if changed is None else changed
        return state

    def _state_dict(self, full: bool) -> dict[str, Any]:
        self._session.flush()
        groups, start = [], 0
        for group in self.param_groups:
            packed = {key: value for key, value in group.items() if key != "params"}
            packed["params"] = list(range(start, start + len(group["params"])))
            start += len(group["params"])
            groups.append(packed)
        state: dict[Any, Any] = {}
        if full:
            order = [param for group in self.param_groups for param in group["params"]]
            state = {
                i: self._session.stored.full_state(param)
                for i, param in enumerate(order)
                if self._session.record.has_state(param)
            }
            return {"state": state, "param_groups": groups}
        return {"state": state, "param_groups": groups, "stoker": reference(self._session)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Accepts references to this run (nothing moves, or it goes back to a snapshot), or a full
        state_dict of the original optimizer."""
        self._session.check_open()
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            changed = hook(self, state_dict)
            state_dict = state_dict if changed is None else changed
        sizes = lambda groups: [len(group["params"]) for group in groups]
        if sizes(self.param_groups) != sizes(state_dict["param_groups"]):
            raise Mismatch(
                f"the state_dict has parameter groups with {sizes(state_dict['param_groups'])}"
                f" parameters, the optimizer has groups with {sizes(self.param_groups)}; give the"
                " optimizer the groups that it had when the state_dict was made"
            )
        if "stoker" in state_dict:
            refer(self._session, state_dict["stoker"])
        for group, loaded in zip(self.param_groups, state_dict["param_groups"]):
            group.update({key: value for key, value in loaded.items() if key != "params"})
        if "stoker" not in state_dict:
            order = [param for group in self.param_groups for param in group["params"]]
            entries = {int(i): entry for i, entry in state_dict["state"].items()}
            # as torch: what it lacks begins anew
            self._session.replacing.load_full_state(
                {param: entries.get(i, {}) for i, param in enumerate(order)}
            )
        for hook in self._optimizer_load_state_dict_post_hooks.values():
            hook(self)

    # -- Stoker's ----------------------------------------------------------------------------------

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, error_if_nonfinite: bool = False) -> torch.Tensor:
        """Scales all gradients so that their joint 2-norm is at most max_norm; returns the norm
        before (float64 scalar).

        Squares are summed in float64, 64 Ki elements at a time, in parameter order: independent of
        threads and blocks. Of a sharded model each rank sums its shards, and all of them the same
        sums in the same order: every rank must call it, and gets the same norm. Speculation goes by
        max_norm: in backward of the steps to come it stops where their norm passes it, until a step
        is made without a clip.
        """
        return clip(self._session, float(max_norm), error_if_nonfinite)

    @contextlib.contextmanager
    def accumulating(self) -> Iterator[None]:
        """Backwards inside are not the last before step(): nothing is updated early."""
        with self._session.gradients.accumulating():
            yield

    def attach(self, **objects: Any) -> None:
        """Objects with state_dict()/load_state_dict() that belong to a step (scheduler=...,
        loader=..., scaler=...). After a resume their state is loaded into them here.

        What can be iterated (a loader, a sampler) is read at step(), before it hands out the batch
        of the next step. So are the random states. Everything else (schedulers, scalers, averages,
        counters) is read when the next forward begins or at flush(). So advance the former before
        step() and the latter between step() and the next forward, as usual loops do.

        A stoker.data.Loader also tells each row of the ledger what its batches waited for: its
        `account` goes into the row's `loaders`, under the name that it is attached by.
        """
        self._session.check_open()
        self._session.record.attach(objects)

    def flush(self) -> None:
        """Closes the decided step and waits until it is durable. Of a sharded model every rank must
        call it."""
        self._session.flush()

    def snapshot(self) -> int:
        """Keeps the present step. load_state_dict() of a state_dict() from now goes back to it,
        weights and all else included. That works as long as it is one of the newest `snapshots`
        (stoker.offload). Closes the step first; returns its number.
        """
        self._session.check_open()
        return self._session.snapshots.make()

    def drop_snapshot(self, step: int) -> None:
        """Gives up a step that snapshot() kept."""
        self._session.check_open()
        self._session.snapshots.drop(step)

    @property
    def snapshots(self) -> list[int]:
        """The steps that the store keeps, oldest first."""
        self._session.check_open()
        return self._session.snapshots.steps()

    def close(self) -> None:
        """flush(), gives the model its placeholders for good and releases memory, threads and the
        store's lock. Of a sharded model, whose shards stay, every rank must call it."""
        closing.close(self._session)

    @property
    def committed_step(self) -> int:
        """The step that a crash now would return to."""
        return self._session.committed_step()

    @property
    def step_count(self) -> int:
        """Decided steps."""
        return self._session.step_count

    @property
    def ledger(self):
        return self._session.ledger

    def restart_ledger(self) -> None:
        """Behind an evaluation: what was read and passed since the first call of the model that
        trains nothing is in no row. Where there was no such call, nothing since the last row is."""
        self._session.check_open()
        self._session.ledger.restart(self._session.counters())

    def trace(self, path: str | os.PathLike) -> None:
        """From now until the next step is decided, notes what disk, kernels and this thread do.
        Writes it to `path` as a Chrome trace: JSON that chrome://tracing and Perfetto show."""
        with self._session.lock:
            self._session.check_open()
            self._session.tracing.begin(path)

    def setting(self) -> Setting:
        """The model and the division of memory, as planner.plan() takes them."""
        self._session.check_open()
        return report.setting(self._session)

    def plan(self, machine: Machine | None = None, compute_seconds: float = 0.0) -> dict[str, Any]:
        """What a step will move, and on a known machine how long it takes: parameters, state by
        class, how dram is divided, and in `step` the items of a ledger row. compute_seconds: of
        forward and backward with nothing beside them.
        """
        self._session.check_open()
        return report.plan(self._session, machine, compute_seconds)
