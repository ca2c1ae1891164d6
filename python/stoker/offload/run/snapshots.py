"""Snapshots: steps of a run that the store keeps beside the current one, and the way back to them.

A snapshot is a name for a committed version: making one moves no bytes, but what it holds stays on
the disk while training goes on. So room is reserved for a number of them when the store is made,
and the newest that many are kept.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from stoker.errors import InvalidArgument, Unsupported
from stoker.offload.division.layout import changing_bytes, store_capacity
from stoker.offload.model.algorithm import Algorithm
from stoker.offload.model.blocks import Block
from stoker.offload.observe.ledger import Waits
from stoker.offload.run.step_record import StepRecord
from stoker.offload.storage import record
from stoker.offload.storage.bring_back import bring_back
from stoker.offload.storage.lineage import Lineage, fresh_name
from stoker.offload.storage.open_store import OpenStore
from stoker.offload.storage.record import META_MODEL, META_STATE

_NAME = "step-"
ONE_RANK = (
    "opt.snapshot() would keep a step of one rank's shards; leave snapshots=0 for a sharded model"
)


def rooms(runtime: OpenStore, blocks: list[Block], algorithm: Algorithm, buffers: int) -> int:
    """For how many snapshots of the model the store has room."""
    spare = runtime.store.info()["capacity_bytes"] - store_capacity(blocks, algorithm, 0, buffers)
    return max(0, spare // changing_bytes(blocks, algorithm, buffers))


def check_room_to_copy(
    runtime: OpenStore, blocks: list[Block], algorithm: Algorithm, kept: int, buffers: int
) -> None:
    """InvalidArgument unless a step can stay in the store while it is copied, beside those kept."""
    if not runtime.store.features()["snapshots"]:
        raise Unsupported(
            f"the store at {runtime.path} cannot keep a step while a checkpoint copies it; "
            "take a local store, or go on without checkpoints"
        )
    if rooms(runtime, blocks, algorithm, buffers) <= kept:
        raise InvalidArgument(
            f"the store at {runtime.path} is too small to keep a step while a checkpoint copies"
            " it. Copy the run into a larger store with `stoker cp`, start a run in a new store"
            " with checkpoints=, or leave checkpoints= out"
        )


def check_room(
    runtime: OpenStore, blocks: list[Block], algorithm: Algorithm, keep: int, buffers: int
) -> None:
    """InvalidArgument unless the store has room for so many snapshots of the model."""
    room = rooms(runtime, blocks, algorithm, buffers)
    if keep > room:
        raise InvalidArgument(
            f"the store at {runtime.path} was made with room for {room} snapshots, not {keep}; pass"
            f" snapshots={room}, or give a new store"
        )


class Snapshots:
    """The snapshots of a session's run."""

    def __init__(
        self,
        keep: int,
        store: Any,
        step_record: StepRecord,
        sharded: bool,
        waiting: Waits,
        flush: Callable[[], None],
        settled: Callable[[], contextlib.AbstractContextManager],
        become: Callable[[dict[str, Any]], None],
    ) -> None:
        """`keep`: how many at most. `flush` makes the newest step durable; within `settled()` it
        is, and what was begun behind it is given up. become(state): the store went to another step,
        whose record this is."""
        self.keep, self._store, self._record, self._sharded = keep, store, step_record, sharded
        self._waiting, self._flush, self._settled = waiting, flush, settled
        self._become = become

    def steps(self) -> list[int]:
        return sorted(
            int(name.removeprefix(_NAME))
            for name in self._store.info()["snapshots"]
            if name.startswith(_NAME)
        )

    def make(self) -> int:
        """Keeps the step as it is now, and forgets the oldest where there are too many."""
        if self._sharded:
            raise InvalidArgument(ONE_RANK)
        if self.keep < 1:
            raise InvalidArgument(
                "the store has no room for snapshots; pass snapshots=1 (or more) to"
                " stoker.offload() when the store is made"
            )
        with self._waiting("checkpoint"):
            self._flush()
            step, there = self._record.step, self.steps()
            if step in there:
                self.drop(step)  # what was attached, or a learning rate, may have changed since
                there.remove(step)
            for old in there[: max(0, len(there) - self.keep + 1)]:
                self.drop(old)
            self._store.snapshot(f"{_NAME}{step}").wait()
            return step

    def drop(self, step: int) -> None:
        with self._waiting("checkpoint"):
            self._store.drop(f"{_NAME}{step}").wait()

    def go_back(self, step: int) -> None:
        """Makes everything what it was at that snapshot, as one durable commit. Other snapshots
        stay."""
        with self._settled():
            self._bring_back(f"{_NAME}{step}")

    def _bring_back(self, name: str) -> None:
        model = record.load(self._store.read_bytes(META_MODEL, snapshot=name))
        then = Lineage.of(model)
        step = record.load(self._store.read_bytes(META_STATE, snapshot=name))["step"]
        lineage = self._record.lineage.back_to(then, step, fresh_name())
        model = {**model, **lineage.members()}
        bring_back(self._store, name, {META_MODEL: record.dump(model)})
        self._record.belongs_to(lineage)
        self._become(record.load(self._store.read_bytes(META_STATE)))
