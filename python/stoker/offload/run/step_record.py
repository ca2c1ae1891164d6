"""What belongs to a step beside weights and the optimizer's state, and is committed with it."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import torch

from stoker import _core
from stoker.errors import InvalidArgument, Mismatch
from stoker.offload.model.algorithm import Algorithm, hyper
from stoker.offload.model.blocks import Block, Param, difference, signature
from stoker.offload.ranks.agreement import Agreement
from stoker.offload.storage import record
from stoker.offload.storage.buffers import Buffers
from stoker.offload.storage.lineage import Lineage
from stoker.offload.storage.open_store import OpenStore
from stoker.offload.storage.record import META_MODEL, META_STATE

FORMAT = 2  # 1 has the buffers in a JSON object, and goes on as 2


def check_stored(runtime: OpenStore, blocks: list[Block], algorithm: Algorithm) -> Algorithm:
    """The algorithm with the stored run's seed. Mismatch unless that run is of this model and
    optimizer."""
    stored = record.load(runtime.store.read_bytes(META_MODEL))
    if stored["format"] not in (1, FORMAT):
        raise Mismatch(
            f"the run in {runtime.path} has format {stored['format']}, but this Stoker reads"
            f" formats 1 and {FORMAT}; use a newer Stoker"
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
            f" {algorithm.name}; resume with that optimizer, or give another store"
        )
    if stored["momentum"] != algorithm.momentum:
        had, has = ("with", "none") if stored["momentum"] else ("without", "some")
        raise Mismatch(
            f"the run in {runtime.path} was trained {had} momentum, but this optimizer has "
            f"{has}; make the optimizer as it was then"
        )
    return replace(algorithm, seed=stored.get("seed", 0))


def _is_source(thing: Any) -> bool:
    """Whether an attached object hands out batches (a loader, a sampler) rather than following the
    optimizer."""
    return hasattr(thing, "__iter__") or hasattr(thing, "__next__")


class StepRecord:
    """Counters, parameter groups, buffers, random states, and the objects that were attached."""

    def __init__(
        self,
        original: torch.optim.Optimizer,
        params: list[Param],
        blocks: list[Block],
        algorithm: Algorithm,
        buffers: Buffers,
        device: torch.device,
        agreement: Agreement | None,
    ) -> None:
        """`device`: on which the model computes."""
        self._params, self._blocks, self._algorithm = params, blocks, algorithm
        self.buffers, self._device, self._agreement = buffers, device, agreement
        self._by_tensor = {param.tensor: param for param in params}
        self._group_of = {
            param: group for group in original.param_groups for param in group["params"]
        }
        self.lineage = Lineage()  # tells this run from others in the same place
        self.step = 0
        self.committed = 0  # the step that a crash returns to
        self.updates: dict[Param, int] = {}  # torch's per-parameter step
        self._attached: dict[str, Any] = {}
        # their states then, until a record holds later ones
        self._when_attached: dict[str, Any] = {}
        self._restored: dict[str, Any] = {}
        # until the first step: what making a scheduler anew may have overwritten
        self._resumed_groups: list[dict] = []
        # what a loop moves on before its next forward
        self.at_step: dict[str, Any] = {"rng": record.rng_state(), "attached": {}}
        self._format = FORMAT  # of the run in the store

    def belongs_to(self, lineage: Lineage) -> None:
        self.lineage = lineage

    def decided(self, updated: list[Param], at_step: dict[str, Any]) -> None:
        """A step that updates these parameters; `at_step` is what now() gave before it."""
        for param in updated:
            self.updates[param] = self.updates.get(param, 0) + 1
        self.step += 1
        self.at_step = at_step

    def lost(self) -> None:
        """The step decided last could not be committed."""
        self.step -= 1

    def returns_to(self, step: int) -> None:
        """A crash from now on returns to this step."""
        self.committed = step

    def has_state(self, tensor: torch.Tensor) -> bool:
        """Whether the parameter was ever updated."""
        param = self._by_tensor[tensor]
        return param.unit.updated and self.updates.get(param, 0) > 0

    def groups(self) -> list[dict]:
        return list({id(group): group for group in self._group_of.values()}.values())

    def members(self) -> list[list[str]]:
        """The names of the trained parameters of each group."""
        params = [
            [self._by_tensor[tensor] for tensor in group["params"]] for group in self.groups()
        ]
        return [[param.name for param in group if param.unit.updated] for group in params]

    def hyper_of(self, param: Param) -> _core.Hyper:
        return hyper(self._group_of[param.tensor], self._algorithm, self.updates.get(param, 0) + 1)

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
                for group, stored in zip(self.groups(), self._resumed_groups):
                    # a scheduler's constructor set the learning rate of step 0
                    group.update(stored)
            self._when_attached[name] = state
            if _is_source(thing):
                self.at_step["attached"][name] = thing.state_dict()

    def loaders(self) -> dict[str, Any]:
        """For the ledger: the accounts of attached loaders since the step before."""
        accounts = {
            name: thing.account.take()
            for name, thing in self._attached.items()
            if hasattr(thing, "account")
        }
        return {"loaders": accounts} if accounts else {}

    def now(self) -> dict[str, Any]:
        """What draws the next batch moves on between step() and the next forward, so its state is
        taken at step()."""
        sources = {
            name: thing.state_dict() for name, thing in self._attached.items() if _is_source(thing)
        }
        # a copy: it may be live
        return {"rng": record.rng_state(), "attached": record.load(record.dump(sources))}

    def objects(self) -> dict[str, bytes]:
        """The record that closes a step, as objects to write."""
        attached = {
            name: thing.state_dict()
            for name, thing in self._attached.items()
            if not _is_source(thing)
        }
        records = {
            META_STATE: record.dump(
                {
                    "step": self.step,
                    "updates": {p.name: n for p, n in self.updates.items()},
                    "groups": [
                        {k: v for k, v in g.items() if k != "params"} for g in self.groups()
                    ],
                    "buffers": self.buffers.table(),
                    "attached": {**attached, **self.at_step["attached"]},
                    "rng": self.at_step["rng"],
                    "environment": record.environment(self._device),
                    **({"timeline": self._agreement.timeline} if self._agreement else {}),
                }
            )
        }
        if self._format != FORMAT:
            records[META_MODEL] = record.dump(self.model())
            self._format = FORMAT
        return records

    def model(self) -> dict[str, Any]:
        algorithm = self._algorithm
        kept = {"moments": algorithm.moments.name, "seed": algorithm.seed}
        ranks = {"ranks": self._agreement.signature()} if self._agreement else {}
        return {
            "format": FORMAT,
            **self.lineage.members(),
            **ranks,
            "algorithm": algorithm.name,
            "momentum": algorithm.momentum,
            **kept,
            "groups": self.members(),
            **signature(self._blocks),
        }

    def check_members(self, runtime: OpenStore) -> None:
        """Mismatch unless each parameter is in the group that it was in: it would go on with the
        hyperparameters of another."""
        stored = record.load(runtime.store.read_bytes(META_MODEL)).get("groups")
        if stored is None:
            return  # the run was made before this was noted
        then = {name: number for number, names in enumerate(stored) for name in names}
        for number, names in enumerate(self.members()):
            for name in names:
                if then[name] != number:
                    raise Mismatch(
                        f"the run in {runtime.path} has {name} in parameter group"
                        f" {then[name]}, but the optimizer has it in group {number}: it would get"
                        " the wrong hyperparameters. Give the optimizer the same groups in the"
                        " same order"
                    )

    def take_up(self, state: dict[str, Any], store: Any) -> None:
        """Counters, hyperparameters, buffers and random states become those of the record that
        closed the last committed step."""
        self.step = state["step"]
        names = {p.name: p for p in self._params}
        self.updates = {names[name]: count for name, count in state["updates"].items()}
        for group, stored in zip(self.groups(), state["groups"]):
            group.update(stored)
        self.buffers.load(store, state["buffers"])
        self._format = 1 if isinstance(state["buffers"], bool) else FORMAT
        record.set_rng_state(state["rng"])
        self.at_step = {"rng": state["rng"], "attached": {}}

    def resume(self, state: dict[str, Any], runtime: OpenStore) -> None:
        """Goes on at the last committed step, whose record is `state`. Mismatch where the optimizer
        has other groups."""
        if len(self.groups()) != len(state["groups"]):
            raise Mismatch(
                f"the run in {runtime.path} has {len(state['groups'])} parameter groups, but the "
                f"optimizer has {len(self.groups())}; make the optimizer as it was then"
            )
        self.check_members(runtime)
        self.take_up(state, runtime.store)
        self._resumed_groups = state["groups"]
        self._restored = state["attached"]

    def warn_of_unattached(self) -> None:
        """Before the first step since a resume: the run may hold state that nobody asked for."""
        names = sorted(self._restored) if self._resumed_groups else []
        if names:
            warnings.warn(
                f"the run holds the state of {', '.join(names)}, but nothing of that name is "
                f"attached, so that state is dropped. Call opt.attach({names[0]}=...) before the"
                " first step",
                stacklevel=6,
            )

    def closed(self) -> None:
        """The first step since a resume is decided."""
        self._resumed_groups = []

    def take_back(self, state: dict[str, Any], store: Any) -> None:
        """Everything becomes that of an earlier step, whose record is `state`; attached objects
        too."""
        attached = {**self._when_attached, **state["attached"]}
        for name, thing in self._attached.items():
            thing.load_state_dict(attached[name])
        self.take_up(state, store)  # behind the schedulers, which may set a learning rate
        self.at_step["attached"] = {
            name: attached[name] for name, thing in self._attached.items() if _is_source(thing)
        }
