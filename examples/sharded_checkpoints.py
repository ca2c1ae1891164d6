"""Checkpoints of a model that FSDP2 shards over processes. Start it with torchrun:

    torchrun --standalone --nproc-per-node 2 examples/sharded_checkpoints.py OUT [--steps 10]

Start it again with another number of processes, and it goes on from the newest checkpoint in
OUT/run. That folder loads with transformers, too. Needs transformers.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

import stoker

WINDOW = 64
CONFIG = LlamaConfig(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=192,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=WINDOW,
)


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("out", type=Path)
    options.add_argument("--steps", type=int, default=10)
    given = options.parse_args()

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = LlamaForCausalLM(CONFIG)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    opt = torch.optim.AdamW(model.parameters(), lr=3e-3)
    text = torch.tensor(list(Path(__file__).read_bytes()))
    windows = text[: len(text) // WINDOW * WINDOW].view(-1, WINDOW)

    with stoker.Checkpoints(given.out / "run", keep=2) as ckpt:
        found = ckpt.restore(model=model, optimizer=opt)
        first = found.step if found is not None else 0
        if dist.get_rank() == 0:
            print(f"{dist.get_world_size()} ranks begin behind step {first}", flush=True)
        for step in range(first, given.steps):
            batch = windows[torch.randint(0, len(windows), (4,))]
            loss = model(input_ids=batch, labels=batch).loss
            loss.backward()
            opt.step()
            opt.zero_grad()
            ckpt.save(step + 1, model=model, optimizer=opt)
            if dist.get_rank() == 0:
                print(f"step {step + 1} loss {loss.item():.6f}", flush=True)
        ckpt.wait()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
