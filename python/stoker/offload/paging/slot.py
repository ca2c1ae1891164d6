"""A block's place in the arena."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from stoker.errors import StokerError
from stoker.offload.model.absent import loud
from stoker.offload.model.blocks import Block, Param


def placeholders(
    params: list[Param], device: torch.device
) -> tuple[list[tuple[torch.Tensor, torch.Tensor]], dict[Param, torch.Tensor]]:
    """What evicted parameters hold: each one element of a tensor of loud ones of its type. And the
    bytes of these tensors, with copies of them."""
    types = {
        dtype: [param for param in params if param.unit.dtype == dtype]
        for dtype in dict.fromkeys(param.unit.dtype for param in params)
    }
    rows = torch.contiguous_format  # else a single one has a stride of 0, and no view of its bytes
    scalars = {
        dtype: loud(dtype, (len(those),), device).clone(memory_format=rows)
        for dtype, those in types.items()
    }
    shown = {
        param: scalars[dtype][at].expand(param.size).detach()
        for dtype, those in types.items()
        for at, param in enumerate(those)
    }
    raw = [each.view(torch.uint8).view(len(each), -1) for each in scalars.values()]
    return [(each, each.clone()) for each in raw], shown


@dataclass(eq=False)
class Slot:
    """One copy of a block's weights in memory."""

    block: Block
    bytes: torch.Tensor  # uint8 over the whole slot; its storage owns the arena Buffer
    version: int  # Pager.versions of the block whose weights these are
    loading: list = field(default_factory=list)  # futures still under way

    @property
    def address(self) -> int:
        return self.bytes.data_ptr()

    @torch.inference_mode(False)  # it outlives the mode that its first use happens to be in
    def typed(self, dtype: torch.dtype, size, stride, offset: int) -> torch.Tensor:
        """A fresh view of the slot's storage; `offset` in elements of dtype from the start of the
        slot."""
        return torch.empty(0, dtype=dtype, device=self.bytes.device).set_(
            self.bytes.untyped_storage(), offset, size, stride
        )

    def view(self, param: Param) -> torch.Tensor:
        offset = param.unit.slot_offset // param.unit.dtype.itemsize + param.offset
        return self.typed(param.unit.dtype, param.size, param.stride, offset)


def drain(futures: list) -> None:
    """Waits until reads are done with their memory, however they end: it may be another block's a
    moment later."""
    for future in futures:
        try:
            future.wait()
        except StokerError:  # these weights are not wanted any more
            pass
