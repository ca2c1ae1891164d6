"""Plain torch, everything in memory: float32 masters beside bf16 weights, or bf16 throughout."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from systems import ADAMW


class TorchSystem:
    def __init__(self, make, settings: dict[str, Any], directory: str) -> None:
        torch.manual_seed(0)
        self.model: nn.Module = make()
        self.params = list(self.model.parameters())
        self.masters = (
            [param.detach().float() for param in self.params] if settings["masters"] else []
        )
        self.planes = settings["rounding"] == "planes"
        self.opt = torch.optim.AdamW(self.masters or self.params, **ADAMW, fused=True)
        self.limit = 0.0

    def clip(self, limit: float) -> None:
        """Clips the gradients of each step from here on."""
        self.limit = limit

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    @torch.no_grad()
    def step(self) -> None:
        if self.limit:
            nn.utils.clip_grad_norm_(self.params, self.limit)
        for master, param in zip(self.masters, self.params):
            master.grad = param.grad.float()
        self.opt.step()
        for master, param in zip(self.masters, self.params):
            param.copy_(rounded(master) if self.planes else master)
            master.grad = None
        self.model.zero_grad(set_to_none=True)

    def finish(self) -> dict[str, Any]:
        return {}


def rounded(master: torch.Tensor) -> torch.Tensor:
    """To the nearest bf16, halfway toward zero: the rule of src/stoker/optim/planes.h. torch's own
    takes the even one."""
    return ((master.view(torch.int32) + 0x7FFF) >> 16).to(torch.int16).view(torch.bfloat16)
