"""What the hooks on saved tensors must not take away from torch."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import stoker


class Layer(nn.Linear):
    change = False
    seen: list

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x).exp()
        self.seen.append(StorageWeakRef(y.untyped_storage()))
        z = y * 2
        if self.change:
            y.detach().add_(1)
        return z


def make(tmp_path, change: bool):
    model = nn.Sequential(Layer(8, 8), Layer(8, 8))
    Layer.change, Layer.seen = change, []
    return stoker.offload(
        model, torch.optim.SGD(model.parameters(), lr=0.1), store=f"{tmp_path}/s", dram="8MiB"
    )


def test_a_saved_tensor_that_was_changed_in_place_is_torchs_error(tmp_path):
    x = torch.randn(2, 8)
    model = nn.Sequential(Layer(8, 8), Layer(8, 8))
    Layer.change, Layer.seen = True, []
    with pytest.raises(RuntimeError) as theirs:
        model(x).sum().backward()
    model, opt = make(tmp_path, True)
    with pytest.raises(RuntimeError) as ours:
        model(x).sum().backward()
    assert str(ours.value) == str(theirs.value)
    opt.close()


def test_a_graph_dropped_without_backward_is_freed(tmp_path):
    """torch's own reference counts do it: no collection is needed."""
    model, opt = make(tmp_path, False)
    model(torch.randn(2, 8)).sum().backward()  # the first call is watched
    Layer.seen.clear()
    gc.disable()
    try:
        loss = model(torch.randn(2, 8)).sum()
        assert not all(ref.expired() for ref in Layer.seen)
        del loss
        assert Layer.seen and all(ref.expired() for ref in Layer.seen)
    finally:
        gc.enable()
    opt.close()
