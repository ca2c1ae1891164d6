"""What Stoker computes beside the model grows with the number of blocks and no faster.

Calls of Python are counted, not seconds.
"""

from __future__ import annotations

import random
import sys
from typing import Callable

import pytest
import torch
from torch import nn

import stoker
from stoker.offload.model.blocks import partition
from stoker.offload.paging.order import NEVER, OUTDATED, Ahead, LastUsed, Order, Outlook, Recorder
from stoker.offload.planning.planner import NOMINAL, Setting, course
from stoker.offload.division.layout import divide
from stoker.offload.planning.rehearsal import Rehearsal
from stoker.plan.outlook import ADAMW
from stoker.plan.shapes import describe

POLICIES = ("sync", "speculate", "lazy")
MOST = 900  # calls a block; 500 to 660 when this was written


def calls(work: Callable[[], object]) -> int:
    count = 0

    def profile(frame, event, arg):
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(profile)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize("policy", POLICIES)
def test_calls_of_python_a_block(tmp_path, policy):
    each = {}
    for count in (12, 48):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(count)))
        opt = torch.optim.AdamW(model.parameters())
        model, opt = stoker.offload(
            model, opt, store=f"{tmp_path}/{count}", dram="64MiB", policy=policy
        )
        x = torch.randn(2, 32)

        def step():
            model(x).square().mean().backward()
            opt.step()
            opt.zero_grad()

        for _ in range(3):
            step()
        each[count] = calls(step) / count
        opt.close()
    assert each[48] <= 1.05 * each[12] and each[48] < MOST


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("dram", [40 << 20, 40 << 30])
def test_calls_of_python_a_block_where_blocks_come_and_go(policy, dram):
    """The same Pager and Steps over a disk that is only thought of: 40 MiB hold a few."""
    each = {}
    for count in (20, 60):
        setting = Setting.of(describe(f"layer=1M*{count}", "bfloat16").blocks, ADAMW, dram)
        goes, layout = course(setting, 1.0, None, None), setting.layout
        made = Rehearsal(setting.blocks, ADAMW, layout, setting.arena_bytes, goes, policy, NOMINAL)
        made.step(), made.step()
        each[count] = calls(made.step) / count
    assert each[60] <= 1.15 * each[20]


def test_calls_of_python_a_block_to_divide_the_memory():
    """Where gradients are spilled, and where modules lie inside each other."""
    each = {}
    for count in (25, 100):
        blocks = describe(f"layer=100k*{count}", "bfloat16").blocks
        room = sum(block.slot_bytes for block in blocks)
        nested = nn.Sequential(*(nn.Sequential(nn.Linear(2, 2)) for _ in range(count)))
        nested = partition(nested, nested.parameters())

        def divide_both():
            assert divide(blocks, ADAMW, room).spilled
            divide(nested, ADAMW, 12 << 20)

        divide_both()  # what is reckoned once
        each[count] = calls(divide_both) / count
    assert each[100] <= 1.15 * each[25]


def test_the_last_used_copy_is_found_as_by_a_look_at_all():
    """Copies come and go, are used, are for a while of no use; of those that may go one with the
    last next use is picked."""
    draw = random.Random(7)
    for _ in range(20):
        uses = draw.choices(range(9), k=40)
        recorder = Recorder()
        recorder.orders["call"] = order = Order.of(uses)
        recorder.begin("call")
        copies: dict[int, None] = {}
        outdated: set[int] = set()

        def key(block: int) -> int | None:
            if block not in copies:
                return None
            return OUTDATED if block in outdated else recorder.next_at(block)

        last = LastUsed(recorder, key, lambda: copies)
        for position, block in enumerate(uses):
            recorder.position = position + 1
            last.put(block)
            if block not in copies:
                copies[block] = None
                last.put(block)
            if draw.random() < 0.2:
                outdated ^= {other := draw.randrange(9)}
                last.put(other)
            least = draw.choice((-1, position + 3))
            may_go = lambda each: each != block
            free = [each for each in copies if may_go(each) and key(each) > least]
            expected = max(map(key, free), default=None)
            picked = last.pick(least, may_go)
            assert (key(picked) if picked is not None else None) == expected
            if picked is not None and draw.random() < 0.6:
                del copies[picked]
                last.drop(picked)
        assert order.next_at(99, 0) == NEVER


def test_what_lies_between_two_positions():
    uses, sizes = [0, 1, 2, 1, 0, 3, 2], [10, 20, 30, 40]
    order = Order.of(uses)
    outlook = Outlook(order, sizes, frozenset({3}))
    again = [4, 3, 6, 1 + 7, 0 + 7, 0, 2 + 7]
    for start in range(len(uses)):
        for end in range(start, len(uses)):
            assert outlook.bytes(start, end) == sum(sizes[block] for block in uses[start:end])
            assert outlook.latest(start, end) == max(again[start:end], default=0)


def test_what_is_under_way_is_counted_once_for_each_use():
    recorder = Recorder()
    recorder.orders["call"] = Order.of([0, 1, 0, 2])
    recorder.begin("call")
    ahead = Ahead(recorder, [1, 10, 100])
    for under_way in (True, False, True, True):
        assert ahead.next() is not None
        ahead.advance(under_way)
    assert ahead.next() is None and ahead.bytes == 102
    recorder.use(0)
    ahead.passed(0)
    assert ahead.bytes == 101
    ahead.arrived(0)
    assert ahead.bytes == 100
    ahead.left(1)  # behind what was counted: it is looked at again
    assert ahead.next() == 1 and ahead.bytes == 0
