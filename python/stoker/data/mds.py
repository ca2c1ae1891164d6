"""MDS shards, as MosaicML Streaming writes them: `index.json`, and what the bytes of shards mean.

A shard begins with a u32, its number of samples n. Then come n + 1 u32 offsets of samples, counted
from its first byte, the writer's settings as JSON, and the samples. A sample is a record
(src/stoker/data/record.h): u32 sizes of columns that have no fixed one, then all columns.
"""

from __future__ import annotations

import json
import posixpath
from collections.abc import Callable, Sequence
from decimal import Decimal
from hashlib import algorithms_available
from typing import Any

import numpy as np
import torch

from stoker import _core

from ..errors import Corruption, InvalidArgument, NotFound
from .index import MDS, Index
from .packed import OF_MDS, about, opened

INDEX = "index.json"
_INDEX_MOST = 1 << 30  # bytes of an index.json
_COLUMNS_MOST = 1 << 12
_NUMBERS = (
    "uint8 uint16 uint32 uint64 int8 int16 int32 int64 float16 float32 float64"  # stored as such
).split()
# What the first byte of an array of no stated type means.
_ARRAY_TYPES = {
    8: "uint8",
    9: "int8",
    16: "uint16",
    17: "int16",
    18: "float16",
    32: "uint32",
    33: "int32",
    34: "float32",
    64: "uint64",
    65: "int64",
    66: "float64",
}
Decode = Callable[[np.ndarray], Any]  # of the bytes of one column, uint8


# ---- which shards there are


def topmost(keys: Sequence[str]) -> list[str]:
    """Of the objects, each index.json that has none above it: one that merges others names their
    shards too."""
    found = sorted((each for each in keys if posixpath.basename(each) == INDEX), key=len)
    folders: list[str] = []
    chosen = []
    for key in found:
        folder = key.removesuffix(INDEX)
        if not any(folder.startswith(above) for above in folders):
            folders.append(folder)
            chosen.append(key)
    return sorted(chosen)


