"""Lightning's CheckpointIO: what the Trainer saves becomes a checkpoint of Stoker.

    trainer = lightning.Trainer(plugins=[StokerCheckpointIO()], ...)

Each path that Lightning gives ("epoch=3-step=120.ckpt") is a folder with one checkpoint: the
weights as safetensors, all else beside them, and a manifest with a hash of every byte.
"""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Any

import torch

from stoker.checkpoint import Checkpoints
from stoker.checkpoint.importing import Imported
from stoker.checkpoint.state import plain
from stoker.errors import Mismatch, NotFound

try:
    from lightning.fabric.plugins import CheckpointIO
except ImportError:
    try:
        from lightning_fabric.plugins import CheckpointIO
    except ImportError:
        raise ImportError(
            "stoker.integrations.lightning needs Lightning: install it with `pip install lightning`"
        ) from None

_REST = "lightning"  # of the manifest: all but the weights


class StokerCheckpointIO(CheckpointIO):
    """`staging`: bytes of memory for bytes on their way. save_checkpoint() returns when the
    checkpoint is durable; Lightning's AsyncCheckpointIO around it does not wait.

    Values that are no numbers, strings, tensors, or lists and dictionaries of them are refused by
    name: nothing here writes a pickle.
    """

    def __init__(self, staging: int | str = "64MiB") -> None:
        self._staging = staging

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike, storage_options: Any = None
    ) -> None:
        if storage_options is not None:
            raise TypeError("StokerCheckpointIO takes no storage_options; leave them out")
        weights = checkpoint.get("state_dict", {})
        rest = {key: value for key, value in checkpoint.items() if key != "state_dict"}
        with Checkpoints(path, keep=sys.maxsize, staging=self._staging) as ckpt:
            handle = ckpt.save(
                int(checkpoint.get("global_step", 0)),
                model=Imported(weights),
                extra={_REST: {"names": list(weights), "rest": rest}},
            )
            ckpt.wait()
            # what the path held before goes, also if it was of a later step of another run
            ckpt.remove_all(but=handle.folder)

    def load_checkpoint(
        self, path: str | os.PathLike, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """`weights_only` changes nothing: no code of a checkpoint ever runs."""
        if not _there(path):
            raise FileNotFoundError(f"{path} does not exist; give the path of a checkpoint")
        with Checkpoints(path, staging=self._staging) as ckpt:
            for reader in ckpt.readers():
                key = f"extra.{_REST}"
                if key not in reader.manifest.objects:
                    raise Mismatch(
                        f"{reader.where} was not saved by StokerCheckpointIO: load it with"
                        " stoker.Checkpoints"
                    )
                said = reader.objects([key])[key]["value"]
                weights = reader.weights()
                state = {name: weights[plain(name)] for name in said["names"]}
                return _moved({"state_dict": state, **said["rest"]}, map_location)
        raise NotFound(
            f"{path} holds no intact checkpoint; `stoker ckpt verify --all` names the damage"
        )

    def remove_checkpoint(self, path: str | os.PathLike) -> None:
        if not _there(path):
            return
        with Checkpoints(path, staging=self._staging) as ckpt:
            ckpt.remove_all()
        with contextlib.suppress(OSError):  # no folder, or somebody put more there
            os.rmdir(path)


def _there(path: str | os.PathLike) -> bool:
    return "://" in os.fspath(path) or os.path.isdir(path)


def _moved(value: Any, where: Any) -> Any:
    """On the device that Lightning wants; what it decides by a function stays on the CPU."""
    if where is None or callable(where) or isinstance(where, dict):
        return value
    if isinstance(value, torch.Tensor):
        return value.to(where)
    if isinstance(value, dict):
        return {key: _moved(each, where) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_moved(each, where) for each in value)
    return value


__all__ = ["StokerCheckpointIO"]
