"""Offloaded float32 training gives the bits of torch's own fused optimizers, whatever the lengths.

Parameters of odd lengths lie one behind the other in a unit, and tiles cut some of them.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

import stoker

pytestmark = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"),
    reason="torch has no fused multiply-add here",
)
FEATURES, CLASSES = 33, 10


class Layer(nn.Module):
    """One unit: vectors of each length up to 40, and matrices of more than a tile."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(FEATURES, 2003)
        self.down = nn.Linear(2003, FEATURES)
        self.short = nn.ParameterList(nn.Parameter(torch.randn(n)) for n in range(1, 41))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = sum(each.square().mean() for each in self.short)
        return x + self.down(torch.tanh(self.up(x))) * (1 + 1e-3 * scale)


def train(make, steps: int, store: str = "", policy: str = "sync"):
    """Losses, weights, and the optimizer's state."""
    torch.manual_seed(0)
    model = nn.Sequential(Layer(), Layer(), nn.Linear(FEATURES, CLASSES))
    opt = make(model.parameters())
    if store:
        model, opt = stoker.offload(model, opt, store=store, dram="16MiB", policy=policy)
        assert opt._session.planes.layout.tile_elements < 2003 * FEATURES  # a tile cuts both
    losses = []
    for step in range(steps):
        torch.manual_seed(step)
        x, y = torch.randn(8, FEATURES), torch.randint(0, CLASSES, (8,))
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        opt.step()
        opt.zero_grad()
        losses.append(loss.item())
    state = opt.state_dict(full=True)["state"] if store else opt.state_dict()["state"]
    weights = {name: weight.clone() for name, weight in model.state_dict().items()}
    if store:
        opt.close()
    return losses, weights, state


KINDS = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-2, fused=True),
    "adam": lambda params: torch.optim.Adam(params, lr=1e-2, weight_decay=0.01, fused=True),
    "sgd": lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9, dampening=0.1, fused=True),
}


@pytest.fixture(scope="module")
def plain():
    """What the same loop gives in memory."""
    known: dict = {}
    return lambda kind, steps: (
        known.get((kind, steps)) or known.setdefault((kind, steps), train(KINDS[kind], steps))
    )


@pytest.mark.parametrize(
    ("kind", "policy", "steps"),
    [
        ("adamw", "sync", 100),
        ("adamw", "speculate", 30),
        ("adamw", "lazy", 30),
        ("adamw", "auto", 30),
        ("adam", "speculate", 100),
        ("sgd", "lazy", 30),
    ],
)
def test_every_bit_is_torchs(tmp_path, plain, kind: str, policy: str, steps: int) -> None:
    losses, weights, state = plain(kind, steps)
    our_losses, our_weights, our_state = train(KINDS[kind], steps, f"{tmp_path}/s", policy)
    assert our_losses == losses
    unlike = [name for name in weights if not torch.equal(weights[name], our_weights[name])]
    assert not unlike
    for index, of_one in state.items():
        for name in ("exp_avg", "exp_avg_sq", "momentum_buffer"):
            if name in of_one:
                assert torch.equal(of_one[name], our_state[index][name]), f"{name} of {index}"
