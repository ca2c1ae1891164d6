"""Weights as the loop sees them between steps: copied, given back to the store, replaced by it."""

from __future__ import annotations

import torch

from stoker.offload.model.blocks import Block, Param
from stoker.offload.paging.offloaded import Place
from stoker.offload.paging.pager import Pager
from stoker.offload.paging.shown import Shown
from stoker.offload.run.stored_state import StoredState
from stoker.offload.steps.steps import Steps


class Weights:
    """Those of one session. Called under its lock by the thread that runs the loop."""

    def __init__(self, pager: Pager, shown: Shown, steps: Steps, stored: StoredState) -> None:
        self._pager, self._shown, self._steps, self._stored = pager, shown, steps, stored

    def current(self, param: Param) -> torch.Tensor:
        """A copy, in host memory, of the parameter's weights as forward would see them now."""
        if param in self._pager.held or self._shown.has(param):
            with torch._C.DisableTorchFunction():
                return param.tensor.detach().clone().cpu()
        self._steps.late.catch_up(param.unit.block)
        slot = self._pager.slots.get(param.unit.block)
        if slot is not None and not slot.loading:
            return slot.view(param).clone()
        return self._stored.plane_slice("w", param, param.unit.dtype)

    def restore(self, params: list[Param]) -> None:
        """Points the parameters back at their block's weights in memory, or at their
        placeholders."""
        for param in params:
            place = Place.of(param.tensor)
            self._pager.held.discard(param)
            self._pager.show(param)
            self._shown.watch(param, place)

    def refresh(self, blocks: set[Block]) -> None:
        """The store has other weights of these blocks."""
        for block in blocks:
            self._pager.versions[block.index] += 1
            self._pager.discard(block)
