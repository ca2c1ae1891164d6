"""Where each sample of a data set lies: arrays in memory, or mapped from a file.

docs/formats/data_index.md has the format, `indexing.py` makes them.
"""

from __future__ import annotations

import itertools
import json
import os
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from stoker import _core

from ..errors import Corruption, InvalidArgument, Mismatch, NotFound

MAGIC = b"STKINDEX"  # docs/formats/data_index.md
VERSION, PACKED_VERSION = 1, 2  # 2: some objects are compressed
# A sample is the members of one name; a whole object; a record of an MDS shard; a row of an
# Arrow object, or of a safetensors object.
TAR, WHOLE, MDS, ARROW, SAFETENSORS = 1, 2, 3, 4, 5
KINDS = {TAR: "tar", WHOLE: "files", MDS: "mds", ARROW: "arrow", SAFETENSORS: "safetensors"}
NAMED = (TAR, WHOLE)  # kinds whose samples have names
_HEADER = struct.Struct("<8sIIQQQQIIQ60xI")
_FOLDERS_MOST = 64  # that are listed one by one
# The sections behind the objects, in their order.
_TYPES = {
    "starts": "<u8",
    "object": "<u4",
    "extension": "<u2",
    "offset": "<u8",
    "bytes": "<u8",
    "crc": "<u4",
    "name_ends": "<u8",
    "names": "u1",
}
Sections = Callable[[], Iterator[np.ndarray]]


