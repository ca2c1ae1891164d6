"""torch.distributed.checkpoint with Stoker's files: saved beside training, loaded by any number of
processes.

    python examples/dcp.py FOLDER [--steps 20]
    torchrun --standalone --nproc-per-node 2 examples/dcp.py FOLDER [--steps 20]

Each fifth step is saved. Start it again, with as many processes as you like, and it goes on from
the newest checkpoint. `stoker ckpt verify --all FOLDER` reads every byte of all.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from stoker.integrations.dcp import Reader, Writer


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", help="where the checkpoints are")
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 64))
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def state() -> dict:
        weights, moments = get_state_dict(model, opt)
        return {"model": weights, "optimizer": moments, "step": step}

    step = 0
    if os.path.isdir(args.folder) and os.listdir(args.folder):
        found = state()
        dcp.load(found, checkpoint_id=args.folder, storage_reader=Reader())
        set_state_dict(
            model, opt, model_state_dict=found["model"], optim_state_dict=found["optimizer"]
        )
        step = found["step"]
        print(f"goes on at step {step}", flush=True)
    if dist.is_initialized():
        dist.barrier()  # all have looked for a checkpoint before one of them makes the first
    # saving goes on beside training, so it needs a group of its own
    group = dist.new_group(backend="gloo") if dist.is_initialized() else None
    writer, saving = Writer(), None
    while step < args.steps:
        torch.manual_seed(step)
        x = torch.randn(64, 64)
        loss = (model(x) - x.flip(1)).square().mean()
        loss.backward()
        opt.step()  # waits until the save under way has read all that it changes
        opt.zero_grad()
        step += 1
        if step % 5 == 0:
            if saving is not None:
                saving.result()
            where = f"{args.folder}/step-{step}"
            saving = dcp.async_save(
                state(), checkpoint_id=where, storage_writer=writer, process_group=group
            )
    if saving is not None:
        saving.result()
    writer.close()
    print(f"step {step}", flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
