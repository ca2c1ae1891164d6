"""Runs on a GPU that a test starts as processes of their own.

gpu_run.py killed STORE STEPS   kill_run.py, with the model on the GPU
gpu_run.py fsdp STORE POLICY    a model of FSDP2 and NCCL, one rank; POLICY plain: not offloaded
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist

import fsdp_run
import kill_run
import stoker
from models import batch, loss_of


def fsdp(store: str, policy: str) -> None:
    dist.init_process_group("nccl", init_method=f"file://{store}.meeting", rank=0, world_size=1)
    model = fsdp_run.make(1)
    opt = fsdp_run.adamw(model)
    if policy == "plain":
        opt = fsdp_run.Reference(opt)
    else:
        model, opt = stoker.offload(model, opt, store=store, dram="24MiB", policy=policy)
    for step in range(12):
        loss = loss_of(model, batch(step))
        loss.backward()
        opt.step()
        opt.zero_grad()
        print(loss.item())
    if policy != "plain":
        opt.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.set_default_device("cuda")
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        if sys.argv[1] == "fsdp":
            fsdp(*sys.argv[2:])
        else:
            kill_run.main(sys.argv[2], int(sys.argv[3]), "speculate", "exact")
