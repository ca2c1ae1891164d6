"""Parameters whose values are not in memory before stoker.offload() takes them up, and where those
are: nowhere yet (the meta device), in the store of a run whose optimizer was closed, or where
stoker.build() left them.

Such a parameter shows a placeholder, and carries an Absent that says so. It is the parameter's own,
so wrapping the model (torch.compile, PEFT) loses nothing, and dropping the model drops it. What
loses it (a copy, a conversion, a shard) shows placeholders still, and is refused for that.
"""

from __future__ import annotations

import glob
import os
from dataclasses import dataclass
from typing import Any, Callable, Iterable

import torch
from torch import nn

from stoker.errors import InvalidArgument
from stoker.offload.model.blocks import Block, Param, local


@dataclass(frozen=True)
class Absent:
    """What a parameter knows whose values are elsewhere. `stride`: theirs; the placeholder has its
    own."""

    stride: tuple[int, ...]

    def why(self, name: str) -> str:
        """The sentence for one who wants the values of that parameter and cannot have them."""
        raise NotImplementedError

    def changed(self, param: torch.Tensor) -> bool:
        """Whether the parameter was changed since, so that its values and what it shows do not fit
        any more."""
        return False

    def near(self, store: str) -> bool:
        """Whether the store of that name may have the values, for all that is known without opening
        it."""
        return False

    def within(self, store: Any) -> bool:
        """Whether the open store has them."""
        return False

    def read(self, store: Any) -> torch.Tensor:
        raise NotImplementedError

    def end(self) -> None:
        """The values are taken up."""


class Empty(Absent):
    """Made on the meta device."""

    def why(self, name: str) -> str:
        return (
            f"parameter {name} is on the meta device and has no values; pass weights= with a"
            " safetensors folder, or use stoker.build()"
        )


def away_of(param: Any) -> Absent | None:
    return getattr(param, "_stoker_away", None)


def forget(params: Iterable[torch.Tensor]) -> None:
    """Values were taken up: nothing is away any more."""
    for param in params:
        if (away := vars(param).pop("_stoker_away", None)) is not None:
            away.end()


def loud(dtype: torch.dtype, size: Iterable[int], device: torch.device | str) -> torch.Tensor:
    """A placeholder: shape and dtype over one scalar, NaN (or the extreme) so that a read by
    mistake is loud."""
    return torch.full((), _scalar(dtype), dtype=dtype, device=device).expand(size)


def only_loud(tensor: torch.Tensor) -> bool:
    """Whether a tensor shows what a placeholder does, and nothing else."""
    here = local(tensor).detach()
    if not here.numel():
        return False
    seen = here[tuple(slice(0, 1) if step == 0 else slice(None) for step in here.stride())]
    first, expected = seen[(0,) * seen.dim()].item(), _scalar(seen.dtype)
    if first == first:  # no NaN
        return first == expected and bool((seen == expected).all())
    wide = seen.float() if seen.dtype.itemsize == 1 else seen
    return expected != expected and bool(torch.isnan(wide).all())


def _scalar(dtype: torch.dtype) -> float | int | bool:
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return True if dtype == torch.bool else torch.iinfo(dtype).max


# -- what offload() asks ---------------------------------------------------------------------------


def check_reachable(model: nn.Module, store: str, elsewhere: bool) -> None:
    """InvalidArgument, before `store` is opened or made, if it cannot have values that are away.
    `elsewhere`: they may come from somewhere else."""
    for name, param in model.named_parameters():
        away = away_of(param)
        if away is None:
            continue
        if away.changed(param):
            raise InvalidArgument(
                f"parameter {name} was converted or written to after stoker.build(). Its values"
                " are in the store, and the change did not reach them. Make the change inside the"
                " factory, as in stoker.build(lambda: make().to(torch.bfloat16), ...)"
            )
        if not elsewhere and not away.near(store):
            raise InvalidArgument(away.why(name))


def check_values(blocks: list[Block], store: Any) -> None:
    """InvalidArgument unless every parameter has its values in memory or in the open store."""
    for param in (param for block in blocks for param in block.params):
        away = away_of(param.tensor)
        if away is not None:
            if not away.within(store):
                raise InvalidArgument(away.why(param.name))
        elif param.numel > 1 and param.unit.dtype.is_floating_point and only_loud(param.tensor):
            raise InvalidArgument(
                f"every value of parameter {param.name} is NaN. It was probably copied, converted"
                " or sharded while its values were not in memory. Do that inside the factory of"
                " stoker.build(), or give it its values before stoker.offload()"
            )


def values_in(store: Any) -> Callable[[Param], torch.Tensor]:
    """Each parameter's values, from memory or out of the open store."""

    def value_of(param: Param) -> torch.Tensor:
        away = away_of(param.tensor)
        return param.tensor.detach() if away is None else away.read(store)

    return value_of


# -- models on the meta device ---------------------------------------------------------------------


def leave_meta(blocks: list[Block]) -> None:
    """Parameters on the meta device become ones of the CPU that hold nothing yet; who has them
    keeps them."""
    for param in (param for block in blocks for param in block.params):
        if param.tensor.is_meta:
            torch.utils.swap_tensors(
                param.tensor,
                nn.Parameter(
                    loud(param.tensor.dtype, param.size, "cpu"), param.tensor.requires_grad
                ),
            )
            param.tensor._stoker_away = Empty(param.stride)  # until its weights are in a store


def leave_meta_buffers(model: nn.Module, folder: str | os.PathLike | None, recorded: bool) -> None:
    """Buffers on the meta device are read from the folder, or (`recorded`) will be from the run in
    the store."""
    where, path = stored_tensors(folder) if folder is not None else ({}, "a folder of weights")
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            full = f"{prefix}.{name}" if prefix else name
            if buffer is None or not buffer.is_meta:
                continue
            if recorded:
                module._buffers[name] = torch.empty_like(buffer, device="cpu")
            elif full in where:
                module._buffers[name] = where[full].get_tensor(full).to(buffer.dtype)
            else:
                raise InvalidArgument(
                    f"buffer {full} is on the meta device, and its values are not in {path}; make"
                    " the model with its buffers, as"
                    " accelerate.init_empty_weights(include_buffers=False) does"
                )


def stored_tensors(folder: str | os.PathLike) -> tuple[dict[str, Any], str]:
    """The safetensors file of each name in a folder (or file), and the path of that."""
    from safetensors import safe_open

    path = os.fspath(folder)
    files = (
        sorted(glob.glob(os.path.join(path, "*.safetensors"))) if os.path.isdir(path) else [path]
    )
    opened = [safe_open(file, framework="pt") for file in files]
    where = {name: each for each in opened for name in each.keys()}
    if not where:
        raise InvalidArgument(
            f"{path} holds no safetensors files with tensors; name the folder of the model's"
            " weights"
        )
    return where, path


def stored_weights(folder: str | os.PathLike) -> Callable[[Param], torch.Tensor]:
    """Reads parameters by name out of a folder of safetensors files."""
    where, path = stored_tensors(folder)

    def value_of(param: Param) -> torch.Tensor:
        if param.name not in where:
            raise InvalidArgument(
                f"{path} has no tensor {param.name}, which the model needs; where it should be tied"
                " to another weight, tie it first (model.tie_weights())"
            )
        value = where[param.name].get_tensor(param.name)
        if value.shape != param.size:
            raise InvalidArgument(
                f"tensor {param.name} in {path} has shape {list(value.shape)}, but the model needs"
                f" {list(param.size)}; give the files of this model"
            )
        return value

    return value_of
