"""What save() and restore() are given, in one form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from stoker.offload.run.optimizer import OffloadedOptimizer


def optimizers_of(optimizer: Any) -> dict[str, Any]:
    if optimizer is None:
        return {}
    if isinstance(optimizer, Mapping):
        return {f"optimizer.{key}": each for key, each in optimizer.items()}
    if isinstance(optimizer, (list, tuple)):
        return {f"optimizer.{i}": each for i, each in enumerate(optimizer)}
    return {"optimizer": optimizer}


def extras_of(extra: Mapping[str, Any] | None) -> dict[str, Any]:
    return {f"extra.{key}": each for key, each in (extra or {}).items()}


def contents_of(files: Mapping[str, Any]) -> dict[str, bytes]:
    found = {}
    for name, each in files.items():
        if isinstance(each, bytes):
            found[name] = each
        else:
            with open(each, "rb") as file:
                found[name] = file.read()
    return found


def model_of(model: nn.Module | None, optimizer: Any) -> nn.Module | None:
    """Where only the optimizer of a sharded offloaded run was given, its model: its ranks save it
    together."""
    for each in optimizers_of(optimizer).values() if model is None else ():
        if isinstance(each, OffloadedOptimizer) and each._session.agreement is not None:
            return each._session.model
    return model


def waits(optimizer: Any) -> bool:
    """Whether its step() waits for saves. One in a CUDA graph runs no hook: `capturable`."""
    return isinstance(optimizer, torch.optim.Optimizer) and not any(
        group.get("capturable") for group in optimizer.param_groups
    )
