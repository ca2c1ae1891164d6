"""A block that module.compile() made: its graph runs between the hooks' entry and exit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from stoker.offload.hooks.hooks import Hooks
    from stoker.offload.model.blocks import Block


class Around:
    """Stands in for what module.compile() made: enters the block, runs the graph, leaves the
    block."""

    def __init__(self, hooks: Hooks, module: nn.Module, block: Block | None) -> None:
        self._hooks, self._module, self._block = hooks, module, block
        self._compiled = module._compiled_call_impl
        module._compiled_call_impl = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._hooks.enter(self._module, self._block)
        out = None
        try:
            out = self._compiled(*args, **kwargs)
            return out
        finally:
            self._hooks.exit(self._module, out)

    def remove(self) -> None:
        if self._module._compiled_call_impl is self:
            self._module._compiled_call_impl = self._compiled
