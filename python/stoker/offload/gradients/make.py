"""make_gradients: the gradients for the place where the model computes, and for what fits."""

from __future__ import annotations

from typing import Callable

from stoker.offload.gradients.device_gradients import DeviceGradients
from stoker.offload.gradients.gradients import Gradients
from stoker.offload.gradients.spilling import SpillingGradients
from stoker.offload.model.blocks import Block, Unit
from stoker.offload.observe.context import Context
from stoker.offload.paging.link import Link
from stoker.offload.storage.planes import Planes


def make_gradients(
    blocks: list[Block],
    planes: Planes,
    on_final: Callable[[Unit], None],
    context: Context,
    accumulate: int | None,
    link: Link | None,
) -> Gradients:
    """`link`: to the device that computes, None for the CPU."""
    making = (blocks, planes, on_final, context, accumulate)
    if link is not None:
        return DeviceGradients(*making, link)
    return (SpillingGradients if planes.layout.spilled else Gradients)(*making)
