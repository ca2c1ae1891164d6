"""Agreement: which step the ranks of a sharded run are at (docs/ranks.md is the protocol).

Each rank commits a step to its own store. It keeps a snapshot of the step before until every rank
has told that it committed too. So two stores of a run are at most one step apart, and the one ahead
can go back.
"""

from __future__ import annotations

import contextlib
from typing import Any

from stoker.errors import Mismatch, StokerError
from stoker.offload.ranks.ranks import Ranks
from stoker.offload.storage import record
from stoker.offload.storage.bring_back import bring_back
from stoker.offload.storage.lineage import Lineage, fresh_name
from stoker.offload.storage.open_store import OpenStore
from stoker.offload.storage.record import META_MODEL, META_STATE

_NAME = "agreed-"


class LostStore(Mismatch):
    """A rank's store is gone or empty, and others hold the run. `sentence`: which. `lineage` and
    `step`: what one of the others holds."""

    def __init__(self, sentence: str, lineage: Lineage, step: int) -> None:
        super().__init__(
            f"{sentence} Give each rank the folders it had. If they are lost, pass restore= to"
            " bring all ranks back to a checkpoint, or give all ranks empty folders to start again"
        )
        self.sentence, self.lineage, self.step = sentence, lineage, step


class Agreement:
    """One rank's part of it. `step`: the newest that every rank is known to have committed."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.step = 0
        # the same on all ranks: names of the run, and of this stretch of it
        self.run = self.timeline = ""
        self.fresh = ""  # a name for another run, if a restore makes it one
        self._next_point: str | None = "open"
        self._store: Any = None
        self._keeping: list | None = []  # on its way to be durable; None where it failed
        self.lost: LostStore | None = None  # all ranks must go back to a checkpoint
        self._anew = False  # the store was filled from a checkpoint: older names go

    @property
    def opening(self) -> bool:
        return self._next_point is not None

    def signature(self) -> dict[str, int]:
        """What a rank's store says about whose it is."""
        return {"world": self.ranks.world, "rank": self.ranks.rank}

    # -- opening -----------------------------------------------------------------------------------

    def meet(self, runtime: OpenStore, restores: bool = False) -> bool:
        """Finds out what all stores hold, and brings this one to the step that all of them have.
        False if there is no run. `restores`: a lost store of one rank is no error yet; a checkpoint
        may bring all of them back."""
        self._store = runtime.store
        mine = {**_holds(runtime), "names": [fresh_name(), fresh_name()]}
        found = self.ranks.exchange("open", facts=mine)
        self._next_point = "ready"
        self.run, self.timeline = found[0]["names"]
        self.fresh = self.run
        try:
            step = judge(found)
        except LostStore as error:
            if not restores:
                raise Mismatch(str(error)) from None
            self.lost = error
            return False
        if step is None:
            if mine["run"] is not None:
                _clear(self._store)
            return False
        if mine["step"] > step or not _stands(mine, found):
            bring_back(self._store, f"{_NAME}{step}")
        else:
            self._anew = mine["restored"]
        self.run, self.step = _lineage_of(self._store).run, step
        return True

    def ready(self) -> None:
        """This rank's store is at the step; from here on all ranks train."""
        self.ranks.exchange("ready", facts=self.step)
        self._next_point = None
        if self._anew:  # one of the same step holds what was there before
            for name in self._store.info()["snapshots"]:
                if name.startswith(_NAME):
                    self._store.drop(name).wait()
        self.keep(self.step)
        self.kept()

    def restored(self, step: int, run: str | None) -> None:
        """Each rank's store was filled from a checkpoint of that step, and of that run."""
        self.run, self.step, self._anew = run or self.run, step, True

    def withdraw(self, error: BaseException) -> None:
        """stoker.offload() failed here."""
        if self._next_point is not None:
            self.ranks.tell(self._next_point, error)

    # -- training ----------------------------------------------------------------------------------

    def committed(self, step: int, error: BaseException | None) -> None:
        """This rank has committed the step (or failed to). Returns when all have, and raises on all
        if one has not."""
        self.ranks.exchange(f"commit of step {step}", error)
        with contextlib.suppress(StokerError):  # kept() tries again
            self.keep(step)

    def keep(self, step: int) -> None:
        """Every rank has committed `step`: this is what they go back to from here on, and no
        further."""
        self.step, self._keeping = step, None
        there = [name for name in self._store.info()["snapshots"] if name.startswith(_NAME)]
        name = f"{_NAME}{step}"
        made = [] if name in there else [self._store.snapshot(name)]
        self._keeping = made + [self._store.drop(other) for other in there if other != name]

    def kept(self) -> None:
        """Waits until that is durable. Before the next commit: it would have nothing to go back to.
        What failed is done anew by the next call."""
        if self._keeping is None:
            self.keep(self.step)
        futures, self._keeping = self._keeping or [], None
        failures = []
        for future in futures:
            try:
                future.wait()
            except StokerError as error:
                failures.append(error)
        if failures:
            raise failures[0]
        self._keeping = []

    def go_back(self) -> dict[str, Any]:
        """This rank committed a step that another could not: its store goes back to the one before,
        whose record is returned."""
        bring_back(self._store, f"{_NAME}{self.step}")
        return record.load(self._store.read_bytes(META_STATE))


