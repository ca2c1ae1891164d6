"""Making an index: what lies where in objects of each kind, by their sizes and headers."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from stoker import _core

from ..errors import Corruption, InvalidArgument, Mismatch, NotFound
from .arrow import arrow_index
from .index import ARROW, MDS, SAFETENSORS, TAR, WHOLE, Index, joined, read, write
from .mds import shard_index
from .packed import Unpacked, about, kind_of_tar
from .tar_members import members
from .tensor_rows import tensor_index


def of_objects(store: _core.Store, objects: Sequence[dict[str, Any]], kind: int) -> Index:
    """Reads sizes and headers only. objects: as store.list() and store.stat() describe them; of
    MDS, as mds.shards() does."""
    if kind == MDS:
        return joined([shard_index(store, each) for each in objects])
    if kind == ARROW:
        return joined([arrow_index(store, each) for each in objects])
    if kind == SAFETENSORS:
        return joined([tensor_index(store, each) for each in objects])
    extensions: dict[str, int] = {}
    told = []
    starts, name_ends, names = [0], [], bytearray()
    rows: list[tuple[int, int, int, int]] = []
    for number, each in enumerate(objects):
        each, reading = _readable(store, each, kind)
        told.append(about(each))
        for name, parts in _samples(reading, each, kind):
            for extension, offset, size in parts:
                rows.append(
                    (number, extensions.setdefault(extension, len(extensions)), offset, size)
                )
            starts.append(len(rows))
            names += name.encode()
            name_ends.append(len(names))
    if len(extensions) >= 1 << 16:
        raise InvalidArgument(
            f"the files have {len(extensions)} different extensions, but 65,535 are the most; index"
            " them in parts"
        )
    object_, extension, offset, size = np.array(rows, np.uint64).reshape(-1, 4).T
    return Index(
        kind,
        told,
        list(extensions),
        np.array(starts, "<u8"),
        object_.astype("<u4"),
        extension.astype("<u2"),
        offset.astype("<u8"),
        size.astype("<u8"),
        None,
        np.array(name_ends, "<u8"),
        np.frombuffer(bytes(names), np.uint8),
    )


def _readable(
    store: _core.Store, found: dict[str, Any], kind: int
) -> tuple[dict[str, Any], _core.Store | Unpacked]:
    """The object, with "packed" and "unpacked" where it is compressed; and what to read it from."""
    packed = kind_of_tar(found["key"]) if kind == TAR else ""
    if not packed:
        return found, store
    unpacked = Unpacked(store, found, packed)
    return {**found, "packed": packed, "unpacked": unpacked.bytes}, unpacked


def _samples(
    store: _core.Store | Unpacked, found: dict[str, Any], kind: int
) -> Iterator[tuple[str, list[tuple[str, int, int]]]]:
    """Name and (extension, offset, bytes) of each part."""
    key, size = found["key"], found.get("unpacked", found["bytes"])
    if kind == WHOLE:
        yield key, [("", 0, size)]
        return
    for member in members(store, key, size):
        yield member.name, [(extension, *span) for extension, span in member.parts.items()]


def build(
    store: _core.Store,
    objects: Sequence[dict[str, Any]],
    kind: int,
    out: Path,
    crcs: Callable[[Index], np.ndarray] | None,
    done: Callable[[dict[str, Any]], None],
) -> Index:
    """Indexes object by object. What is done stays in a folder beside `out` until all is: a build
    that was ended goes on from there. crcs: gives the CRCs of all parts. done: told each object.
    Memory: that of the largest object's index."""
    if not objects:
        raise NotFound(
            "there is nothing to index: no object has a name of this kind; check the path of the"
            " store, and --kind"
        )
    folder = out.with_name(out.name + ".parts")
    folder.mkdir(parents=True, exist_ok=True)
    parts = _Parts([folder / f"{number:08d}" for number in range(len(objects))])
    for path, each in zip(parts.paths, objects, strict=True):
        if not _finished(path, each, kind, crcs is not None):
            part = of_objects(store, [each], kind)
            if crcs is not None:
                part = replace(part, crc=crcs(part))
            write(part, path)
        done(each)
    write(parts, out)
    shutil.rmtree(folder)
    return read(out)


class _Parts(Sequence[Index]):
    """Indexes in files, each mapped only while it is used: a process has 65,530 mappings."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = paths

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, number: int) -> Index:
        return read(self.paths[number])


def _finished(path: Path, found: dict[str, Any], kind: int, with_crcs: bool) -> bool:
    """Whether an earlier build left the part of this very object."""
    try:
        part = read(path)
    except (OSError, Corruption, InvalidArgument, Mismatch):
        return False
    names = ("key", "bytes", "tag")
    same = [{key: found[key] for key in names}] == [
        {key: each[key] for key in names} for each in part.objects
    ]
    if kind == MDS:
        same = same and (len(part), part.columns) == (found["samples"], found["columns"])
    return same and part.kind == kind and (part.crc is not None) == with_crcs
