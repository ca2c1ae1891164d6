"""The plan against what training then moves: bytes, never times."""

from __future__ import annotations

import statistics

import models
import pytest
import stoker
import torch
from stoker.offload.machine import DEMAND, STATE, WEIGHTS, WRITES, Clock, Machine
from stoker.offload.rehearsal import CountedArena

STEPS = 10
CLASSES = ("weights", "remainder", "m", "v")


def trained(store, dram: str, policy: str, **shape):
    """(plan before the first step, plan with the recorded order, ledger rows once steps repeat)."""
    torch.manual_seed(0)
    model = models.Tiny(width=256, **shape).bfloat16()
    model, opt = stoker.offload(model, torch.optim.AdamW(model.parameters(), lr=1e-3), store=str(store), dram=dram, policy=policy)
    rows = []
    before = opt.plan()
    for step in range(STEPS):
        models.loss_of(model, models.batch(step)).backward()
        opt.step()
        opt.zero_grad()
        rows.append(opt.ledger.last)
    after = opt.plan()
    opt.close()
    return before, after, rows[3:]


@pytest.mark.parametrize("policy", ["sync", "speculate", "lazy"])
@pytest.mark.parametrize("dram", ["23MiB", "36MiB", "160MiB"])
def test_the_plan_knows_the_bytes_of_a_step(tmp_path, dram, policy):
    before, after, rows = trained(tmp_path / "store", dram, policy)
    measured = {name: statistics.median(row["read_bytes"][name] for row in rows) for name in CLASSES}
    total = sum(measured.values())
    for plan in (before, after):
        assert plan["policy"] == policy
        planned = plan["step"]["read_bytes"]
        print(dram, policy, {name: (planned[name] / 1e6, measured[name] / 1e6) for name in CLASSES})
        assert sum(planned.values()) == pytest.approx(total, rel=0.05, abs=1e5)
        # when written memory comes free for weights is a matter of time, which is not planned here
        assert planned["weights"] == pytest.approx(measured["weights"], rel=0.3, abs=1e5)
        # a step's writes may end in the next one; over several they are all there
        written = {name: sum(row["written_bytes"][name] for row in rows) / len(rows) for name in CLASSES}
        assert sum(plan["step"]["written_bytes"].values()) == pytest.approx(sum(written.values()), rel=0.12)
        elements = sum(plan["step"]["written_bytes"][name] for name in CLASSES) / 12
        assert 0 <= elements - plan["parameters"] < 9 * 2048  # 2 + 2 + 4 + 4 bytes of each, padded to 4 KiB planes in 9 blocks
