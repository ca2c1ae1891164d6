"""stoker.Checkpoints: saves that run beside training, and the way back from them."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import secrets
import signal
import socket
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

import torch
from torch import nn

from stoker import _core
from stoker.checkpoint import gate, planes
from stoker.checkpoint import state as states
from stoker.checkpoint.commits import (
    check_newest,
    commit,
    composition_of,
    copy_checkpoint,
    removable,
)
from stoker.checkpoint.divided import Divided, is_divided
from stoker.checkpoint.grace import Grace
from stoker.checkpoint.handle import Handle
from stoker.checkpoint.in_memory import InMemory
from stoker.checkpoint.in_place import state_in_memory
from stoker.checkpoint.manifest import File, Manifest, Name
from stoker.checkpoint.pace import COPYING_AT_MOST, Costs, Pace, Rests
from stoker.checkpoint.parts import Edited
from stoker.checkpoint.reading import Reader
from stoker.checkpoint.reduction import Reduction
from stoker.checkpoint.retention import Keep
from stoker.checkpoint.sharded import Share, distribute, places_of
from stoker.checkpoint.shards import is_sharded, local
from stoker.checkpoint.state import Contents, Run
from stoker.checkpoint.together import Together
from stoker.checkpoint.unchanged import Before
from stoker.checkpoint.workspace import Commits, Ring, Tier
from stoker.errors import (
    Corruption,
    InvalidArgument,
    Mismatch,
    NotFound,
    StokerError,
    Unsupported,
)
from stoker.offload.storage import record
from stoker.offload.storage.lineage import Lineage, fresh_name
from stoker.offload.model.blocks import Block
from stoker.offload.ranks.agreement import Agreement
from stoker.offload.ranks.ranks import Ranks, sharded_modules
from stoker.offload.run.optimizer import OffloadedOptimizer
from stoker.offload.division.amounts import parse_bytes
from stoker.offload.run.snapshots import check_room_to_copy

log = logging.getLogger("stoker")
_SNAPSHOT = "checkpoint-"
# Those of this process: it waits at its end for what they save.
_all: weakref.WeakSet[Checkpoints] = weakref.WeakSet()


@dataclass(frozen=True)
class Restored:
    """What restore() found. `extra`: the plain values of `extra` that were saved. Where a run of
    stoker.offload() went into memory, also the states of what was attached to it, by name."""

    step: int
    folder: str
    tier: str
    extra: dict[str, Any]
    manifest: Manifest


@dataclass(frozen=True)
class At:
    """The checkpoint of one step."""

    checkpoints: Checkpoints
    step: int

    def fill(self, store: Any, blocks: list[Block], agreement: Agreement | None = None) -> bool:
        return self.checkpoints.fill(store, blocks, agreement, self.step)


class Checkpoints:
    """Checkpoints of a run in a store, and copies of them in others.

        ckpt = stoker.Checkpoints("dir:/nvme0/run", keep=3, also=["s3://bucket/run"])
        restored = ckpt.restore(model=model, optimizer=opt)  # None if there is none
        for step in range(restored.step if restored else 0, steps):
            ...
            opt.step()
            ckpt.save(step + 1, model=model, optimizer=opt)
        ckpt.close()

    store: a composition string ("dir:/folder", "s3://bucket/prefix", "local:/folder"); a plain path
    means `dir:`. A local store has a capacity: `stoker create` makes it first. A folder of the
    store is one checkpoint: plain safetensors files that transformers loads, the rest beside them,
    and a manifest with a hash of every byte.

    keep: how many of the newest stay, or a stoker.Keep with more rules. `also`: other stores that
    get a copy of each, in the background; `keep` holds for each by itself.

    every: None saves at each save(); a number, at steps that are multiples of it. "auto" saves as
    often as loses the least time, by what a save costs and how often runs fail. `failures_every`
    gives the latter in seconds; by default it is learned from restarts. Each store of `also` has a
    pace of its own.

    staging: bytes of memory for bytes on their way ("256MiB"). "full" copies all of the state in
    save(), for optimizers that are not torch's own, and loops that edit weights by themselves.

    reduce: whether copies in stores of `also` get smaller. "auto": packs do (optimizer state, the
    planes of an offloaded run) where the store is so slow that it pays, by measured rates. "on":
    always. "all": the weights too; then transformers cannot load that folder before `stoker ckpt
    export`. "off": never. All readers here take such copies like others.

    grace: seconds. On SIGTERM the next save() saves whether one is due or not, and waits that long
    until it is durable. It ends the run by SystemExit(143), with a sentence in the log. A second
    SIGTERM ends at once. None leaves SIGTERM alone.

    Errors of a background save are logged at once and raised by the next call.
    """

    def __init__(
        self,
        store: str | os.PathLike,
        *,
        keep: int | Keep = 3,
        every: int | Literal["auto"] | None = None,
        also: list[str] | tuple[str, ...] = (),
        staging: int | str = "256MiB",
        failures_every: float | None = None,
        grace: float | None = None,
        reduce: Literal["auto", "on", "off", "all"] = "auto",
    ) -> None:
        if every is not None and every != "auto" and not (isinstance(every, int) and every > 0):
            raise InvalidArgument(f'every={every!r}: give a number of steps, "auto" or None')
        self._reduction = Reduction(reduce)
        self.keep = keep if isinstance(keep, Keep) else Keep(last=keep)
        self._every, self._full = every, staging == "full"
        staging_bytes = parse_bytes("staging", "256MiB" if self._full else staging)
        budget = 4 * staging_bytes + (1 << 30)
        self._runtime = _core.Runtime(threads=2, budget_bytes=budget)
        self._ring = Ring(self._runtime, staging_bytes)
        compositions = [composition_of(each) for each in (store, *also)]
        if len(set(compositions)) != len(compositions):
            raise InvalidArgument("also= names a store twice; name each store once")
        self._tiers: list[Tier] = []
        try:
            for each in compositions:
                self._tiers.append(Tier(each, self._runtime))
        except BaseException:
            self.close()
            raise
        self._thread: threading.Thread | None = None
        self._handle: Handle | None = None
        self._just: Name | None = None  # what this run saved last
        self._failed: BaseException | None = None
        self._pace = Pace(failures_every)
        self._copying = {each: Pace(failures_every) for each in compositions[1:]}
        self._behind: dict[str, Name] = {}  # what tiers did not get yet
        self._restarted = self._told = False
        self._anew: set[str] = set()  # tiers whose newest is damaged: the next takes no file of it
        self._ends: float | None = None  # when a run that got SIGTERM must have ended
        self.costs = Costs()
        self._grace = Grace(grace) if grace is not None else None
        self._attempt = max(
            (name.attempt for tier in self._tiers for name in tier.folders()), default=0
        )
        self._newer: Mismatch | None = None  # a checkpoint that only a newer Stoker reads
        self._ranks: Together | None = None  # once a sharded model was given
        gate.add(self)
        _all.add(self)

    # -- saving ------------------------------------------------------------------------------------

    def save(
        self,
        step: int,
        *,
        model: nn.Module | None = None,
        optimizer: Any = None,
        loader: Any = None,
        extra: Mapping[str, Any] | None = None,
        files: Mapping[str, bytes | str | os.PathLike] | None = None,
        metric: float | None = None,
        pin: bool = False,
        force: bool = False,
    ) -> Handle | None:
        """Begins to save step `step`, and returns at once; None where none is due.

        optimizer: one, or several as a list or a dict; anything with state_dict(). loader: the
        same.
        extra: values and objects with state_dict(), by name. Random states are always saved.
        files: more files for the folder (a tokenizer's, say), by name: bytes, or a path.
        metric: what `keep` rates it by. pin: no rule lets it go, only `stoker ckpt rm`. force: save
        though none is due.

        Until the bytes have left memory, step() of every torch optimizer waits. Where the optimizer
        is none of torch's, or none is given, save() itself waits. Tensors that the loop edits by
        itself before that make the save fail, with their name, if torch counts such edits (not
        those through `.data`).
        """
        if not isinstance(step, int) or isinstance(step, bool) or step < 0:
            raise InvalidArgument(
                f"step={step!r} is not a step number: give a whole number from 0 on"
            )
        self._check_open()
        left = self._grace.left if self._grace is not None else None
        model = _model_of(model, optimizer)
        due = force or self._due(step)
        name = Name(step, self._attempt + 1, secrets.token_hex(4))
        if (ranks := self._ranks_of(model)) is not None:
            failed = self._failed is not None
            due, left, failed, told = ranks.agree(step, due, left, failed, str(name))
            name = Name.of(told)
            if failed:  # all ranks raise, also one that was told already
                self._finish()
                told_already = StokerError("the last save failed on another rank; its log says why")
                self._failed = self._failed or told_already
                self._raise_failure()
        if left is not None:
            if self._grace is not None:
                self._grace.close()  # what is saved now is not saved again
            self._grace = None
            what = {"model": model, "optimizer": optimizer, "loader": loader, "extra": extra}
            self._save_and_end(left, step, **what, files=files, metric=metric, pin=pin)
        if ranks is None:  # else they agreed that none has failed
            self._raise_failure()
        if not due:
            return None
        begin = time.monotonic()
        self._pace.saved(begin, 0.0)
        try:
            return self._begin(name, model, optimizer, loader, extra, files or {}, metric, pin)
        finally:
            self._waited(time.monotonic() - begin)

    def save_within(self, seconds: float, step: int, **what: Any) -> Handle:
        """save(force=True), and waits until it is durable. TimeoutError if that takes longer."""
        until = time.monotonic() + seconds
        if not self._joined(seconds):
            raise TimeoutError(
                f"the save of step {self._handle.step} was not done after {seconds:g} s; give more"
                " time, or look whether its store still answers"
            )
        self._failed = None  # it was logged
        handle = self.save(step, force=True, **what)
        handle.wait("durable", max(0.0, until - time.monotonic()))
        return handle

    def _save_and_end(self, seconds: float, step: int, **what: Any) -> NoReturn:
        self._ends = time.monotonic() + seconds
        try:
            handle = self.save_within(seconds, step, **what)
        except (StokerError, TimeoutError) as error:
            log.error("SIGTERM: the run ends at step %d, which was not saved: %s", step, error)
        else:
            where = self._tiers[0].where(Name.of(handle.folder))
            log.warning("SIGTERM: the run ends at step %d, saved as %s", step, where)
        raise SystemExit(128 + signal.SIGTERM)

    def _begin(
        self,
        name: Name,
        model: nn.Module | None,
        optimizer: Any,
        loader: Any,
        extra: Mapping[str, Any] | None,
        files: Mapping[str, bytes | str | os.PathLike],
        metric: float | None,
        pin: bool,
    ) -> Handle:
        self._finish()
        self._raise_failure()
        self._attempt = name.attempt
        ranks = self._ranks if Together.needed(model) else None
        if ranks is None:
            said = self._said(1, metric, pin)
            contents, runs = self._collect(name, model, optimizer, loader, extra, files)
        else:
            said = ranks.front.guard("state", lambda: self._said(ranks.world, metric, pin))
            share = lambda: self._share(ranks, model, optimizer, loader, extra, files, str(name))
            contents, runs = ranks.front.guard("state", share)
            try:
                plans = ranks.front.exchange("state", facts=contents.plan)
            except BaseException:
                _drop(runs)
                raise
            if len(set(plans)) > 1:
                _drop(runs)
                raise Mismatch(
                    "the ranks have different models, or shard them differently; make the same"
                    " model on all ranks, and give it to fully_shard() in the same way"
                )
        handle = Handle(name.step, str(name), [tier.composition for tier in self._tiers])
        if runs:
            handle.hurry = runs[0].hurry
        self._handle = handle
        if not contents.in_memory:
            handle.reached("copied")
        self._thread = threading.Thread(
            target=self._run,
            args=(handle, name, contents, runs, said),
            name="stoker checkpoint",
            daemon=True,
        )
        try:
            self._thread.start()
        except BaseException:  # there are too many threads
            self._thread = None
            handle.ends(None)
            _drop(runs)
            raise
        optimizers = _optimizers(optimizer).values()
        if not optimizers or not all(map(_waits, optimizers)):
            handle.wait("copied")  # nothing else holds back who changes the state
        return handle

    def _said(self, ranks: int, metric: float | None, pin: bool) -> dict[str, Any]:
        """What the manifest says beside the contents."""
        try:
            rated = None if metric is None else float(metric)
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:
            raise InvalidArgument(
                f"metric={metric!r} is not a number: give a number, or None"
            ) from error
        writer = {
            "stoker": _core.__version__,
            "host": socket.gethostname(),
            "ranks": ranks,
            "ran_seconds": round(self._pace.ran, 6),
            "restarts": self._pace.restarts,
        }
        return {"writer": writer, "metric": rated, "pinned": bool(pin)}

    def _collect(
        self,
        name: Name,
        model: nn.Module | None,
        optimizer: Any,
        loader: Any,
        extra: Any,
        files: Any,
    ) -> tuple[Contents, list[Run]]:
        objects, runs = self._objects(optimizer, loader, extra, str(name))
        if any(run.session.agreement is not None for run in runs):
            raise Unsupported(
                "the optimizer is that of a sharded run of stoker.offload(), and the model is not"
                " sharded; give save() the model that stoker.offload() returned with it"
            )
        for run in runs:
            with run.session.ledger.waiting("checkpoint"):
                _take_snapshot(run)
        try:
            more = _contents_of(files)
            buffer = self._ring.plane
            return states.collect(model, objects, runs, self._full, more, buffer), runs
        except BaseException:
            _drop(runs)
            raise

    def _share(
        self,
        ranks: Together,
        model: nn.Module,
        optimizer: Any,
        loader: Any,
        extra: Any,
        files: Any,
        name: str,
    ) -> tuple[Share, list[Run]]:
        objects, runs = self._objects(optimizer, loader, extra, name)
        try:
            for run in runs:
                with run.session.ledger.waiting("checkpoint"):
                    _take_snapshot_together(ranks, run)
            more = _contents_of(files)
            return Share(ranks, model, objects, more, self._full, runs, self._ring), runs
        except BaseException:
            _drop(runs)
            raise

    def _ranks_of(self, model: nn.Module | None) -> Together | None:
        """The ranks that share the model; None for one that this process has whole."""
        if not Together.needed(model):
            return None
        if self._ranks is None:
            self._ranks = Together()
        return self._ranks

    def _due(self, step: int) -> bool:
        if self._every == "auto":
            busy = self._thread is not None and self._thread.is_alive()  # save() would wait
            return not busy and self._pace.due(time.monotonic())
        return self._every is None or step % self._every == 0

    def _objects(
        self, optimizer: Any, loader: Any, extra: Mapping[str, Any] | None, name: str
    ) -> tuple[dict[str, Any], list[Run]]:
        objects: dict[str, Any] = {"rng": record.rng_state()}
        runs: list[Run] = []
        for key, each in _optimizers(optimizer).items():
            run = states.run_of(key, each, _SNAPSHOT + name)
            if run is None:
                objects[key] = each
            else:
                runs.append(run)
        if len(runs) > 1:
            raise Unsupported(
                f"{' and '.join(run.name for run in runs)} belong to {len(runs)} runs of "
                f"stoker.offload(), but a checkpoint holds one. Give each run its own "
                f"stoker.Checkpoints with its own folder"
            )
        for key, each in {
            **({"loader": loader} if loader is not None else {}),
            **_extras(extra),
        }.items():
            objects[key] = each if hasattr(each, "state_dict") else {"value": each}
        return objects, runs

    def _run(
        self,
        handle: Handle,
        name: Name,
        contents: Contents | Share,
        runs: list[Run],
        said: dict[str, Any],
    ) -> None:
        """On the thread of its own."""
        error: BaseException | None = None
        begin = time.monotonic()
        ranks = self._ranks if isinstance(contents, Share) else None
        try:
            first = self._tiers[0]
            try:
                written = self._write(first, name, contents, said, handle)
            except BaseException:
                if ranks is None or ranks.leads:
                    first.remove_quietly(name)
                raise
            finally:
                _drop(runs)
            self._pace.persist = time.monotonic() - begin
            self.costs.saved += 1
            self.costs.bytes += written
            self._just = name
            first.store.keep_space(written)  # of what goes now: the next save writes into it
            handle.reached("durable")
            handle.reached(first.composition)
            if ranks is None:
                self._spread(handle, name)
            else:
                self._spread_together(ranks, handle, name)
            log.info(
                "checkpoint %s: %s in %.1f s",
                name,
                _core.human_bytes(written),
                time.monotonic() - begin,
            )
        except BaseException as caught:
            error = caught
            what = "failed"
            if handle.done():
                what = "is durable, but what follows failed"
            log.error("the checkpoint of step %d %s: %s", handle.step, what, caught)
            self._failed = caught
        busy = time.thread_time()  # processors that training may have wanted
        self._pace.spent(busy)
        self.costs.processor_seconds += busy
        handle.ends(error)

    def _spread(self, handle: Handle, name: Name) -> None:
        """Copies it to the other tiers, and lets old ones go."""
        errors = []
        with contextlib.suppress(StokerError):  # who cannot list now says so below
            self._tell_newer(name)
        for tier in self._tiers:
            try:
                if tier is not self._tiers[0] and not self._copy(handle, name, tier):
                    continue
                self._retain(tier, name)
            except StokerError as error:  # the others get it nevertheless
                errors.append(error)
        for error in errors[1:]:
            log.error("the checkpoint of step %d: %s", name.step, error)
        if errors:
            raise errors[0]

    def _spread_together(self, ranks: Together, handle: Handle, name: Name) -> None:
        """Rank 0 does it, and all ranks hear which tiers have it, which do not, and what failed."""

        def spread() -> StokerError | None:
            try:
                self._spread(handle, name)
            except StokerError as error:  # told behind what other tiers have
                return error
            return None

        error = ranks.back.guard("spread", spread) if ranks.leads else None
        told = ranks.back.exchange("spread", facts=handle.outcome() if ranks.leads else None)
        handle.hears(told[0])
        ranks.back.exchange("spread ended", error)

    def _copy(self, handle: Handle, name: Name, tier: Tier) -> bool:
        """Whether the tier got it: with every="auto" it does if a copy pays."""
        pace, begin, used = self._copying[tier.composition], time.monotonic(), time.thread_time()
        self._behind[tier.composition] = name
        if self._every == "auto" and not pace.due(begin):
            handle.passes(tier.composition)
            return False
        self._copy_to(tier, name)
        del self._behind[tier.composition]
        handle.reached(tier.composition)
        now = time.monotonic()
        pace.persist = COPYING_AT_MOST * (now - begin)
        pace.saved(now, time.thread_time() - used)
        return True

    def _copy_to(self, tier: Tier, name: Name) -> None:
        how = {"anew": tier.composition in self._anew, "reduction": self._reduction}
        copy_checkpoint(self._tiers[0], tier, name, self._ring, **how)
        tier.store.keep_space(tier.manifest(name).stored_bytes)
        self._anew.discard(tier.composition)
        self.costs.reduced_bytes = self._reduction.saved_bytes

    def _catch_up(self) -> None:
        """Brings the newest to the tiers that did not get it. One that fails keeps none from the
        others; the first error is raised."""
        behind, self._behind = self._behind, {}
        there, errors = self._tiers[0].names(), []
        for tier in self._tiers[1:]:
            if (name := behind.get(tier.composition)) in there:
                try:
                    self._copy_to(tier, name)
                    self._retain(tier, name)
                except StokerError as error:
                    log.error("%s did not get %s: %s", tier.composition, name, error)
                    errors.append(error)
        if errors:
            raise errors[0]

    def _tell_newer(self, name: Name) -> None:
        """Says once that restore() will not take what this run saves."""
        if self._told or self.keep.last == sys.maxsize:
            return
        first = self._tiers[0]
        newest = max(first.names(), default=name)
        if newest > name:
            self._told = True
            log.warning(
                "another program put %s into %s, and it counts as newer than step %d of this run: "
                "restore() will take it. Remove it (stoker ckpt rm), or save to another folder",
                newest,
                first.composition,
                name.step,
            )

    def _write(
        self,
        tier: Tier,
        name: Name,
        contents: Contents | Share,
        said: dict[str, Any],
        handle: Handle,
    ) -> int:
        """The bytes that this process wrote."""
        if isinstance(contents, Share):
            copied = lambda: handle.reached("copied")
            ends = lambda *all_of_it: commit(tier, name, *all_of_it, said)
            anew = tier.composition in self._anew
            written = contents.write(tier, name, self._ring, copied, ends, anew)
            self._anew.discard(tier.composition)
            self.costs.taken_bytes += contents.taken_bytes
            return written
        hashes = []
        left = len(contents.files)
        rests = Rests(sum(each.bytes for each in contents.files), self._pace.between, handle.hurry)
        # step() waits for what is in memory, but not for an offloaded run.
        after = (lambda size: None) if contents.in_memory else rests.after

        def copied() -> None:
            nonlocal left
            left -= 1
            if left == 0:
                handle.reached("copied")

        frozen = any(each.frozen for each in contents.files)
        frozen = frozen and tier.composition not in self._anew
        before = Before(tier) if frozen else None
        with Commits(self._ring) as commits:
            for whole in contents.files:
                of_file = before.hashes_of(whole, self._ring) if before and whole.frozen else None
                if of_file is not None and before.take(name, whole.name, whole.bytes, of_file):
                    self.costs.taken_bytes += whole.bytes
                    copied()
                else:
                    of_file = tier.write(name, whole, self._ring, commits, copied, after)
                hashes.append(of_file)
        files = [
            File(each.name, each.bytes, len(of_file))
            for each, of_file in zip(contents.files, hashes)
        ]
        written = commit(tier, name, files, hashes, contents, said).bytes
        self._anew.discard(tier.composition)
        return written

    def _retain(self, tier: Tier, just: Name | None = None) -> list[Name]:
        """Nothing that is whole goes before the newest was read back."""
        just = just or self._just
        gone = removable(tier, self.keep, just)
        if gone:
            try:
                check_newest(tier, gone, self._ring, just)
            except Corruption:
                self._anew.add(tier.composition)
                raise
        for name in gone:
            tier.remove(name)
        return gone

    def collect_garbage(self) -> list[str]:
        """Removes now what `keep` does not hold, in all tiers; the folders. Each save does so,
        too."""
        self._finish()
        return [tier.where(name) for tier in self._tiers for name in self._retain(tier)]

    def remove_all(self, but: str | None = None) -> None:
        """Removes every checkpoint from every tier, whatever `keep` says. `but`: the folder of one
        that stays; if it is not sound, nothing is removed."""
        self._finish()
        for tier in self._tiers:
            gone = [name for name in tier.folders() if str(name) != but]
            if but is not None and gone:
                Reader(tier, Name.of(but), self._ring, []).verify()
            for name in gone:
                tier.remove(name)

    def wait(self) -> None:
        """Until the save under way is in all tiers. Raises what it raised."""
        self._finish()
        self._raise_failure()

    def wait_copied(self) -> None:
        """Until no save needs the state in memory any more."""
        if self._handle is None or self._handle.done("copied"):
            return
        begin = time.monotonic()
        self._handle.event("copied").wait()
        self._waited(time.monotonic() - begin)

    def _waited(self, seconds: float) -> None:
        self._pace.spent(seconds)
        self.costs.seconds += seconds

    @property
    def memory_bytes(self) -> int:
        """What a save takes beside the state."""
        return self._ring.bytes

    def _joined(self, seconds: float | None = None) -> bool:
        """Whether the save under way is done. Waits for that so long; None: until it is."""
        if self._thread is None:
            return True
        self._handle.hurry.set()
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _finish(self) -> None:
        self._joined()
        self._thread = None

    def _finish_in_time(self) -> bool:
        """Whether the save under way is done. A run that got SIGTERM waits for it as long as its
        grace lasts."""
        if self._ends is not None and not self._joined(max(0.0, self._ends - time.monotonic())):
            return False
        self._finish()
        return True

    def _raise_failure(self) -> None:
        if self._failed is not None and (self._thread is None or not self._thread.is_alive()):
            failed, self._failed = self._failed, None
            raise failed

    # -- the way back ------------------------------------------------------------------------------

    def restore(
        self,
        *,
        model: nn.Module | None = None,
        optimizer: Any = None,
        loader: Any = None,
        extra: Mapping[str, Any] | None = None,
        step: int | None = None,
    ) -> Restored | None:
        """Loads the newest checkpoint that verifies, or that of `step`; None if there is none.

        Where the newest is damaged, the next older one is taken, and a warning says why. A damaged
        chunk is taken from another tier that has it. `extra`: objects that get their state back, by
        the names that save() had; plain values come back in the result.

        A checkpoint of a run of stoker.offload() goes back by `stoker.offload(..., restore=ckpt)`,
        or into a model and an optimizer of torch in memory.
        Raises Mismatch if it belongs to another model: then nothing was changed. Weights, and an
        optimizer's tensors that are there, are filled in place.
        """
        self._finish()
        self._raise_failure()
        self._check_open()
        wanted = (_optimizers(optimizer), loader, _extras(extra))
        if (ranks := self._ranks_of(model)) is not None:
            return self._restore_together(ranks, step, model, *wanted)
        begin = time.monotonic()
        for reader in self.readers(step):
            try:
                restored = self._load(reader, model, *wanted)
                self._learn(reader, time.monotonic() - begin)
                return restored
            except (Corruption, NotFound) as error:
                _skipped(error)
        self._none_was_sound(step)
        return None

    def _learn(self, reader: Reader, seconds: float) -> None:
        """That the run was restarted, for every="auto"; once a process."""
        if not self._restarted:
            self._restarted = True
            for pace in (self._pace, *self._copying.values()):
                pace.restarted(reader.manifest.writer)
                pace.restart = seconds

    def _restore_together(
        self, ranks: Together, step: int | None, model: nn.Module, *wanted: Any
    ) -> Restored | None:
        """All ranks load the same one, or go on to the same older one."""
        readers, passed = self.readers(step), None
        while True:
            found = None
            if ranks.leads:
                found = ranks.front.guard("restore", lambda: next(readers, None))
            told, _ = self._agreed(ranks.front, step, found)
            if told is None:
                self._none_for_all(ranks.front, step, passed)
                return None
            restored, error, begin = None, None, time.monotonic()
            try:
                reader = found or self._reader_of(Name.of(told), ranks.rank)
                restored = self._load(reader, model, *wanted)
            except (Corruption, NotFound) as caught:
                error = caught
            except BaseException as caught:
                ranks.front.tell("restored", caught)
                raise
            errors = ranks.front.exchange("restored", facts=error and str(error)[:2000])
            if not any(errors):
                self._learn(reader, time.monotonic() - begin)
                return restored
            passed = _first(errors)
            _skipped(error or StokerError(passed))

    def _agreed(
        self, line: Ranks, step: int | None, found: Reader | None, said: Any = None
    ) -> tuple[str | None, Any]:
        """Which checkpoint rank 0 has found, and what it says of it. Mismatch if the ranks want
        different steps."""
        mine = {"step": step, "name": found and str(found.manifest.name), "said": said}
        told = line.exchange("restore", facts=mine)
        if any(each["step"] != told[0]["step"] for each in told):
            wanted = ", ".join(str(each["step"] or "the newest") for each in told)
            raise Mismatch(
                f"the ranks ask for checkpoints of different steps ({wanted}); give all of them"
                " the same"
            )
        return told[0]["name"], told[0]["said"]

    def _none_for_all(self, line: Ranks, step: int | None, passed: str | None) -> None:
        """Raises on all ranks where one of them finds that there were checkpoints."""
        error: StokerError | None = None
        try:
            self._none_was_sound(step, passed)
        except StokerError as caught:
            error = caught
        line.exchange("none", error)

    def _reader_of(self, name: Name, rank: int) -> Reader:
        """Of the first tier that has it sound."""
        if all(name not in tier.folders() for tier in self._tiers):
            where = ", ".join(tier.composition for tier in self._tiers)
            raise NotFound(
                f"rank {rank} does not find {name} in {where}, and rank 0 does; give all ranks one"
                " folder or bucket that they share"
            )
        error: StokerError | None = None
        for i, tier in enumerate(self._tiers):
            try:
                others = self._tiers[:i] + self._tiers[i + 1 :]
                return Reader(tier, name, self._ring, others)
            except (Corruption, NotFound) as caught:
                error = error or caught
        raise error

    def _none_was_sound(self, step: int | None, passed: str | None = None) -> None:
        """Raises where there were checkpoints: to begin anew would lose them. `passed`: why ranks
        passed over the last that one of them found sound."""
        if passed is not None:
            raise Corruption(f"there is no checkpoint that all ranks can read; the last: {passed}")
        if step is not None:
            raise NotFound(
                f"no tier has an intact checkpoint of step {step}; `stoker ckpt ls` shows what"
                " there is"
            )
        if any(tier.names() for tier in self._tiers):
            if self._newer is not None:
                raise self._newer
            raise Corruption(
                f"none of the checkpoints in {', '.join(tier.composition for tier in self._tiers)}"
                " is intact, and a failed restore may have changed some values; `stoker ckpt "
                "verify --all` names the damage"
            )

    def readers(self, step: int | None = None) -> Any:
        """The checkpoints, the newest first, each from the first tier that has it sound."""
        self._finish()  # a save uses the same buffers
        self._newer = None
        tried: set[Name] = set()
        # listed anew each time: another process may save, and remove what was listed
        while tiers_of := self._tiers_of(step, tried):
            name = max(tiers_of)
            tried.add(name)
            for i, tier in enumerate(tiers_of[name]):
                others = tiers_of[name][:i] + tiers_of[name][i + 1 :]
                try:
                    yield Reader(tier, name, self._ring, others)
                    break
                except (Corruption, NotFound, Mismatch) as error:
                    if isinstance(error, Mismatch):
                        self._newer = error
                    _skipped(error)

    def _tiers_of(self, step: int | None, tried: set[Name]) -> dict[Name, list[Tier]]:
        """The checkpoints that were not tried yet, and who has them."""
        found: dict[Name, list[Tier]] = {}
        for tier in self._tiers:
            for name in tier.names():
                if name not in tried and (step is None or name.step == step):
                    found.setdefault(name, []).append(tier)
        return found

    def _load(
        self,
        reader: Reader,
        model: nn.Module | None,
        optimizers: dict[str, Any],
        loader: Any,
        extra: dict[str, Any],
    ) -> Restored:
        manifest = reader.manifest
        away = [key for key, each in optimizers.items() if isinstance(each, OffloadedOptimizer)]
        if away:
            raise Mismatch(
                f"{reader.where}: {away[0]} belongs to a run of stoker.offload(), whose state does"
                " not pass through memory; give the checkpoints to it: stoker.offload(...,"
                " restore=ckpt)"
            )
        for module in sharded_modules(model) if model is not None else ():
            module.reshard()
        runs = {
            key: InMemory(reader, model, each)
            for key, each in optimizers.items()
            if key in manifest.offloaded
        }
        optimizers = {key: each for key, each in optimizers.items() if key not in runs}
        things = {**optimizers, **({"loader": loader} if loader is not None else {}), **extra}
        for key in things:
            if key not in manifest.objects:
                raise Mismatch(
                    f"{reader.where} holds no {key}; it has {', '.join(sorted(manifest.objects))}"
                )
            if not hasattr(things[key], "load_state_dict"):
                raise InvalidArgument(
                    f"do not pass {key} to restore(): it has no load_state_dict(). Its value is"
                    " in the result's `extra`"
                )
        targets = _targets(model, reader) if model is not None else {}
        values = {key for key in manifest.objects if key.startswith("extra.") and key not in things}
        masters = {n: t for run in runs.values() for n, t in run.masters(targets).items()}
        targets = {name: each for name, each in targets.items() if name not in masters}
        reader.check_tensors(targets)
        like: dict[int, torch.Tensor] = {}
        for key, thing in optimizers.items():
            _check_groups(reader, key, thing)
            like |= places_of(reader, key, thing)
        rng = f"rng.{_rank()}"  # also where this rank asks for a loader's state alone
        rng = rng if rng in manifest.objects else "rng"
        into = state_in_memory(reader, optimizers, [local(each) for each in targets.values()])
        loaded = reader.objects([*things, *values, rng], like=like, into=into)
        for key, thing in optimizers.items():
            distribute(loaded[key], thing)
        reader.load_tensors(targets)
        for run in runs.values():
            run.fill(masters)
        for key, thing in things.items():
            thing.load_state_dict(loaded[key])
        record.set_rng_state(loaded[rng])
        plain = {
            key.removeprefix("extra."): (
                loaded[key]["value"] if list(loaded[key]) == ["value"] else loaded[key]
            )
            for key in values
        }
        for run in runs.values():
            plain = run.attached | plain
        return Restored(manifest.step, str(manifest.name), reader.tier.composition, plain, manifest)

    def at(self, step: int) -> At:
        """The checkpoint of that step, for `stoker.offload(..., restore=ckpt.at(step))`."""
        return At(self, step)

    def fill(
        self,
        store: Any,
        blocks: list[Block],
        agreement: Agreement | None = None,
        step: int | None = None,
    ) -> bool:
        """Makes the store of an offloaded run what it was at the newest sound checkpoint, or that
        of `step`; whether it did. A store that holds a newer step stays as it is, unless `step` is
        given. For stoker.offload(), which knows its blocks, and the ranks that share the model."""
        self._finish()
        self._raise_failure()
        self._check_open()
        if agreement is not None:
            return self._fill_together(store, blocks, agreement, step)
        held, begin, named = planes.held_in(store), time.monotonic(), step is not None
        for reader in self.readers(step):
            self._learn(reader, 0.0)
            planes.check_not_another(reader, store, blocks)
            told = planes.told_of(reader)
            if not planes.takes(held, told, named, store):
                return False
            lineage = planes.lineage_after(held, told, named, fresh_name())
            if divided := is_divided(reader):
                run = Divided(reader, blocks, None)
            else:
                planes.check_model(reader, blocks)
            try:
                if divided:
                    run.stage(store, self._runtime, lineage).commit("durable").wait()
                else:
                    planes.write_run(reader, store, self._runtime, lineage)
                planes.tell_replaced(held, told, store)
                self._pace.restart = time.monotonic() - begin
                return True
            except (Corruption, NotFound) as error:
                _skipped(error)
        self._none_was_sound(step)
        return False

    def _fill_together(
        self, store: Any, blocks: list[Block], agreement: Agreement, step: int | None
    ) -> bool:
        """Each rank fills its own store, all of them from one checkpoint."""
        line = agreement.ranks
        readers, leads, named = self.readers(step), line.rank == 0, step is not None
        held, begin, lost = planes.held_in(store), time.monotonic(), agreement.lost
        # All ranks must decide alike. Unless one is lost the stores are at one step.
        common = held if lost is None else planes.Held(lost.step, lost.lineage)
        passed: str | None = None
        while True:
            found = line.guard("restore", lambda: next(readers, None)) if leads else None
            mine = line.guard("restore", lambda: _said_of(found)) if found else None
            name, said = self._agreed(line, step, found, mine)
            if name is None:
                self._none_for_all(line, step, passed)
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
                reader = found or self._reader_of(Name.of(name), line.rank)
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
                self._learn(reader, 0.0)
                self._pace.restart = time.monotonic() - begin
                return True
            if txn is not None:
                txn.abandon()
            passed = _first(errors)
            _skipped(error or StokerError(passed))

    def _check_open(self) -> None:
        if not self._tiers:
            raise InvalidArgument(
                "this Checkpoints object is closed; make a new one with stoker.Checkpoints()"
            )

    def close(self) -> None:
        """Waits for the save under way, brings the newest to all stores, closes them, and raises
        what went wrong."""
        if getattr(self, "_grace", None) is not None:
            self._grace.close()
        if getattr(self, "_thread", None) is not None and not self._finish_in_time():
            return  # the process ends, and the thread uses the stores
        try:
            if self._tiers and getattr(self, "_behind", None) and self._ends is None:
                self._catch_up()
        except StokerError as error:
            self._failed = self._failed or error
        tiers, self._tiers = self._tiers, []
        for tier in tiers:
            try:
                tier.close()
            except StokerError as error:
                log.error("%s was not closed: %s", tier.composition, error)
                self._failed = getattr(self, "_failed", None) or error
        self._ranks = None
        if getattr(self, "_failed", None) is not None:
            self._raise_failure()

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


@atexit.register
def _wait_for_saves() -> None:
    """At the end of a program that did not call close()."""
    for each in list(_all):
        if each._thread is not None and each._thread.is_alive():
            log.warning("waiting for the save of step %d; close() does so too", each._handle.step)
            if not each._finish_in_time():
                continue
        for tier in each._tiers:
            tier.store.keep_space(0)


def _waits(optimizer: Any) -> bool:
    """Whether its step() waits for saves. One in a CUDA graph runs no hook: `capturable`."""
    return isinstance(optimizer, torch.optim.Optimizer) and not any(
        group.get("capturable") for group in optimizer.param_groups
    )


def _check_groups(reader: Reader, key: str, optimizer: Any) -> None:
    """Mismatch where torch's optimizer would refuse the state, which it does after others were
    loaded."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        return
    sizes = lambda groups: [len(group["params"]) for group in groups]
    ours, theirs = sizes(optimizer.param_groups), sizes(reader.outline(key)["param_groups"])
    if ours != theirs:
        raise Mismatch(
            f"{reader.where}: {key} has groups of {theirs} parameters, and the given one of {ours};"
            " make it with the same groups in the same order"
        )


def _targets(model: nn.Module, reader: Reader) -> dict[str, torch.Tensor]:
    """The model's tensors by the names that the checkpoint has. Mismatch if they are not the
    same."""
    found: dict[str, torch.Tensor] = {}
    for name, tensor in states.named_tensors(model, away=False).items():
        if hasattr(tensor, "_stoker_session"):
            raise Mismatch(
                f"the values of {name} are in the store of stoker.offload(); restore by"
                " stoker.offload(..., restore=ckpt), or before the model is given to it"
            )
        if local(tensor).is_meta:
            raise Mismatch(
                f"{name} of the model is on the meta device and has no memory; call"
                ' model.to_empty(device="cpu") first'
            )
        found[states.plain(name)] = tensor
    names, every = set(found), found
    there = {*reader.tensors(), *reader.manifest.aliases}
    found = _tied_once(found, there, reader)
    if missing := sorted(found.keys() - there):
        raise Mismatch(f"{reader.where} lacks {_some(missing)}; it belongs to another model")
    if left := sorted(there - names):
        raise Mismatch(
            f"the model lacks {_some(left)}, which {reader.where} holds; it belongs to another"
            " model"
        )
    for alias, name in reader.manifest.aliases.items():
        if local(every[alias]).data_ptr() != local(every[name]).data_ptr():
            raise Mismatch(
                f"{reader.where} has {alias} tied to {name}, the model has them apart; tie them"
                " first (model.tie_weights(), say)"
            )
    return {
        name: tensor.detach()
        for name, tensor in found.items()
        if name not in reader.manifest.aliases
    }


def _tied_once(
    found: dict[str, torch.Tensor], there: set[str], reader: Reader
) -> dict[str, torch.Tensor]:
    """Of names that are the same memory in the model, those that are to be read: the checkpoint may
    have the weight once, under one of the names. Mismatch if it has different values for them."""
    groups: dict[Any, list[str]] = {}
    for name, tensor in found.items():
        same = id(tensor) if is_sharded(tensor) else states.place_of(tensor)
        groups.setdefault(same, []).append(name)
    kept = dict(found)
    aliases, places = reader.manifest.aliases, reader.tensors()
    for names in groups.values():
        known = [name for name in names if name in there]
        if not known:
            continue
        for name in set(names) - there:
            del kept[name]
        first, *others = dict.fromkeys(aliases.get(name, name) for name in known)
        for other in others:
            (one, left), (two, right) = (reader.tensor(*places[n]) for n in (first, other))
            if (one.dtype, one.shape, left) != (two.dtype, two.shape, right):
                raise Mismatch(
                    f"{reader.where} has {first} and {other} apart, with different values, and the"
                    " model has them tied; make the model without the tie"
                )
    return kept


def _said_of(reader: Reader) -> list[Any]:
    """What other ranks are told of a run; they make a planes.Told of it."""
    told = planes.told_of(reader)
    return [told.step, [told.lineage.run, told.lineage.left], told.where]


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _optimizers(optimizer: Any) -> dict[str, Any]:
    if optimizer is None:
        return {}
    if isinstance(optimizer, Mapping):
        return {f"optimizer.{key}": each for key, each in optimizer.items()}
    if isinstance(optimizer, (list, tuple)):
        return {f"optimizer.{i}": each for i, each in enumerate(optimizer)}
    return {"optimizer": optimizer}


def _extras(extra: Mapping[str, Any] | None) -> dict[str, Any]:
    return {f"extra.{key}": each for key, each in (extra or {}).items()}


def _contents_of(files: Mapping[str, Any]) -> dict[str, bytes]:
    found = {}
    for name, each in files.items():
        if isinstance(each, bytes):
            found[name] = each
        else:
            with open(each, "rb") as file:
                found[name] = file.read()
    return found


def _model_of(model: nn.Module | None, optimizer: Any) -> nn.Module | None:
    """Where only the optimizer of a sharded offloaded run was given, its model: its ranks save it
    together."""
    for each in _optimizers(optimizer).values() if model is None else ():
        if isinstance(each, OffloadedOptimizer) and each._session.agreement is not None:
            return each._session.model
    return model


def _take_snapshot(run: Run) -> None:
    """Names the run's newest step, and makes it durable."""
    _make_room(run)
    run.session.name_step(run.snapshot)
    run.session.reads.until(run.read, run.hurry)


def _take_snapshot_together(ranks: Together, run: Run) -> None:
    """The same on all ranks, each in its own store; and all named the same step. Where one cannot,
    all raise."""
    session = run.session
    if session.agreement is None:
        raise Unsupported(
            "the model is sharded, and the optimizer that stoker.offload() made is of another one;"
            " save them apart"
        )
    if session.agreement.ranks.world != ranks.world:
        raise Unsupported(
            f"{session.agreement.ranks.world} of {ranks.world} ranks share the offloaded model; a"
            " checkpoint takes one that all ranks share"
        )
    ranks.front.guard("room", lambda: _make_room(run))
    ranks.front.exchange("room")
    ranks.front.guard("named", lambda: session.name_step(run.snapshot))
    session.reads.until(run.read, run.hurry)
    agreement = session.agreement
    mine = [session.step_count, agreement.run, agreement.timeline]
    if any(each != mine for each in ranks.front.exchange("named", facts=mine)):
        raise Mismatch(
            "the ranks have the stores of different steps or runs; end all processes and start them"
            " again with resume=True"
        )


def _make_room(run: Run) -> None:
    """For one more step in the store. An error where there is none."""
    session, store = run.session, run.store
    session.check_open()
    session.reads.wait()  # other Checkpoints may copy a step: its name must stay
    left = [each for each in store.info()["snapshots"] if each.startswith(_SNAPSHOT)]
    for each in left:  # of a process that was killed
        store.drop(each).wait()
    kept = len(store.info()["snapshots"]) if session.agreement is None else 1
    what = session.blocks, session.algorithm
    check_room_to_copy(session.runtime, *what, kept, session.buffers.bytes)


def _drop(runs: list[Run]) -> None:
    for run in runs:
        try:
            if run.snapshot in run.store.info()["snapshots"]:
                run.store.drop(run.snapshot, "deferred").wait()
        except StokerError as error:  # the checkpoint is as good without it
            log.warning("a step that was copied keeps its snapshot until the next save: %s", error)
        finally:
            run.read.set()


def _rank() -> int:
    there = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_rank() if there else 0


def _first(errors: list[str | None]) -> str:
    """The first of what ranks told, with its rank."""
    return next(f"rank {rank}: {each}" for rank, each in enumerate(errors) if each)


def _skipped(error: BaseException) -> None:
    warnings.warn(f"skipped a checkpoint: {error}", stacklevel=4)


__all__ = ["Checkpoints", "Edited", "Handle", "Keep", "Restored"]
