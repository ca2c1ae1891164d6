"""Activations on the disk: the same steps with all that backward needs kept in memory, sent to the
disk, and computed again.

    python examples/activations.py STORE [--width 256] [--layers 8] [--batch 64] [--steps 3] [--dram
    96MiB]

Prints for each what lay in memory for backward when forward ended, what moved, and the losses,
which are the same to the last bit.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F

import stoker


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down, self.drop = (
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.Linear(4 * width, width),
            nn.Dropout(0.1),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.down(F.gelu(self.up(self.norm(x)))))


def train(mode: str, given: argparse.Namespace) -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(
        *(Layer(given.width) for _ in range(given.layers)), nn.Linear(given.width, 1)
    )
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, opt = stoker.offload(
        model, opt, store=given.store / mode, dram=given.dram, activations=mode
    )
    alive: list[StorageWeakRef] = []
    for layer in model[: given.layers]:  # the largest of what a layer computes
        layer.up.register_forward_hook(
            lambda module, inputs, out: alive.append(StorageWeakRef(out.untyped_storage()))
        )
    losses, kept = [], 0
    for step in range(given.steps):
        x = torch.randn(given.batch, 64, given.width, generator=torch.Generator().manual_seed(step))
        alive.clear()
        loss = (model(x) - x.mean(-1, keepdim=True)).square().mean()
        kept = sum(not each.expired() for each in alive)
        loss.backward()
        opt.step()
        opt.zero_grad()
        losses.append(loss.item())
    row = opt.ledger.last
    print(
        f"{mode}: {kept} of {given.layers} layers' activations in memory,"
        f" {row['written_bytes']['activations']} bytes written, {row['read_bytes']['activations']}"
        " read"
    )
    opt.close()
    return losses


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("store", type=Path)
    options.add_argument("--width", type=int, default=256)
    options.add_argument("--layers", type=int, default=8)
    options.add_argument("--batch", type=int, default=64)
    options.add_argument("--steps", type=int, default=3)
    options.add_argument("--dram", default="96MiB")
    given = options.parse_args()
    losses = {mode: train(mode, given) for mode in ("keep", "disk", "dram", "recompute", "auto")}
    for mode, values in losses.items():
        print(mode, *(f"{value:.9g}" for value in values))
    print(
        "the same losses"
        if all(values == losses["keep"] for values in losses.values())
        else "the losses differ"
    )


if __name__ == "__main__":
    main()
