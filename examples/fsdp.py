"""FSDP2: a model sharded over processes, each of which keeps its shards' optimizer state on disk.
Start it with torchrun:

    torchrun --standalone --nproc-per-node 2 --max-restarts 3 examples/fsdp.py OUT [--text FILE ...]
    [--steps 20] [--dram 16MiB]

Kill a process, or all of them: torchrun starts them again (or you do), and they go on from the last
step that all had committed, with the bits of a run that was never killed. The weights go to
OUT/model. Needs transformers.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

import stoker

WINDOW = 64
CONFIG = LlamaConfig(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=192,
    num_hidden_layers=4,
    num_attention_heads=4,
    max_position_embeddings=WINDOW,
)


def meeting() -> dist.Store:
    """Where the processes find each other. torchrun keeps it over restarts, and with it the
    addresses of those that ended: hence a part of it for each attempt."""
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False
    )
    return dist.PrefixStore(f"attempt-{os.environ['TORCHELASTIC_RESTART_COUNT']}", store)


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("out", type=Path)
    options.add_argument(
        "--text", type=Path, nargs="*", default=[Path(__file__).parent.parent / "README.md"]
    )
    options.add_argument("--steps", type=int, default=20)
    options.add_argument(
        "--dram", default="16MiB", help="of each process, beside its shards and activations"
    )
    given = options.parse_args()

    device = (
        torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        if torch.cuda.is_available()
        else torch.device("cpu")
    )
    if device.type == "cuda":
        torch.cuda.set_device(device)
    rank = int(os.environ["RANK"])
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=meeting(),
        rank=rank,
        world_size=int(os.environ["WORLD_SIZE"]),
    )

    # not every processor multiplies bfloat16 quickly
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.manual_seed(0)  # the same weights everywhere, of which each rank keeps its shards
    model = LlamaForCausalLM(CONFIG).to(device, dtype)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    opt = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
    torch.manual_seed(1 + rank)  # batches of its own; a resume takes up the generator where it was
    model, opt = stoker.offload(
        model, opt, store=given.out / "store", dram=given.dram, resume="auto"
    )
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=1000)
    opt.attach(scheduler=scheduler)
    if rank == 0:
        print(f"{dist.get_world_size()} ranks begin behind step {opt.step_count}", flush=True)

    text = torch.tensor(list(b"\n".join(file.read_bytes() for file in given.text)))
    windows = text[: len(text) // WINDOW * WINDOW].view(-1, WINDOW)
    for step in range(opt.step_count, given.steps):
        batch = windows[torch.randint(0, len(windows), (4,))].to(device)
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        opt.zero_grad()
        scheduler.step()
        print(f"rank {rank} step {step + 1} loss {loss.item():.6f}", flush=True)
    opt.flush()

    # whole on rank 0 alone
    weights = get_model_state_dict(
        model, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
    )
    if rank == 0:
        LlamaForCausalLM(CONFIG).to(dtype).save_pretrained(given.out / "model", state_dict=weights)
    opt.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
