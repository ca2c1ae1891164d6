"""Weights in a folder that torch.distributed.checkpoint wrote to disk by its own FileSystemWriter.

Its `.metadata` is a pickle. It is read without running code of it: each name that it refers to is
one of a short list, and stands for a plain object here.
"""

from __future__ import annotations

import ctypes
import io
import math
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from stoker.checkpoint.parts import Brought, Source
from stoker.checkpoint.tensors import Spec
from stoker.errors import Corruption, InvalidArgument, NotFound, Unsupported

METADATA = ".metadata"
_BROKEN = (  # what a damaged pickle raises
    pickle.UnpicklingError,
    EOFError,
    AttributeError,
    KeyError,
    TypeError,
    ValueError,
    IndexError,
    ImportError,
)


class _Record:
    """An object of the pickle: its attributes, and nothing that it does."""

    def __init__(self, *values: Any) -> None:
        self.values = values

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            vars(self).update(state)
        else:
            self.values = state


class _Index(_Record):
    """Which part of what; a key of a dictionary."""

    @property
    def key(self) -> tuple:
        return vars(self).get("fqn"), vars(self).get("offset")

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Index) and self.key == other.key


_DCP = "torch.distributed.checkpoint"
_ALLOWED: dict[tuple[str, str], Any] = {
    **{
        (f"{_DCP}.metadata", name): _Record
        for name in (
            "Metadata",
            "TensorStorageMetadata",
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "TensorProperties",
            "StorageMeta",
            "_MEM_FORMAT_ENCODING",
        )
    },
    (f"{_DCP}.metadata", "MetadataIndex"): _Index,
    (f"{_DCP}.filesystem", "_StorageInfo"): _Record,
    ("torch", "Size"): tuple,
    ("torch.serialization", "_get_layout"): str,
    ("collections", "OrderedDict"): dict,
    **{("pathlib", name): _Record for name in ("PosixPath", "PurePosixPath", "WindowsPath")},
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ALLOWED:
            return _ALLOWED[module, name]
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        raise InvalidArgument(
            f"it refers to {module}.{name}, which Stoker does not load: no checkpoint of DCP "
            f"needs it"
        )


class _Chunk:
    """A rectangle of a tensor: a file of torch.save within a file."""

    def __init__(self, folder: Path, begin: tuple, size: tuple, info: _Record) -> None:
        self.begin, self.size = tuple(begin), tuple(size)
        # a plain name: no file elsewhere is read
        self._file = folder / Path(info.relative_path).name
        self._offset, self._length = int(info.offset), int(info.length)
        if vars(info).get("transform_descriptors"):
            raise Unsupported(
                "its files are compressed by an extension of DCP; save it without the extension"
            )

    def load(self, dtype: torch.dtype) -> torch.Tensor:
        where = f"{self._file} between byte {self._offset} and {self._offset + self._length}"
        try:
            with open(self._file, "rb") as file:
                file.seek(self._offset)
                data = file.read(self._length)
            tensor = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        except FileNotFoundError as error:
            raise NotFound(
                f"{METADATA} lists {self._file}, which does not exist: download it too"
            ) from error
        except (pickle.UnpicklingError, EOFError, RuntimeError, ValueError) as error:
            raise Corruption(
                f"{where} is not a tensor that torch.save wrote ({error}); download it again"
            ) from error
        if (
            not isinstance(tensor, torch.Tensor)
            or tuple(tensor.shape) != self.size
            or tensor.dtype != dtype
        ):
            raise Corruption(
                f"{where} differs from the tensor that {METADATA} describes; download it again"
            )
        return tensor


class _Assembled(Brought):
    """A tensor of chunks; all of it is in memory while it is read."""

    def __init__(self, spec: Spec, chunks: list[_Chunk]) -> None:
        self._spec, self._chunks = spec, chunks
        self._whole: torch.Tensor | None = None

    def read(self, at: int, size: int, address: int) -> None:
        if self._whole is None:
            whole = torch.empty(self._spec.shape, dtype=self._spec.dtype, device="cpu")
            for chunk in self._chunks:
                place = tuple(slice(b, b + s) for b, s in zip(chunk.begin, chunk.size))
                whole[place] = chunk.load(self._spec.dtype)
            self._whole = whole
        ctypes.memmove(address, self._whole.data_ptr() + at, size)
        if at + size == self._spec.bytes:
            self._whole = None


def read(folder: Path, key: str | None) -> dict[str, tuple[Spec, Source]]:
    """The tensors by name. `key`: the entry of the saved state that holds the weights, where it
    held more."""
    file = folder / METADATA
    try:
        with open(file, "rb") as opened:
            metadata = _Unpickler(opened).load()
        paths = vars(metadata).get("planner_data") or {}
        known = metadata.state_dict_metadata
        stored = metadata.storage_data
        path_of = {fqn: tuple(paths.get(fqn, (fqn,))) for fqn in known}
        names = _chosen(file, path_of, key, lambda fqn: "chunks" in vars(known[fqn]))
        return {name: _tensor(folder, name, fqn, known[fqn], stored) for fqn, name in names.items()}
    except (InvalidArgument, Unsupported) as error:
        raise type(error)(f"{file}: {error}") from None
    except _BROKEN as error:
        raise Corruption(f"{file} is damaged ({error}); download it again") from None


def _chosen(
    file: Path, path_of: dict[str, tuple], key: str | None, is_tensor: Callable[[str], bool]
) -> dict[str, str]:
    """The entries that are weights, and the names that they get."""
    entries = sorted({str(path[0]) for path in path_of.values()})
    if key is not None:
        if key not in entries:
            raise InvalidArgument(f"it has no entry {key!r}; its entries are {_some(entries)}")
        chosen = {
            fqn: ".".join(map(str, path[1:]))
            for fqn, path in path_of.items()
            if str(path[0]) == key and len(path) > 1
        }
    else:
        chosen = {fqn: fqn for fqn in path_of}
    if not chosen or not all(map(is_tensor, chosen)) or (
        key is None and any(len(path) > 1 for path in path_of.values())
    ):  # fmt: skip
        raise InvalidArgument(
            "it holds more than named tensors; name the entry that holds the weights with key= "
            f"(--key); its entries are {_some(entries)}"
        )
    return chosen


def _some(names: list[str]) -> str:
    return ", ".join(names[:8])


def _tensor(
    folder: Path, name: str, fqn: str, said: _Record, stored: dict[_Index, _Record]
) -> tuple[Spec, Source]:
    dtype = said.properties.values[0]
    spec = Spec(name, dtype, tuple(int(each) for each in said.size))
    chunks = []
    for each in said.chunks:
        index = _Index()
        index.__setstate__({"fqn": fqn, "offset": tuple(each.offsets)})
        chunk = _Chunk(folder, each.offsets, each.sizes, stored[index])
        inside = (b >= 0 and b + s <= n for b, s, n in zip(chunk.begin, chunk.size, spec.shape))
        if not all(inside) or len(chunk.size) != len(spec.shape):
            raise ValueError(f"a chunk of {fqn} lies outside of its shape {list(spec.shape)}")
        chunks.append(chunk)
    if sum(math.prod(chunk.size) for chunk in chunks) != math.prod(spec.shape):
        raise ValueError(f"the chunks of {fqn} do not fill its shape {list(spec.shape)}")
    return spec, _Assembled(spec, chunks)
