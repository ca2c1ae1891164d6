"""Tensors of an optimizer that a restore fills, rather than new ones: their memory is there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch

from stoker.checkpoint.reading import Number, Reader


def state_in_memory(
    reader: Reader, optimizers: dict[str, Any], others: Iterable[torch.Tensor]
) -> dict[int, torch.Tensor]:
    """By the number of the part that goes there. No two of them share memory, nor does one with
    `others` or a parameter."""
    found: dict[int, torch.Tensor] = {}
    users: Counter[int] = Counter(map(_memory, filter(_in_memory, others)))
    for key, optimizer in optimizers.items():
        if not isinstance(optimizer, torch.optim.Optimizer):
            continue
        params = [param for group in optimizer.param_groups for param in group["params"]]
        users.update(
            _memory(each) for each in {id(p): p for p in params}.values() if _in_memory(each)
        )
        ours = optimizer.state_dict()["state"]
        for at, theirs in reader.outline(key)["state"].items():
            mine = ours.get(at)
            if not isinstance(theirs, dict) or not isinstance(mine, dict):
                continue
            for name, value in theirs.items():
                tensor = mine.get(name)
                if isinstance(value, Number) and _plain(tensor):
                    found[value.number] = tensor
        users.update(_memory(each) for each in _tensors(ours))
    return {n: tensor for n, tensor in found.items() if users[_memory(tensor)] == 1}


def _in_memory(tensor: Any) -> bool:
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.layout == torch.strided
        and tensor.device.type == "cpu"
    )


def _plain(tensor: Any) -> bool:
    """Whether its elements lie there one behind the other, in row-major order."""
    return (
        _in_memory(tensor)
        and tensor.is_contiguous()
        and not (tensor.is_conj() or tensor.is_neg() or tensor.requires_grad)
    )


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _tensors(state: Any) -> Iterable[torch.Tensor]:
    """All of host memory in it."""
    if isinstance(state, dict):
        state = state.values()
    elif not isinstance(state, (list, tuple)):
        return [state] if _in_memory(state) else []
    return [each for value in state for each in _tensors(value)]
