"""Root calls of a sharded model: torch gathers its weights, so nothing else needs a hook."""

from __future__ import annotations

from typing import Callable

import torch
from torch import nn

from stoker.offload.hooks.hooks import Hook


class Calls:
    """In the place of Hooks: root calls of a model whose weights are there anyhow."""

    def __init__(self, model: nn.Module, on_call: Callable[[tuple], None]) -> None:
        def enter(module: nn.Module, args: tuple) -> None:
            if torch._C._current_graph_task_id() == -1:  # else it is recomputed inside a backward
                on_call(("", module.training, torch.is_grad_enabled()))

        # before fully_shard's own, which gathers weights
        self._handle = model.register_forward_pre_hook(
            Hook(torch.compiler.disable(enter)), prepend=True
        )

    def unwind(self) -> None: ...

    def remove(self) -> None:
        self._handle.remove()
