"""Clipping of gradients by their norm."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from stoker.offload.model.blocks import Param

if TYPE_CHECKING:
    from stoker.offload.run.session import Session


_DTYPE = {torch.bfloat16: "bf16", torch.float32: "f32"}


def clip(session: Session, max_norm: float, error_if_nonfinite: bool) -> torch.Tensor:
    """opt.clip_grad_norm_()."""
    # from finding gradients in memory to reading them: another thread that looks at one may take
    # their place
    with session.lock:
        session.check_open()
        session.steps.late.complete()  # it wants gradients, which may land where these do
        params = [param for param in session.params if param.unit.updated]
        norm = _clip(session, params, max_norm, error_if_nonfinite)
        session.steps.clips(max_norm, norm.item())
        return norm


def _clip(
    session: Session, params: list[Param], max_norm: float, error_if_nonfinite: bool
) -> torch.Tensor:
    grads = [param.tensor.grad for param in params if param.tensor.grad is not None]
    units = list(dict.fromkeys(param.unit for param in params))
    for unit in units:
        session.gradients.land(unit)
    core, squares = session.planes.session, []
    for unit in units:  # one at a time: of spilled gradients no more may be in memory
        landed = session.gradients.consumed(unit)
        squares += core.sum_of_squares(
            [(g.data_ptr(), g.numel(), _DTYPE[g.dtype]) for _, g in landed]
        )
    if session.agreement is not None:
        squares = session.agreement.ranks.numbers("opt.clip_grad_norm_()", math.fsum(squares))
    norm = (
        math.sqrt(math.fsum(squares))
        if all(map(math.isfinite, squares))
        else float("nan")
        if any(map(math.isnan, squares))
        else float("inf")
    )
    if error_if_nonfinite and not math.isfinite(norm):
        raise RuntimeError(
            f"the gradient norm is {norm}, so the gradients cannot be clipped; pass"
            " error_if_nonfinite=False to scale them anyway"
        )
    coefficient = max_norm / (norm + 1e-6)
    if not coefficient >= 1.0:  # also for NaN
        for grad in grads:
            grad.mul_(coefficient)
    return torch.tensor(norm, dtype=torch.float64, device="cpu")
