"""What the ranks of test_dcp.py do: a sharded model, saved and loaded by
torch.distributed.checkpoint."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from stoker.integrations.dcp import Reader, Writer


def made(world: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(9, 7), torch.nn.BatchNorm1d(7), torch.nn.Linear(7, 5)
    )
    if world:
        from torch.distributed.device_mesh import init_device_mesh

        fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def train(model: torch.nn.Module, opt: torch.optim.Optimizer, step: int) -> None:
    torch.manual_seed(step)
    model(torch.randn(4, 9)).square().mean().backward()
    opt.step()
    opt.zero_grad()


def state_of(model: torch.nn.Module, opt: torch.optim.Optimizer) -> dict:
    weights, moments = get_state_dict(model, opt)
    return {"model": weights, "optimizer": moments, "step": 3, "note": {"a": (1, "b")}}


def whole(value):
    """With every tensor gathered, as lists."""
    if isinstance(value, DTensor):
        value = value.full_tensor()
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {key: whole(each) for key, each in value.items()}
    return [whole(each) for each in value] if isinstance(value, (list, tuple)) else value


def save(tell, rank: int, world: int, where: str, asynchronously: bool) -> None:
    model, opt = made(world)
    train(model, opt, 0)
    state = state_of(model, opt)
    expected = whole(state)
    writer, where = Writer(staging="16MiB"), f"{where}/step-1"
    if asynchronously:
        future = dcp.async_save(
            state,
            checkpoint_id=where,
            storage_writer=writer,
            process_group=dist.new_group(backend="gloo"),  # beside that of the model
        )
        train(model, opt, 1)  # step() waits until the bytes have left
        future.result()
    else:
        dcp.save(state, checkpoint_id=where, storage_writer=writer)
    writer.close()
    tell(state=expected)


def load(tell, rank: int, world: int, where: str) -> None:
    model, opt = made(world)
    train(model, opt, 7)
    state = state_of(model, opt)
    dcp.load(state, checkpoint_id=where, storage_reader=Reader(staging="16MiB"))
    set_state_dict(model, opt, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    tell(state=whole(state_of(model, opt)))
