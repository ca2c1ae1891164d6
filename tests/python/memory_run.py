"""One process of the memory test: `memory_run.py control|offloaded STORE DRAM` prints base, peak
and activation bytes (and of gradients, those spilled) as JSON.

Memory = RssAnon + RssShmem + HugetlbPages of this process, sampled every 5 ms.
"""

from __future__ import annotations

import json
import re
import sys
import threading
import time

import torch

import stoker
from models import Tiny, batch, loss_of

WIDTH, LAYERS, BATCH = 512, 12, 2


def memory() -> int:
    status = open("/proc/self/status").read()
    return 1024 * sum(
        int(re.search(rf"^{name}:\s+(\d+)", status, re.M).group(1))
        for name in ("RssAnon", "RssShmem", "HugetlbPages")
    )


class Sampler(threading.Thread):
    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak, self.running = 0, True

    def run(self) -> None:
        while self.running:
            self.peak = max(self.peak, memory())
            time.sleep(0.005)

    def stop(self) -> int:
        self.running = False
        self.join()
        return max(self.peak, memory())


def make() -> torch.nn.Module:
    return Tiny(layers=LAYERS, width=WIDTH).to(torch.bfloat16)


def main(mode: str, store: str, dram: str) -> None:
    # torch loads libraries, thread stacks and (for the meta device) modules at first use; both
    # processes do that first
    with torch.device("meta"):
        Tiny(layers=1)
    small = Tiny(layers=1).to(torch.bfloat16)
    loss_of(small, batch(0)).backward()
    del small
    base = memory()
    if mode == "control":
        model = make()
        for param in model.parameters():
            param.grad = torch.zeros_like(param)
        static = memory()
        sampler = Sampler()
        sampler.start()
        for step in range(2):
            loss_of(model, batch(step, size=BATCH)).backward()
        print(json.dumps({"base": base, "activations": sampler.stop() - static}))
        return
    sampler = Sampler()
    sampler.start()
    model = stoker.build(make, seed=0, store=store, dram=dram)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, opt = stoker.offload(model, opt, store=store, dram=dram)
    for step in range(3):
        loss_of(model, batch(step, size=BATCH)).backward()
        opt.clip_grad_norm_(1.0)
        opt.step()
        opt.zero_grad()
    opt.flush()
    peak = sampler.stop()
    plan = opt.plan()
    print(
        json.dumps(
            {
                "base": base,
                "peak": peak,
                "pools": opt.ledger.last["dram_bytes_peak"],
                "state": plan["state_bytes"],
                "spilled": plan.get("spilled_gradients", {}).get("bytes", 0),
                "gradients": plan["classes"]["gradients"],
            }
        )
    )
    opt.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
