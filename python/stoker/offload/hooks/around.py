"""A block that module.compile() made: its graph runs between the hooks' entry and exit."""

from __future__ import annotations

from typing import Any, Callable

from torch import nn

from stoker.offload.model.blocks import Block


class Around:
    """Stands in for what module.compile() made: enters the block, runs the graph, leaves the
    block."""

    def __init__(
        self,
        module: nn.Module,
        block: Block | None,
        enter: Callable[[nn.Module, Block | None], None],
        leave: Callable[[nn.Module, Any], None],
    ) -> None:
        """leave(module, out): `out` is what it gave; None if it raised."""
        self._module, self._block = module, block
        self._enter, self._leave = enter, leave
        self._compiled = module._compiled_call_impl
        module._compiled_call_impl = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._enter(self._module, self._block)
        out = None
        try:
            out = self._compiled(*args, **kwargs)
            return out
        finally:
            self._leave(self._module, out)

    def remove(self) -> None:
        if self._module._compiled_call_impl is self:
            self._module._compiled_call_impl = self._compiled
