"""Weights that other tools wrote, as a checkpoint: safetensors files and folders, torch.save files.

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
from safetensors import SafetensorError, safe_open
from torch import nn

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
    such files, or a file of torch.save.

    key: which entry of a torch.save file holds the weights, where it holds more than weights.
    No code of the file runs: torch.load gets weights_only=True.
    """
    path = Path(path)
    if not path.exists():
        raise NotFound(f"there is no {path}")
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
            raise InvalidArgument("key= is for files of torch.save; safetensors files have none")
        return {"model": Imported(_safetensors(sources)), "files": beside}
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
        raise Corruption(f"{index} is damaged ({error}): fetch it anew") from error
    for source in sources:
        if not source.exists():
            raise NotFound(f"{source} is missing, which {index.name} names: fetch it too")
    return sources


def _safetensors(sources: list[Path]) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for source in sources:
        try:
            with safe_open(source, framework="pt") as file:
                for name in file.keys():
                    if name in found:
                        raise InvalidArgument(f"{source} has {name}, as a file before it has")
                    found[name] = file.get_tensor(name)
        except SafetensorError as error:
            raise Corruption(f"{source} is no whole safetensors file: {error}") from error
    return found


def _torch_file(path: Path, key: str | None) -> dict[str, torch.Tensor]:
    try:
        # a file of torch before 1.6 is no zip, and cannot be mapped
        mapped = zipfile.is_zipfile(path)
        loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except (pickle.UnpicklingError, EOFError, RuntimeError) as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InvalidArgument(
            f"torch.load(weights_only=True) refuses {path}: {first} Save its state_dict() alone."
        ) from error
    if key is not None:
        if not isinstance(loaded, Mapping) or key not in loaded:
            raise InvalidArgument(f"{path} has no entry {key!r}; {_entries(loaded)}")
        loaded = loaded[key]
    if not isinstance(loaded, Mapping) or not all(
        isinstance(each, torch.Tensor) for each in loaded.values()
    ):
        raise InvalidArgument(
            f"{path} holds more than tensors by name; name the entry with the weights by key="
            f" (--key); {_entries(loaded)}"
        )
    return dict(loaded)


def _entries(loaded: Any) -> str:
    if not isinstance(loaded, Mapping):
        return f"it holds a {type(loaded).__name__}"
    return "its entries are " + ", ".join(map(str, list(loaded)[:8]))
