"""Samples in objects of any store: tokens, rows of arrays, files, tar files, MDS, Arrow.

A source knows where each sample lies, and reads a batch of them by one call (`Store.read_many`). So
a slow store works on all of them at once. Opening one reads sizes and headers only. The tag of
every object is part of the fingerprint: a resume over changed data is refused.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from stoker import _core

from ..errors import Corruption, InvalidArgument, NotFound
from . import arrow, mds
from .index import ARROW, KINDS, MDS, SAFETENSORS, TAR, WHOLE, Index, read
from .indexing import of_objects
from .stored import Places, Stored
from .tensor_rows import TensorRows, columns_of, row_bytes, tensors_of
from .token_file import HEADER_BYTES, check_size, header_of

_INDEX = struct.Struct(
    "<9sQBQQ"
)  # of Megatron: magic, version, code of the type, sequences, documents
_INDEX_BEGINS = b"MMIDIDX\x00\x00"
_INDEX_TYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
_NPY_HEADER_MAX = 1 << 16


@dataclass(frozen=True)
class Array:
    """Where the items of one array lie in an object: `count` of them from byte `offset` on."""

    key: str
    offset: int
    count: int
    dtype: np.dtype  # of one item, little-endian
    shape: tuple[int, ...] = ()  # of one item


class _Objects:
    """Sizes of objects, and what tells these from others."""

    def __init__(self, store: _core.Store, keys: Sequence[str]) -> None:
        self.keys = list(keys)
        digest = hashlib.sha256()
        self.tags = []
        for key in self.keys:
            found = store.stat(key)
            self.tags.append(found["tag"])
            digest.update(f"{key}\0{found['bytes']}\0{found['tag']}\n".encode())
        self.fingerprint = digest.hexdigest()


def _equal(
    keys: list[str], arrays: Sequence[Array], counts: Sequence[int], stride: int, size: int
) -> _core.SampleTable:
    """Samples of `size` bytes, `stride` apart: so many in each array."""
    runs = [
        (number, count, array.offset)
        for number, (array, count) in enumerate(zip(arrays, counts, strict=True))
    ]
    return _core.SampleTable.equal(keys, np.array(runs, np.uint64).reshape(-1, 3), stride, size)


class Tokens(Stored):
    """Packed tokens as windows of `length` inputs and the one token behind them.

        Tokens(store, "train.bin", 1024)          # the type: of Megatron's train.idx beside it
        Tokens(store, ["a.npy", "b.npy"], 1024)   # arrays of one dimension
        Tokens(store, shards(store), 1024)        # what `stoker data build` made
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
        split: Literal["train", "heldout"] = "train",
    ) -> None:
        """split: which part of the token files of a build; other files have only one."""
        if length < 1:
            raise ValueError(f"a window has at least one token, not {length}")
        keys = [keys] if isinstance(keys, str) else list(keys)
        arrays = [_tokens_of(store, key, dtype, split) for key in keys]
        types = {array.dtype for array in arrays}
        if len(types) > 1:
            raise InvalidArgument(
                f"the objects hold tokens of several types ({', '.join(map(str, types))}): "
                "give each its own source"
            )
        dtype_of_all = types.pop()
        width = dtype_of_all.itemsize
        self.length, self.integers = length, dtype_of_all.name
        self.kind = ("tokens", length)
        counts = [max(0, array.count - 1) // length for array in arrays]
        objects = _Objects(store, keys)
        super().__init__(
            store,
            _equal(keys, arrays, counts, length * width, (length + 1) * width),
            f"tokens {objects.fingerprint} {dtype_of_all.str}, windows of {length}"
            + (f", {split}" if split != "train" else ""),
            sum(counts) * length * width,
            objects.tags,
        )

    @property
    def slot_bytes(self) -> float:
        return 8 * (self.length + 1)

    def rows(self, memory: np.ndarray, count: int) -> torch.Tensor:
        """int64 [count, length + 1]"""
        return torch.from_numpy(memory.view(np.int64).reshape(count, self.length + 1))


class Rows(Stored):
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
        self.kind = self._dtype, self._shape = kinds.pop()
        size = self._dtype.itemsize * int(np.prod(self._shape, dtype=np.int64))
        if size == 0:
            raise InvalidArgument(
                f"the rows of {keys[0]} have no bytes: their shape is {self._shape}; leave this"
                " file out"
            )
        objects = _Objects(store, keys)
        super().__init__(
            store,
            _equal(keys, arrays, [array.count for array in arrays], size, size),
            f"rows {objects.fingerprint}",
            sum(array.count for array in arrays) * size,
            objects.tags,
        )

    def rows(self, memory: np.ndarray, count: int) -> torch.Tensor:
        """[count, ...] of the files' type"""
        return torch.from_numpy(memory.view(self._dtype).reshape(count, *self._shape))


class Indexed(Stored):
    """Samples that an index tells of, as `stoker data index` makes one (a path), or in memory.

    Batches are lists: of dicts for tar files ("__key__", and each extension with its bytes), of
    (key, bytes) for whole objects, of dicts by column for the other kinds. Bytes are uint8 tensors.
    Opening reads no object. Raises NotFound and Mismatch for objects that are not there or were
    changed since.
    """

    def __init__(self, store: _core.Store, index: str | os.PathLike[str] | Index) -> None:
        if isinstance(index, Index):  # made of these very objects just now
            self._index = index
        else:
            self._index = read(index)
            self._index.check(store)
        digest = hashlib.sha256(json.dumps(self._index.objects).encode()).hexdigest()
        kind, columns = self._index.kind, self._index.columns
        self._records = mds.Records(columns) if kind == MDS else None
        self._cells = arrow.Cells(columns) if kind == ARROW else None
        self._rows = TensorRows(columns) if kind == SAFETENSORS else None
        super().__init__(
            store,
            self._index.table(self._records.bytes if self._records else ()),
            f"{KINDS[kind]} {digest}",
            self._index.all_bytes,
            [each["tag"] for each in self._index.objects],
        )

    @property
    def shard_samples(self) -> int:
        if not self._index.packed:
            return 0
        return max(1, int(self._index.samples_of_objects().max(initial=1)))

    def sample(self, number: int, memory: np.ndarray, places: Places) -> Any:
        """One sample."""
        raw = [memory[at : at + size] for at, size in places]
        if self._records is not None:
            return self._records.sample(number, raw)
        if self._cells is not None:
            return self._cells.sample(number, raw, self._index.extensions_of(number))
        if self._rows is not None:
            return self._rows.sample(number, raw)
        parts = [torch.from_numpy(each) for each in raw]
        name = self._index.name(number)
        if self._index.kind == WHOLE:
            return name, parts[0]
        return {"__key__": name, **dict(zip(self._index.extensions_of(number), parts, strict=True))}

    def part_name(self, number: int, part: int) -> str:
        for of in (self._records, self._cells, self._rows):
            if of is not None:
                return of.names[part]
        return self._index.extensions_of(number)[part]


class Files(Indexed):
    """Every object below `prefix` is a sample, in the order of names: a folder of images, say.

    suffixes: take only names that end so. Batches are lists of (key, bytes as a uint8 tensor).
    """

    def __init__(self, store: _core.Store, prefix: str = "", suffixes: Sequence[str] = ()) -> None:
        found = [
            each
            for each in store.list(prefix)
            if not suffixes or each["key"].endswith(tuple(suffixes))
        ]
        if not found:
            raise NotFound(
                f"there is no object below '{prefix}'"
                + (f" that ends in {', '.join(suffixes)}" if suffixes else "")
                + "; check the path of the store and prefix="
            )
        super().__init__(store, of_objects(store, found, WHOLE))


class Tar(Indexed):
    """Tar files as WebDataset has them: members of one name up to the first dot are one sample.

    Batches are lists of dicts: "__key__", and each extension ("jpg", "cls") with a uint8 tensor.
    Opening reads the headers of all members: of many files, make an index once (`Indexed`).
    Compressed ones (.tar.gz, .tgz, .tar.zst) are read whole for that, and unpacked. Raises
    Corruption for a file that is cut or whose headers do not match their checksums.
    """

    def __init__(self, store: _core.Store, keys: str | Sequence[str]) -> None:
        keys = [keys] if isinstance(keys, str) else list(keys)
        super().__init__(store, of_objects(store, [store.stat(key) for key in keys], TAR))


class Mds(Indexed):
    """MDS shards, as MosaicML Streaming's MDSWriter makes them: folders with an index.json.

    Batches are lists of dicts by column: numbers, str, what JSON holds; arrays as tensors; bytes,
    JPEGs and PNGs as uint8 tensors of what was written. Opening reads each index.json and the
    offsets in front of each shard, and all of a compressed one (zstd, gz): of many, make an index
    once (`Indexed`). Raises InvalidArgument for pickled columns, Corruption for shards that are cut
    or differ from their index.json.
    """

    def __init__(self, store: _core.Store, folders: str | Sequence[str] = "") -> None:
        folders = [folders] if isinstance(folders, str) else list(folders)
        found = []
        for folder in folders:
            prefix = folder.rstrip("/") + "/" if folder else ""
            found += mds.shards(store, [prefix + mds.INDEX], store.list(prefix))
        super().__init__(store, of_objects(store, found, MDS))


class Arrow(Indexed):
    """Rows of Arrow streams and files, as HF `datasets` saves them (`save_to_disk`).

    names: folders with a state.json, or with .arrow objects; or such objects. Batches are lists of
    dicts by column: numbers, bool and str; binary as uint8 tensors; lists of numbers as tensors;
    None where a cell is null; dates and times as integers in the unit of their column. Members of
    structs are columns, "image.bytes". Opening reads the head and the offsets of each record batch:
    of many, make an index once (`Indexed`). Raises InvalidArgument for other types, compressed or
    dictionary-encoded ones; Corruption for objects that are cut or damaged.
    """

    def __init__(self, store: _core.Store, names: str | Sequence[str] = "") -> None:
        names = [names] if isinstance(names, str) else list(names)
        found = []
        for name in names:
            found += arrow.objects(store, name, store.list(name))
        super().__init__(store, of_objects(store, found, ARROW))


class Safetensors(Stored):
    """Rows of safetensors files: sample i is row i, through all objects.

        Safetensors(store, "data.safetensors", "images")   # one tensor: [samples, ...] of its type
        Safetensors(store, keys)                           # all tensors: list of dicts by name
        Safetensors(store, keys, ["images", "labels"])     # some of them

    The tensors of an object have the same first dimension, and all objects the same tensors, types
    and shapes of a row. Opening reads headers only, however many rows there are. Raises
    InvalidArgument for tensors that do not fit one another, Corruption for objects that are cut.
    """

    def __init__(
        self,
        store: _core.Store,
        keys: str | Sequence[str],
        tensors: str | Sequence[str] | None = None,
    ) -> None:
        keys = [keys] if isinstance(keys, str) else list(keys)
        names = [tensors] if isinstance(tensors, str) else tensors
        objects = [store.stat(key) for key in keys]
        placed = [tensors_of(store, each, names) for each in objects]
        columns = columns_of(placed[0])
        for key, each in zip(keys, placed, strict=True):
            if columns_of(each) != columns:
                raise InvalidArgument(
                    f"'{key}' has other tensors, types or shapes than '{keys[0]}': give each kind "
                    "its own source"
                )
        self._rows = TensorRows(columns)
        counts = [each[0].spec.shape[0] for each in placed]
        sizes = [row_bytes(each) for each in placed[0]]
        if isinstance(tensors, str):
            self.kind = self._dtype, self._shape = (
                placed[0][0].spec.dtype,
                tuple(columns[0]["shape"]),
            )
            runs = [(at, counts[at], each[0].offset) for at, each in enumerate(placed)]
            table = _core.SampleTable.equal(
                keys, np.array(runs, np.uint64).reshape(-1, 3), sizes[0], sizes[0]
            )
        else:
            table = _core.SampleTable.rows(
                keys,
                [
                    (at, counts[at], [tensor.offset for tensor in each])
                    for at, each in enumerate(placed)
                ],
                sizes,
            )
        chosen = "" if tensors is None else f" {json.dumps(tensors)}"
        about = [{name: each[name] for name in ("key", "bytes", "tag")} for each in objects]
        digest = hashlib.sha256(json.dumps(about).encode()).hexdigest()
        super().__init__(
            store,
            table,
            f"safetensors {digest}{chosen}",
            sum(counts) * sum(sizes),
            [each["tag"] for each in objects],
        )

    def rows(self, memory: np.ndarray, count: int) -> torch.Tensor:
        """[count, ...] of the one tensor's type"""
        return torch.from_numpy(memory).view(self._dtype).reshape(count, *self._shape)

    def sample(self, number: int, memory: np.ndarray, places: Places) -> Any:
        if self.kind is not None:
            return super().sample(number, memory, places)
        return self._rows.sample(number, [memory[at : at + size] for at, size in places])

    def part_name(self, number: int, part: int) -> str:
        return self._rows.names[part]


# ---- what lies where


def _tokens_of(store: _core.Store, key: str, dtype: str | None, split: str) -> Array:
    if key.endswith(".tokens"):
        return _of_build(store, key, split)
    if split != "train":
        raise InvalidArgument(
            f"{key} has no split '{split}': only token files of `stoker data build` have splits; "
            "leave split= out"
        )
    if key.endswith(".npy"):
        array = _npy(store, key)
        if array.shape or array.dtype.kind not in "iu":
            raise InvalidArgument(
                f"{key} is not an array of one dimension of integers, so it holds no tokens; "
                "use Rows for it"
            )
    else:
        size = store.stat(key)["bytes"]
        kind = np.dtype(dtype).newbyteorder("<") if dtype else _megatron_type(store, key)
        if kind.kind not in "iu":
            raise InvalidArgument(
                f"dtype={dtype!r} cannot be the type of tokens: give an integer type, such as "
                '"uint16"'
            )
        if size % kind.itemsize:
            raise Corruption(
                f"{key} has {size} bytes, which is not a multiple of the {kind.itemsize} of a "
                f"token: it was cut, or has another type; fetch it again, or give its dtype="
            )
        array = Array(key, 0, size // kind.itemsize, kind)
    if array.dtype.itemsize == 8 and array.dtype.kind == "u":
        raise InvalidArgument(
            f"{key} holds uint64, which torch does not support: write it with a smaller type"
        )
    return array


def _of_build(store: _core.Store, key: str, split: str) -> Array:
    size = store.stat(key)["bytes"]
    header = header_of(store.read_bytes(key, 0, min(size, HEADER_BYTES)), key)
    check_size(header, size, key)
    before, count = {
        "train": (0, header.train_tokens),
        "heldout": (header.train_tokens, header.heldout_tokens),
    }[split]
    width = header.token_bytes
    return Array(key, header.tokens_offset + before * width, count, np.dtype(f"<u{width}"))


def _megatron_type(store: _core.Store, key: str) -> np.dtype:
    """The type of the tokens of a .bin, by the .idx beside it, whose sizes are compared too."""
    index = key.removesuffix(".bin") + ".idx"
    if not key.endswith(".bin") or not store.exists(index):
        raise InvalidArgument(
            f'the type of the tokens of {key} is unknown: give dtype= ("uint16", for example),'
            f" or put {index} beside it"
        )
    raw = store.read_bytes(index, 0, min(_INDEX.size, store.stat(index)["bytes"]))
    if len(raw) < _INDEX.size:
        raise Corruption(f"the index {index} is cut after {len(raw)} bytes: make it again")
    magic, version, code, sequences, _ = _INDEX.unpack(raw)
    if magic != _INDEX_BEGINS or version != 1:
        raise Corruption(
            f"{index} is not an index of Megatron of version 1: make it again, or give dtype="
        )
    if code not in _INDEX_TYPES:
        raise InvalidArgument(
            f"the tokens of {key} have a type that is not an integer (code {code}); write them as"
            " integers"
        )
    kind = np.dtype(_INDEX_TYPES[code])
    if store.stat(index)["bytes"] < _INDEX.size + 12 * sequences:
        raise Corruption(
            f"the index {index} is cut: it is too short for its {sequences} sequences; make it "
            f"again"
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
            f"tokens of {kind.itemsize}: one of them was cut or replaced; fetch both again"
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
            "write it again with numpy.save"
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
            f"{head.tell() + items * dtype.itemsize}: it was cut or damaged; fetch or write it "
            "again"
        )
    if dtype.byteorder == ">":
        raise InvalidArgument(f"{key} holds big-endian numbers: save it little-endian")
    return Array(key, head.tell(), shape[0], dtype, tuple(shape[1:]))
