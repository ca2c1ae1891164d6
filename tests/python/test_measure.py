"""Measurements at start: which type of weights is quick, and who is told."""

from __future__ import annotations

import sys
import time

import pytest
import torch
from torch import nn

import stoker
from stoker.offload.planning import products
from stoker.plan import measure

package = sys.modules["stoker.offload.open"]  # `stoker.offload` is the function
SLOW = products.Quickest("float32", {"bfloat16": 2e9, "float32": 40e9})


def test_rates_cost_no_random_numbers_and_no_threads(monkeypatch):
    """They are the caller's. Both types are measured at the same sizes, and no larger ones than the
    time allows."""
    sizes, product = [], products._product
    monkeypatch.setattr(
        products,
        "_product",
        lambda tokens, width, dtype: (
            sizes.append((tokens, width, dtype)) or product(tokens, width, dtype)
        ),
    )
    monkeypatch.setattr(products, "_thread_seconds", lambda run: run() and None or 0.01)
    before, threads = torch.get_rng_state(), torch.get_num_threads()
    found = products.quickest_type(4096, 96, seconds=0.45)
    assert torch.equal(before, torch.get_rng_state()) and torch.get_num_threads() == threads
    assert sizes == [
        (tokens, 96, dtype) for tokens in (16, 64, 256, 1024) for dtype in products.TYPES.values()
    ]
    assert found.name == "bfloat16" and set(found.flops) == {
        "bfloat16",
        "float32",
    }, "of equals the one that moves fewer bytes"
    assert (
        str(SLOW) == "float32: this processor makes 40 GFLOP/s of products in it, and 2 in bfloat16"
    )


@pytest.mark.parametrize(
    "dtype, width, warned",
    [(torch.bfloat16, 1024, True), (torch.bfloat16, 64, False), (torch.float32, 1024, False)],
)
def test_a_type_that_is_slow_here_is_told_of_once(
    tmp_path, monkeypatch, recwarn, dtype, width, warned
):
    looks = []
    monkeypatch.setattr(package, "quick_look", lambda: looks.append(1) or SLOW)
    monkeypatch.setattr(package, "_told", [])
    for path in ("a", "b"):
        model = nn.Linear(width, width, dtype=dtype)
        stoker.offload(
            model, torch.optim.AdamW(model.parameters()), store=tmp_path / path, dram="40MiB"
        )[1].close()
    told = [str(each.message) for each in recwarn if "slow in bfloat16" in str(each.message)]
    assert len(told) == len(looks) == int(warned)
    assert all(
        "2 GFLOP/s" in each and "40 in float32" in each and "dtype=torch.float32" in each
        for each in told
    )


def test_a_slow_measurement_is_repeated_less_often():
    calls = []
    assert (
        products.repeated(lambda: calls.append(1) or 2.0, 5, 60.0) == [2.0] * 5 and len(calls) == 6
    ), "the first does not count"
    calls.clear()
    assert products.repeated(lambda: calls.append(1) or time.sleep(0.05) or 2.0, 100, 0.12) == [
        2.0
    ] * (len(calls) - 1)
    assert 2 <= len(calls) <= 4
    calls.clear()
    assert products.repeated(lambda: calls.append(1) or time.sleep(0.02) or 2.0, 100, 0.01) == [
        2.0
    ], "one counts in any case"


@pytest.mark.parametrize("rate, layers", [(3e9, 6), (2.5e8, 2), (1e6, 1)])
def test_a_slow_disk_gets_a_smaller_model_and_fewer_steps(tmp_path, monkeypatch, rate, layers):
    sizes, steps, offload, step = [], [], measure.offload, stoker.OffloadedOptimizer.step
    monkeypatch.setattr(
        measure,
        "offload",
        lambda model, *args, **options: (
            sizes.append(len(model)) or offload(model, *args, **options)
        ),
    )
    monkeypatch.setattr(
        stoker.OffloadedOptimizer,
        "step",
        lambda self: steps.append(1) or time.sleep(0.3) or step(self),
    )
    share = measure.disk_share(
        str(tmp_path), measure.Machine(read=rate, write=rate, update_seconds=1e-9)
    )
    assert (
        0.1 <= share <= 1.0
        and sizes == [layers]
        and 2 <= len(steps) <= 5
        and not list(tmp_path.iterdir())
    )
