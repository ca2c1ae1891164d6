"""Samples in objects of any store: tokens, rows of arrays, whole files, WebDataset's tar files.

A source knows where each sample lies and reads a batch of them by one call (`Store.read_many`), so
that a slow store works on all of them at once. Opening one reads sizes and headers only. The tag of
every object is part of the fingerprint: a resume over changed data is refused.
"""

from __future__ import annotations

import hashlib
import io
import struct
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from stoker import _core

from ..errors import Corruption, InvalidArgument, NotFound

_INDEX = struct.Struct(
    "<9sQBQQ"
)  # of Megatron: magic, version, code of the type, sequences, documents
_INDEX_BEGINS = b"MMIDIDX\x00\x00"
_INDEX_TYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
_NPY_HEADER_MAX = 1 << 16
_KEPT: list[tuple[_core.Future, np.ndarray]] = []  # reads that nobody waits for any more


@dataclass(frozen=True)
class Array:
    """Where the items of one array lie in an object: `count` of them from byte `offset` on."""

    key: str
    offset: int
    count: int
    dtype: np.dtype  # of one item, little-endian
    shape: tuple[int, ...] = ()  # of one item


class _Ranges:
    """Reads ranges of objects. Any thread."""

    def __init__(self, store: _core.Store, keys: Sequence[str]) -> None:
        self.store, self.keys = store, list(keys)
        digest = hashlib.sha256()
        self.sizes = []
        for key in self.keys:
            found = store.stat(key)
            self.sizes.append(found["bytes"])
            digest.update(f"{key}\0{found['bytes']}\0{found['tag']}\n".encode())
        self.fingerprint = digest.hexdigest()

    def read(self, pieces: np.ndarray, into: np.ndarray) -> None:
        """pieces: uint64 [n, 4] as Store.read_many takes them; into: C order, any type."""
        if len(pieces) == 0:
            return
        address, size = into.ctypes.data, into.nbytes
        done = self.store.read_many(self.keys, np.ascontiguousarray(pieces), address, size)
        try:
            done.wait()
        except BaseException:
            if not done.ready():  # Ctrl-C: the store still writes into this memory
                _KEPT.append((done, into))
            raise
        _KEPT[:] = [kept for kept in _KEPT if not kept[0].ready()]


class _Items:
    """A number of equal ranges in several objects, numbered through."""

    def __init__(
        self, ranges: _Ranges, counts: Sequence[int], offsets: Sequence[int], stride: int, size: int
    ) -> None:
        self._ranges, self._stride, self._size = ranges, stride, size
        self._ends = np.cumsum(np.asarray(counts, np.uint64), dtype=np.uint64)
        self._offsets = np.asarray(offsets, np.uint64)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def read(self, samples: np.ndarray) -> np.ndarray:
        """uint8 [samples, size]."""
        objects = np.searchsorted(self._ends, samples, side="right").astype(np.uint64)
        before = np.concatenate([np.zeros(1, np.uint64), self._ends])[objects]
        out = np.empty((len(samples), self._size), np.uint8)
        pieces = np.empty((len(samples), 4), np.uint64)
        pieces[:, 0] = objects
        pieces[:, 1] = self._offsets[objects] + (samples - before) * np.uint64(self._stride)
        pieces[:, 2] = self._size
        pieces[:, 3] = np.arange(len(samples), dtype=np.uint64) * np.uint64(self._size)
        self._ranges.read(pieces, out)
        return out


