"""A training run of a tiny model: `python nvme_run.py STORE...`, once in each. Prints a digest of
all bits of each."""

from __future__ import annotations

import hashlib
import sys

import torch

import stoker
from models import Tiny, batch, loss_of

STEPS = 6


def digest(store: str) -> str:
    torch.manual_seed(0)
    model = Tiny(width=128)
    model, opt = stoker.offload(
        model, torch.optim.AdamW(model.parameters(), lr=1e-3), store=store, dram="24MiB"
    )
    bits = hashlib.sha256()
    for step in range(STEPS):
        loss = loss_of(model, batch(step))
        loss.backward()
        opt.step()
        opt.zero_grad()
        bits.update(repr(loss.item()).encode())
    opt.flush()
    for name, value in sorted(model.state_dict().items()):
        bits.update(name.encode() + value.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    opt.close()
    return bits.hexdigest()


if __name__ == "__main__":
    torch.set_num_threads(1)
    for named in sys.argv[1:]:
        print("digest", digest(named), named, flush=True)
