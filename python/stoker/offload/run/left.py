"""What users find in a model after its session: weights that were left in the store."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Container

import torch
from torch import nn

from stoker.errors import StokerError
from stoker.offload.hooks.hooks import Hook
from stoker.offload.model.absent import Absent, forget
from stoker.offload.model.blocks import Param


def refuse_state_dict(model: nn.Module, path: str, params: dict[torch.Tensor, Param]) -> None:
    """After close(): the weights are in the store at `path`, and a state_dict() of placeholders
    would pass for one."""

    def refuse(module: nn.Module, prefix: str, keep_vars: bool) -> None:
        raise StokerError(
            f"this model's weights are in the store at {path}, but its optimizer was closed. "
            f"Call state_dict() before close(), or stoker.offload() with resume=True"
        )

    def refuse_load(
        _module: nn.Module, _state: dict, _prefix: str, metadata: dict, *_others
    ) -> None:
        if metadata.get("assign_to_params_buffers"):
            return  # the model gets parameters of its own
        raise StokerError(
            f"this model's weights are in the store at {path}, but its optimizer was closed. "
            f"Call stoker.offload() with resume=True, then load; or load into a new model"
        )

    forget(params)  # they may have been left, or built, before
    owners = owners_of(model, params)
    handles = [module.register_state_dict_pre_hook(Hook(refuse)) for module in owners]
    handles += [module.register_load_state_dict_pre_hook(Hook(refuse_load)) for module in owners]
    for param in params.values():
        param.tensor._stoker_away = Left(param.stride, path, handles)


@dataclass(frozen=True)
class Left(Absent):
    """After close(): the weights are in the store at `path`, and these hooks say so."""

    path: str
    handles: list

    def why(self, name: str) -> str:
        return (
            f"this model's weights were left in the store at {self.path} when its optimizer was"
            " closed; pass resume=True with that store, or make a new model"
        )

    def end(self) -> None:
        for handle in self.handles:
            handle.remove()


def owners_of(model: nn.Module, params: Container[torch.Tensor]) -> list[nn.Module]:
    """The modules that have some of the parameters themselves."""
    return [
        module
        for module in model.modules()
        if any(param in params for param in module._parameters.values() if param is not None)
    ]