class Tokens:
    """Packed tokens as windows of `length` inputs and the one token behind them.

        Tokens(store, "train.bin", 1024)          # the type: of Megatron's train.idx beside it
        Tokens(store, ["a.npy", "b.npy"], 1024)   # arrays of one dimension
        Tokens(store, "raw.bin", 1024, dtype="uint16")

    Sample i of an object holds tokens [i * length, i * length + length] of it: targets are inputs
    moved by one, so neighbours share one token. No window reaches into another object; what is left
    of one, shorter than a window, is left out. Batches are int64 [samples, length + 1].
    Raises InvalidArgument for a type that is not known, Corruption for a size that cannot be.
    """

    def __init__(
        self,
        store: _core.Store,
        keys: str | Sequence[str],
        length: int,
        *,
        dtype: str | None = None,
    ) -> None:
        if length < 1:
            raise ValueError(f"a window has at least one token, not {length}")
        keys = [keys] if isinstance(keys, str) else list(keys)
        arrays = [_tokens_of(store, key, dtype) for key in keys]
        types = {array.dtype for array in arrays}
        if len(types) > 1:
            raise InvalidArgument(
                f"the objects hold tokens of several types ({', '.join(map(str, types))}): "
                "give each its own source"
            )
        self.length, self._dtype = length, types.pop()
        width = self._dtype.itemsize
        ranges = _Ranges(store, keys)
        counts = [max(0, array.count - 1) // length for array in arrays]
        self._items = _Items(
            ranges, counts, [array.offset for array in arrays], length * width, (length + 1) * width
        )
        self.fingerprint = f"tokens {ranges.fingerprint} {self._dtype.str}, windows of {length}"

    def __len__(self) -> int:
        return len(self._items)

    def batch(self, samples: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(self._items.read(samples).view(self._dtype).astype(np.int64))


class Rows:
    """Rows of .npy files: sample i is row i, through all objects. Batches are [samples, ...] of the
    files' type. All files have one type and one shape of a row."""

    def __init__(self, store: _core.Store, keys: str | Sequence[str]) -> None:
        keys = [keys] if isinstance(keys, str) else list(keys)
        arrays = [_npy(store, key) for key in keys]
        kinds = {(array.dtype, array.shape) for array in arrays}
        if len(kinds) > 1:
            raise InvalidArgument(
                f"the objects hold rows of several kinds ({kinds}): give each its own source"
            )
        self._dtype, self._shape = kinds.pop()
        ranges = _Ranges(store, keys)
        size = self._dtype.itemsize * int(np.prod(self._shape, dtype=np.int64))
        if size == 0:
            raise InvalidArgument(f"the rows of {keys[0]} have no bytes")
        self._items = _Items(
            ranges,
            [array.count for array in arrays],
            [array.offset for array in arrays],
            size,
            size,
        )
        self.fingerprint = f"rows {ranges.fingerprint}"

    def __len__(self) -> int:
        return len(self._items)

    def batch(self, samples: np.ndarray) -> torch.Tensor:
        rows = self._items.read(samples).view(self._dtype).reshape(len(samples), *self._shape)
        return torch.from_numpy(rows)


class Files:
    """Every object below `prefix` is a sample, in the order of names: a folder of images, say.

    suffixes: take only names that end so. Batches are lists of (key, bytes as a uint8 tensor).
    """

    def __init__(self, store: _core.Store, prefix: str = "", suffixes: Sequence[str] = ()) -> None:
        keys = [
            each["key"]
            for each in store.list(prefix)
            if not suffixes or each["key"].endswith(tuple(suffixes))
        ]
        if not keys:
            raise NotFound(
                f"there is no object below '{prefix}'"
                + (f" that ends in {', '.join(suffixes)}" if suffixes else "")
            )
        self._ranges = _Ranges(store, keys)
        self.fingerprint = f"files {self._ranges.fingerprint}"

    def __len__(self) -> int:
        return len(self._ranges.keys)

    def batch(self, samples: np.ndarray) -> list[tuple[str, torch.Tensor]]:
        spans = [(int(sample), 0, self._ranges.sizes[int(sample)]) for sample in samples]
        parts = _read_spans(self._ranges, spans)
        return [
            (self._ranges.keys[int(sample)], part)
            for sample, part in zip(samples, parts, strict=True)
        ]


@dataclass
class _Member:
    """One sample of a tar file: its name and where its parts lie."""

    object: int
    name: str
    parts: dict[str, tuple[int, int]] = field(default_factory=dict)  # extension: offset, bytes


class Tar:
    """Tar files as WebDataset has them: members of one name up to the first dot are one sample.

    Batches are lists of dicts: "__key__", and each extension ("jpg", "cls") with a uint8 tensor.
    Opening reads the headers of all members. Compressed tar files are refused. Raises Corruption
    for a file that is cut or whose headers do not match their checksums.
    """

    def __init__(self, store: _core.Store, keys: str | Sequence[str]) -> None:
        keys = [keys] if isinstance(keys, str) else list(keys)
        self._ranges = _Ranges(store, keys)
        self._members = [
            each
            for index, key in enumerate(keys)
            for each in _members(store, index, key, self._ranges.sizes[index])
        ]
        self.fingerprint = f"tar {self._ranges.fingerprint}"

    def __len__(self) -> int:
        return len(self._members)

    def batch(self, samples: np.ndarray) -> list[dict[str, Any]]:
        members = [self._members[int(sample)] for sample in samples]
        spans = [(each.object, *span) for each in members for span in each.parts.values()]
        parts = iter(_read_spans(self._ranges, spans))
        return [
            {"__key__": each.name, **{extension: next(parts) for extension in each.parts}}
            for each in members
        ]


def _read_spans(ranges: _Ranges, spans: Sequence[tuple[int, int, int]]) -> list[torch.Tensor]:
    """(object, offset, bytes) each, as uint8 tensors over one piece of memory."""
    pieces = np.zeros((len(spans), 4), np.uint64)
    at = 0
    for row, (number, offset, size) in zip(pieces, spans, strict=True):
        row[:] = number, offset, size, at
        at += size
    memory = np.empty(at, np.uint8)
    ranges.read(pieces[pieces[:, 2] > 0], memory)
    whole = torch.from_numpy(memory)
    return [whole[int(row[3]) : int(row[3] + row[2])] for row in pieces]


# ---- what lies where


def _tokens_of(store: _core.Store, key: str, dtype: str | None) -> Array:
    if key.endswith(".npy"):
        array = _npy(store, key)
        if array.shape or array.dtype.kind not in "iu":
            raise InvalidArgument(
                f"{key} is no array of one dimension of integers, so it holds no tokens; "
                "use Rows for it"
            )
    else:
        size = store.stat(key)["bytes"]
        kind = np.dtype(dtype).newbyteorder("<") if dtype else _megatron_type(store, key)
        if kind.kind not in "iu":
            raise InvalidArgument(f"tokens are integers, so dtype={dtype!r} cannot be theirs")
        if size % kind.itemsize:
            raise Corruption(
                f"{key} has {size} bytes, which is no multiple of the {kind.itemsize} of a token: "
                "it was cut, or it is of another type"
            )
        array = Array(key, 0, size // kind.itemsize, kind)
    if array.dtype.itemsize == 8 and array.dtype.kind == "u":
        raise InvalidArgument(
            f"{key} holds uint64, which torch has no room for: write it with a smaller type"
        )
    return array


def _megatron_type(store: _core.Store, key: str) -> np.dtype:
    """The type of the tokens of a .bin, by the .idx beside it, whose sizes are compared too."""
    index = key.removesuffix(".bin") + ".idx"
    if not key.endswith(".bin") or not store.exists(index):
        raise InvalidArgument(
            f'nobody says of what type the tokens of {key} are: give dtype="uint16" '
            f"(or what it is), or put {index} beside it"
        )
    raw = store.read_bytes(index, 0, min(_INDEX.size, store.stat(index)["bytes"]))
    if len(raw) < _INDEX.size:
        raise Corruption(f"the index {index} is cut after {len(raw)} bytes: make it anew")
    magic, version, code, sequences, _ = _INDEX.unpack(raw)
    if magic != _INDEX_BEGINS or version != 1:
        raise Corruption(
            f"{index} is no index of Megatron of version 1: make it anew, or give dtype="
        )
    if code not in _INDEX_TYPES:
        raise InvalidArgument(
            f"the tokens of {key} are of a type that holds no integers (code {code})"
        )
    kind = np.dtype(_INDEX_TYPES[code])
    if store.stat(index)["bytes"] < _INDEX.size + 12 * sequences:
        raise Corruption(
            f"the index {index} is cut: it names {sequences} sequences and has no room for them; "
            "make it anew"
        )
    sizes = (
        np.frombuffer(store.read_bytes(index, _INDEX.size, 4 * sequences), "<i4")
        if sequences
        else np.zeros(0, "<i4")
    )
    tokens = int(sizes.sum(dtype=np.int64))
    if tokens * kind.itemsize != store.stat(key)["bytes"]:
        raise Corruption(
            f"{key} has {store.stat(key)['bytes']} bytes, but its index {index} names {tokens} "
            f"tokens of {kind.itemsize}: one of them was cut or replaced"
        )
    return kind


def _npy(store: _core.Store, key: str) -> Array:
    size = store.stat(key)["bytes"]
    head = io.BytesIO(store.read_bytes(key, 0, min(size, _NPY_HEADER_MAX)) if size else b"")
    try:
        version = np.lib.format.read_magic(head)
        read = {
            (1, 0): np.lib.format.read_array_header_1_0,
            (2, 0): np.lib.format.read_array_header_2_0,
        }[version]
        shape, fortran, dtype = read(head)
    except (ValueError, KeyError, EOFError) as error:
        raise Corruption(
            f"{key} does not begin as a .npy file of version 1 or 2 does ({error}): "
            "write it anew with numpy.save"
        ) from error
    if dtype.hasobject or dtype.names or not shape or (fortran and len(shape) > 1):
        raise InvalidArgument(
            f"{key} holds {'one number' if not shape else 'objects, records or columns'}: "
            "save it as an array of numbers in C order"
        )
    items = int(np.prod(shape, dtype=np.int64))
    if head.tell() + items * dtype.itemsize != size:
        raise Corruption(
            f"{key} has {size} bytes where its header asks for "
            f"{head.tell() + items * dtype.itemsize}: it was cut or damaged"
        )
    if dtype.byteorder == ">":
        raise InvalidArgument(f"{key} holds big-endian numbers: save it little-endian")
    return Array(key, head.tell(), shape[0], dtype, tuple(shape[1:]))


class _Reading(io.RawIOBase):
    """An object as a file that can be read, for tarfile."""

    def __init__(self, store: _core.Store, key: str, size: int) -> None:
        self._store, self._key, self._size, self._at = store, key, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, into: Any) -> int:
        many = max(0, min(len(into), self._size - self._at))
        into[:many] = self._store.read_bytes(self._key, self._at, many) if many else b""
        self._at += many
        return many


def _members(store: _core.Store, number: int, key: str, size: int) -> Iterator[_Member]:
    if key.endswith((".gz", ".tgz", ".zst", ".xz", ".bz2")):
        raise InvalidArgument(
            f"{key} is compressed, so no sample can be read by itself: unpack it to a plain .tar"
        )
    file = io.BufferedReader(_Reading(store, key, size), 128 << 10)
    sample: _Member | None = None
    seen: set[str] = set()
    try:
        with tarfile.open(fileobj=file, mode="r:") as tar:
            for member in tar:
                if not member.isfile():
                    continue
                if member.offset_data + member.size > size:
                    raise Corruption(
                        f"{key} is cut inside of '{member.name}': fetch or write it anew"
                    )
                folder, _, base = member.name.rpartition("/")
                stem, _, extension = base.partition(".")
                name = f"{folder}/{stem}" if folder else stem
                if not stem or not extension:
                    # As in WebDataset: such names are no part of a sample.
                    continue
                if sample is None or sample.name != name:
                    if sample is not None:
                        yield sample
                    if name in seen:
                        raise InvalidArgument(
                            f"the parts of sample '{name}' do not stand together in {key}: "
                            "sort its members by name"
                        )
                    seen.add(name)
                    sample = _Member(number, name)
                if extension in sample.parts:
                    raise InvalidArgument(
                        f"{key} has '{member.name}' twice: a sample needs each part once"
                    )
                sample.parts[extension] = member.offset_data, member.size
            # tarfile takes a damaged header for the end: the end has a block of zeros.
            end = tar.offset
        if end + 512 > size or store.read_bytes(key, end, 512).strip(b"\0"):
            raise Corruption(
                f"{key} is cut or damaged at byte {end} of {size}: fetch or write it anew"
            )
    except tarfile.TarError as error:
        raise Corruption(f"{key} is no whole tar file ({error}): fetch or write it anew") from error
    if sample is not None:
        yield sample
