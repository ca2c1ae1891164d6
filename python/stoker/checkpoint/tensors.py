"""Safetensors files as checkpoints have them: which tensor is where, and the header that says
so."""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass
from typing import Any

import torch

from stoker.errors import Corruption, InvalidArgument

ALIGN = 4096  # of the data section, and of what lies in packs
FILE_BYTES = 4 << 30
INDEX = "model.safetensors.index.json"
HEADER_BYTES_MAX = 100_000_000
_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
_TYPES = {name: dtype for dtype, name in _NAMES.items()}


@dataclass(frozen=True)
class Spec:
    """A tensor by its name, without its bytes."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    trained: bool = True

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Placed:
    spec: Spec
    offset: int  # in the file


@dataclass(frozen=True)
class Layout:
    """A file: its header, and the tensors behind it."""

    name: str
    header: bytes  # the length before it and the padding included
    tensors: list[Placed]
    bytes: int

    @property
    def frozen(self) -> bool:
        return bool(self.tensors) and not any(each.spec.trained for each in self.tensors)


def lay_out(apart: list[list[Spec]]) -> tuple[list[Layout], bytes | None]:
    """The files of a model, and their index if there are several. `apart`: tensors that share no
    file with those of another list."""
    groups = [files for specs in apart for files in _by_size(specs)] or [[]]
    single = len(groups) == 1
    layouts = []
    for i, group in enumerate(groups):
        name = (
            "model.safetensors" if single else f"model-{i + 1:05}-of-{len(groups):05}.safetensors"
        )
        layouts.append(_file(name, group))
    if single:
        return layouts, None
    where = {each.spec.name: layout.name for layout in layouts for each in layout.tensors}
    total = sum(spec.bytes for specs in apart for spec in specs)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
    return layouts, (json.dumps(index, indent=2) + "\n").encode()


def _by_size(specs: list[Spec]) -> list[list[Spec]]:
    """Large ones first, cut into files."""
    files: list[list[Spec]] = []
    room = 0
    for spec in sorted(specs, key=lambda each: (-each.bytes, each.name)):
        if not files or spec.bytes > room:
            files.append([])
            room = FILE_BYTES
        files[-1].append(spec)
        room -= spec.bytes
    return files


def _file(name: str, specs: list[Spec]) -> Layout:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at, places = 0, []
    # Falling sizes are not all multiples of each element size: wide elements come first.
    for spec in sorted(specs, key=lambda each: -each.dtype.itemsize):
        if spec.dtype not in _NAMES:
            raise InvalidArgument(
                f"the tensor {spec.name} is {spec.dtype}, which safetensors files cannot hold:"
                " convert it to another type"
            )
        shape, end = list(spec.shape), at + spec.bytes
        entries[spec.name] = {
            "dtype": _NAMES[spec.dtype],
            "shape": shape,
            "data_offsets": [at, end],
        }
        places.append((spec, at))
        at = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    padded = -(-(8 + len(text)) // ALIGN) * ALIGN
    if padded > HEADER_BYTES_MAX:
        raise InvalidArgument(
            f"the header of {name} would take {padded} bytes for {len(specs)} tensors, and a"
            f" safetensors file allows {HEADER_BYTES_MAX}: shorten the names of the tensors"
        )
    header = struct.pack("<Q", padded - 8) + text.ljust(padded - 8)
    tensors = [Placed(spec, padded + start) for spec, start in places]
    return Layout(name, header, tensors, padded + at)


def read_header(data: bytes, size: int, where: str) -> list[Placed]:
    """The tensors of a file of `size` bytes that begins with `data` (the whole header).
    Corruption."""
    try:
        (length,) = struct.unpack_from("<Q", data)
        if length > min(HEADER_BYTES_MAX, size - 8):
            raise ValueError(f"it states a header of {length} bytes")
        entries = json.loads(data[8 : 8 + length])
        entries.pop("__metadata__", None)
        found = []
        for name, entry in entries.items():
            start, end = entry["data_offsets"]
            spec = Spec(name, _TYPES[entry["dtype"]], tuple(entry["shape"]))
            if not all(isinstance(each, int) and each >= 0 for each in (start, end, *spec.shape)):
                raise ValueError(f"the shape or the place of {name} is not of whole numbers")
            if end - start != spec.bytes or 8 + length + end > size:
                raise ValueError(
                    f"the bytes of {name} lie outside of the file, or do not fit its shape"
                )
            found.append(Placed(spec, 8 + length + start))
        return found
    except (ValueError, TypeError, KeyError, AttributeError, struct.error, RecursionError) as error:
        raise Corruption(
            f"{where} is not a safetensors file ({error}); fetch or write it again"
        ) from None


def header_bytes(data: bytes) -> int:
    """How many bytes the header takes, of the first 8."""
    return 8 + struct.unpack_from("<Q", data)[0]


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
