"""Brings checkpoints back: into memory, or into the stores of stoker.offload()."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from typing import Any

from torch import nn

from stoker import _core
from stoker.checkpoint import planes
from stoker.checkpoint.candidates import Candidates, first_of, skipped
from stoker.checkpoint.divided import Divided, is_divided
from stoker.checkpoint.loading import Restored, load
from stoker.checkpoint.manifest import Name
from stoker.checkpoint.pace import Restarts
from stoker.checkpoint.reading import Reader
from stoker.checkpoint.together import Together
from stoker.errors import Corruption, Mismatch, NotFound, StokerError
from stoker.offload.model.blocks import Block
from stoker.offload.ranks.agreement import Agreement
from stoker.offload.storage.lineage import Lineage, fresh_name

log = logging.getLogger("stoker")


class Restoring:
    """Of one Checkpoints. `wanted`: optimizers, loader and extra, as loading.load() takes them."""

    def __init__(self, candidates: Candidates, runtime: _core.Runtime, restarts: Restarts) -> None:
        self._candidates, self._runtime, self._restarts = candidates, runtime, restarts

    def into_memory(
        self, step: int | None, model: nn.Module | None, wanted: tuple[Any, ...]
    ) -> Restored | None:
        begin = time.monotonic()
        for reader in self._candidates.readers(step):
            try:
                restored = load(reader, model, *wanted)
                self._restarts.learn(reader.manifest.writer, time.monotonic() - begin)
                return restored
            except (Corruption, NotFound) as error:
                skipped(error)
        self._candidates.none_was_sound(step)
        return None

    def into_memory_together(
        self, ranks: Together, step: int | None, model: nn.Module, wanted: tuple[Any, ...]
    ) -> Restored | None:
        """All ranks load the same one, or go on to the same older one."""
        readers, passed = self._candidates.readers(step), None
        while True:
            found = None
            if ranks.leads:
                found = ranks.front.guard("restore", lambda: next(readers, None))
            told, _ = self._candidates.agreed(ranks.front, step, found)
            if told is None:
                self._candidates.none_for_all(ranks.front, step, passed)
                return None
            restored, error, begin = None, None, time.monotonic()
            try:
                reader = found or self._candidates.reader_of(Name.of(told), ranks.rank)
                restored = load(reader, model, *wanted)
            except (Corruption, NotFound) as caught:
                error = caught
            except BaseException as caught:
                ranks.front.tell("restored", caught)
                raise
            errors = ranks.front.exchange("restored", facts=error and str(error)[:2000])
            if not any(errors):
                self._restarts.learn(reader.manifest.writer, time.monotonic() - begin)
                return restored
            passed = first_of(errors)
            skipped(error or StokerError(passed))

    def into_store(self, store: Any, blocks: list[Block], step: int | None) -> bool:
        """See Checkpoints.fill()."""
        held, begin, named = planes.held_in(store), time.monotonic(), step is not None
        for reader in self._candidates.readers(step):
            self._restarts.learn(reader.manifest.writer, 0.0)
            try:
                planes.check_not_another(reader, store, blocks)
                told = planes.told_of(reader)
                if not planes.takes(held, told, named, store):
                    return False
                lineage = planes.lineage_after(held, told, named, fresh_name())
                if is_divided(reader):
                    run = Divided(reader, blocks, None)
                    run.stage(store, self._runtime, lineage).commit("durable").wait()
                else:
                    planes.check_model(reader, blocks)
                    planes.write_run(reader, store, self._runtime, lineage)
                planes.tell_replaced(held, told, store)
                self._restarts.took(time.monotonic() - begin)
                return True
            except (Corruption, NotFound) as error:
                skipped(error)
        self._candidates.none_was_sound(step)
        return False

    def into_stores(
        self, store: Any, blocks: list[Block], agreement: Agreement, step: int | None
    ) -> bool:
        """Each rank fills its own store, all of them from one checkpoint."""
        line = agreement.ranks
        readers, leads, named = self._candidates.readers(step), line.rank == 0, step is not None
        held, begin, lost = planes.held_in(store), time.monotonic(), agreement.lost
        # All ranks must decide alike. Unless one is lost the stores are at one step.
        common = held if lost is None else planes.Held(lost.step, lost.lineage)
        passed: str | None = None
        while True:
            found = mine = None
            if leads:
                found, mine = line.guard("restore", lambda: _next_said(readers))
            name, said = self._candidates.agreed(line, step, found, mine)
            if name is None:
                self._candidates.none_for_all(line, step, passed)
                if lost is not None:
                    raise Mismatch(str(lost))
                return False
            told = planes.Told(said[0], Lineage(*said[1]), said[2])
            decide = lambda told=told: planes.takes(common, told, named, store)
            # before any of them reads what it may not need
            if not line.guard("restored", decide) and lost is None:
                return False
            if not named and planes.is_abandoned(common, told):
                passed = f"{told.where} is of a step that the run went back from"
                continue
            lineage = planes.lineage_after(common, told, named, agreement.fresh)
            txn = error = None
            try:
                reader = found or self._candidates.reader_of(Name.of(name), line.rank)
                run = Divided(reader, blocks, agreement)
                planes.check_not_another(reader, store, blocks)
                txn = run.stage(store, self._runtime, lineage)
            except (Corruption, NotFound) as caught:
                error = caught
            except BaseException as caught:
                line.tell("restored", caught)
                raise
            try:
                errors = line.exchange("restored", facts=error and str(error)[:2000])
            except BaseException:
                if txn is not None:
                    txn.abandon()
                raise
            if not any(errors):
                txn.commit("durable").wait()
                agreement.restored(told.step, lineage.run)
                planes.tell_replaced(held, told, store)
                if lost is not None and leads:
                    log.warning(
                        "%s All ranks go back to step %d, from %s",
                        *(lost.sentence, told.step, reader.where),
                    )
                self._restarts.learn(reader.manifest.writer, 0.0)
                self._restarts.took(time.monotonic() - begin)
                return True
            if txn is not None:
                txn.abandon()
            passed = first_of(errors)
            skipped(error or StokerError(passed))


def _next_said(readers: Iterator[Reader]) -> tuple[Reader | None, list[Any] | None]:
    """The next checkpoint that says of what run it is, and that."""
    for reader in readers:
        try:
            return reader, _said_of(reader)
        except Corruption as error:
            skipped(error)
    return None, None


def _said_of(reader: Reader) -> list[Any]:
    """What other ranks are told of a run; they make a planes.Told of it."""
    told = planes.told_of(reader)
    return [told.step, [told.lineage.run, told.lineage.left], told.where]
