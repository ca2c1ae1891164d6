"""Trains a small model in memory, and saves each step to a folder; whoever starts it kills it.

checkpoint_run.py FOLDER STEPS           prints each step that handle.wait() called durable
checkpoint_run.py FOLDER STEPS GRACE     prints each step, and saves at SIGTERM
"""

from __future__ import annotations

import sys

import torch
from torch import nn

import stoker


def made() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(600, 900), nn.BatchNorm1d(900), nn.Linear(900, 600))
    return model, torch.optim.AdamW(model.parameters())


def train(model: nn.Module, opt: torch.optim.Optimizer, step: int) -> None:
    torch.manual_seed(step)
    model(torch.randn(4, 600)).square().mean().backward()
    opt.step()
    opt.zero_grad()


def main(folder: str, steps: int) -> None:
    model, opt = made()
    with stoker.Checkpoints(folder, keep=2, staging="64MiB") as ckpt:
        restored = ckpt.restore(model=model, optimizer=opt)
        handle = None
        for step in range(restored.step if restored else 0, steps):
            train(model, opt, step)
            if handle is not None:
                handle.wait()
                print(handle.step, flush=True)
            handle = ckpt.save(step + 1, model=model, optimizer=opt)


def until_told(folder: str, steps: int, grace: float) -> None:
    model, opt = made()
    with stoker.Checkpoints(folder, every=steps, staging="64MiB", grace=grace) as ckpt:
        for step in range(steps):
            train(model, opt, step)
            print(step + 1, flush=True)
            sys.stdin.readline()  # a step lasts as long as whoever started it wants
            ckpt.save(step + 1, model=model, optimizer=opt)


if __name__ == "__main__":
    folder, steps, *grace = sys.argv[1:]
    until_told(folder, int(steps), float(grace[0])) if grace else main(folder, int(steps))
