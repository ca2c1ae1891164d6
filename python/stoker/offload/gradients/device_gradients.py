"""Gradients that stay on the accelerator until the step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Callable

import torch

from stoker.offload.gradients.gradients import Gradients, Reader, in_plane_order
from stoker.offload.model.blocks import Block, Param, Unit
from stoker.offload.paging.link import Link

if TYPE_CHECKING:
    from stoker.offload.observe.context import Context
    from stoker.offload.storage.planes import Planes


class DeviceGradients(Gradients):
    """p.grad stays on the device, where torch accumulates; a unit's host memory takes copies of
    it."""

    in_flight = 1  # the device computes the next unit's gradients while one's are copied

    def __init__(
        self,
        blocks: list[Block],
        planes: Planes,
        on_final: Callable[[Unit], None],
        context: Context,
        accumulate: int | None,
        link: Link,
    ) -> None:
        super().__init__(blocks, planes, on_final, context, accumulate)
        self._link = link
        self._landing: dict[Unit, list] = {}  # events of copies that nobody has waited for

    def _adopt(self, param: Param) -> None:
        """The gradient stays where it is."""

    @torch.no_grad()
    def land(self, unit: Unit, reader: Reader | None = None) -> None:
        self._await(unit)
        if reader is not None:
            reader.wait_computed()
        if unit in self._lent:
            self._recall(unit)
        # known one by one: memory may run out, or Ctrl-C come, in between
        events = self._landing[unit] = []
        for param in unit.params:
            if param.tensor.grad is not None and param.numel:
                events.append(
                    self._link.download(
                        _flat(in_plane_order(param.tensor.grad, param), param),
                        _flat(self._views[param], param),
                    )
                )

    def _idle(self, unit: Unit) -> bool:
        self._await(unit)  # of a backward that broke off
        return super()._idle(unit)

    def laid_out(self, param: Param) -> torch.Tensor | None:
        if param.tensor.grad is None:
            return None
        self._await(param.unit)
        return self._views[param]

    def _await(self, unit: Unit) -> None:
        with self.waiting("gradients"):
            for event in self._landing.get(unit, ()):
                self._link.wait(event)
        self._landing.pop(unit, None)

    def remove(self) -> None:
        for unit in list(self._landing):
            self._await(unit)
        super().remove()


def _flat(tensor: torch.Tensor, param: Param) -> torch.Tensor:
    """The parameter's elements in memory order, so that a copy is one piece."""
    return torch.as_strided(tensor, (param.numel,), (1,), tensor.storage_offset())
