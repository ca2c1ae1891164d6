"""What a session puts into its model: hooks, and layers that may be computed again."""

from __future__ import annotations

from typing import Any, Callable

from torch import nn

from stoker.offload.activations.activations import Activations
from stoker.offload.hooks.calls import Calls
from stoker.offload.hooks.hooks import Hooks
from stoker.offload.hooks.recompute import Auto, Recomputed, layers_of
from stoker.offload.model.blocks import Param
from stoker.offload.observe.context import Gate
from stoker.offload.observe.ledger import Ledger
from stoker.offload.paging.pager import Pager


class Installed:
    """In there from install() to remove()."""

    def __init__(self) -> None:
        self.hooks: Hooks | Calls | None = None
        self.layers: list[Recomputed] = []  # those that may be computed again
        self._auto: Auto | None = None  # chooses among them
        self._handles: list = []

    def install(
        self,
        model: nn.Module,
        pager: Pager,
        activations: Activations | None,
        mode: str,
        ledger: Ledger,
        gate: Gate,
        on_call: Callable[[tuple], None],
        on_outside: Callable[[Param], None],
    ) -> None:
        """From here on the model trains out of the store. `mode`: where activations go.
        on_call(key): a root call of the model begins. on_outside(param): it is used outside of its
        modules."""
        if mode in ("recompute", "auto"):
            self.layers = layers_of(
                model, pager.blocks, ledger.waiting, activations is None, lambda: self.hooks
            )
            if activations is not None:
                self._auto = Auto(self.layers, activations, ledger.event)
        self.hooks = (
            Calls(model, on_call)
            if pager.resident
            else Hooks(model, pager, on_call, on_outside, gate, activations)
        )

    def call(self, last: dict[str, Any] | None) -> None:
        """A training forward begins. `last`: the ledger's newest row."""
        if self._auto is not None:
            self._auto.call(last)

    def keep(self, handles: list) -> None:
        """Handles of other hooks, which go with these."""
        self._handles += handles

    def remove(self) -> None:
        if self.hooks is not None:
            self.hooks.remove()
        for each in (*self.layers, *self._handles):
            each.remove()
