"""`stoker data`: what the options mean, and what is printed."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from pathlib import Path

import numpy as np
from tqdm import tqdm

import stoker
from stoker import _core
from stoker.command import Parser, fail, named, number, say, whole
from stoker.data import arrow, mds
from stoker.data.build import Built, Rule, learn, learned_before, share_below
from stoker.data.build import build as build_tokens
from stoker.data.corpus import find_text_files
from stoker.data.index import ARROW, KINDS, MDS, SAFETENSORS, TAR, WHOLE, Index, read
from stoker.data.indexing import build
from stoker.data.planning import choose
from stoker.data.rebuild import rebuild, resizing, unpacking
from stoker.data.sources import Indexed
from stoker.data.stored import Stored, StoredSources
from stoker.data.texts import Input, of_files, of_store
from stoker.data.vocabulary import load_tokenizer
from stoker.errors import InvalidArgument, NotFound, StokerError

_DESCRIPTION = """\
Data sets in stores. STORE is a folder, or a composition ("dir:/folder", "s3://bucket/prefix",
"local:/folder"). `stoker.data.Indexed(store, FILE)` reads what was indexed."""
_EPILOG = """\
Exit status: 0 it was done; 1 it failed; 2 the command line is wrong."""
# Kinds of compression that are not unpacked are refused by name, rather than left out.
_TARS = (".tar", ".tar.gz", ".tgz", ".tar.zst", ".tar.xz", ".tar.bz2")
_AT_ONCE = 64 << 20  # bytes of samples that are read at once for their checksums


def parser() -> Parser:
    top = Parser("stoker data", _DESCRIPTION, _EPILOG)
    commands = top.add_subparsers(dest="command", metavar="COMMAND", required=True)
    text = "write down where each sample lies, so that opening the data set reads no object"
    index = commands.add_parser("index", help=text, description=text[0].upper() + text[1:] + ".")
    index.add_argument("store", type=named, metavar="STORE", help="where the objects are")
    index.add_argument(
        "prefix", nargs="?", default="", metavar="PREFIX", help="only names that begin so"
    )
    index.add_argument("--out", type=Path, required=True, metavar="FILE", help="the index")
    index.add_argument(
        "--kind",
        choices=tuple(KINDS.values()),
        help="samples are members of tar files, whole objects, records of MDS shards, or rows of "
        "Arrow or safetensors files (default: by the names)",
    )
    index.add_argument(
        "--crc", action="store_true", help="read all samples and note their checksums"
    )
    index.set_defaults(run=_index)
    _add_build(commands)
    text = "tell what an index holds"
    show = commands.add_parser("show", help=text, description=text[0].upper() + text[1:] + ".")
    show.add_argument("index", type=Path, metavar="FILE", help="the index")
    show.add_argument("--json", action="store_true", help="print JSON")
    show.set_defaults(run=_show)
    text = "tell which order would read an indexed data set well, and why"
    plan = commands.add_parser("plan", help=text, description=text[0].upper() + text[1:] + ".")
    plan.add_argument("store", type=named, metavar="STORE", help="where the objects are")
    plan.add_argument("index", type=Path, metavar="FILE", help="the index")
    plan.add_argument(
        "--batch",
        type=whole(1, 1 << 32),
        default=32,
        metavar="SAMPLES",
        help="of a batch of all ranks (default 32)",
    )
    plan.set_defaults(run=_plan)
    return top


_BUILD = """\
Turn texts into shards of tokens that stoker.data.Tokens reads, and an index.json that says what
they were made of.

IN is a file or a folder (text: *.txt, *.md, *.html, *.py, ...; *.jsonl; *.parquet; text and JSONL
also with .gz), or a store ("dir:/folder", "s3://bucket/prefix"). Each text file, each line of JSONL
and each row of Parquet is a document; a text file larger than a shard is cut at line ends. OUT is a
folder or a store. The tokens are the same whatever the number of processes.

With --resize, images of tar files or of a folder become smaller JPEGs in tar files. With --unpack,
compressed tar files and MDS shards are written unpacked. Both take one IN.

