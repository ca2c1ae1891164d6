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
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

from torch import nn

from stoker import _core
from stoker.checkpoint import gate
from stoker.checkpoint import state as states
from stoker.checkpoint.asked import contents_of, extras_of, model_of, optimizers_of, waits
from stoker.checkpoint.candidates import Candidates
from stoker.checkpoint.commits import (
    check_newest,
    commit,
    composition_of,
    copy_checkpoint,
    removable,
)
from stoker.checkpoint.grace import Grace
from stoker.checkpoint.handle import Handle
from stoker.checkpoint.loading import Restored
from stoker.checkpoint.manifest import File, Name
from stoker.checkpoint.named_steps import SNAPSHOT, drop, name_newest, name_together
from stoker.checkpoint.pace import COPYING_AT_MOST, Costs, Pace, Restarts, Rests
from stoker.checkpoint.parts import Edited
from stoker.checkpoint.reading import Reader
from stoker.checkpoint.reduction import Reduction
from stoker.checkpoint.restoring import Restoring
from stoker.checkpoint.retention import Keep
from stoker.checkpoint.sharded import Share
from stoker.checkpoint.state import Contents, Run
from stoker.checkpoint.together import Together
from stoker.checkpoint.unchanged import Before
from stoker.checkpoint.workspace import Commits, Ring, Tier
from stoker.errors import (
    Corruption,
    InvalidArgument,
    Mismatch,
    StokerError,
    Unsupported,
)
from stoker.offload.storage import record
from stoker.offload.model.blocks import Block
from stoker.offload.ranks.agreement import Agreement
from stoker.offload.division.amounts import parse_bytes

log = logging.getLogger("stoker")
# Those of this process: it waits at its end for what they save.
_all: weakref.WeakSet[Checkpoints] = weakref.WeakSet()


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
        self._grace = Grace(grace) if grace is not None else None
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
        self._told = False
        self._anew: set[str] = set()  # tiers whose newest is damaged: the next takes no file of it
        self._ends: float | None = None  # when a run that got SIGTERM must have ended
        self.costs = Costs()
        self._attempt = max(
            (name.attempt for tier in self._tiers for name in tier.folders()), default=0
        )
        self._candidates = Candidates(self._tiers, self._ring)
        restarts = Restarts(self._pace, list(self._copying.values()))
        self._restoring = Restoring(self._candidates, self._runtime, restarts)
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
        model = model_of(model, optimizer)
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
                drop(runs)
                raise
            if len(set(plans)) > 1:
                drop(runs)
                raise Mismatch(
                    "the ranks have different models, or shard them differently; make the same"
                    " model on all ranks, and give it to fully_shard() in the same way"
                )
        handle = self._start(name, contents, runs, said)
        optimizers = optimizers_of(optimizer).values()
        if not optimizers or not all(map(waits, optimizers)):
            handle.wait("copied")  # nothing else holds back who changes the state
        return handle

    def _start(
        self, name: Name, contents: Contents | Share, runs: list[Run], said: dict[str, Any]
    ) -> Handle:
        handle = thread = None
        try:
            handle = Handle(name.step, str(name), [tier.composition for tier in self._tiers])
            if runs:
                handle.hurry = runs[0].hurry
            if not contents.in_memory:
                handle.reached("copied")
            thread = threading.Thread(
                target=self._run,
                args=(handle, name, contents, runs, said),
                name="stoker checkpoint",
                daemon=True,
            )
            self._handle, self._thread = handle, thread
            thread.start()
        except BaseException as error:
            # Ctrl-C comes while start() waits for the new thread, which goes on.
            if thread is None or isinstance(error, RuntimeError) or not _begins(thread):
                self._thread = None
                if handle is not None:
                    handle.ends(None)
                drop(runs)
            raise
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
                name_newest(run)
        try:
            more = contents_of(files)
            buffer = self._ring.plane
            return states.collect(model, objects, runs, self._full, more, buffer), runs
        except BaseException:
            drop(runs)
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
                    name_together(ranks, run)
            more = contents_of(files)
            return Share(ranks, model, objects, more, self._full, runs, self._ring), runs
        except BaseException:
            drop(runs)
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
        for key, each in optimizers_of(optimizer).items():
            run = states.run_of(key, each, SNAPSHOT + name)
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
            **extras_of(extra),
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
        rests = self._rests(contents, handle)
        try:
            first = self._tiers[0]
            try:
                written = self._write(first, name, contents, said, handle, rests)
            except BaseException:
                if ranks is None or ranks.leads:
                    first.remove_quietly(name)
                raise
            finally:
                drop(runs)
            self._pace.persist = time.monotonic() - begin - (rests.rested if rests else 0.0)
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
                what = "is saved, but copying it or removing old ones failed"
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
            log.error("copying the checkpoint of step %d failed: %s", name.step, error)
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
                    log.error("copying %s to %s failed: %s", name, tier.composition, error)
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
        rests: Rests | None,
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
        after = rests.after if rests is not None else lambda size: None

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

    def _rests(self, contents: Contents | Share, handle: Handle) -> Rests | None:
        """Those of the copy of an offloaded run. step() waits for what is in memory, and copies
        that save() made of it are let go of the sooner the better."""
        if isinstance(contents, Share) or contents.in_memory or not contents.offloaded:
            return None
        between = self._pace.between
        if between is None and self._every == "auto":
            return None  # no save is due while one is under way: nobody would hurry it
        return Rests(sum(each.bytes for each in contents.files), between, handle.hurry)

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
        wanted = (optimizers_of(optimizer), loader, extras_of(extra))
        if (ranks := self._ranks_of(model)) is not None:
            return self._restoring.into_memory_together(ranks, step, model, wanted)
        return self._restoring.into_memory(step, model, wanted)

    def readers(self, step: int | None = None) -> Iterator[Reader]:
        """The checkpoints, the newest first, each from the first tier that has it sound."""
        self._finish()  # a save uses the same buffers
        yield from self._candidates.readers(step)

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
            return self._restoring.into_stores(store, blocks, agreement, step)
        return self._restoring.into_store(store, blocks, step)

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
                log.error("closing %s failed: %s", tier.composition, error)
                self._failed = getattr(self, "_failed", None) or error
        self._ranks = None
        if getattr(self, "_failed", None) is not None:
            self._raise_failure()

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _begins(thread: threading.Thread) -> bool:
    """Whether a thread whose start() was interrupted runs, or did."""
    for _ in range(100):
        if thread.ident is not None:
            return True
        time.sleep(0.01)
    return False


@atexit.register
def _wait_for_saves() -> None:
    """At the end of a program that did not call close()."""
    leaves = False
    for each in list(_all):
        if each._thread is not None and each._thread.is_alive():
            log.warning(
                "the program ends: waiting for the save of step %d; call close() to wait before",
                each._handle.step,
            )
            if not each._finish_in_time():
                leaves = True
                continue
        for tier in each._tiers:
            tier.store.keep_space(0)
    if leaves:  # else Python would end its thread by unwinding frames of C++, and abort
        _core.leave()


__all__ = ["Checkpoints", "Edited", "Handle", "Keep", "Restored"]
