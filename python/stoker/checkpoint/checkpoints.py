"""stoker.Checkpoints: saves that run beside training, and the way back from them."""

from __future__ import annotations

import logging
import os
import secrets
import signal
import socket
import threading
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn

import torch
from torch import nn

from stoker import _core
from stoker.checkpoint import gate, planes
from stoker.checkpoint import state as states
from stoker.checkpoint.grace import Grace
from stoker.checkpoint.manifest import (
    MANIFEST,
    TABLE,
    File,
    Manifest,
    Name,
    Table,
    dump_table,
    hash_of,
)
from stoker.checkpoint.pace import Costs, Pace
from stoker.checkpoint.parts import Edited
from stoker.checkpoint.reading import Reader
from stoker.checkpoint.retention import Keep
from stoker.checkpoint.state import Contents, Run
from stoker.checkpoint.unchanged import Before
from stoker.checkpoint.workspace import Ring, Tier
from stoker.errors import Corruption, InvalidArgument, Mismatch, NotFound, StokerError
from stoker.offload.storage import record
from stoker.offload.model.blocks import Block
from stoker.offload.run.optimizer import OffloadedOptimizer
from stoker.offload.division.amounts import parse_bytes
from stoker.offload.run.snapshots import check_room_to_copy

log = logging.getLogger("stoker")
_SNAPSHOT = "checkpoint-"
FAILURES_EVERY = 4 * 3600.0  # seconds; what "auto" assumes until it is told


@dataclass
class Handle:
    """A save under way."""

    step: int
    folder: str
    _tiers: list[str]
    _error: BaseException | None = None
    _events: dict[str, threading.Event] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._events = {name: threading.Event() for name in ("copied", "durable", *self._tiers)}

    def done(self, what: str = "durable") -> bool:
        return self._event(what).is_set()

    def wait(self, what: str = "durable", timeout: float | None = None) -> None:
        """Until the state may change ("copied"), the checkpoint would survive a power loss
        ("durable"), or another tier has it whole (its composition). Raises what the save raised."""
        if not self._event(what).wait(timeout):
            said = f"the checkpoint of step {self.step} was not {what} after {timeout:g} s"
            raise TimeoutError(said)
        if self._error is not None and what != "copied":
            raise self._error

    def _event(self, what: str) -> threading.Event:
        if what not in self._events:
            raise InvalidArgument(
                f"wait({what!r}): give one of {', '.join(map(repr, self._events))}"
            )
        return self._events[what]

    def _reached(self, what: str) -> None:
        self._events[what].set()

    def _ends(self, error: BaseException | None) -> None:
        self._error = self._error or error
        for event in self._events.values():
            event.set()