def shards(
    store: _core.Store, indexes: Sequence[str], listed: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """The shards that each index.json names, in its order, as store.list() describes objects, with
    "samples" (how many) and "columns" ({"name", "encoding", "bytes"}; 0: each sample says).

    A compressed shard also has "packed", how, and "unpacked", the bytes that it unpacks to.

    listed: the objects of the store, as far as they may be shards. Corruption: an index.json that
    says what cannot be, or a shard of another size. InvalidArgument: columns that run code or that
    are not known, a compression that is not, several kinds of samples. NotFound: a shard that is
    not there.
    """
    objects = {each["key"]: each for each in listed}
    found = []
    for key in indexes:
        if key not in objects:
            raise NotFound(
                f"there is no '{key}': name the folder that MDSWriter wrote, which has its index"
            )
        found += _named(store, key, objects)
    kinds = {json.dumps(each["columns"]) for each in found}
    if len(kinds) > 1:
        raise InvalidArgument(
            f"the shards of {', '.join(indexes)} have different columns: give each kind its own "
            "source, or its own index"
        )
    if not found:
        raise NotFound(f"{', '.join(indexes)} names no shard: there is nothing to read")
    return found


def packed_shards(
    store: _core.Store, key: str, objects: dict[str, Any]
) -> list[tuple[dict[str, Any], dict[str, Any], str]]:
    """Of each shard that an index.json names: its raw form ("key", "bytes", "hashes" by the names
    of hashlib), the object that it is made of, and that one's compression ("": it is the raw form).

    Corruption, InvalidArgument and NotFound as in shards()."""
    found = []
    folder = key.removesuffix(INDEX)
    for number, said in enumerate(_said(store, key, objects)):
        try:
            raw, zipped, packed = said["raw_data"], said.get("zip_data"), said.get("compression")
            name, hashes = raw["basename"], dict(raw.get("hashes") or {})
            source = (zipped or {}).get("basename", f"{name}.zstd") if packed else name
            kind = packed.partition(":")[0] if packed else ""
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise Corruption(
                f"{key} does not say what shard {number} is ({error}): fetch or write it again"
            ) from error
        if not (_is_count(raw.get("bytes")) and _is_name(name) and _is_name(source)):
            raise Corruption(f"{key} has impossible values for shard {number}: fetch it again")
        if kind not in ("", "gz", "bz2", "br", "zstd"):
            raise InvalidArgument(
                f"{folder}{source} is compressed with {packed!r}, which Stoker cannot unpack: "
                f"write the shards with zstd, gz, bz2 or br"
            )
        if folder + source not in objects:
            if folder + name not in objects:
                raise NotFound(
                    f"{key} names '{folder}{source}', which is not in the store: fetch that shard"
                )
            source, kind = name, ""  # somebody unpacked it
        known = {each: text for each, text in hashes.items() if each in algorithms_available}
        about = {"key": folder + name, "bytes": raw["bytes"], "hashes": known}
        found.append((about, objects[folder + source], kind))
    return found


def _named(store: _core.Store, key: str, objects: dict[str, Any]) -> list[dict[str, Any]]:
    folder = key.removesuffix(INDEX)
    said = _said(store, key, objects)
    return [_shard(key, folder, number, each, objects) for number, each in enumerate(said)]


def _said(store: _core.Store, key: str, objects: dict[str, Any]) -> list[Any]:
    """What an index.json says of each shard, not yet judged."""
    size = objects[key]["bytes"]
    if size > _INDEX_MOST:
        raise Corruption(f"{key} has {size} bytes: that is not an index of MDS shards")
    try:
        about = json.loads(bytes(store.read_bytes(key, 0, size)))
        version, named = about["version"], about["shards"]
        if version != 2 or not isinstance(named, list):
            raise ValueError(f"version {version!r}")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise Corruption(
            f"{key} is not an index of MDS shards of version 2 ({error}): fetch or write it again"
        ) from error
    return named


def _shard(
    index: str, folder: str, number: int, said: Any, objects: dict[str, Any]
) -> dict[str, Any]:
    try:
        form, samples, raw = said["format"], said["samples"], said["raw_data"]
        name, size = raw["basename"], raw["bytes"]
        lists = said["column_names"], said["column_encodings"], said["column_sizes"]
        packed = said.get("compression")
    except (KeyError, TypeError, AttributeError) as error:
        raise Corruption(
            f"{index} does not say what shard {number} is ({error}): fetch or write it again"
        ) from error
    if form != "mds":
        raise InvalidArgument(
            f"{index} names shards of the format {form!r}: only samples of 'mds' can be read one "
            f"by one; write them with MDSWriter"
        )
    columns = _columns(f"{index}, shard {number}", *lists)
    if not (_is_count(samples) and _is_count(size) and _is_name(name)):
        raise Corruption(
            f"{index} has impossible values for shard {number} ({samples!r} samples, {size!r} "
            f"bytes, "
            f"named {name!r}): fetch or write it again"
        )
    key = folder + name
    if key not in objects:
        if packed:
            found = _packed(folder, name, said, objects)
            return {**found, "unpacked": size, "samples": samples, "columns": columns}
        raise NotFound(f"{index} names '{key}', which is not in the store: fetch that shard")
    if objects[key]["bytes"] != size:
        raise Corruption(
            f"{key} has {objects[key]['bytes']} bytes, but {index} names {size}: it was cut or "
            "replaced; fetch or write it again"
        )
    return {**objects[key], "samples": samples, "columns": columns}


def _packed(
    folder: str, name: str, said: dict[str, Any], objects: dict[str, Any]
) -> dict[str, Any]:
    """The object that a shard lies in, compressed."""
    how = str(said["compression"])
    zipped = said.get("zip_data")
    source = zipped.get("basename") if isinstance(zipped, dict) else f"{name}.zstd"
    kind = OF_MDS.get(how.partition(":")[0])
    if kind is None:
        raise InvalidArgument(
            f"{folder}{source} is compressed with {how!r}, which only `stoker data build STORE "
            f"OUT --unpack` can unpack: unpack it to '{folder}{name}', or write it with zstd or gz"
        )
    if not _is_name(source) or folder + source not in objects:
        raise NotFound(
            f"the index.json in '{folder}' names '{folder}{source}', which is not in the store: "
            "fetch that shard"
        )
    return {**objects[folder + source], "packed": kind}


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def _is_name(value: Any) -> bool:
    """Inside of the folder of its index."""
    return isinstance(value, str) and not set(value.split("/")) & {"", ".", ".."}


def _columns(where: str, names: Any, encodings: Any, sizes: Any) -> list[dict[str, Any]]:
    lists = (names, encodings, sizes)
    if not (
        all(isinstance(each, list) for each in lists)
        and 0 < len(names) == len(encodings) == len(sizes) <= _COLUMNS_MOST
        and all(isinstance(each, str) for each in (*names, *encodings))
        and all(each is None or _is_count(each) for each in sizes)
        and len(set(names)) == len(names)
    ):
        raise Corruption(f"{where}: its columns are impossible; fetch or write it again")
    columns = []
    for name, encoding, size in zip(names, encodings, sizes, strict=True):
        _, fixed = decoder(name, encoding)
        if (size or 0) != fixed:
            raise Corruption(
                f"{where}: column '{name}' has {size} bytes, but '{encoding}' has "
                f"{fixed or 'no fixed size'}; fetch or write it again"
            )
        columns.append({"name": name, "encoding": encoding, "bytes": fixed})
    return columns


# ---- where the samples of a shard lie


def shard_index(store: _core.Store, shard: dict[str, Any]) -> Index:
    """Of a shard of shards(). Reads its offsets and settings. Corruption: they cannot be."""
    key, samples = shard["key"], shard["samples"]
    size = shard.get("unpacked", shard["bytes"])
    store = opened(store, shard)
    first = 4 + 4 * (samples + 1)  # behind the offsets

    def damaged(why: str) -> Corruption:
        return Corruption(f"{key} is damaged or cut: {why}; fetch or write it again")

    if first > size:
        raise damaged(f"it has no room for the offsets of {samples} samples")
    head = np.frombuffer(bytes(store.read_bytes(key, 0, first)), "<u4")
    if head[0] != samples:
        raise damaged(f"it says it has {head[0]} samples, its index.json says {samples}")
    offsets = head[1:].astype(np.int64)
    sizes = np.diff(offsets)
    if offsets[0] < first or offsets[-1] != size:
        raise damaged(f"its samples lie from byte {offsets[0]} to {offsets[-1]} of {size}")
    fixed = [column["bytes"] for column in shard["columns"]]
    least = sum(each or 4 for each in fixed)
    wrong = sizes != least if all(fixed) else sizes < least
    if wrong.any():
        at = int(np.flatnonzero(wrong)[0])
        raise damaged(f"its sample {at} has {sizes[at]} bytes, where its columns take {least}")
    _check_settings(store, shard, first, int(offsets[0]), damaged)
    return Index(
        MDS,
        [about(shard)],
        [""],
        np.arange(samples + 1, dtype="<u8"),
        np.zeros(samples, "<u4"),
        np.zeros(samples, "<u2"),
        offsets[:-1].astype("<u8"),
        sizes.astype("<u8"),
        None,
        np.zeros(0, "<u8"),
        np.zeros(0, np.uint8),
        shard["columns"],
    )


def _check_settings(
    store: _core.Store,
    shard: dict[str, Any],
    begin: int,
    end: int,
    damaged: Callable[[str], Corruption],
) -> None:
    """What the shard itself says of its columns is what its index.json says."""
    if begin == end:
        return
    try:
        said = json.loads(bytes(store.read_bytes(shard["key"], begin, end - begin)))
        columns = _columns(
            shard["key"], said["column_names"], said["column_encodings"], said["column_sizes"]
        )
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise damaged(f"its settings cannot be read ({error})") from error
    if columns != shard["columns"]:
        raise damaged("its columns are not those of its index.json")


# ---- what the bytes of a column mean


def decoder(name: str, encoding: str) -> tuple[Decode, int]:
    """How a column is decoded, and the bytes of each of its values (0: they differ).

    Decoding raises ValueError for bytes that cannot be. InvalidArgument: no such column is read."""
    kind, _, settings = encoding.partition(":")
    if kind == "pkl":
        raise InvalidArgument(
            f"column '{name}' is pickled, and loading a pickle can run code of its author. Write "
            f"it as 'json', 'ndarray' or 'bytes' instead"
        )
    if kind == "ndarray":
        return _array_decoder(name, settings)
    if kind in ("bytes", "jpeg", "png"):  # of a picture: its file
        return torch.from_numpy, 0
    if kind == "int":
        kind = "int64"
    if kind in _NUMBERS and not settings:
        dtype = np.dtype(kind).newbyteorder("<")
        return lambda raw: raw.view(dtype)[0].item(), dtype.itemsize
    texts: dict[str, Callable[[str], Any]] = {
        "str": lambda text: text,
        "json": json.loads,
        "str_int": int,
        "str_float": float,
        "str_decimal": _decimal,
    }
    if encoding not in texts:
        raise InvalidArgument(
            f"column '{name}' is of the type '{encoding}', which the loader does not support: "
            f"write it as 'bytes', 'jpeg', 'ndarray', 'json', or a number"
        )
    make = texts[encoding]
    return lambda raw: make(raw.tobytes().decode()), 0


def _decimal(text: str) -> Decimal:
    try:
        return Decimal(text)
    except ArithmeticError as error:
        raise ValueError(f"{text!r} is not a decimal number") from error


def _array_decoder(name: str, settings: str) -> tuple[Decode, int]:
    """settings: "", "int32" or "int32:4,5"; what is not there, each value says."""
    kind, _, sides = settings.partition(":")
    shape = tuple(int(side) for side in sides.split(",") if side.isdecimal()) if sides else None
    known = not kind or kind in _NUMBERS
    if not known or (shape is not None and (len(shape) != sides.count(",") + 1 or 0 in shape)):
        raise InvalidArgument(
            f"column '{name}' is of the type 'ndarray:{settings}', which does not exist: write "
            f"its index.json again"
        )
    if shape is not None:
        size = np.dtype(kind).itemsize
        for side in shape:
            size *= side
        if size >= 1 << 32:
            raise InvalidArgument(
                f"column '{name}' has arrays of {size} bytes; at most 2^32 are supported"
            )
        return lambda raw: _tensor(raw, kind, shape), size
    return lambda raw: _array(raw, kind), 0


def _array(raw: np.ndarray, kind: str) -> torch.Tensor:
    """An array that says its shape, and its type unless `kind` does."""
    at = 0
    if not kind:
        if len(raw) == 0 or int(raw[0]) not in _ARRAY_TYPES:
            raise ValueError("an array of an unknown type")
        kind, at = _ARRAY_TYPES[int(raw[0])], 1
    if len(raw) == at:
        raise ValueError("an array without a shape")
    sides, width = int(raw[at]) >> 2, 1 << (int(raw[at]) & 3)
    end = at + 1 + sides * width
    if end > len(raw):
        raise ValueError("an array whose shape is cut")
    shape = tuple(raw[at + 1 : end].view(f"<u{width}").tolist())
    return _tensor(raw[end:], kind, shape)


def _tensor(raw: np.ndarray, kind: str, shape: tuple[int, ...]) -> torch.Tensor:
    dtype = np.dtype(kind).newbyteorder("<")
    items = 1
    for side in shape:
        items *= side
    if items * dtype.itemsize != len(raw):
        raise ValueError(f"{len(raw)} bytes for an array of {shape}")
    # Unaligned ones are moved: not every use of a tensor bears that.
    values = raw if raw.ctypes.data % dtype.itemsize == 0 else raw.copy()
    return torch.from_numpy(values.view(dtype).reshape(shape))


class Records:
    """Samples of MDS shards as dicts. columns: as shards() describes them."""

    def __init__(self, columns: Sequence[dict[str, Any]]) -> None:
        self.names = [column["name"] for column in columns]
        self.bytes = [column["bytes"] for column in columns]
        self._decode = [decoder(column["name"], column["encoding"])[0] for column in columns]

    def sample(self, number: int, parts: Sequence[np.ndarray]) -> dict[str, Any]:
        """parts: the bytes of each column. Corruption: what a column cannot hold."""
        sample = {}
        for name, decode, part in zip(self.names, self._decode, parts, strict=True):
            try:
                sample[name] = decode(part)
            except (ValueError, RecursionError) as error:
                raise Corruption(
                    f"sample {number} is damaged: its column '{name}' cannot be read ({error}); "
                    "fetch that shard again"
                ) from error
        return sample
