"""Where each sample of a data set lies: made in memory, or mapped from a file.

docs/formats/data_index.md has the format.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from stoker import _core

from ..errors import Corruption, InvalidArgument, Mismatch, NotFound
from .tar_members import members

MAGIC = b"STKINDEX"  # docs/formats/data_index.md
VERSION = 1
TAR, WHOLE = 1, 2  # a sample is the members of one name; a sample is a whole object
_HEADER = struct.Struct("<8sIIQQQQIIQ60xI")
_FOLDERS_MOST = 64  # that are listed one by one
_TYPES = {"starts": "<u8", "object": "<u4", "extension": "<u2", "offset": "<u8", "bytes": "<u8"}


@dataclass(frozen=True)
class Index:
    """Sample i has parts [starts[i], starts[i + 1]); each part lies in an object from an offset on,
    and has an extension. objects: {"key", "bytes", "tag"}."""

    kind: int
    objects: list[dict[str, Any]]
    extensions: list[str]
    starts: np.ndarray
    object: np.ndarray
    extension: np.ndarray
    offset: np.ndarray
    bytes: np.ndarray
    crc: np.ndarray | None
    name_ends: np.ndarray
    names: np.ndarray  # uint8

    def __len__(self) -> int:
        return len(self.name_ends)

    def name(self, sample: int) -> str:
        first = int(self.name_ends[sample - 1]) if sample else 0
        return self.names[first : int(self.name_ends[sample])].tobytes().decode()

    def extensions_of(self, sample: int) -> list[str]:
        """The extension of each part."""
        parts = self.extension[int(self.starts[sample]) : int(self.starts[sample + 1])]
        return [self.extensions[number] for number in parts.tolist()]

    def table(self) -> _core.SampleTable:
        return _core.SampleTable.ranges(
            [each["key"] for each in self.objects],
            [each["bytes"] for each in self.objects],
            self.starts,
            self.object,
            self.offset,
            self.bytes,
            self.crc,
        )

    def check(self, store: _core.Store) -> None:
        """Mismatch if an object of the store is not the one that was indexed; NotFound."""
        found = {
            each["key"]: each
            for prefix in _prefixes([each["key"] for each in self.objects])
            for each in store.list(prefix)
        }
        for each in self.objects:
            now = found.get(each["key"])
            if now is None:
                raise NotFound(
                    f"the index names '{each['key']}', which is not in the store: "
                    "open the store that was indexed, or make the index anew"
                )
            if (now["bytes"], now["tag"]) != (each["bytes"], each["tag"]):
                raise Mismatch(
                    f"'{each['key']}' was changed since it was indexed: make the index anew"
                )


def _prefixes(keys: Sequence[str]) -> list[str]:
    """What to list to see all of these: folder by folder, so that a store's other folders are left
    alone; of many folders, what is common to all."""
    folders: dict[str, list[str]] = {}
    for key in keys:
        folders.setdefault(key.rpartition("/")[0], []).append(key)
    if len(folders) > _FOLDERS_MOST:
        return [os.path.commonprefix(keys)]
    return [os.path.commonprefix(inside) for inside in folders.values()]


def of_objects(store: _core.Store, objects: Sequence[dict[str, Any]], kind: int) -> Index:
    """Reads sizes and headers only. objects: as store.list() and store.stat() describe them."""
    extensions: dict[str, int] = {}
    starts, name_ends, names = [0], [], bytearray()
    rows: list[tuple[int, int, int, int]] = []
    for number, each in enumerate(objects):
        for name, parts in _samples(store, each, kind):
            for extension, offset, size in parts:
                rows.append(
                    (number, extensions.setdefault(extension, len(extensions)), offset, size)
                )
            starts.append(len(rows))
            names += name.encode()
            name_ends.append(len(names))
    if len(extensions) >= 1 << 16:
        raise InvalidArgument(f"there are {len(extensions)} extensions; 65,535 are the most")
    columns = np.array(rows, np.uint64).reshape(-1, 4).T
    return Index(
        kind,
        [{key: each[key] for key in ("key", "bytes", "tag")} for each in objects],
        list(extensions),
        np.array(starts, "<u8"),
        *(column.astype(kind) for column, kind in zip(columns, list(_TYPES.values())[1:])),
        None,
        np.array(name_ends, "<u8"),
        np.frombuffer(bytes(names), np.uint8),
    )


def _samples(
    store: _core.Store, found: dict[str, Any], kind: int
) -> Iterator[tuple[str, list[tuple[str, int, int]]]]:
    """Name and (extension, offset, bytes) of each part."""
    key, size = found["key"], found["bytes"]
    if kind == WHOLE:
        yield key, [("", 0, size)]
        return
    for member in members(store, key, size):
        yield member.name, [(extension, *span) for extension, span in member.parts.items()]


def joined(parts: Sequence[Index]) -> Index:
    """One index of what several have, in this order."""
    extensions: dict[str, int] = {}
    columns: dict[str, list[np.ndarray]] = {name: [] for name in (*_TYPES, "name_ends", "names")}
    objects, rows, letters = [], 0, 0
    columns["starts"].append(np.zeros(1, "<u8"))
    for part in parts:
        numbers = [extensions.setdefault(each, len(extensions)) for each in part.extensions]
        columns["starts"].append(part.starts[1:] + np.uint64(rows))
        columns["object"].append(part.object + np.uint32(len(objects)))
        columns["extension"].append(np.array([*numbers, 0], "<u2")[part.extension])
        columns["offset"].append(part.offset)
        columns["bytes"].append(part.bytes)
        columns["name_ends"].append(part.name_ends + np.uint64(letters))
        columns["names"].append(part.names)
        objects += part.objects
        rows += len(part.object)
        letters += len(part.names)
    crcs = [part.crc for part in parts]
    return Index(
        parts[0].kind,
        objects,
        list(extensions),
        **{name: np.concatenate(column) for name, column in columns.items()},
        crc=np.concatenate(crcs) if all(each is not None for each in crcs) else None,
    )


# ---- the file


def _padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % 64)


def write(index: Index, path: Path) -> None:
    """Durable when this returns, and whole whenever it can be seen."""
    text = json.dumps({"objects": index.objects, "extensions": index.extensions}).encode()
    crc = index.crc if index.crc is not None else np.zeros(0, "<u4")
    arrays = [getattr(index, name).astype(kind) for name, kind in _TYPES.items()]
    arrays += [crc.astype("<u4"), index.name_ends.astype("<u8"), index.names]
    size = 128 + len(_padded(text)) + sum(-(-each.nbytes // 64) * 64 for each in arrays)
    head = _HEADER.pack(
        MAGIC,
        VERSION,
        index.kind,
        len(index),
        len(index.object),
        len(text),
        index.names.nbytes,
        index.crc is not None,
        _crc32c(text),
        size,
        0,
    )[:-4]
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(head + struct.pack("<I", _crc32c(head)))
            for each in (text, *arrays):
                data = each if isinstance(each, bytes) else memoryview(each).cast("B")
                file.write(data)
                file.write(bytes(-len(data) % 64))
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    finally:
        temporary.unlink(missing_ok=True)


def _crc32c(data: bytes) -> int:
    array = np.frombuffer(data, np.uint8)
    return _core.crc32c(array.ctypes.data, array.nbytes)


def read(path: str | os.PathLike[str]) -> Index:
    """Maps an index. Corruption for one that is cut or damaged, Mismatch for another version."""
    path = Path(path)
    damaged = Corruption(f"the index {path} is cut or damaged: make it anew")
    try:
        whole = np.memmap(path, np.uint8, "r")
    except ValueError:  # an empty file
        raise damaged from None
    if len(whole) < 128:
        raise damaged
    head = whole[:128].tobytes()
    magic, version, kind, samples, parts, text, names, has_crc, text_crc, size, crc = (
        _HEADER.unpack(head)
    )
    if magic != MAGIC:
        raise InvalidArgument(f"{path} is no index of a data set: `stoker data index` makes one")
    if crc != _crc32c(head[:-4]) or size != len(whole):
        raise damaged
    if version != VERSION or kind not in (TAR, WHOLE):
        raise Mismatch(
            f"the index {path} is of version {version}, kind {kind}, which this Stoker does not "
            "know: use a newer one, or make the index anew"
        )
    at = 128

    def section(dtype: str, count: int) -> np.ndarray:
        nonlocal at
        bytes_ = count * np.dtype(dtype).itemsize
        if bytes_ > len(whole) - at:
            raise damaged
        found = whole[at : at + bytes_].view(dtype)
        at += -(-bytes_ // 64) * 64
        return found

    described = section("u1", text).tobytes()
    if _crc32c(described) != text_crc:
        raise damaged
    about = json.loads(described)
    counts = dict.fromkeys(_TYPES, parts) | {"starts": samples + 1}
    arrays = {name: section(dtype, counts[name]) for name, dtype in _TYPES.items()}
    found = section("<u4", parts if has_crc else 0)
    index = Index(
        kind,
        about["objects"],
        about["extensions"],
        **arrays,
        crc=found if has_crc else None,
        name_ends=section("<u8", samples),
        names=section("u1", names),
    )
    if index.starts[0] != 0 or index.starts[-1] != parts:
        raise damaged
    return index


# ---- making it


def build(
    store: _core.Store,
    objects: Sequence[dict[str, Any]],
    kind: int,
    out: Path,
    crcs: Callable[[Index], np.ndarray] | None,
    done: Callable[[dict[str, Any]], None],
) -> Index:
    """Indexes object by object. What is done stays in a folder beside `out` until all is: a build
    that was ended goes on from there. crcs: gives the CRCs of all parts. done: told each object."""
    if not objects:
        raise NotFound("there is nothing to index: no object has such a name")
    parts = out.with_name(out.name + ".parts")
    parts.mkdir(parents=True, exist_ok=True)
    all_of_them = []
    for number, each in enumerate(objects):
        path = parts / f"{number:08d}"
        part = _finished(path, each, kind, crcs is not None)
        if part is None:
            part = of_objects(store, [each], kind)
            if crcs is not None:
                part = replace(part, crc=crcs(part))
            write(part, path)
        all_of_them.append(part)
        done(each)
    whole = joined(all_of_them)
    write(whole, out)
    shutil.rmtree(parts)
    return whole


def _finished(path: Path, found: dict[str, Any], kind: int, with_crcs: bool) -> Index | None:
    """The part of an earlier build, if it is one of this very object."""
    try:
        part = read(path)
    except (OSError, Corruption, InvalidArgument, Mismatch):
        return None
    same = [{key: found[key] for key in ("key", "bytes", "tag")}] == part.objects
    return part if same and part.kind == kind and (part.crc is not None) == with_crcs else None
