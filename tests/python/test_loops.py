"""Training loops of other tools' shapes, which need nothing of Stoker's: the offloaded optimizer is
a torch.optim.Optimizer."""

from __future__ import annotations

import sys

import pytest
import torch

from models import batch, loss_of
from test_offload_features import adamw, both, offload, tiny  # noqa: F401 (offload is a fixture)


class Module(torch.nn.Module):
    """A module that holds its model and makes the optimizer's closure, as LightningModule and its
    trainers do."""

    def __init__(self, model) -> None:
        super().__init__()
        self.model = model

    def training_step(self, step: int) -> torch.Tensor:
        return loss_of(self.model, batch(step))


def wrap(optimizer):
    """Lightning's wrapper: an object whose class is made of the optimizer's own, with the same
    dictionary, and that calls its step."""

    class Base:
        def __init__(self) -> None:
            self.__dict__ = {
                name: value
                for name, value in optimizer.__dict__.items()
                if name not in ("step", "__del__")
            }
            self.__class__ = type(
                "Wrapped" + type(optimizer).__name__, (type(self), type(optimizer)), {}
            )
            self._wrapped = optimizer

        def step(self, closure=None):
            return self._wrapped.step(closure)

    return Base()


@pytest.mark.parametrize("policy", ["speculate", "lazy"])
def test_automatic_loop(offload, policy):
    """step(closure) with forward, zero_grad and backward inside, gradient clipping in the closure,
    two batches a step in the end."""

    def loop(model, opt):
        module, wrapped, losses = Module(model), wrap(opt), []
        assert (
            isinstance(wrapped, torch.optim.Optimizer) and wrapped.param_groups is opt.param_groups
        )
        scheduler = torch.optim.lr_scheduler.StepLR(opt, 2, 0.5)

        def closure(step):
            loss = module.training_step(step)
            wrapped.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_value_(module.parameters(), 0.05)
            return loss

        for step in range(5):
            losses.append(wrapped.step(lambda step=step: closure(step)).item())
            scheduler.step()
        return losses

    both(offload, tiny, loop, policy=policy)


def test_manual_loop(offload):
    """manual_optimization: several backwards, a step every other batch, evaluation in the middle,
    state_dict through the wrapper."""

    def loop(model, opt):
        module, wrapped, losses = Module(model), wrap(opt), []
        for index in range(6):
            loss = module.training_step(index)
            (loss / 2).backward()
            if index % 2:
                torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
                wrapped.step()
                wrapped.zero_grad(set_to_none=index == 1)
            elif index == 2:
                module.eval()
                with torch.inference_mode():
                    losses.append(module.training_step(99).item())
                module.train()
            losses.append(loss.item())
        assert len(wrapped.state_dict()["param_groups"]) == 1
        return losses

    ours, opt, _ = both(offload, tiny, loop, options=lambda model: adamw(model))
    assert opt.step_count == 3


def test_inside_another_module(offload):
    """The whole module that encloses the model is what gets offloaded, prefixes and all."""

    def loop(module, opt):
        losses = []
        for step in range(3):
            loss = module.training_step(step)
            loss.backward()
            opt.step()
            opt.zero_grad()
            losses.append(loss.item())
        return losses

    module, _, _ = both(offload, lambda: Module(tiny()), loop)
    assert all(name.startswith("model.") for name in module.state_dict())


def test_torch_sleeps_between_operators_where_it_has_several_threads(monkeypatch):
    """One thread with a parallel region of its own, made once: what GNU OpenMP then no longer does
    takes a processor to see, and is not asserted."""
    process = sys.modules["stoker.offload.observe.process"]
    monkeypatch.setattr(process, "_sleeper", None)
    process.sleep_between_operators()
    assert process._sleeper is None, "tests have one thread, which never spins"
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    process.sleep_between_operators()
    made = process._sleeper
    process.sleep_between_operators()
    assert process._sleeper is made and made.daemon and made.is_alive()
