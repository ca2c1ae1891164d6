"""Trains a small model and saves each tenth step; kill it at any moment and start it again.

python examples/checkpoints.py FOLDER [--steps 200]
stoker ckpt ls FOLDER
"""

from __future__ import annotations

import argparse
import time

import torch
from torch import nn

import stoker


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", help="where the checkpoints are")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument(
        "--slowly", action="store_true", help="wait after each step, to be killed in time"
    )
    args = parser.parse_args()

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 256))
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, args.steps)
    with stoker.Checkpoints(args.folder, keep=2, every=10) as ckpt:
        restored = ckpt.restore(model=model, optimizer=opt, extra={"schedule": schedule})
        if restored:
            print(f"goes on at step {restored.step}")
        last = float("nan")
        for step in range(restored.step if restored else 0, args.steps):
            x = torch.randn(64, 256)  # the random state is part of a checkpoint
            loss = (model(x) - x.flip(1)).square().mean()
            loss.backward()
            opt.step()
            schedule.step()
            opt.zero_grad()
            if args.slowly:
                time.sleep(0.1)
            ckpt.save(
                step + 1,
                model=model,
                optimizer=opt,
                extra={"schedule": schedule},
                metric=loss.item(),
            )
            last = loss.item()
    print(f"step {args.steps}: loss {last:.6f}")


if __name__ == "__main__":
    main()