@dataclass(frozen=True)
class Index:
    """Sample i has parts [starts[i], starts[i + 1]); each part lies in an object from an offset on,
    and has an extension. objects: {"key", "bytes", "tag"}, and of compressed ones "packed", how,
    and "unpacked", the bytes that they unpack to, which all offsets are in. columns: of kinds whose
    samples are records or rows, {"name", "encoding", "bytes"}, see mds.py; also "shape", see
    arrow.py."""

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
    columns: list[dict[str, Any]] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.starts) - 1

    def name(self, sample: int) -> str:
        """Of a kind that is NAMED."""
        first = int(self.name_ends[sample - 1]) if sample else 0
        return self.names[first : int(self.name_ends[sample])].tobytes().decode()

    def extensions_of(self, sample: int) -> list[str]:
        """The extension of each part."""
        parts = self.extension[int(self.starts[sample]) : int(self.starts[sample + 1])]
        return [self.extensions[number] for number in parts.tolist()]

    def table(self, record: Sequence[int] = ()) -> _core.SampleTable:
        """record: bytes of the columns that each sample is split into (0: the sample says)."""
        return _core.SampleTable.ranges(
            [each["key"] for each in self.objects],
            [each.get("unpacked", each["bytes"]) for each in self.objects],
            self.starts,
            self.object,
            self.offset,
            self.bytes,
            self.crc,
            list(record),
            [(each.get("packed", ""), each["bytes"]) for each in self.objects]
            if self.packed
            else [],
        )

    @property
    def packed(self) -> bool:
        """Whether an object is compressed."""
        return any("packed" in each for each in self.objects)

    @property
    def all_bytes(self) -> int:
        """Of all objects, unpacked."""
        return sum(each.get("unpacked", each["bytes"]) for each in self.objects)

    def samples_of_objects(self) -> np.ndarray:
        """How many samples each object has."""
        first = self.object[self.starts[:-1].astype(np.int64)]
        return np.bincount(first, minlength=len(self.objects))

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
                    "open the store that was indexed, or make the index again"
                )
            if (now["bytes"], now["tag"]) != (each["bytes"], each["tag"]):
                raise Mismatch(
                    f"'{each['key']}' was changed since it was indexed: make the index again"
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


def _shifted(parts: Sequence[Index], extensions: dict[str, int]) -> dict[str, Sections]:
    """Each section of the index that has what all of these have, in this order: how to get it,
    piece by piece. extensions: their numbers there."""

    def section(name: str, of: Callable[[Index, int, int, int], np.ndarray]) -> Sections:
        def pieces() -> Iterator[np.ndarray]:
            objects = rows = letters = 0
            for part in parts:
                yield np.ascontiguousarray(of(part, objects, rows, letters), _TYPES[name])
                objects += len(part.objects)
                rows += len(part.object)
                letters += len(part.names)

        return pieces

    def renumbered(part: Index, *_: int) -> np.ndarray:
        numbers = [extensions[each] for each in part.extensions]
        return np.array([*numbers, 0], "<u2")[part.extension]

    starts = section("starts", lambda part, _, rows, __: part.starts[1:] + np.uint64(rows))
    with_crcs = all(part.crc is not None for part in parts)
    return {
        "starts": lambda: itertools.chain([np.zeros(1, "<u8")], starts()),
        "object": section("object", lambda part, objects, *_: part.object + np.uint32(objects)),
        "extension": section("extension", renumbered),
        "offset": section("offset", lambda part, *_: part.offset),
        "bytes": section("bytes", lambda part, *_: part.bytes),
        "crc": section("crc", lambda part, *_: part.crc) if with_crcs else lambda: iter(()),
        "name_ends": section("name_ends", lambda part, _, __, at: part.name_ends + np.uint64(at)),
        "names": section("names", lambda part, *_: part.names),
    }


def _extensions(parts: Sequence[Index]) -> dict[str, int]:
    numbers: dict[str, int] = {}
    for part in parts:
        for each in part.extensions:
            numbers.setdefault(each, len(numbers))
    if len(numbers) >= 1 << 16:
        raise InvalidArgument(f"there are {len(numbers)} extensions; at most 65,535 are supported")
    return numbers


def _columns(parts: Sequence[Index]) -> list[dict[str, Any]]:
    columns = parts[0].columns
    for part in parts:
        if part.columns != columns:
            raise InvalidArgument(
                f"'{part.objects[0]['key']}' has other columns than '{parts[0].objects[0]['key']}'"
                ": give each kind its own source, or its own index"
            )
    return columns


def joined(parts: Sequence[Index]) -> Index:
    """One index of what several of one kind have, in this order."""
    extensions = _extensions(parts)
    found = {name: list(pieces()) for name, pieces in _shifted(parts, extensions).items()}
    arrays = {name: np.concatenate(each) if each else None for name, each in found.items()}
    objects = [each for part in parts for each in part.objects]
    return Index(parts[0].kind, objects, list(extensions), **arrays, columns=_columns(parts))


# ---- the file


def write(parts: Index | Sequence[Index], path: Path) -> None:
    """One index, or what several of one kind have together. Durable when this returns, and whole
    whenever it can be seen. Memory: that of the largest part."""
    parts = [parts] if isinstance(parts, Index) else parts
    extensions = _extensions(parts)
    about: dict[str, Any] = {
        "objects": [each for part in parts for each in part.objects],
        "extensions": list(extensions),
    }
    first = parts[0]
    if first.columns:
        about["columns"] = _columns(parts)
    text = json.dumps(about).encode()
    samples = rows = letters = 0
    with_crcs = True
    for part in parts:
        samples += len(part)
        rows += len(part.object)
        letters += len(part.names)
        with_crcs = with_crcs and part.crc is not None
    counts = _counts(first.kind, samples, rows, letters, with_crcs)
    size = 128 + _padded(len(text))
    size += sum(_padded(counts[name] * np.dtype(kind).itemsize) for name, kind in _TYPES.items())
    head = _HEADER.pack(
        MAGIC,
        PACKED_VERSION if any(part.packed for part in parts) else VERSION,
        first.kind,
        samples,
        rows,
        len(text),
        letters,
        with_crcs,
        _crc32c(text),
        size,
        0,
    )[:-4]
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(head + struct.pack("<I", _crc32c(head)))
            for pieces in (lambda: iter([text]), *_shifted(parts, extensions).values()):
                for each in pieces():
                    file.write(each if isinstance(each, bytes) else memoryview(each).cast("B"))
                file.write(bytes(-file.tell() % 64))
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


def _padded(size: int) -> int:
    return -(-size // 64) * 64


def _counts(kind: int, samples: int, parts: int, letters: int, with_crcs: bool) -> dict[str, int]:
    """Items of each section."""
    return dict.fromkeys(_TYPES, parts) | {
        "starts": samples + 1,
        "crc": parts if with_crcs else 0,
        "name_ends": samples if kind in NAMED else 0,
        "names": letters,
    }


def _crc32c(data: bytes) -> int:
    array = np.frombuffer(data, np.uint8)
    return _core.crc32c(array.ctypes.data, array.nbytes)


def read(path: str | os.PathLike[str]) -> Index:
    """Maps an index. Corruption for one that is cut or damaged, Mismatch for another version."""
    path = Path(path)
    damaged = Corruption(f"the index {path} is cut or damaged: make it again")
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
        raise InvalidArgument(
            f"{path} is not an index of a data set: `stoker data index` makes one"
        )
    if crc != _crc32c(head[:-4]) or size != len(whole):
        raise damaged
    if version not in (VERSION, PACKED_VERSION) or kind not in KINDS:
        raise Mismatch(
            f"the index {path} is of version {version}, kind {kind}, which this Stoker does not "
            "know: use a newer Stoker, or make the index again"
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
    counts = _counts(kind, samples, parts, names, bool(has_crc))
    arrays = {name: section(dtype, counts[name]) for name, dtype in _TYPES.items()}
    if not has_crc:
        arrays["crc"] = None
    index = Index(
        kind, about["objects"], about["extensions"], **arrays, columns=about.get("columns", [])
    )
    if index.starts[0] != 0 or index.starts[-1] != parts:
        raise damaged
    return index
