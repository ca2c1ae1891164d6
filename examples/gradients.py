"""A memory cap below the gradients of one step: the same steps with all gradients in memory, and
with most of them on the disk.

    python examples/gradients.py STORE [--width 256] [--layers 16] [--steps 4] [--micro-batches 2]
    [--caps 32MiB 8MiB]

Prints for each cap what is spilled, what moved, and the losses, which are the same to the last bit.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import nn

import stoker


def train(dram: str, given: argparse.Namespace) -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(
        *(
            nn.Sequential(nn.Linear(given.width, given.width), nn.GELU())
            for _ in range(given.layers)
        ),
        nn.Linear(given.width, 1),
    )
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, opt = stoker.offload(model, opt, store=given.store / dram, dram=dram)
    losses = []
    for step in range(given.steps):
        for micro in range(given.micro_batches):
            x = torch.randn(
                32,
                given.width,
                generator=torch.Generator().manual_seed(step * given.micro_batches + micro),
            )
            loss = (model(x) - x.mean(-1, keepdim=True)).square().mean() / given.micro_batches
            loss.backward()
            losses.append(loss.item())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        opt.zero_grad()
    row, plan = opt.ledger.last, opt.plan()
    print(
        f"dram {dram}: {plan.get('spilled_gradients', {}).get('bytes', 0)} of"
        f" {plan['classes']['gradients']} bytes of gradients are spilled; a step wrote"
        f" {row['written_bytes']['gradients']} of them and read {row['read_bytes']['gradients']}"
    )
    opt.close()
    return losses


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("store", type=Path)
    options.add_argument("--width", type=int, default=256)
    options.add_argument("--layers", type=int, default=16)
    options.add_argument("--steps", type=int, default=4)
    options.add_argument("--micro-batches", type=int, default=2)
    options.add_argument("--caps", nargs="+", default=["32MiB", "8MiB"])
    given = options.parse_args()
    losses = [train(dram, given) for dram in given.caps]
    print("losses", *(f"{value:.9g}" for value in losses[0]))
    print(
        "the same losses" if all(values == losses[0] for values in losses) else "the losses differ"
    )


if __name__ == "__main__":
    main()
