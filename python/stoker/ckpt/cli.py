"""`stoker ckpt`: what checkpoints there are, whether they are sound, and what to do with them."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from stoker import _core
from stoker.checkpoint import importing
from stoker.checkpoint.checkpoints import Checkpoints
from stoker.checkpoint.commits import (
    as_stored,
    check_newest,
    composition_of,
    copy_checkpoint,
    removable,
    sound,
    tidy,
)
from stoker.checkpoint.manifest import MANIFEST, TABLE, Manifest, Name
from stoker.checkpoint.reading import Number, Reader
from stoker.checkpoint.reduction import Reduction
from stoker.checkpoint.retention import Keep
from stoker.checkpoint.tensors import dtype_name
from stoker.checkpoint.workspace import Ring, Tier
from stoker.command import Parser, fail, named, number, say, whole
from stoker.errors import Corruption, InvalidArgument, Mismatch, NotFound, StokerError
from stoker.offload.storage import record

_TENSORS = (torch.Tensor, Number)
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_DESCRIPTION = """\
Checkpoints that stoker.Checkpoints wrote. STORE is a folder, or a composition ("dir:/folder",
"s3://bucket/prefix", "local:/folder"). CHECKPOINT is STORE alone (the newest sound one is meant),
or with --step."""
_EPILOG = """\
Exit status: 0 it was done and all is sound; 1 it failed, or damage was found; 2 the command line
is wrong."""


def parser() -> Parser:
    top = Parser("stoker ckpt", _DESCRIPTION, _EPILOG)
    commands = top.add_subparsers(dest="command", metavar="COMMAND", required=True)

    def command(name: str, run: Callable, text: str, step: bool = True) -> Parser:
        made = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        made.add_argument("store", type=named, metavar="STORE", help="where the checkpoints are")
        if step:
            made.add_argument(
                "--step", type=whole(0), metavar="N", help="of this step (default: the newest)"
            )
        made.set_defaults(run=run)
        return made

    ls = command("ls", _ls, "list the checkpoints, the newest first", step=False)
    ls.add_argument("--json", action="store_true", help="print a JSON list")
    show = command("show", _show, "show what a checkpoint holds: files, tensors, objects")
    show.add_argument("--json", action="store_true", help="print the manifest")
    verify = command("verify", _verify, "read every byte and compare its hash")
    verify.add_argument("--all", action="store_true", help="of all checkpoints")
    diff = command(
        "diff", _diff, "tell which tensors, and which of the state, differ in two checkpoints"
    )
    diff.add_argument(
        "other", metavar="OTHER", help="a store; the same one with another --with-step"
    )
    diff.add_argument("--with-step", type=whole(0), metavar="N", help="the step of the other one")
    export = command("export", _export, "copy a checkpoint to a folder that transformers can load")
    export.add_argument("folder", metavar="FOLDER", type=Path, help="a new or empty folder")
    export.add_argument(
        "--everything", action="store_true", help="optimizer state and manifest too"
    )
    gc = command("gc", _gc, "remove what no rule keeps, and say why the rest stays", step=False)
    gc.add_argument(
        "--last", type=whole(0), default=3, metavar="N", help="keep the newest N (default: 3)"
    )
    gc.add_argument("--every-steps", type=whole(0), metavar="N", help="keep every N steps")
    gc.add_argument(
        "--every-seconds",
        type=number(0, 1e12),
        metavar="S",
        help="keep the first of each S seconds",
    )
    gc.add_argument(
        "--best", type=whole(0), default=0, metavar="N", help="keep the best N by metric"
    )
    gc.add_argument("--mode", choices=("min", "max"), default="min", help="which metric is best")
    gc.add_argument("--dry-run", action="store_true", help="remove nothing")
    rm = command("rm", _rm, "remove checkpoints, also pinned ones", step=False)
    which = rm.add_mutually_exclusive_group(required=True)
    which.add_argument("--step", type=whole(0), metavar="N", help="those of this step")
    which.add_argument("--after", type=whole(0), metavar="N", help="those of later steps than N")
    cp = command("cp", _cp, "copy a checkpoint to another store, verified on the way")
    cp.add_argument("to", metavar="TO", help="the store to copy it to; made where there is none")
    cp.add_argument(
        "--reduce",
        choices=("on", "all", "off"),
        help="make it smaller there: packs, or all files; or as plain files (default: as it is)",
    )
    load = command("import", _import, "make a checkpoint of weights of other tools", step=False)
    load.add_argument(
        "source",
        metavar="FROM",
        help="a safetensors file, a folder of them or of DCP, or a file of torch.save",
    )
    load.add_argument("--step", type=whole(0), default=0, metavar="N", help="its step (default: 0)")
    load.add_argument("--key", metavar="NAME", help="the entry of what was saved to take")
    return top


def main(arguments: list[str] | None = None) -> int:
    args = parser().parse_args(arguments)
    try:
        with _Stores() as stores:
            return args.run(args, stores)
    except (StokerError, OSError) as error:
        return fail(f"stoker ckpt {args.command}", error)


class _Stores:
    """The stores of one command, closed at its end."""

    def __init__(self) -> None:
        self._runtime = _core.Runtime(threads=2, budget_bytes=2 << 30)
        self.ring = Ring(self._runtime, 128 << 20)
        self._open: dict[str, Tier] = {}

    def __enter__(self) -> _Stores:
        return self

    def __exit__(self, *_: object) -> None:
        for tier in self._open.values():
            tier.close()

    def tier(self, store: str, write: bool = False) -> Tier:
        composition = composition_of(store)
        if composition not in self._open:
            if composition.startswith("dir:") and not write and not os.path.isdir(composition[4:]):
                raise NotFound(f"there is no folder {composition[4:]}; check the path")
            self._open[composition] = Tier(composition, self._runtime, read_only=not write)
        return self._open[composition]

    def name(self, tier: Tier, step: int | None) -> Name:
        """The newest that has a manifest that verifies."""
        manifests = [each for each in sound(tier) if step is None or each.step == step]
        if not manifests:
            which = "" if step is None else f" of step {step}"
            raise NotFound(
                f"{tier.composition} holds no intact checkpoint{which}; `stoker ckpt verify` says"
                " what is damaged"
            )
        return max(each.name for each in manifests)

    def reader(self, store: str, step: int | None) -> Reader:
        tier = self.tier(store)
        return Reader(tier, self.name(tier, step), self.ring, [])


def _ls(args: argparse.Namespace, stores: _Stores) -> int:
    tier, rows, damaged = stores.tier(args.store), [], 0
    for name in tier.names():
        try:
            made = tier.manifest(name)
            rows.append(
                {
                    "step": name.step,
                    "name": str(name),
                    "bytes": made.bytes,
                    "stored_bytes": made.stored_bytes,
                    "created": made.created,
                    "metric": made.metric,
                    "pinned": made.pinned,
                }
            )
        except (Corruption, Mismatch, NotFound) as error:
            damaged += 1
            rows.append({"step": name.step, "name": str(name), "damaged": str(error)})
    unfinished = [str(name) for name, files in tier.folders().items() if MANIFEST not in files]
    if args.json:
        print(
            json.dumps(rows + [{"name": each, "unfinished": True} for each in unfinished], indent=1)
        )
        return 1 if damaged else 0
    for row in rows:
        if "damaged" in row:
            say(f"{row['step']:>9}  DAMAGED    {row['damaged']}")
            continue
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(row["created"]))
        said = (f"  metric {row['metric']:g}" if row["metric"] is not None else "") + (
            "  pinned" if row["pinned"] else ""
        )
        say(f"{row['step']:>9}  {_core.human_bytes(row['bytes']):>10}  {when}  {row['name']}{said}")
    for each in unfinished:
        say(f"{'':>9}  unfinished {each}: no manifest; a save under way, or one that was cut off")
    if not rows and not unfinished:
        say(f"{tier.composition} holds no checkpoints")
    return 1 if damaged else 0


def _show(args: argparse.Namespace, stores: _Stores) -> int:
    reader = stores.reader(args.store, args.step)
    made = reader.manifest
    if args.json:
        print(made.dump().decode(), end="")
        return 0
    say(reader.where)
    say(
        f"step {made.step}, {_core.human_bytes(made.bytes)}, by Stoker {made.writer.get('stoker')}"
        f" on {made.writer.get('host')}{_ranks(made)}"
    )
    for file in made.files:
        small = ""
        if stored := made.reduced.get(file.name):
            small = f"  reduced to {_core.human_bytes(stored)}, {file.bytes / stored:.2f} times"
        say(f"  {_core.human_bytes(file.bytes):>10}  {file.name}{small}")
    for name, (_, placed) in sorted(reader.tensors().items()):
        say(f"  {name}  {dtype_name(placed.spec.dtype)} {list(placed.spec.shape)}")
    for alias, name in sorted(made.aliases.items()):
        say(f"  {alias} is {name}")
    for name in (*made.objects, *(f"{each} (offloaded)" for each in made.offloaded)):
        say(f"  object {name}")
    return 0


def _ranks(made: Manifest) -> str:
    count = made.writer.get("ranks", 1)
    return f", {count} ranks" if count != 1 else ""


def _verify(args: argparse.Namespace, stores: _Stores) -> int:
    tier = stores.tier(args.store)
    names = [each for each in tier.names() if args.step is None or each.step == args.step]
    if not names:
        which = "" if args.step is None else f" of step {args.step}"
        raise NotFound(
            f"{tier.composition} holds no checkpoint{which}; look for it in another store"
        )
    if not args.all:  # those that a reader tries first do not open
        whole = {each.name for each in sound(tier)}
        opens = next((i for i, name in enumerate(names) if name in whole), len(names))
        names = names[: opens + 1]
    bad = 0
    for name in names:
        try:
            reader = Reader(tier, name, stores.ring, [])
            with _bar(reader.manifest.bytes, f"step {name.step}") as bar:
                reader.verify(bar.update)
            say(f"{tier.where(name)}: sound, {_core.human_bytes(reader.manifest.bytes)}")
        except (Corruption, NotFound, Mismatch) as error:
            bad += 1
            say(f"DAMAGED {error}")
    return 1 if bad else 0


def _diff(args: argparse.Namespace, stores: _Stores) -> int:
    ours, theirs = stores.reader(args.store, args.step), stores.reader(args.other, args.with_step)
    differ = _diff_tensors(ours, theirs) + _diff_state(ours, theirs)
    return 1 if differ else 0


def _diff_tensors(ours: Reader, theirs: Reader) -> int:
    a, b = ours.tensors(), theirs.tensors()
    differ = 0
    for name in sorted(a.keys() | b.keys()):
        if name not in a or name not in b:
            say(f"{name}: only in {(ours if name in a else theirs).where}")
        elif (left := _bytes_of(ours, a[name])) == (right := _bytes_of(theirs, b[name])):
            continue
        else:
            say(f"{name}: {_difference(a[name][1].spec, b[name][1].spec, left, right)}")
        differ += 1
    say(f"{differ} of {len(a.keys() | b.keys())} tensors differ")
    return differ


def _diff_state(ours: Reader, theirs: Reader) -> int:
    """Of optimizers and other objects, and of an offloaded run: tensors, planes and plain values.
    Two tensors at a time are in memory."""
    a, b = _state_of(ours), _state_of(theirs)
    tensors, values = [0, 0], [0, 0]  # that differ, that there are
    for name in sorted(a.keys() | b.keys()):
        is_tensor = any(isinstance(each.get(name), _TENSORS) for each in (a, b))
        count = tensors if is_tensor else values
        count[1] += 1
        if name not in a or name not in b:
            said = f"only in {(ours if name in a else theirs).where}"
        elif is_tensor:
            said = _tensor_difference(_loaded(ours, a[name]), _loaded(theirs, b[name]))
        else:
            said = None if a[name] == b[name] else _both(a[name], b[name])
        if said is not None:
            count[0] += 1
            say(f"{name}: {said}")
    say(f"{tensors[0]} of {tensors[1]} tensors and planes of the state differ")
    say(f"{values[0]} of {values[1]} other values differ")
    return tensors[0] + values[0]


def _state_of(reader: Reader) -> dict[str, Any]:
    """What is in a checkpoint beside the weights, by its place. Random states of other ranks than
    the first, which another number of ranks cannot have, are left out."""
    made, found = reader.manifest, {}
    for name in made.objects:
        if not name.startswith("rng."):
            found |= _leaves(reader.outline(name), name)
    for name, run in made.offloaded.items():
        for rank, share in enumerate(run.get("ranks", [run])):
            of_rank = f"{name} of rank {rank}" if "ranks" in run else name
            for part in ("model", "state"):
                found |= _leaves(record.decode(share[part]), f"{of_rank}.{part}")
            for key, said in share["objects"].items():
                if "part" in said:
                    found[f"{of_rank}:{key}"] = Number(said["part"])
    return found


def _leaves(value: Any, at: str) -> dict[str, Any]:
    """Tensors and plain values of a state, by their places. A list of plain values is one."""
    if isinstance(value, dict):
        return {
            k: v for key, each in value.items() for k, v in _leaves(each, f"{at}.{key}").items()
        }
    if isinstance(value, (list, tuple)) and _has_tensors(value):
        return {k: v for i, each in enumerate(value) for k, v in _leaves(each, f"{at}.{i}").items()}
    if type(value).__module__ == "numpy":
        value = torch.from_numpy(value.view(f"i{value.itemsize}"))
    return {at: value}


def _has_tensors(value: Any) -> bool:
    """Whether something in a list is told of by itself."""
    if isinstance(value, (list, tuple)):
        return any(map(_has_tensors, value))
    return isinstance(value, (*_TENSORS, dict)) or type(value).__module__ == "numpy"


def _both(a: Any, b: Any) -> str:
    short = [str(each) for each in (a, b)]
    return " and ".join(short) if max(map(len, short)) <= 40 else "other values"


def _loaded(reader: Reader, value: Any) -> Any:
    return reader.part(value.number) if isinstance(value, Number) else value


def _tensor_difference(a: Any, b: Any) -> str | None:
    """None if they are the same, else how they differ."""
    described = [
        f"{dtype_name(each.dtype)} {list(each.shape)}" if isinstance(each, torch.Tensor) else each
        for each in (a, b)
    ]
    if described[0] != described[1]:
        return f"{described[0]} and {described[1]}"
    left, right = (each.contiguous().view(-1) for each in (a, b))
    words = _WORDS[left.element_size()]
    if not (count := int((left.view(words) != right.view(words)).sum())):
        return None
    if not left.dtype.is_floating_point:
        what = "bytes" if left.dtype == torch.uint8 else "values"
        return f"{count:,} of {left.numel():,} {what} differ"
    most = (left.double() - right.double()).abs().max().item()
    return f"{count:,} of {left.numel():,} values differ, by at most {most:.3g}"


def _bytes_of(reader: Reader, place: tuple[str, Any]) -> Any:
    return reader.tensor(*place)[1]


def _difference(one: Any, other: Any, left: Any, right: Any) -> str:
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return (
            f"{dtype_name(one.dtype)} {list(one.shape)} and {dtype_name(other.dtype)}"
            f" {list(other.shape)}"
        )
    if not one.dtype.is_floating_point:
        return "other values"
    a, b = (torch.frombuffer(bytearray(each), dtype=one.dtype).double() for each in (left, right))
    return f"differs by at most {(a - b).abs().max().item():.3g}"


def _export(args: argparse.Namespace, stores: _Stores) -> int:
    reader = stores.reader(args.store, args.step)
    if args.folder.exists() and (not args.folder.is_dir() or any(args.folder.iterdir())):
        raise InvalidArgument(f"{args.folder} is not an empty folder; name a new one")
    args.folder.mkdir(parents=True, exist_ok=True)
    files = [
        each for each in reader.manifest.files if args.everything or not each.name.endswith(".pack")
    ]
    with _bar(sum(each.bytes for each in files), "export") as bar:
        for file in files:
            with open(args.folder / file.name, "wb") as out:
                for _, buffer, size in reader.stream(file):
                    out.write(buffer.view(size))
                    bar.update(size)
                out.flush()
                os.fsync(out.fileno())
    more = {}
    if args.everything:
        plain = as_stored(reader.manifest, {}).dump()
        more = {TABLE: reader.small(TABLE)}
        more[MANIFEST] = plain if reader.manifest.reduced else reader.small(MANIFEST)
    for name, data in more.items():
        (args.folder / name).write_bytes(data)
    say(f"{args.folder}: {len(files) + len(more)} files of {reader.where}")
    return 0


def _gc(args: argparse.Namespace, stores: _Stores) -> int:
    keep = Keep(args.last, args.every_steps, args.every_seconds, args.best, args.mode)
    tier = stores.tier(args.store, write=not args.dry_run)
    for name, reason in sorted(keep.reasons(sound(tier)).items(), reverse=True):
        say(f"keeps    {name}  {reason}")
    gone = removable(tier, keep)
    if gone:
        check_newest(tier, gone, stores.ring)
    for name in gone:
        say(f"removes  {name}")
        if not args.dry_run:
            tier.remove(name)
    return 0


def _rm(args: argparse.Namespace, stores: _Stores) -> int:
    tier = stores.tier(args.store, write=True)
    goes = lambda name: name.step == args.step if args.after is None else name.step > args.after
    gone = sorted(filter(goes, tier.folders()))
    if not gone:
        raise NotFound(f"{tier.composition} holds no such checkpoint; `stoker ckpt ls` lists them")
    for name in gone:
        tier.remove(name)
        say(f"removed  {name}")
    return 0


def _cp(args: argparse.Namespace, stores: _Stores) -> int:
    source, to = stores.tier(args.store), stores.tier(args.to, write=True)
    name = stores.name(source, args.step)
    there = name in to.names()
    if there and args.reduce and args.reduce != (is_there := _how(to.manifest(name))):
        raise InvalidArgument(
            f"{to.where(name)} is there already, with --reduce {is_there}; to copy it again, remove"
            f" it first: stoker ckpt rm {args.to} --step {name.step}"
        )
    with _bar(source.manifest(name).bytes, "copy") as bar:
        if there:
            Reader(to, name, stores.ring, []).verify(bar.update)
            tidy(to, name)
        else:
            how = Reduction(args.reduce or _how(source.manifest(name)))
            copy_checkpoint(source, to, name, stores.ring, bar.update, reduction=how)
    say(f"{to.where(name)}: {'was there already, and is sound' if there else 'copied'}")
    return 0


def _how(manifest: Manifest) -> str:
    """As it is reduced."""
    if not manifest.reduced:
        return "off"
    return "on" if all(name.endswith(".pack") for name in manifest.reduced) else "all"


def _import(args: argparse.Namespace, stores: _Stores) -> int:
    what = importing.read(args.source, args.key)
    # whoever imports adds a checkpoint; what the store keeps is not theirs to say
    with Checkpoints(args.store, keep=sys.maxsize, staging="128MiB") as ckpt:
        handle = ckpt.save(args.step, **what)
        handle.wait("durable")
    say(f"{args.store}: {handle.folder} of {args.source}")
    return 0


def _bar(total: int, what: str) -> tqdm:
    quiet = not sys.stderr.isatty()
    return tqdm(total=total, desc=what, unit="B", unit_scale=True, disable=quiet, leave=False)
