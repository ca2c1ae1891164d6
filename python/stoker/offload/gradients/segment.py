"""What an update consumes of one parameter."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from stoker import _core
from stoker.offload.model.blocks import Param

DTYPES = {torch.bfloat16: "bf16", torch.float32: "f32"}


@dataclass(frozen=True)
class Segment:
    """One parameter's share of an update: what it consumes."""

    param: Param
    grad: torch.Tensor  # in plane order; kept alive until the update has consumed it
    hyper: _core.Hyper

    def core(self) -> _core.Segment:
        """As the kernels take it."""
        return _core.Segment(
            self.param.index,
            self.param.offset,
            self.param.numel,
            self.grad.data_ptr(),
            DTYPES[self.grad.dtype],
            self.hyper,
        )
