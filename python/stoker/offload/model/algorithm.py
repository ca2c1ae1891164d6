"""The optimizers that Stoker runs, and what they keep for each parameter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from stoker import _core
from stoker.errors import InvalidArgument
from stoker.offload.model.blocks import Unit
from stoker.offload.model.moments import EXACT, Moments, moments_of


@dataclass(frozen=True)
class Algorithm:
    """An optimizer as the kernels know it: its name, which state planes it keeps, and how."""

    name: str
    momentum: bool  # plane m
    variance: bool  # plane v
    moments: Moments = EXACT
    seed: int = 0  # of the draws that round lossy moments

    @property
    def planes(self) -> str:
        return ("m" if self.momentum else "") + ("v" if self.variance else "")

    def state_bytes(self, unit: Unit) -> dict[str, int]:
        """Bytes of each state plane of an updated unit."""
        planes = {"remainder": 2 * unit.elements} if unit.dtype == torch.bfloat16 else {}
        return planes | {plane: self.moments.plane_bytes(unit.elements) for plane in self.planes}

    def tile_bytes(self, elements: int) -> int:
        """Bytes of one tile buffer: weights and remainder (or float32 weights), m and v of any
        unit."""
        return 4 * elements + 2 * self.moments.plane_bytes(elements)


def algorithm_of(optimizer: torch.optim.Optimizer, moments: str = "exact") -> Algorithm:
    """The kernel that does what `optimizer` does, keeping its state as `moments` says.
    InvalidArgument names what Stoker has no kernel for."""
    kind = type(optimizer)
    names = {torch.optim.AdamW: "adamw", torch.optim.Adam: "adam", torch.optim.SGD: "sgd"}
    if kind not in names:
        raise InvalidArgument(
            f"{kind.__name__} cannot be offloaded; use AdamW, Adam or SGD of torch.optim"
        )
    for group in optimizer.param_groups:
        for option in ("amsgrad", "differentiable", "capturable"):
            if group.get(option):
                raise InvalidArgument(
                    f"{kind.__name__}({option}=True) cannot be offloaded; leave {option} off"
                )
    name = names[kind]
    if name == "adam" and any(
        group.get("decoupled_weight_decay") for group in optimizer.param_groups
    ):
        name = "adamw"
    momentum = name != "sgd" or any(group["momentum"] != 0 for group in optimizer.param_groups)
    return Algorithm(
        name,
        momentum=momentum,
        variance=name != "sgd",
        moments=moments_of(moments),
        seed=torch.initial_seed(),
    )


def hyper(group: dict[str, Any], algorithm: Algorithm, step: int) -> _core.Hyper:
    """The kernel's hyperparameters for a parameter of `group` at its `step`-th update (1-based)."""
    number = lambda value: float(value.item() if isinstance(value, torch.Tensor) else value)
    values: dict[str, Any] = {
        "algorithm": algorithm.name,
        "lr": number(group["lr"]),
        "weight_decay": number(group["weight_decay"]),
        "maximize": bool(group.get("maximize", False)),
        "step": step,
    }
    if algorithm.name == "sgd":
        values.update(
            momentum=number(group["momentum"]),
            dampening=number(group["dampening"]),
            nesterov=bool(group["nesterov"]),
        )
    else:
        beta1, beta2 = group["betas"]
        values.update(beta1=number(beta1), beta2=number(beta2), eps=number(group["eps"]))
    return _core.Hyper(**values)
