"""The un-offloaded control: the same kernels over planes in ordinary memory, behind torch's
optimizer interface."""

from __future__ import annotations

import math

import torch

from stoker import _core
from stoker.offload.model.algorithm import algorithm_of, hyper

_NAMES = {torch.bfloat16: "bf16", torch.float32: "f32"}


class ReferenceOptimizer(torch.optim.Optimizer):
    """Updates parameters in place, tensor by tensor; bfloat16 parameters keep a remainder plane
    (exact float32 master).

    `moments`: how m and v are kept; lossy ones are keyed by a parameter's place in `model`.
    """

    def __init__(
        self,
        original: torch.optim.Optimizer,
        moments: str = "exact",
        model: torch.nn.Module | None = None,
    ) -> None:
        self.algorithm = algorithm_of(original, moments)
        self.index = (
            {param: i for i, param in enumerate(model.parameters())} if model is not None else {}
        )
        super().__init__(original.param_groups, original.defaults)

    @torch.no_grad()
    def step(self, closure=None):
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
            self.step()
            return loss
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._update(param, group)

    def _update(self, param: torch.Tensor, group: dict) -> None:
        state = self.state[param]
        if not state:
            state["step"] = 0
            state["remainder"] = torch.zeros(param.numel(), dtype=torch.int16, device="cpu")
            for plane in "mv":
                state[f"kept_{plane}"] = torch.zeros(
                    self.algorithm.moments.element_bytes * param.numel(),
                    dtype=torch.uint8,
                    device="cpu",
                )
                state[f"scales_{plane}"] = torch.zeros(
                    -(-param.numel() // 256), dtype=torch.float32, device="cpu"
                )
        state["step"] += 1
        assert param.is_contiguous()
        weight = param.detach().cpu()  # the same memory where it is there already
        grad = param.grad.contiguous().cpu()
        _core.optim_update(
            param.numel(),
            weight_type=_NAMES[param.dtype],
            grad_type=_NAMES[grad.dtype],
            weight_in=weight.data_ptr(),
            weight_out=weight.data_ptr(),
            grad=grad.data_ptr(),
            remainder=state["remainder"].data_ptr() if param.dtype == torch.bfloat16 else 0,
            m=state["kept_m"].data_ptr() if self.algorithm.momentum else 0,
            v=state["kept_v"].data_ptr() if self.algorithm.variance else 0,
            m_scales=state["scales_m"].data_ptr(),
            v_scales=state["scales_v"].data_ptr(),
            moments=self.algorithm.moments.name,
            seed=self.algorithm.seed,
            parameter=self.index.get(param, 0),
            hyper=hyper(group, self.algorithm, state["step"]),
        )
        if param.device.type != "cpu":
            param.copy_(weight)

    def moment(self, param: torch.Tensor, plane: str) -> torch.Tensor | None:
        """m or v as float32, flat; None before the first update."""
        if param not in self.state:
            return None
        kept, scales = (self.state[param][f"{name}_{plane}"] for name in ("kept", "scales"))
        return self.algorithm.moments.decode(
            plane,
            param.numel(),
            bytearray(kept.numpy().tobytes()),
            bytearray(scales.numpy().tobytes()),
        )


def clip(params, max_norm: float) -> float:
    """What opt.clip_grad_norm_ does, over ordinary gradients."""
    grads = [p.grad.cpu() for p in params if p.grad is not None]
    squares = [
        _core.optim_sum_of_squares(grad.data_ptr(), _NAMES[grad.dtype], grad.numel())
        for grad in grads
    ]
    norm = (
        math.sqrt(math.fsum(squares))
        if all(map(math.isfinite, squares))
        else math.nan
        if any(map(math.isnan, squares))
        else math.inf
    )
    coefficient = max_norm / (norm + 1e-6)
    if not coefficient >= 1.0:
        for p in params:
            if p.grad is not None:
                p.grad.mul_(coefficient)
    return norm


def master(opt: ReferenceOptimizer, param: torch.Tensor) -> torch.Tensor:
    """The float32 value of a parameter."""
    if param.dtype == torch.float32:
        return param.detach().clone()
    out = torch.empty(param.shape, dtype=torch.float32, device="cpu")
    rest = (
        opt.state[param]["remainder"]
        if param in opt.state
        else torch.zeros(param.numel(), dtype=torch.int16, device="cpu")
    )
    weight = param.detach().cpu()
    _core.optim_join(weight.data_ptr(), rest.data_ptr(), out.data_ptr(), param.numel())
    return out
