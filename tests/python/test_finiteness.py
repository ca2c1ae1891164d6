"""A step whose gradients hold NaN or infinity is told of once, or refused before its commit."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import stoker
from stoker.errors import InvalidArgument, NotFinite
from stoker.offload.gradients.spilled import SpilledGradient

POLICIES = ("auto", "sync", "speculate", "lazy")
BAD = 3  # the step whose batch has an infinity


def made(width: int = 32, layers: int = 3) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


def offloaded(tmp_path, **options) -> tuple[nn.Module, stoker.OffloadedOptimizer]:
    return stoker.offload(*made(), store=f"{tmp_path}/s", dram="64MiB", **options)


def backward(model: nn.Module, step: int, bad: bool, width: int = 32) -> None:
    x = torch.randn(2, width, generator=torch.Generator().manual_seed(step))
    if bad:
        x[0, 0] = float("inf")
    model(x).square().mean().backward()


def weights(model: nn.Module) -> list[torch.Tensor]:
    with stoker.gather(list(model.parameters())):
        return [param.detach().clone() for param in model.parameters()]


@pytest.mark.parametrize("policy", POLICIES)
def test_it_is_said_once_with_the_step(tmp_path, policy):
    model, opt = offloaded(tmp_path, policy=policy)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for step in range(1, BAD + 3):
            backward(model, step, bad=step == BAD)
            opt.step()
            opt.zero_grad()
            opt.flush()
            assert len(told) == (step >= BAD)
    assert f"step {BAD} " in str(told[0].message)
    events = [event for event in opt.ledger.events if event["what"] == "not finite"]
    assert [event["step"] for event in events] == [BAD]
    opt.close()


@pytest.mark.parametrize("policy", POLICIES)
def test_a_step_is_refused_and_the_loop_goes_on(tmp_path, policy):
    there, plain = made()
    for step in (each for each in range(1, BAD + 3) if each != BAD):
        backward(there, step, bad=False)
        plain.step()
        plain.zero_grad()
    model, opt = offloaded(tmp_path, policy=policy, on_nan="raise")
    for step in range(1, BAD + 3):
        backward(model, step, bad=step == BAD)
        if step == BAD:
            with pytest.raises(NotFinite, match=f"step {BAD} "):
                opt.step()
            assert opt.step_count == BAD - 1
            opt.flush()
            assert opt.committed_step == BAD - 1
        else:
            opt.step()
        opt.zero_grad()
    assert opt.step_count == BAD + 1
    assert all(map(torch.equal, weights(model), there.parameters()))
    opt.close()


def test_lazy_refuses_what_was_spilled_before_it_is_committed(tmp_path):
    """Those gradients are on the disk when the step is decided: their updates tell."""
    width = 256
    little = {"dram": "12MiB", "policy": "lazy", "on_nan": "raise"}
    model, opt = stoker.offload(*made(width, 24), store=f"{tmp_path}/s", **little)
    backward(model, 1, False, width)
    opt.step()
    opt.flush()
    before = weights(model)
    opt.zero_grad()
    backward(model, 2, False, width)
    param = next(param for param in model.parameters() if isinstance(param.grad, SpilledGradient))
    param.grad.view(-1)[5] = float("nan")
    opt.step()
    with pytest.raises(NotFinite, match="step 2 "):
        opt.flush()
    assert opt.step_count == opt.committed_step == 1
    assert all(map(torch.equal, weights(model), before))
    opt.zero_grad()
    backward(model, 2, False, width)
    opt.step()
    opt.close()


@pytest.mark.parametrize("policy", POLICIES)
def test_a_scaler_that_skips_steps_hears_nothing(tmp_path, policy):
    model, opt = offloaded(tmp_path, policy=policy, on_nan="raise")
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, backoff_factor=2.0**-60)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(1, 5):
            x = torch.randn(2, 32, generator=torch.Generator().manual_seed(step))
            scaler.scale(100 * model(x).square().sum()).backward()
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()
    assert 0 < opt.step_count < 4
    assert not any(event["what"] == "not finite" for event in opt.ledger.events)
    opt.close()


def test_other_words_are_refused(tmp_path):
    with pytest.raises(InvalidArgument, match="on_nan"):
        offloaded(tmp_path, on_nan="stop")
