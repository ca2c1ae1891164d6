"""The optimizer kernels against torch's own fused CPU kernels: the same bits, step after step."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from stoker import _core

OPTIMIZERS = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam, "sgd": torch.optim.SGD}
DTYPES = {"bf16": torch.bfloat16, "f32": torch.float32}

# torch fuses multiply-adds in its AVX2 and AVX-512 kernels only, and the equality is with those.
fused = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"),
    reason="torch has no fused multiply-add here",
)


class Kernel:
    """One tensor under our kernels. `master` is what a float32 weight would be, for either weight
    type."""

    def __init__(
        self, weight: torch.Tensor, weight_type: str, algorithm: str, **hyper: Any
    ) -> None:
        self.count, self.weight_type, self.algorithm = weight.numel(), weight_type, algorithm
        self.hyper = dict(hyper)
        if "betas" in self.hyper:
            self.hyper["beta1"], self.hyper["beta2"] = self.hyper.pop("betas")
        self.m, self.v = torch.zeros(self.count), torch.zeros(self.count)
        self.weight = torch.empty(self.count, dtype=DTYPES[weight_type])
        self.remainder = torch.zeros(self.count, dtype=torch.uint16)
        self.steps = 0
        if weight_type == "f32":
            self.weight.copy_(weight)
        else:
            _core.optim_split(
                weight.data_ptr(), self.weight.data_ptr(), self.remainder.data_ptr(), self.count
            )

    @property
    def master(self) -> torch.Tensor:
        if self.weight_type == "f32":
            return self.weight
        out = torch.empty(self.count)
        _core.optim_join(
            self.weight.data_ptr(), self.remainder.data_ptr(), out.data_ptr(), self.count
        )
        return out

    def step(self, grad: torch.Tensor) -> None:
        self.steps += 1
        _core.optim_update(
            self.count,
            weight_type=self.weight_type,
            grad_type="bf16" if grad.dtype == torch.bfloat16 else "f32",
            weight_in=self.weight.data_ptr(),
            weight_out=self.weight.data_ptr(),
            remainder=self.remainder.data_ptr(),
            m=self.m.data_ptr(),
            v=self.v.data_ptr(),
            grad=grad.data_ptr(),
            hyper=_core.Hyper(
                algorithm=self.algorithm, step=self.steps, **{"lr": 1e-3, **self.hyper}
            ),
        )


def gradients(count: int, steps: int, seed: int = 1):
    """Gradients over sixteen decades, with exact zeros among them."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        decades = torch.randint(-8, 8, (count,), generator=generator).float()
        grad = torch.randn(count, generator=generator) * 10**decades
        grad[torch.rand(count, generator=generator) < 0.02] = 0
        yield grad