The same command goes on after it was killed: shards that are there are kept."""
_BUILD_EPILOG = """\
Example:
  stoker data build texts more.jsonl dir:/data/tokens --tokenizer gpt2/tokenizer.json
and in Python:
  with stoker.open_store("dir:/data/tokens") as store:
      source = Tokens(store, shards(store), 1024)

Parquet needs the Python package pyarrow. The Python package gigatoken makes this many times as
fast; it is used where its ids equal those of tokenizers on a sample of the documents.
Exit status: 0 it was done; 1 it failed; 2 the command line is wrong."""


def _add_build(commands) -> None:
    build = commands.add_parser(
        "build",
        help="turn texts into tokens, images into smaller ones; unpack compressed shards",
        description=_BUILD,
        epilog=_BUILD_EPILOG,
    )
    build.add_argument("inputs", nargs="+", type=named, metavar="IN", help="texts, or a store")
    build.add_argument("out", type=named, metavar="OUT", help="where the tokens go")
    which = build.add_mutually_exclusive_group(required=True)
    which.add_argument(
        "--tokenizer", type=Path, metavar="FILE", help="a tokenizer.json, or the folder it is in"
    )
    which.add_argument(
        "--learn",
        type=whole(257, 1 << 24),
        metavar="TOKENS",
        help="learn a byte-level BPE of so many tokens from the inputs (keeps their distinct words"
        " in memory)",
    )
    which.add_argument(
        "--resize",
        type=whole(1, 16384),
        metavar="SIDE",
        help="make tar files of images whose shorter side has so many pixels at most",
    )
    which.add_argument(
        "--unpack", action="store_true", help="unpack compressed tar files and MDS shards"
    )
    build.add_argument(
        "--quality",
        type=whole(1, 100),
        default=90,
        metavar="Q",
        help="of the JPEGs that --resize writes (default: 90)",
    )
    build.add_argument(
        "--on-corrupt",
        choices=("raise", "skip"),
        default="raise",
        help="what --resize does with an image that cannot be used: end with its name, or leave it "
        "out and list it in build.json (default: raise)",
    )
    build.add_argument(
        "--column",
        default="text",
        metavar="NAME",
        help="which field of JSONL, or column of Parquet, has the text (default: text)",
    )
    build.add_argument(
        "--heldout",
        type=number(0, 0.5),
        default=0.0,
        metavar="SHARE",
        help="hold out about this share of the documents, chosen by what they say; "
        'Tokens(..., split="heldout") reads them (default: 0)',
    )
    build.add_argument(
        "--shard",
        default="64MiB",
        metavar="SIZE",
        help="bytes of the inputs for each shard; a killed build loses less than one of each "
        "process (default: 64MiB)",
    )
    build.add_argument(
        "--processes",
        type=whole(1, 4096),
        default=len(os.sched_getaffinity(0)),
        metavar="N",
        help="how many tokenise (default: one for each core; less where there are fewer shards)",
    )
    build.add_argument(
        "--restart", action="store_true", help="remove what another build left in OUT, and begin"
    )
    build.add_argument("--json", action="store_true", help="print JSON")
    build.set_defaults(run=_build)


_STORE = re.compile(r"(dir|s3|local|unix|memory):|(coded|cached)\(")


def _build(args) -> int:
    shard = _core.parse_bytes(args.shard)
    if not 4096 <= shard <= 1 << 40:
        raise InvalidArgument(f"--shard {args.shard}: a shard takes 4KiB to 1TiB of the inputs")
    if args.unpack or args.resize:
        return _rebuild(args, shard)
    inputs = _inputs(args.inputs, args.out)
    rule = Rule(
        column=args.column,
        heldout_below=share_below(args.heldout),
        shard_bytes=shard,
        piece_bytes=shard,
        learn=args.learn or 0,
    )
    out = _composition(args.out)
    description = args.tokenizer and load_tokenizer(args.tokenizer).to_str(pretty=True)
    began = time.monotonic()
    with stoker.open_store(out, create=True) as store:
        if description is None and not args.restart:
            description = learned_before(store, rule)
        done = build_tokens(
            inputs,
            description or learn(inputs, rule),
            store,
            rule,
            args.processes,
            _quiet,
            args.restart,
        )
    seconds = time.monotonic() - began
    if args.json:
        print(json.dumps({"built": done.built, "seconds": seconds, "index": done.index}))
    else:
        say(_told(done, args.out, seconds))
    return 0


def _quiet(text: str) -> None:
    print(text, file=sys.stderr)


def _composition(given: str) -> str:
    return given if _STORE.match(given) else f"dir:{Path(given).resolve()}"


def _rebuild(args, shard: int) -> int:
    """--unpack and --resize: one store to another."""
    if len(args.inputs) > 1:
        raise InvalidArgument("--unpack and --resize take one IN: build each IN into its own OUT")
    source, out = _composition(args.inputs[0]), _composition(args.out)
    if source.startswith("dir:") and not Path(source[4:]).is_dir():
        raise NotFound(f"there is no folder {args.inputs[0]}; check the path")
    _check_apart(args.inputs, args.out)
    began = time.monotonic()
    with stoker.open_store(source, read_only=True) as store:
        job = (
            unpacking(store)
            if args.unpack
            else resizing(store, args.resize, args.quality, shard, args.on_corrupt)
        )
        with stoker.open_store(out, create=True) as target:
            about, built = rebuild(job, target, args.processes, _quiet, args.restart)
    if args.json:
        print(json.dumps({"built": built, "seconds": time.monotonic() - began, "index": about}))
    else:
        say(_rebuilt(about, args.out, built, time.monotonic() - began))
    return 0


def _rebuilt(about: dict, out: str, built: bool, seconds: float) -> str:
    objects = about["objects"]
    before = _core.human_bytes(sum(each["bytes"] for each in about["inputs"]))
    after = _core.human_bytes(sum(each["bytes"] for each in objects))
    told = f"{out}: {len(objects)} objects, {after} of {before}"
    if "resize" in about["options"]:
        skipped = sum(len(each["skipped"]) for each in objects)
        told += (
            f", {sum(each['samples'] for each in objects):,} samples, "
            f"{sum(each['smaller'] for each in objects):,} made smaller"
            + (f", {skipped:,} left out (build.json names them)" if skipped else "")
        )
    return told + (f", in {seconds:.1f} s" if built else "; they were there already")


def _inputs(given: list[str], out: str) -> list[Input]:
    stores = [each for each in given if _STORE.match(each)]
    paths = [each for each in given if not _STORE.match(each)]
    inputs = of_files(find_text_files(paths)) if paths else []
    for composition in stores:
        inputs += of_store(composition)
    _check_apart(given, out)
    return inputs


def _check_apart(given: list[str], out: str) -> None:
    """OUT lies in no IN."""
    stores = [each for each in given if _STORE.match(each)]
    paths = [each for each in given if not _STORE.match(each)]
    target = Path(out.removeprefix("dir:")).resolve() if not out.startswith("s3:") else None
    for each in [*paths, *(each[4:] for each in stores if each.startswith("dir:"))]:
        folder = Path(each).resolve()
        if target is not None and (target == folder or folder in target.parents):
            raise InvalidArgument(
                f"OUT {out} lies in IN {each}, so the next build would read it as an input: "
                f"choose an OUT beside it"
            )


def _told(done: Built, out: str, seconds: float) -> str:
    index = done.index
    size = _core.human_bytes(index["text_bytes"])
    heldout = f", {index['heldout_tokens']:,} of them held out" if index["heldout_tokens"] else ""
    tokens = index["train_tokens"] + index["heldout_tokens"]
    count = index["train_documents"] + index["heldout_documents"]
    told = (
        f"{out}: {tokens:,} tokens{heldout}, of {count:,} documents ({size} of text) in "
        f"{len(index['shards'])} shards"
    )
    if not done.built:
        return f"{told}; they were there already"
    return f"{told}, in {seconds:.1f} s"


def main(arguments: list[str] | None = None) -> int:
    args = parser().parse_args(arguments)
    try:
        return args.run(args)
    except (StokerError, OSError, ValueError) as error:
        return fail("stoker data", error)


def _index(args) -> int:
    with stoker.open_store(args.store, read_only=True) as store:
        found = store.list(args.prefix)
        named = {name: kind for kind, name in KINDS.items()}
        kind = named[args.kind] if args.kind else _kind_of(found)
        chosen = _chosen(store, found, kind)
        if args.out.is_dir():
            raise InvalidArgument(f"{args.out} is a folder: name a file for the index")
        total = sum(each["bytes"] for each in chosen)
        quiet = None if sys.stderr.isatty() else True
        with tqdm(
            total=total, desc="index", unit="B", unit_scale=True, disable=quiet, leave=False
        ) as bar:
            crcs = (lambda part: _crcs(store, part)) if args.crc else None
            index = build(store, chosen, kind, args.out, crcs, lambda e: bar.update(e["bytes"]))
    say(_words(index, args.out))
    return 0


def _kind_of(found: list[dict]) -> int:
    names = [each["key"] for each in found]
    if any(name.endswith(_TARS) for name in names):
        return TAR
    shards = any(name.endswith((".mds", ".mds.zstd")) for name in names)
    if shards and mds.topmost(names):
        return MDS
    for ending, kind in ((".arrow", ARROW), (".safetensors", SAFETENSORS)):
        if any(name.endswith(ending) for name in names):
            return kind
    return WHOLE


def _chosen(store: _core.Store, found: list[dict], kind: int) -> list[dict]:
    """Those that samples of this kind lie in."""
    if kind == TAR:
        return [each for each in found if each["key"].endswith(_TARS)]
    if kind == MDS:
        indexes = mds.topmost([each["key"] for each in found])
        return mds.shards(store, indexes, found) if indexes else []
    if kind == ARROW:
        return arrow.all_objects(store, found)
    if kind == SAFETENSORS:
        return [each for each in found if each["key"].endswith(".safetensors")]
    return found


def _crcs(store: _core.Store, index: Index) -> np.ndarray:
    """CRC-32C of every part."""
    reader = StoredSources([Stored(store, index.table(), "", 0)], 2)  # records are left whole
    crcs, first = [], 0
    # Bytes of all samples before each.
    before = np.append(0, np.cumsum(index.bytes, dtype=np.int64))[index.starts.astype(np.int64)]
    while first < len(index):
        last = max(first + 1, int(np.searchsorted(before, before[first] + _AT_ONCE)) - 1)
        memory, places = reader.read_samples(np.arange(first, last, dtype=np.uint64)).raw()
        address = memory.ctypes.data
        crcs += [_core.crc32c(address + at, size) for parts in places for at, size in parts]
        first = last
    return np.array(crcs, "<u4")


def _show(args) -> int:
    index = read(args.index)
    if args.json:
        print(json.dumps(_facts(index)))
    else:
        print(_words(index, args.index))
    return 0


def _plan(args) -> int:
    with stoker.open_store(args.store, read_only=True) as store:
        chosen = choose(Indexed(store, args.index), args.batch)
        shuffle = '"window"' if chosen.shuffle == "window" else "True"
        print(f"Loader(..., shuffle={shuffle}): {chosen.why}")
    return 0


def _facts(index: Index) -> dict:
    return {
        "kind": KINDS[index.kind],
        "objects": len(index.objects),
        "samples": len(index),
        "parts": len(index.object),
        "bytes": int(index.bytes.sum(dtype=np.uint64)),
        "extensions": index.extensions,
        "columns": index.columns,
        "checksums": index.crc is not None,
    }


def _words(index: Index, path: Path) -> str:
    facts = _facts(index)
    size = _core.human_bytes(facts["bytes"])
    sums = "with checksums" if facts["checksums"] else "without checksums"
    return f"{path}: {facts['samples']} samples, {size} in {facts['objects']} objects, {sums}"
