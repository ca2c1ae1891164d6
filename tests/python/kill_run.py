"""A training run for the kill tests: `python kill_run.py STORE STEPS POLICY MOMENTS [DRAM]` trains
(or goes on) and prints a digest at the end."""

from __future__ import annotations

import hashlib
import random
import sys

import torch

import stoker
from models import Tiny, batch, loss_of


class Position:
    """The data position, as a loader keeps it: moved on when a batch is drawn, so it is read at
    step()."""

    def __init__(self) -> None:
        self.next = 0

    def __iter__(self) -> Position:
        return self

    def __next__(self) -> int:
        self.next += 1
        return self.next - 1

    def state_dict(self) -> dict:
        return {"next": self.next}

    def load_state_dict(self, state: dict) -> None:
        self.next = state["next"]


def main(store: str, steps: int, policy: str, moments: str, dram: str = "7MiB", **options) -> None:
    torch.manual_seed(0)
    random.seed(0)
    model = Tiny().to(torch.bfloat16)
    opt = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
    model, opt = stoker.offload(
        model, opt, store=store, dram=dram, policy=policy, resume="auto", moments=moments, **options
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(opt, lambda s: 1.0 / (1 + 0.05 * s))
    position = Position()
    opt.attach(scheduler=scheduler, position=position)
    print(f"at {opt.step_count}", flush=True)
    while position.next < steps:
        tokens = batch(next(position))
        # the global generators are part of the run
        noise = int(torch.randint(0, 96, ()).item()) + random.randrange(3)
        tokens = (tokens + noise) % 96
        loss = loss_of(model, tokens)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 2.0)
        opt.step()
        scheduler.step()
        opt.zero_grad()
        print(f"step {opt.step_count} {loss.item()!r}", flush=True)
    opt.flush()
    digest = hashlib.sha256()
    full = opt.state_dict(full=True)
    for index in sorted(full["state"]):
        for name, value in sorted(full["state"][index].items()):
            digest.update(
                name.encode()
                + value.contiguous().view(-1).view(torch.uint8).cpu().numpy().tobytes()
            )
    for name, value in sorted(model.state_dict().items()):
        digest.update(
            name.encode() + value.contiguous().view(-1).view(torch.uint8).cpu().numpy().tobytes()
        )
    digest.update(
        repr(
            (
                opt.param_groups[0]["lr"],
                scheduler.last_epoch,
                position.next,
                torch.rand(3).tolist(),
                random.random(),
            )
        ).encode()
    )
    print(f"digest {digest.hexdigest()}", flush=True)
    opt.close()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])