def same_bits(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    return torch.equal(ours.view(torch.int32), theirs.detach().view(torch.int32))


def assert_follows_torch(
    kernel: Kernel, optimizer: torch.optim.Optimizer, weight: torch.Tensor, steps: int
) -> None:
    for grad in gradients(kernel.count, steps):
        weight.grad = grad.clone()
        optimizer.step()
        kernel.step(grad)
    state = optimizer.state[weight]
    assert same_bits(kernel.master, weight)
    if kernel.algorithm == "sgd":
        if kernel.hyper.get("momentum"):
            assert same_bits(kernel.m, state["momentum_buffer"])
    else:
        assert same_bits(kernel.m, state["exp_avg"])
        assert same_bits(kernel.v, state["exp_avg_sq"])


def pair(weight_type: str, algorithm: str, count: int, **hyper: Any):
    weight = torch.nn.Parameter(torch.randn(count, generator=torch.Generator().manual_seed(0)))
    kernel = Kernel(weight.detach().clone(), weight_type, algorithm, **hyper)
    return kernel, OPTIMIZERS[algorithm]([weight], fused=True, **hyper), weight


@fused
@pytest.mark.parametrize("weight_type", ["f32", "bf16"])
@pytest.mark.parametrize("count", [16, 4096, 16 * 999])
def test_adamw_equals_torch_for_1000_steps(weight_type: str, count: int) -> None:
    assert_follows_torch(*pair(weight_type, "adamw", count, lr=1e-3, weight_decay=0.01), steps=1000)


@fused
@pytest.mark.parametrize("weight_type", ["f32", "bf16"])
@pytest.mark.parametrize(
    "algorithm, hyper",
    [
        ("adamw", {"lr": 1e-2, "weight_decay": 0.0, "betas": (0.4, 0.95)}),
        ("adamw", {"lr": 1e-2, "weight_decay": 0.1, "maximize": True, "eps": 1e-3}),
        ("adam", {"lr": 1e-2}),
        ("adam", {"lr": 1e-2, "weight_decay": 0.1, "maximize": True}),
        ("sgd", {"lr": 1e-2}),
        ("sgd", {"lr": 1e-2, "weight_decay": 0.1}),
        ("sgd", {"lr": 1e-2, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.01}),
        ("sgd", {"lr": 1e-2, "momentum": 0.9, "nesterov": True, "maximize": True}),
    ],
)
def test_other_settings_equal_torch(
    weight_type: str, algorithm: str, hyper: dict[str, Any]
) -> None:
    assert_follows_torch(*pair(weight_type, algorithm, 4096, **hyper), steps=100)


SETTINGS = [
    ("adamw", {"lr": 1e-2, "weight_decay": 0.1}),
    ("adamw", {"lr": torch.tensor(1e-2), "weight_decay": 0.0, "betas": (0.4, 0.95)}),
    ("adamw", {"lr": 1e-2, "weight_decay": 0.1, "eps": 1e-3, "maximize": True}),
    ("adam", {"lr": 1e-2, "weight_decay": 0.1}),
    ("adam", {"lr": 1e-2, "betas": (0.5, 0.999), "maximize": True}),
    ("sgd", {"lr": 1e-2, "weight_decay": 0.1}),
    ("sgd", {"lr": 1e-2, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1}),
    ("sgd", {"lr": 1e-2, "momentum": 0.9, "nesterov": True, "maximize": True}),
]


def assert_follow_torch(
    counts: list[int], algorithm: str, hyper: dict[str, Any], steps: int
) -> None:
    """Parameters of these lengths in one optimizer of torch's, and each under our kernel."""
    start = torch.randn(sum(counts), generator=torch.Generator().manual_seed(0)).split(counts)
    weights = [torch.nn.Parameter(each.clone()) for each in start]
    optimizer = OPTIMIZERS[algorithm](weights, fused=True, **hyper)
    ours = hyper | {"lr": float(hyper["lr"])}
    kernels = [Kernel(each, "f32", algorithm, **ours) for each in start]
    for grads in gradients(sum(counts), steps):
        for weight, kernel, grad in zip(weights, kernels, grads.split(counts)):
            weight.grad = grad.clone()
            kernel.step(grad)
        optimizer.step()
    for weight, kernel in zip(weights, kernels):
        state = optimizer.state[weight]
        assert same_bits(kernel.weight, weight), f"weights, {kernel.count} elements"
        planes = {"momentum_buffer": kernel.m, "exp_avg": kernel.m, "exp_avg_sq": kernel.v}
        for name, plane in planes.items():
            if state.get(name) is not None:
                assert same_bits(plane, state[name]), f"{name}, {kernel.count} elements"


@fused
@pytest.mark.parametrize(("algorithm", "hyper"), SETTINGS)
def test_any_length_equals_torch(algorithm: str, hyper: dict[str, Any]) -> None:
    """torch's loop for the last elements, beyond a multiple of 8, rounds another product."""
    assert_follow_torch([*range(1, 41), 300 * 7, 300 * 13 + 3], algorithm, hyper, steps=100)


@fused
@pytest.mark.parametrize(("algorithm", "hyper"), [SETTINGS[i] for i in (0, 3, 6)])
def test_torchs_threads_change_nothing(algorithm: str, hyper: dict[str, Any]) -> None:
    """They begin at multiples of 16 elements: only the end of a tensor has such a rest."""
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 3, 7):
            torch.set_num_threads(count)
            assert_follow_torch([13, 127, 2**16 + 1, 100003], algorithm, hyper, steps=3)
    finally:
        torch.set_num_threads(threads)


@fused
def test_learning_rate_and_betas_may_change_every_step() -> None:
    kernel, optimizer, weight = pair("f32", "adamw", 1024, lr=1e-3, weight_decay=0.01)
    for step, grad in enumerate(gradients(1024, 50)):
        lr, beta1 = 1e-3 / (1 + step), 0.8 + step * 1e-3
        optimizer.param_groups[0].update(lr=lr, betas=(beta1, 0.999))
        kernel.hyper.update(lr=lr, beta1=beta1)
        weight.grad = grad.clone()
        optimizer.step()
        kernel.step(grad)
    assert same_bits(kernel.master, weight)


