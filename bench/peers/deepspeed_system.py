"""DeepSpeed ZeRO-3 on one CPU process: state in memory, offloaded to CPU memory, or offloaded to
NVMe."""

from __future__ import annotations

import os
from typing import Any

import deepspeed
import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam

from systems import ADAMW, configuration


class DeepSpeedSystem:
    def __init__(self, make, settings: dict[str, Any], directory: str) -> None:
        torch.manual_seed(0)
        model = make()
        optimizer = DeepSpeedCPUAdam(model.parameters(), **ADAMW, adamw_mode=True)
        sizes = [param.numel() for param in model.parameters()]
        config = configuration(settings, sizes, os.path.join(directory, "swap"))
        self.model, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)

    def clip(self, limit: float) -> None:
        """What `gradient_clipping` in the configuration becomes."""
        self.model.optimizer.clip_grad = limit

    def backward(self, loss: torch.Tensor) -> None:
        self.model.backward(loss)

    def step(self) -> None:
        self.model.step()

    def finish(self) -> dict[str, Any]:
        return {"deepspeed": deepspeed.__version__}
