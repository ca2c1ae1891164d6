"""torch.func over an offloaded model: grad, vmap, jvp and the like wrap every tensor that is made
inside them, and know no hooks on saved tensors. So weights cannot come and go there. What uses none
of ours works: functional_call() with other tensors, or weights that gather() holds."""

from __future__ import annotations

from typing import Iterable

import torch
from torch._C import _functorch

from stoker.errors import Unsupported
from stoker.offload.model.blocks import Param


def transforming() -> bool:
    return _functorch.peek_interpreter_stack() is not None


def unwrapped(tensor: torch.Tensor) -> torch.Tensor:
    """What a transform was given."""
    while _functorch.is_functorch_wrapped_tensor(tensor):
        tensor = _functorch.get_unwrapped(tensor)
    return tensor


def refuse(params: Iterable[Param]) -> None:
    for param in params:
        raise Unsupported(
            f"{param.name} is used inside a transform of torch.func (grad, vmap, jvp, ...), where"
            " an offloaded weight cannot be fetched. Call the transform inside `with"
            " stoker.gather(model.parameters()):`, or give functional_call() copies of all weights"
        )