@fused
def test_grad_scale_divides_as_torch_does() -> None:
    kernel, optimizer, weight = pair("f32", "adamw", 1024, lr=1e-3, weight_decay=0.01)
    optimizer.grad_scale = torch.tensor(1000.0)
    optimizer.found_inf = torch.tensor(0.0)
    kernel.hyper["grad_scale"] = 1000.0
    assert_follows_torch(kernel, optimizer, weight, steps=20)


def ulps_apart(a: torch.Tensor, b: torch.Tensor, scale: torch.Tensor) -> float:
    """Largest |a - b| in units of the last place of `scale` (float32)."""
    _, exponent = torch.frexp(scale.abs().double().clamp_min(2.0**-126))
    return ((a.double() - b.double()).abs() / 2.0 ** (exponent - 24).double()).max().item()


@pytest.mark.parametrize("count", [1, 7, 16, 1001])
def test_one_step_is_within_two_ulp_at_any_length(count: int) -> None:
    kernel, optimizer, weight = pair("f32", "adamw", count, lr=1e-3, weight_decay=0.01)
    for grad in gradients(count, 30):
        state = optimizer.state[weight]
        if state:  # equal inputs for each step
            kernel.m.copy_(state["exp_avg"])
            kernel.v.copy_(state["exp_avg_sq"])
            kernel.weight.copy_(weight.detach())
        old = [kernel.weight.clone(), kernel.m.clone(), kernel.v.clone()]
        weight.grad = grad.clone()
        optimizer.step()
        kernel.step(grad)
        state = optimizer.state[weight]
        theirs = [weight.detach(), state["exp_avg"], state["exp_avg_sq"]]
        for before, our, their in zip(old, [kernel.weight, kernel.m, kernel.v], theirs):
            assert ulps_apart(our, their, torch.maximum(before.abs(), their.abs())) <= 2


def test_default_adamw_stays_close(record_property) -> None:
    """torch's default AdamW (no fused kernel) rounds differently; how far it drifts is recorded,
    and bounded loosely."""
    count, steps = 4096, 1000
    weight = torch.nn.Parameter(torch.randn(count, generator=torch.Generator().manual_seed(0)))
    kernel = Kernel(weight.detach().clone(), "f32", "adamw", lr=1e-3, weight_decay=0.01)
    optimizer = torch.optim.AdamW([weight], lr=1e-3, weight_decay=0.01)
    for grad in gradients(count, steps):
        weight.grad = grad.clone()
        optimizer.step()
        kernel.step(grad)
    drift = (kernel.master - weight.detach()).abs().max().item()
    moved = 1e-3 * steps
    record_property("largest_difference_after_1000_steps", drift)
    print(f"largest difference to torch's default AdamW after {steps} steps: {drift:.3g}")
    assert drift < 1e-4 * moved


@pytest.mark.parametrize("count", [8, 13, 100])
def test_bf16_masters_equal_float32_weights(count: int) -> None:
    """But for the last elements of float32 weights, which follow torch; it keeps no masters."""
    start = torch.randn(count, generator=torch.Generator().manual_seed(0))
    half = Kernel(start, "bf16", "adamw", lr=1e-2, weight_decay=0.1)
    full = Kernel(start, "f32", "adamw", lr=1e-2, weight_decay=0.1)
    for grad in gradients(count, 200):
        half.step(grad.bfloat16())
        full.step(grad.bfloat16().float())
    whole = count - count % 8
    assert same_bits(half.master[:whole], full.weight[:whole])
    assert same_bits(half.m[:whole], full.m[:whole]) and same_bits(half.v[:whole], full.v[:whole])


def test_lion_is_what_it_says() -> None:
    weight = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    kernel = Kernel(weight.clone(), "f32", "lion", lr=1e-2, weight_decay=0.1, betas=(0.9, 0.99))
    w, m = weight.double(), torch.zeros(1000).double()
    for grad in gradients(1000, 20):
        kernel.step(grad)
        blend = 0.9 * m + 0.1 * grad.double()
        w = w * (1 - 1e-2 * 0.1) - 1e-2 * blend.sign()
        m = 0.99 * m + 0.01 * grad.double()
    assert torch.allclose(kernel.weight.double(), w, atol=1e-5)
    assert torch.allclose(kernel.m.double(), m, rtol=1e-3, atol=1e-6)