@dataclass(frozen=True)
class Restored:
    """What restore() found. `extra`: the plain values of `extra` that were saved."""

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

    def fill(self, store: Any, blocks: list[Block]) -> bool:
        return self.checkpoints.fill(store, blocks, self.step)


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
    means `dir:`. A folder of it is one checkpoint: plain safetensors files that transformers loads,
    the rest beside them, and a manifest with a hash of every byte.

    keep: how many of the newest stay, or a stoker.Keep with more rules. `also`: other stores that
    get a copy of each, in the background; `keep` holds for each by itself.

    every: None saves at each save(); a number, at steps that are multiples of it; "auto", as often
    as loses the least time, by what a save costs and how often runs fail (`failures_every`, in
    seconds).

    staging: bytes of memory for bytes on their way ("256MiB"). "full" copies all of the state in
    save(), for optimizers that are not torch's own, and loops that edit weights by themselves.

    grace: seconds. On SIGTERM the next save() saves whether one is due or not, waits that long
    until it is durable, and ends the run by SystemExit(143), with a sentence in the log. A second
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
        failures_every: float = FAILURES_EVERY,
        grace: float | None = None,
    ) -> None:
        if every is not None and every != "auto" and not (isinstance(every, int) and every > 0):
            raise InvalidArgument(f'every={every!r}: give a number of steps, "auto" or None')
        self.keep = keep if isinstance(keep, Keep) else Keep(last=keep)
        self._every, self._full = every, staging == "full"
        staging_bytes = parse_bytes("staging", "256MiB" if self._full else staging)
        budget = 4 * staging_bytes + (1 << 30)
        self._runtime = _core.Runtime(threads=2, budget_bytes=budget)
        self._ring = Ring(self._runtime, staging_bytes)
        compositions = [composition_of(each) for each in (store, *also)]
        if len(set(compositions)) != len(compositions):
            raise InvalidArgument("also= names a store twice")
        self._tiers: list[Tier] = []
        try:
            for each in compositions:
                self._tiers.append(Tier(each, self._runtime))
        except BaseException:
            self.close()
            raise
        self._thread: threading.Thread | None = None
        self._handle: Handle | None = None
        self._failed: BaseException | None = None
        self._pace = Pace(failures_every)
        self.costs = Costs()
        self._grace = Grace(grace) if grace is not None else None
        self._attempt = max((name.attempt for name in self._tiers[0].folders()), default=0)
        gate.add(self)

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
        metric: what `keep` rates it by. pin: it stays until it is unpinned by hand. force: save
        though none is due.

        Until the bytes have left memory, step() of every torch optimizer waits. Where the optimizer
        is none of torch's, or none is given, save() itself waits. Tensors that the loop edits by
        itself before that make the save fail, with their name, if torch counts such edits (not
        those through `.data`).
        """
        if not isinstance(step, int) or isinstance(step, bool) or step < 0:
            raise InvalidArgument(f"step={step!r} is no number of a step")
        self._check_open()
        if self._grace is not None and (left := self._grace.left) is not None:
            self._grace.close()  # what is saved now is not saved again
            self._grace = None
            what = {"model": model, "optimizer": optimizer, "loader": loader, "extra": extra}
            self._save_and_end(left, step, **what, files=files, metric=metric, pin=pin)
        self._raise_failure()
        if not force and not self._due(step):
            return None
        begin = time.monotonic()
        self._pace.saved(begin, 0.0)
        try:
            return self._begin(step, model, optimizer, loader, extra, files or {}, metric, pin)
        finally:
            self._waited(time.monotonic() - begin)

    def save_within(self, seconds: float, step: int, **what: Any) -> Handle:
        """save(force=True), and waits until it is durable. TimeoutError if that takes longer."""
        until = time.monotonic() + seconds
        if self._thread is not None:
            self._thread.join(seconds)
            if self._thread.is_alive():
                under_way = self._handle.step
                raise TimeoutError(f"the save of step {under_way} was not done after {seconds:g} s")
        self._failed = None  # it was logged
        handle = self.save(step, force=True, **what)
        handle.wait("durable", max(0.0, until - time.monotonic()))
        return handle

    def _save_and_end(self, seconds: float, step: int, **what: Any) -> NoReturn:
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
        step: int,
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
        self._attempt += 1
        name = Name(step, self._attempt, secrets.token_hex(4))
        objects, runs = self._objects(optimizer, loader, extra, str(name))
        try:
            more = _contents_of(files)
            contents = states.collect(model, objects, runs, self._full, more, self._ring.plane)
        except BaseException:
            _drop(runs)
            raise
        said = {
            "writer": {"stoker": _core.__version__, "host": socket.gethostname(), "ranks": 1},
            "metric": None if metric is None else float(metric),
            "pinned": bool(pin),
        }
        handle = Handle(step, str(name), [tier.composition for tier in self._tiers])
        self._handle = handle
        if not contents.in_memory:
            handle._reached("copied")
        self._thread = threading.Thread(
            target=self._run,
            args=(handle, name, contents, runs, said),
            name="stoker checkpoint",
            daemon=True,
        )
        self._thread.start()
        optimizers = _optimizers(optimizer).values()
        if not optimizers or not all(
            isinstance(each, torch.optim.Optimizer) for each in optimizers
        ):
            handle.wait("copied")  # nothing else holds back who changes the state
        return handle

    def _due(self, step: int) -> bool:
        if self._every == "auto":
            return (self._handle is None or self._handle.done()) and self._pace.due(
                time.monotonic()
            )
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
        for key, each in {
            **({"loader": loader} if loader is not None else {}),
            **_extras(extra),
        }.items():
            objects[key] = each if hasattr(each, "state_dict") else {"value": each}
        for run in runs:
            with run.session.ledger.waiting("checkpoint"):
                _take_snapshot(run)
        return objects, runs

    def _run(
        self, handle: Handle, name: Name, contents: Contents, runs: list[Run], said: dict[str, Any]
    ) -> None:
        """On the thread of its own."""
        error: BaseException | None = None
        begin = time.monotonic()
        try:
            first = self._tiers[0]
            try:
                manifest = self._write(first, name, contents, said, handle)
            except BaseException:
                first.remove_quietly(name)
                raise
            finally:
                _drop(runs)
            self._pace.persist = time.monotonic() - begin
            self.costs.saved += 1
            self.costs.bytes += manifest.bytes
            handle._reached("durable")
            handle._reached(first.composition)
            self._retain(first)
            for tier in self._tiers[1:]:
                copy_checkpoint(first, tier, name, self._ring)
                handle._reached(tier.composition)
                self._retain(tier)
            log.info(
                "checkpoint %s: %s in %.1f s",
                name,
                _core.human_bytes(manifest.bytes),
                time.monotonic() - begin,
            )
        except BaseException as caught:
            error = caught
            log.error("the checkpoint of step %d failed: %s", handle.step, caught)
            self._failed = caught
        busy = time.thread_time()  # processors that training may have wanted
        self._pace.spent(busy)
        self.costs.processor_seconds += busy
        handle._ends(error)

    def _write(
        self, tier: Tier, name: Name, contents: Contents, said: dict[str, Any], handle: Handle
    ) -> Manifest:
        hashes = []
        left = len(contents.files)

        def copied() -> None:
            nonlocal left
            left -= 1
            if left == 0:
                handle._reached("copied")

        before = Before(tier) if any(each.frozen for each in contents.files) else None
        for whole in contents.files:
            of_file = before.hashes_of(whole, self._ring) if whole.frozen else None
            if of_file is not None and before.take(name, whole.name, whole.bytes, of_file):
                self.costs.taken_bytes += whole.bytes
                copied()
            else:
                of_file = tier.write(name, whole, self._ring, copied)
            hashes.append(of_file)
        files = [
            File(each.name, each.bytes, len(of_file))
            for each, of_file in zip(contents.files, hashes)
        ]
        return commit(tier, name, files, hashes, contents, said)

    def _retain(self, tier: Tier) -> list[Name]:
        """Nothing that is whole goes before the newest was read back."""
        gone = removable(tier, self.keep)
        kept = [each.name for each in sound(tier) if each.name not in gone]
        if gone and kept:
            Reader(tier, max(kept), self._ring, []).verify()
        for name in gone:
            tier.remove(name)
        return gone

    def collect_garbage(self) -> list[str]:
        """Removes now what `keep` does not hold, in all tiers; the folders. Each save does so,
        too."""
        self._finish()
        return [tier.where(name) for tier in self._tiers for name in self._retain(tier)]

    def remove_all(self) -> None:
        """Removes every checkpoint from every tier, whatever `keep` says."""
        self._finish()
        for tier in self._tiers:
            for name in tier.folders():
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
        self._handle._event("copied").wait()
        self._waited(time.monotonic() - begin)

    def _waited(self, seconds: float) -> None:
        self._pace.spent(seconds)
        self.costs.seconds += seconds

    @property
    def memory_bytes(self) -> int:
        """What a save takes beside the state."""
        return self._ring.bytes

    def _finish(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

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

        A checkpoint of a run of stoker.offload() goes back by `stoker.offload(..., restore=ckpt)`.
        Raises Mismatch if it belongs to another model: then nothing was changed.
        """
        self._finish()
        self._raise_failure()
        self._check_open()
        wanted = (_optimizers(optimizer), loader, _extras(extra))
        for reader in self.readers(step):
            try:
                return self._load(reader, model, *wanted)
            except (Corruption, NotFound) as error:
                _skipped(error)
        self._none_was_sound(step)
        return None

    def _none_was_sound(self, step: int | None) -> None:
        """Raises where there were checkpoints: to begin anew would lose them."""
        if step is not None:
            raise NotFound(
                f"no tier has a sound checkpoint of step {step}; `stoker ckpt ls` shows what"
                " there is"
            )
        if any(tier.names() for tier in self._tiers):
            raise Corruption(
                f"none of the checkpoints in {', '.join(tier.composition for tier in self._tiers)}"
                " is sound, and what was given may hold parts of one; `stoker ckpt verify --all`"
                " names the damage"
            )

    def readers(self, step: int | None = None) -> Any:
        """The checkpoints, the newest first, each from the first tier that has it sound."""
        self._finish()  # a save uses the same buffers
        tiers_of: dict[Name, list[Tier]] = {}
        for tier in self._tiers:
            for name in tier.names():
                tiers_of.setdefault(name, []).append(tier)
        for name in sorted(tiers_of, reverse=True):
            if step is not None and name.step != step:
                continue
            for i, tier in enumerate(tiers_of[name]):
                others = tiers_of[name][:i] + tiers_of[name][i + 1 :]
                try:
                    yield Reader(tier, name, self._ring, others)
                    break
                except (Corruption, NotFound, Mismatch) as error:
                    _skipped(error)

    def _load(
        self,
        reader: Reader,
        model: nn.Module | None,
        optimizers: dict[str, Any],
        loader: Any,
        extra: dict[str, Any],
    ) -> Restored:
        manifest = reader.manifest
        away = [
            key
            for key, each in optimizers.items()
            if key in manifest.offloaded or isinstance(each, OffloadedOptimizer)
        ]
        if away:
            raise Mismatch(
                f"{reader.where}: {away[0]} belongs to a run of stoker.offload(), whose state does"
                " not pass through memory; give the checkpoints to it: stoker.offload(...,"
                " restore=ckpt)"
            )
        things = {**optimizers, **({"loader": loader} if loader is not None else {}), **extra}
        for key in things:
            if key not in manifest.objects:
                raise Mismatch(
                    f"{reader.where} holds no {key}; it has {', '.join(sorted(manifest.objects))}"
                )
        targets = _targets(model, reader) if model is not None else {}
        values = {key for key in manifest.objects if key.startswith("extra.") and key not in things}
        loaded = reader.objects([*things, *values, "rng"])
        for key, thing in optimizers.items():
            _check_groups(reader, key, thing, loaded[key])
        reader.load_tensors(targets)
        for key, thing in things.items():
            thing.load_state_dict(loaded[key])
        record.set_rng_state(loaded["rng"])
        plain = {
            key.removeprefix("extra."): loaded[key].get("value", loaded[key]) for key in values
        }
        return Restored(manifest.step, str(manifest.name), reader.tier.composition, plain, manifest)

    def at(self, step: int) -> At:
        """The checkpoint of that step, for `stoker.offload(..., restore=ckpt.at(step))`."""
        return At(self, step)

    def fill(self, store: Any, blocks: list[Block], step: int | None = None) -> bool:
        """Makes the store of an offloaded run what it was at the newest sound checkpoint, or that
        of `step`; whether it did. A store that holds a newer step stays as it is, unless `step` is
        given. For stoker.offload(), which knows its blocks."""
        self._finish()
        self._raise_failure()
        there = planes.step_in(store)
        for reader in self.readers(step):
            if step is None and there is not None and there >= reader.manifest.step:
                return False
            planes.check_model(reader, blocks)
            try:
                planes.write_run(reader, store, self._ring.plane)
                return True
            except (Corruption, NotFound) as error:
                _skipped(error)
        self._none_was_sound(step)
        return False

    def _check_open(self) -> None:
        if not self._tiers:
            raise InvalidArgument("these checkpoints are closed; make stoker.Checkpoints() anew")

    def close(self) -> None:
        """Waits for the save under way, closes the stores, and raises what it raised."""
        if getattr(self, "_thread", None) is not None:
            self._finish()
        if getattr(self, "_grace", None) is not None:
            self._grace.close()
        for tier in self._tiers:
            tier.close()
        self._tiers = []
        if getattr(self, "_failed", None) is not None:
            self._raise_failure()

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _check_groups(reader: Reader, key: str, optimizer: Any, state: Any) -> None:
    """Mismatch where torch's optimizer would refuse the state, which it does after others were
    loaded."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        return
    sizes = lambda groups: [len(group["params"]) for group in groups]
    ours, theirs = sizes(optimizer.param_groups), sizes(state["param_groups"])
    if ours != theirs:
        raise Mismatch(
            f"{reader.where}: {key} has groups of {theirs} parameters, and the given one of {ours};"
            " make it with the same groups in the same order"
        )


def composition_of(store: str | os.PathLike) -> str:
    """A composition string; a plain path is a folder of plain files."""
    text = os.fspath(store)
    known = ("dir:", "s3:", "local:", "coded(", "memory:")
    return text if text.startswith(known) else f"dir:{os.path.abspath(os.path.expanduser(text))}"


def commit(
    tier: Tier,
    name: Name,
    files: list[File],
    hashes: list,
    contents: Contents,
    said: dict[str, Any],
) -> Manifest:
    """Writes table and manifest. From here on it is a checkpoint."""
    table = dump_table(zip(files, hashes))
    manifest = Manifest(
        name.step,
        name.attempt,
        name.id,
        created=time.time(),
        files=files,
        tables=[Table(TABLE, len(table), hash_of(table).hex())],
        aliases=contents.aliases,
        state=contents.state,
        objects=contents.objects,
        offloaded=contents.offloaded,
        **said,
    )
    tier.put(name, TABLE, table)
    tier.put_manifest(name, manifest.dump(), [TABLE, *(each.name for each in files)])
    return manifest


def copy_checkpoint(
    source: Tier, to: Tier, name: Name, ring: Ring, progress: Any = lambda _: None
) -> None:
    """Copies a checkpoint to another tier, verified on the way. Its manifest is the last object."""
    if name in to.names():
        return
    reader = Reader(source, name, ring, [])
    try:
        before = Before(to)
        for file in reader.manifest.files:
            if before.take(name, file.name, file.bytes, reader.hashes(file)):
                progress(file.bytes)
            else:
                to.write_stream(name, file, reader.stream(file), ring, progress)
        to.put(name, TABLE, source.store.read_bytes(f"{name}/{TABLE}"))
        files = [TABLE, *(each.name for each in reader.manifest.files)]
        to.put_manifest(name, source.store.read_bytes(f"{name}/{MANIFEST}"), files)
    except BaseException:
        to.remove_quietly(name)
        raise


def sound(tier: Tier) -> list[Manifest]:
    """The manifests of a tier that match their digest."""
    found = []
    for name in tier.names():
        try:
            found.append(tier.manifest(name))
        except (Corruption, NotFound, Mismatch):
            continue
    return found


def removable(tier: Tier, keep: Keep) -> list[Name]:
    """What `keep` lets go: checkpoints that no rule holds, and what attempts left that came to
    nothing. One whose manifest does not verify stays: somebody may want to look at it."""
    manifests = sound(tier)
    if not manifests:
        return []
    stays = keep.reasons(manifests)
    gone = [each.name for each in manifests if str(each.name) not in stays]
    newest = max(each.name for each in manifests)
    given_up = set(tier.folders()) - set(tier.names())
    return gone + sorted(name for name in given_up if name.attempt < newest.attempt)


def _targets(model: nn.Module, reader: Reader) -> dict[str, torch.Tensor]:
    """The model's tensors by the names that the checkpoint has. Mismatch if they are not the
    same."""
    found: dict[str, torch.Tensor] = {}
    for name, tensor in states.named_tensors(model, away=False).items():
        found[states.plain(name)] = tensor.detach()
    there = {*reader.tensors(), *reader.manifest.aliases}
    if missing := sorted(found.keys() - there):
        raise Mismatch(f"{reader.where} lacks {_some(missing)}; it belongs to another model")
    if left := sorted(there - found.keys()):
        raise Mismatch(
            f"the model lacks {_some(left)}, which {reader.where} holds; it belongs to another"
            " model"
        )
    for alias, name in reader.manifest.aliases.items():
        if found[alias].data_ptr() != found[name].data_ptr():
            raise Mismatch(
                f"{reader.where} has {alias} tied to {name}, the model has them apart; tie them"
                " first (model.tie_weights(), say)"
            )
    return {name: tensor for name, tensor in found.items() if name not in reader.manifest.aliases}


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


def _take_snapshot(run: Run) -> None:
    """Names the run's newest step, and makes it durable."""
    session, store = run.session, run.store
    left = [each for each in store.info()["snapshots"] if each.startswith(_SNAPSHOT)]
    for each in left:  # of a process that was killed
        store.drop(each).wait()
    kept = len(store.info()["snapshots"])
    what = session.blocks, session.algorithm
    check_room_to_copy(session.runtime, *what, kept, session.buffers.bytes)
    session.name_step(run.snapshot)
    session.read_until(run.read)


def _drop(runs: list[Run]) -> None:
    for run in runs:
        try:
            if run.snapshot in run.store.info()["snapshots"]:
                run.store.drop(run.snapshot, "deferred").wait()
        finally:
            run.read.set()


def _skipped(error: BaseException) -> None:
    warnings.warn(f"a checkpoint is passed over: {error}", stacklevel=4)


__all__ = ["Checkpoints", "Edited", "Handle", "Keep", "Restored"]
