"""A training run: `python slow_volume_run.py STORE [GROUP DISK...]`. With a control group, all
disks are as fast as each other, whatever the machine does; before step SLOW the last becomes slow.

The last line is what came of it, as JSON: a digest of all bits, what each step wrote to which
volume, the events.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

import torch

import stoker
from faults import Throttle
from models import Tiny, batch, loss_of

SLOW, STEPS = 8, 15
QUICK_BYTES_PER_S, SLOW_BYTES_PER_S = 50_000_000, 2_000_000


def main(store: str, group: str = "", *disks: str) -> None:
    throttle = Throttle(Path(group))
    if disks:
        throttle.enter()  # with all threads to come
    for disk in disks:
        throttle.limit(Path(disk), QUICK_BYTES_PER_S)
    torch.manual_seed(0)
    model = Tiny(width=128)
    model, opt = stoker.offload(
        model, torch.optim.AdamW(model.parameters(), lr=1e-3), store=store, dram="24MiB"
    )
    rows: list[dict] = []
    opt.ledger.on_step(rows.append)
    digest = hashlib.sha256()
    for step in range(STEPS):
        if disks and step == SLOW:
            throttle.limit(Path(disks[-1]), SLOW_BYTES_PER_S)
        loss = loss_of(model, batch(step))
        loss.backward()
        opt.step()
        opt.zero_grad()
        digest.update(repr(loss.item()).encode())
    opt.flush()
    for index, state in sorted(opt.state_dict(full=True)["state"].items()):
        for name, value in sorted(state.items()):
            digest.update(
                f"{index} {name}".encode()
                + value.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
            )
    for name, value in sorted(model.state_dict().items()):
        digest.update(
            name.encode() + value.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        )
    told = [event for event in opt.ledger.events if event["what"] == "volumes"]
    opt.close()
    print(
        json.dumps(
            {
                "digest": digest.hexdigest(),
                "written": [row["volume_bytes"] for row in rows],
                "events": told,
            }
        ),
        flush=True,
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
