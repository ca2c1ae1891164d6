"""The memory cap is hard: measured on a process from outside the pools, as the design defines it."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

import stoker
from models import Tiny
from stoker.errors import OverBudget

HERE = os.path.dirname(__file__)
MIB = 1 << 20
DRAM = 128 * MIB


def run(mode: str, store: str, dram: int = DRAM) -> dict:
    done = subprocess.run([sys.executable, os.path.join(HERE, "memory_run.py"), mode, store, str(dram)], capture_output=True, text=True, cwd=HERE, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def control() -> dict:
    return run("control", "")


@pytest.mark.parametrize("dram", [DRAM, DRAM // 2], ids=["gradients that fit", "gradients that do not"])
def test_a_process_stays_under_its_cap(tmp_path, control, dram):
    ours = run("offloaded", f"{tmp_path}/s", dram)
    assert ours["state"] > 3 * dram
    assert (ours["gradients"] > dram) == (dram < DRAM) == (ours["spilled"] > 0)
    assert ours["pools"] <= dram
    allowed = ours["base"] + dram + control["activations"] + 32 * MIB
    print({name: f"{value / MIB:.0f} MiB" for name, value in {**ours, **control, "allowed": allowed}.items()})
    assert ours["peak"] <= allowed


def test_a_budget_too_small_names_the_smallest_that_works(tmp_path):
    def attempt(dram):
        model = Tiny().to(torch.bfloat16)
        return stoker.offload(model, torch.optim.AdamW(model.parameters()), store=f"{tmp_path}/{dram}", dram=dram)

    with pytest.raises(OverBudget, match=r'smallest budget that works is dram="(\d+)MiB"') as refused:
        attempt("3MiB")
    smallest = str(refused.value).rpartition('dram="')[2].rstrip('"')
    model, opt = attempt(smallest)
    model(torch.zeros(1, 4, dtype=torch.int64)).sum().backward()
    opt.step()
    opt.close()
