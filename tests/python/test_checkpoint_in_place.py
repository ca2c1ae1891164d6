"""A restore fills the tensors that an optimizer has, and no others."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import stoker
from stoker import errors


def trained(width: int = 300) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(width, 300)
    opt = torch.optim.AdamW(model.parameters(), lr=0.1)
    step(model, opt)
    return model, opt


def step(model: nn.Module, opt: torch.optim.Optimizer) -> None:
    model(torch.ones(2, model.in_features)).square().mean().backward()
    opt.step()
    opt.zero_grad()


def moments(opt: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [state[name] for state in opt.state.values() for name in ("exp_avg", "exp_avg_sq")]


def assert_equal(found: Any, expected: Any) -> None:
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            assert_equal(found[key], value)
    elif isinstance(expected, torch.Tensor):
        assert torch.equal(found, expected)
    else:
        assert found == expected


def test_the_moments_that_are_there_are_filled(tmp_path):
    model, opt = trained()
    with stoker.Checkpoints(tmp_path, staging="16MiB") as ckpt:
        ckpt.save(1, model=model, optimizer=opt).wait()
        expected = copy.deepcopy(opt.state_dict())
        step(model, opt)
        large = [each for each in moments(opt) if each.numel() > 300]
        places = [each.data_ptr() for each in large]
        ckpt.restore(model=model, optimizer=opt)
    assert_equal(opt.state_dict(), expected)
    assert [each.data_ptr() for each in moments(opt) if each.numel() > 300] == places


def test_an_optimizer_without_moments_gets_them(tmp_path):
    model, opt = trained()
    with stoker.Checkpoints(tmp_path, staging="16MiB") as ckpt:
        ckpt.save(1, model=model, optimizer=opt).wait()
        new = torch.optim.AdamW(model.parameters())
        ckpt.restore(model=model, optimizer=new)
    assert_equal(new.state_dict(), opt.state_dict())


@pytest.mark.parametrize("shared_with", ["each other", "a parameter", "a view of a parameter"])
def test_moments_that_share_memory_get_memory_of_their_own(tmp_path, shared_with):
    model, opt = trained()
    with stoker.Checkpoints(tmp_path, staging="16MiB") as ckpt:
        ckpt.save(1, model=model, optimizer=opt).wait()
        expected = copy.deepcopy(opt.state_dict())
        weights = copy.deepcopy(model.state_dict())
        state = opt.state[model.weight]
        weight = model.weight.detach()
        state["exp_avg"] = {
            "each other": state["exp_avg_sq"],
            "a parameter": weight,
            "a view of a parameter": weight.view(-1)[:].view(300, 300),
        }[shared_with]
        ckpt.restore(model=model, optimizer=opt)
    assert_equal(opt.state_dict(), expected)
    assert_equal(dict(model.state_dict()), dict(weights))


def test_a_restore_that_is_refused_fills_nothing(tmp_path):
    model, opt = trained()
    other, of_other = trained(width=301)
    with stoker.Checkpoints(tmp_path, staging="16MiB") as ckpt:
        ckpt.save(1, model=model, optimizer=opt).wait()
        step(model, opt)
        before = copy.deepcopy(opt.state_dict())
        with pytest.raises(errors.Mismatch, match=r"weight as float32 \[300, 300\]"):
            ckpt.restore(model=other, optimizer=opt)
        assert_equal(opt.state_dict(), before)
        before = copy.deepcopy(of_other.state_dict())
        with pytest.raises(errors.Mismatch, match=r"weight as float32 \[300, 300\]"):
            ckpt.restore(model=other, optimizer=of_other)
        assert_equal(of_other.state_dict(), before)


def test_an_older_checkpoint_replaces_what_a_damaged_one_has_filled(tmp_path):
    model, opt = trained()
    with stoker.Checkpoints(tmp_path, staging="16MiB") as ckpt:
        ckpt.save(1, model=model, optimizer=opt).wait()
        expected = copy.deepcopy(opt.state_dict())
        step(model, opt)
        handle = ckpt.save(2, model=model, optimizer=opt)
        handle.wait()
        pack = tmp_path / handle.folder / "state-00000.pack"
        data = bytearray(pack.read_bytes())
        data[-1] ^= 1
        pack.write_bytes(data)
        with pytest.warns(UserWarning, match="is damaged"):
            assert ckpt.restore(model=model, optimizer=opt).step == 1
    assert_equal(opt.state_dict(), expected)
