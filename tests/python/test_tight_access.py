"""What reads or replaces weights and state between steps needs no more memory than training leaves
of the budget."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

import stoker
from stoker import errors
from stoker.offload.model.blocks import partition
from stoker.offload.model.moments import MODES
from stoker.offload.model.algorithm import algorithm_of
from stoker.offload.division.layout import MIB, PIECE, arena_bytes_for, divide
from test_offload_features import (
    TIGHT,
    adamw,
    assert_same,
    offload,
    weights,
)  # noqa: F401 (offload is a fixture)

USED = 256 << 10  # of the budget, by an open store


def layers(dtype: torch.dtype) -> nn.Module:
    """Their weights begin within a chunk and end within another, and optimizer state has as many
    chunks."""
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(300, 1700), nn.Linear(1700, 300)) for _ in range(2))
    ).to(dtype)


def everything(model, opt) -> dict[str, torch.Tensor]:
    state = opt.state_dict(full=True)["state"]
    return {
        **weights(model),
        **{
            f"{i}.{name}": value.clone()
            for i, entry in state.items()
            for name, value in entry.items()
        },
    }


def steps(model, opt, numbers) -> None:
    for step in numbers:
        model(
            torch.full((2, 300), float(step), dtype=next(model.parameters()).dtype)
        ).square().mean().backward()
        opt.step()
        opt.zero_grad()


def trained(offload, dram: str, moments: str, **kwargs):
    model, opt = offload(layers(torch.float32), dram=dram, moments=moments, **kwargs)
    steps(model, opt, range(2))
    return model, opt


@pytest.mark.parametrize("moments", ["exact", "8bit"])
@pytest.mark.parametrize("dram", ["96MiB", "126MiB", "250MiB"])
def test_all_reads_work_in_what_training_leaves_of_the_budget(offload, dram, moments):
    model, opt = trained(offload, dram, moments)
    for evicted in (False, True):
        if evicted:
            for block in opt._session.blocks:
                opt._session.pager.discard(block)
        for param in model.parameters():
            with stoker.gather(param):
                assert param.isfinite().all()
        assert_same(model.state_dict(), weights(model))
        assert all(value.isfinite().all() for value in everything(model, opt).values())


@pytest.mark.parametrize("dram", ["96MiB", "250MiB"])
def test_all_writes_work_in_what_training_leaves_of_the_budget(offload, dram):
    model, opt = trained(offload, dram, "exact", snapshots=1)
    opt.snapshot()
    reference, before = opt.state_dict(), everything(model, opt)
    full = opt.state_dict(full=True)
    model.load_state_dict({name: value * 2 for name, value in model.state_dict().items()})
    opt.load_state_dict(full)
    with stoker.gather(list(model.parameters()), write=True):
        for param in model.parameters():
            param.data.mul_(2)
    opt.load_state_dict(reference)
    assert_same(everything(model, opt), before)


@pytest.mark.parametrize(("dtype", "moments"), [(torch.float32, "exact"), (torch.bfloat16, "8bit")])
@pytest.mark.parametrize("first", ["28MiB", "400MiB"])
def test_a_run_goes_on_with_other_memory(offload, dtype, moments, first):
    """Its chunks keep their size; tiles of that size find room in every budget that is said to
    work."""
    plain, plain_opt = offload(layers(dtype), dram="96MiB", moments=moments, path="plain")
    steps(plain, plain_opt, range(4))
    for number, dram in enumerate([first, "400MiB", TIGHT, "96MiB"]):
        if dram == TIGHT:
            with pytest.raises(errors.OverBudget) as error:
                offload(layers(dtype), dram="4MiB", moments=moments, resume=True)
            dram = re.search(r'that works is dram="(\d+MiB)"', str(error.value)).group(1)
        model, opt = offload(layers(dtype), dram=dram, moments=moments, resume=number > 0)
        steps(model, opt, [number])
        model.load_state_dict(model.state_dict())
        found = everything(model, opt)
        opt.close()
    assert_same(found, everything(plain, plain_opt))


@pytest.mark.parametrize("moments", MODES)
@pytest.mark.parametrize("frozen", [None, torch.float64])
def test_every_budget_leaves_room_for_two_chunks_and_a_piece(moments, frozen):
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(4)))
        if frozen is not None:
            model.append(nn.Linear(512, 512, dtype=frozen).requires_grad_(False))
    opt = adamw(model)
    blocks, algorithm = (
        partition(model, [p for group in opt.param_groups for p in group["params"]]),
        algorithm_of(opt, moments),
    )
    widest = 4 if frozen is None else frozen.itemsize
    for mib in range(16, 1200):
        arena = arena_bytes_for(mib * MIB, USED)
        chunk = widest * divide(blocks, algorithm, arena).tile_elements
        assert mib * MIB - USED - arena >= 2 * chunk + 2 * PIECE, f"{mib} MiB"
