"""Weights that other tools wrote, as a checkpoint: safetensors files and folders, torch.save files,
folders of torch.distributed.checkpoint. They are read while the checkpoint is written.

ckpt.save(0, **importing.read("llama/"))
"""

from __future__ import annotations

import json
import os
import pickle
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from stoker.checkpoint import dcp_folder
from stoker.checkpoint.parts import Brought, Source, memory
from stoker.checkpoint.state import Elsewhere
from stoker.checkpoint.tensors import HEADER_BYTES_MAX, Spec, header_bytes, read_header
from stoker.errors import Corruption, InvalidArgument, NotFound

INDEX = "model.safetensors.index.json"
_BESIDE = ("*.json", "tokenizer.model", "merges.txt", "vocab.txt")  # what transformers looks for


class Imported(nn.Module):
    """Tensors by name, in the shape that save() takes."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self._tensors = dict(tensors)

    def state_dict(self, *_: Any, **__: Any) -> dict[str, torch.Tensor]:
        return dict(self._tensors)


def read(path: str | os.PathLike, key: str | None = None) -> dict[str, Any]:
    """The arguments `model` and `files` of Checkpoints.save() for a safetensors file, a folder of
    such files, a file of torch.save, or a folder of torch.distributed.checkpoint.

    key: which entry of what was saved holds the weights, where it holds more than weights.
    No code of a file runs: torch.load gets weights_only=True.
    """
    path = Path(path)
    if not path.exists():
        raise NotFound(f"{path} does not exist; check the path")
    if (path / dcp_folder.METADATA).exists():
        return {"model": Elsewhere(dcp_folder.read(path, key)), "files": {}}
    if path.is_dir():
        sources = _files_of(path)
        if not sources:
            raise InvalidArgument(f"{path} holds no safetensors files; name the file to import")
        beside = {each.name: each for kind in _BESIDE for each in path.glob(kind)}
        beside.pop(INDEX, None)  # the checkpoint has its own
    else:
        sources, beside = [path], {}
    if path.is_dir() or path.suffix == ".safetensors":
        if key is not None:
            raise InvalidArgument(
                f"key={key!r} names an entry of a file of torch.save, but {path} is safetensors;"
                " leave key= (--key) out"
            )
        return {"model": Elsewhere(_safetensors(sources)), "files": beside}
    return {"model": Imported(_torch_file(path, key)), "files": {}}


def _files_of(folder: Path) -> list[Path]:
    """Those that the index names, where there is one; else all."""
    index = folder / INDEX
    if not index.exists():
        return sorted(folder.glob("*.safetensors"))
    try:
        names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
        sources = [folder / Path(name).name for name in names]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Corruption(f"{index} is damaged ({error}): download it again") from error
    for source in sources:
        if not source.exists():
            raise NotFound(
                f"{index} lists {source.name}, which is not in that folder: download it too"
            )
    return sources


class _File:
    """A file that is read at many places."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = open(path, "rb", buffering=0)  # noqa: SIM115  (until its last reader is gone)
        self.bytes = os.fstat(self._file.fileno()).st_size

    def read(self, at: int, into: memoryview) -> None:
        while into:
            if (count := os.preadv(self._file.fileno(), [into], at)) == 0:
                raise Corruption(f"{self.path} became shorter while it was read: download it again")
            at, into = at + count, into[count:]


class _Range(Brought):
    """Bytes of a file."""

    def __init__(self, file: _File, begin: int) -> None:
        self._file, self._begin = file, begin

    def read(self, at: int, size: int, address: int) -> None:
        self._file.read(self._begin + at, memory(address, size)[:size].numpy().data)


def _safetensors(sources: list[Path]) -> dict[str, tuple[Spec, Source]]:
    found: dict[str, tuple[Spec, Source]] = {}
    for source in sources:
        file = _File(source)
        head = bytearray(min(8, file.bytes))
        file.read(0, memoryview(head))
        if len(head) == 8:
            size = min(header_bytes(bytes(head)), file.bytes, HEADER_BYTES_MAX)
            head = bytearray(size)
            file.read(0, memoryview(head))
        for placed in read_header(bytes(head), file.bytes, str(source)):
            name = placed.spec.name
            if name in found:
                raise InvalidArgument(
                    f"{source} holds {name}, which an earlier file holds too; remove one of the "
                    "files"
                )
            found[name] = placed.spec, _Range(file, placed.offset)
    return found


def _torch_file(path: Path, key: str | None) -> dict[str, torch.Tensor]:
    try:
        # a file of torch before 1.6 is no zip, and cannot be mapped
        mapped = zipfile.is_zipfile(path)
        loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except (pickle.UnpicklingError, EOFError, RuntimeError) as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InvalidArgument(
            f"{path} cannot be loaded with torch.load(weights_only=True): {first} Save its "
            "state_dict() alone."
        ) from error
    if key is not None:
        if not isinstance(loaded, Mapping) or key not in loaded:
            raise InvalidArgument(f"{path} has no entry {key!r}; {_entries(loaded)}")
        loaded = loaded[key]
    if not isinstance(loaded, Mapping) or not all(
        isinstance(each, torch.Tensor) for each in loaded.values()
    ):
        raise InvalidArgument(
            f"{path} holds more than named tensors; name the entry that holds the weights with "
            f"key= (--key); {_entries(loaded)}"
        )
    return dict(loaded)


def _entries(loaded: Any) -> str:
    if not isinstance(loaded, Mapping):
        return f"it holds a {type(loaded).__name__}"
    return "its entries are " + ", ".join(map(str, list(loaded)[:8]))