def test_plane_is_torchs_bfloat16_but_for_ties() -> None:
    bits = torch.randint(
        -(2**31), 2**31, (1 << 20,), dtype=torch.int64, generator=torch.Generator().manual_seed(0)
    )
    bits[:4096] = (bits[:4096] & ~0xFFFF) | 0x8000  # many ties
    masters = bits.to(torch.int32).view(torch.float32)
    kernel = Kernel(masters, "bf16", "adamw")
    low = bits & 0xFFFF
    tie_up = (low == 0x8000) & ((bits >> 16) & 1 == 1)
    nan = masters.isnan()
    assert torch.equal(kernel.weight.isnan(), nan)
    plain = ~tie_up & ~nan
    assert torch.equal(
        kernel.weight[plain].view(torch.int16), masters[plain].bfloat16().view(torch.int16)
    )
    toward_zero = (bits >> 16).to(torch.int16)
    assert tie_up.sum() > 1000
    ties = tie_up & ~nan
    assert torch.equal(kernel.weight[ties].view(torch.int16), toward_zero[ties])
    assert same_bits(kernel.master[~nan], masters[~nan]) and bool(kernel.master[nan].isnan().all())


@pytest.mark.parametrize("grad_type", ["bf16", "f32"])
def test_sum_of_squares_and_pieces(grad_type: str) -> None:
    grad = next(gradients(200_001, 1)).to(DTYPES[grad_type])
    pieces = _core.optim_sums_of_squares(grad.data_ptr(), grad_type, grad.numel())
    assert len(pieces) == 4
    for piece, sum_ in zip(grad.double().split(65536), pieces):
        assert math.isclose(piece.square().sum().item(), sum_, rel_tol=1e-12)
    total = 0.0
    for sum_ in pieces:
        total += sum_
    assert _core.optim_sum_of_squares(grad.data_ptr(), grad_type, grad.numel()) == total


@pytest.mark.parametrize("grad_type", ["bf16", "f32"])
@pytest.mark.parametrize("factor", [0.37, 1.0, 1e-20, 1e20])
def test_scale_equals_mul_by_a_tensor(grad_type: str, factor: float) -> None:
    grad = torch.cat(
        [
            next(gradients(10_003, 1)),
            torch.tensor([math.inf, -math.inf, math.nan, 0.0, -0.0, 1e-40]),
        ]
    )
    grad = grad.to(DTYPES[grad_type])
    for coefficient in (torch.tensor(factor), torch.tensor(factor, dtype=torch.bfloat16)):
        ours, theirs = grad.clone(), grad.clone().mul_(coefficient)
        _core.optim_scale(ours.data_ptr(), grad_type, ours.numel(), coefficient.item())
        integers = torch.int16 if grad_type == "bf16" else torch.int32
        number = ~theirs.isnan()
        assert torch.equal(ours.isnan(), theirs.isnan())
        assert torch.equal(ours[number].view(integers), theirs[number].view(integers))


@pytest.mark.parametrize(
    "change, sentence",
    [
        ({"algorithm": "adagrad"}, "adagrad"),
        ({"weight_type": "f16"}, "f16"),
        ({"m": 0}, "'m'"),
        ({"v": 0}, "'v'"),
        ({"grad": 0}, "'grad'"),
        ({"weight_type": "bf16", "remainder": 0}, "'remainder'"),
        ({"step": 0}, "counts from 1"),
    ],
)
def test_bad_arguments_are_a_sentence(change: dict[str, Any], sentence: str) -> None:
    planes = [torch.zeros(16) for _ in range(4)]
    w, m, v, g = (plane.data_ptr() for plane in planes)
    call: dict[str, Any] = dict(
        weight_type="f32", grad_type="f32", weight_in=w, weight_out=w, m=m, v=v, grad=g
    )
    hyper = dict(algorithm="adamw", lr=1e-3, step=1)
    hyper |= {name: change.pop(name) for name in tuple(change) if name in hyper}
    with pytest.raises(ValueError, match=sentence):
        _core.optim_update(16, **(call | change), hyper=_core.Hyper(**hyper))
