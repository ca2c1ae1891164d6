"""Safetensors objects as samples: row i of tensors that have the same first dimension."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from stoker import _core

from ..checkpoint.tensors import Placed, header_bytes, read_header
from ..errors import Corruption, InvalidArgument
from .index import SAFETENSORS, Index

_BLOCK = 128 << 10  # of a header, that are read at once


def tensors_of(
    store: _core.Store, found: dict[str, Any], names: Sequence[str] | None
) -> list[Placed]:
    """The tensors of these names, or all by name, of an object as store.list() describes it.

    Corruption: the header cannot be, or its tensors do not fill the object. InvalidArgument: they
    have no rows, or not the same number of them."""
    key, size = found["key"], found["bytes"]
    head = bytes(store.read_bytes(key, 0, min(size, _BLOCK))) if size else b""
    if len(head) >= 8 and header_bytes(head) > len(head):
        head = bytes(store.read_bytes(key, 0, min(size, header_bytes(head))))
    tensors = {each.spec.name: each for each in read_header(head, size, key)}
    end = header_bytes(head)
    for each in sorted(tensors.values(), key=lambda each: (each.offset, each.spec.bytes)):
        if each.offset != end:
            raise Corruption(
                f"{key} is damaged: '{each.spec.name}' does not begin at byte {end}; fetch or write"
                " it again"
            )
        end += each.spec.bytes
    if end != size:
        raise Corruption(
            f"{key} has {size} bytes, but its tensors end at byte {end}: it was cut or replaced; "
            "fetch or write it again"
        )
    missing = [name for name in names or () if name not in tensors]
    if missing or not tensors:
        raise InvalidArgument(
            f"{key} has no tensor {missing[0]!r}: name one that it has "
            f"({', '.join(sorted(tensors))})"
            if tensors
            else f"{key} has no tensors: leave it out"
        )
    chosen = [tensors[name] for name in (sorted(tensors) if names is None else names)]
    for each in chosen:
        if not each.spec.shape or 0 in each.spec.shape[1:]:
            raise InvalidArgument(
                f"'{each.spec.name}' of {key} has no rows (its shape is {each.spec.shape}): name "
                f"the tensors that have rows with tensors=[...]"
            )
    counts = {each.spec.name: each.spec.shape[0] for each in chosen}
    if len(set(counts.values())) > 1:
        raise InvalidArgument(
            f"the tensors of {key} have different numbers of rows ({counts}): name those that "
            f"belong together with tensors=[...]"
        )
    return chosen


def columns_of(tensors: Sequence[Placed]) -> list[dict[str, Any]]:
    """What a row has: the name, torch's name of the type, bytes, and shape of each part."""
    return [
        {
            "name": each.spec.name,
            "encoding": str(each.spec.dtype).removeprefix("torch."),
            "bytes": row_bytes(each),
            "shape": list(each.spec.shape[1:]),
        }
        for each in tensors
    ]


def row_bytes(tensor: Placed) -> int:
    size = tensor.spec.dtype.itemsize
    for side in tensor.spec.shape[1:]:
        size *= side
    return size


def tensor_index(store: _core.Store, found: dict[str, Any]) -> Index:
    """Of all tensors of an object. Memory: 30 bytes a row and tensor."""
    tensors = tensors_of(store, found, None)
    rows, width = tensors[0].spec.shape[0], len(tensors)
    steps = np.array([row_bytes(each) for each in tensors], "<u8")
    first = np.array([each.offset for each in tensors], "<u8")
    offset = first + np.arange(rows, dtype="<u8")[:, None] * steps
    return Index(
        SAFETENSORS,
        [{name: found[name] for name in ("key", "bytes", "tag")}],
        [""],
        np.arange(0, rows * width + 1, width, dtype="<u8"),
        np.zeros(rows * width, "<u4"),
        np.zeros(rows * width, "<u2"),
        offset.reshape(-1),
        np.tile(steps, rows),
        None,
        np.zeros(0, "<u8"),
        np.zeros(0, np.uint8),
        columns_of(tensors),
    )


class TensorRows:
    """Samples as dicts of tensors. columns: of columns_of()."""

    def __init__(self, columns: Sequence[dict[str, Any]]) -> None:
        self.names = [column["name"] for column in columns]
        self._kinds = [(getattr(torch, each["encoding"]), each["shape"]) for each in columns]

    def sample(self, number: int, parts: Sequence[np.ndarray]) -> dict[str, torch.Tensor]:
        sample = {}
        for name, (dtype, shape), part in zip(self.names, self._kinds, parts, strict=True):
            # Unaligned ones are moved: not every use of a tensor bears that.
            raw = part if part.ctypes.data % dtype.itemsize == 0 else part.copy()
            sample[name] = torch.from_numpy(raw).view(dtype).reshape(shape)
        return sample
