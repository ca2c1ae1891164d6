"""`stoker data`: what the options mean, and what is printed."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
from tqdm import tqdm

import stoker
from stoker import _core
from stoker.command import Parser, fail, named, say
from stoker.data import arrow, mds
from stoker.data.index import ARROW, KINDS, MDS, SAFETENSORS, TAR, WHOLE, Index, read
from stoker.data.indexing import build
from stoker.data.stored import Stored, StoredSources
from stoker.errors import InvalidArgument, StokerError

_DESCRIPTION = """\
Data sets in stores. STORE is a folder, or a composition ("dir:/folder", "s3://bucket/prefix",
"local:/folder"). `stoker.data.Indexed(store, FILE)` reads what was indexed."""
_EPILOG = """\
Exit status: 0 it was done; 1 it failed; 2 the command line is wrong."""
# Compressed ones are refused by name, rather than left out.
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
    text = "tell what an index holds"
    show = commands.add_parser("show", help=text, description=text[0].upper() + text[1:] + ".")
    show.add_argument("index", type=Path, metavar="FILE", help="the index")
    show.add_argument("--json", action="store_true", help="print JSON")
    show.set_defaults(run=_show)
    return top


def main(arguments: list[str] | None = None) -> int:
    args = parser().parse_args(arguments)
    try:
        return args.run(args)
    except (StokerError, OSError) as error:
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