def judge(found: list[dict[str, Any]]) -> int | None:
    """The step at which a run goes on, of what the stores of all ranks hold; None if there is no
    run, or one that was not made everywhere and so never began. Mismatch if the stores are not
    those of one run."""
    holders = [each for each in found if each["run"] is not None]
    for each in holders:
        if each["world"] is None:
            raise Mismatch(
                f"the run in {each['path']} was made by one process with the whole model; give a"
                " sharded model another store"
            )
    begun = lambda each: each["agreed"] or (each["step"] > 0 and not each["restored"])
    if not any(map(begun, holders)) and not all(
        each["restored"] and _stands(each, found) for each in found
    ):
        return None
    found = [each if _stands(each, found) else _before(each) for each in found]
    holders = [each for each in found if each["run"] is not None]
    for each in holders:
        if each["world"] != len(found):
            raise Mismatch(
                f"the run in {each['path']} was made by {each['world']} processes, but now there "
                f"are {len(found)}. Resume it with as many, or move it to a new store through a "
                f"checkpoint (restore=)"
            )
    first = holders[0]
    for rank, each in enumerate(found):
        if each["run"] is None:
            continue
        if each["rank"] != rank:
            raise Mismatch(
                f"the store in {each['path']} belongs to rank {each['rank']}, but rank {rank}"
                " opened it: give each rank the folders it had"
            )
        if each["run"] != first["run"]:
            raise Mismatch(
                f"the stores in {first['path']} and {each['path']} belong to different runs; give"
                " each rank the folders it had"
            )
    for rank, each in enumerate(found):
        if each["run"] is None:
            raise LostStore(
                f"rank {rank} finds no run in {each['path']}, but {first['path']} holds one at"
                f" step {first['step']}.",
                Lineage.of(first),
                first["step"],
            )
    return _common(found)


def _common(found: list[dict[str, Any]]) -> int:
    """The step that all stores hold, or still hold."""
    step = min(each["step"] for each in found)
    last = next(each for each in found if each["step"] == step)
    for each in found:
        if str(step) not in each["timelines"] or each["step"] > step + 1:
            raise Mismatch(
                f"the store in {last['path']} is at step {step}, the one in {each['path']} at step"
                f" {each['step']}, which cannot go back that far. One of them is an old copy:"
                " give each rank the folders it had last"
            )
        if each["timelines"][str(step)] != last["timelines"][str(step)]:
            raise Mismatch(
                f"step {step} in {each['path']} and in {last['path']} come from different"
                " continuations of the run. One of them is an old copy: give each rank the folders"
                " it had last"
            )
    return step


def _stands(each: dict[str, Any], found: list[dict[str, Any]]) -> bool:
    """Whether a rank's step counts. One from a checkpoint does if all ranks had it from there."""
    step = str(each["step"])
    return not each["restored"] or all(
        other["timelines"].get(step) == each["timelines"][step] for other in found
    )


def _before(each: dict[str, Any]) -> dict[str, Any]:
    """What a rank's store held before it was filled from a checkpoint that others did not get."""
    if not each["agreed"]:
        return each | {"run": None}
    step = max(each["agreed"])
    was = {"left": {}, **each["before_that"], "step": step}
    return each | was | {"timelines": each["timelines"] | each["before"]}


def _holds(runtime: OpenStore) -> dict[str, Any]:
    """What this rank's store holds, as judge() takes it."""
    store = runtime.store
    nothing = {
        "path": runtime.path,
        "run": None,
        "left": {},
        "world": None,
        "rank": None,
        "step": 0,
        "agreed": [],
        "restored": False,
        "timelines": {},  # by step
        "before": {},  # those of the steps in `agreed`
        "before_that": {},  # run and those it left, of these steps: a restore may bring others
    }
    if not runtime.holds(META_MODEL):
        return nothing
    model = record.load(store.read_bytes(META_MODEL))
    agreed = [name for name in store.info()["snapshots"] if name.startswith(_NAME)]
    states = [
        record.load(store.read_bytes(META_STATE)),
        *(record.load(store.read_bytes(META_STATE, snapshot=name)) for name in agreed),
    ]
    return nothing | {
        **Lineage.of(model).members(),
        **model.get("ranks", {}),
        "step": states[0]["step"],
        "restored": states[0].get("restored", False),
        "agreed": sorted(int(name.removeprefix(_NAME)) for name in agreed),
        "timelines": {str(state["step"]): state.get("timeline") for state in reversed(states)},
        "before": {str(state["step"]): state.get("timeline") for state in states[1:]},
        "before_that": _lineage_of(store, agreed[-1]).members() if agreed else {},
    }


def _lineage_of(store: Any, snapshot: str = "") -> Lineage:
    return Lineage.of(record.load(store.read_bytes(META_MODEL, snapshot=snapshot)))


def _clear(store: Any) -> None:
    """Removes what a run that was not made everywhere left here."""
    keys = [each["key"] for each in store.list()]
    if keys:
        txn = store.begin()
        for key in keys:
            txn.remove(key)
        txn.commit("durable").wait()
