"""Where the thread that trains waits for updates, their writes and commits, with memory to spare:
the list of docs/semantics.md, and nothing else. For weights and gradients to come it waits
elsewhere, where they are used (Pager, Gradients); the ledger has these waits under names of their
own.
"""

from __future__ import annotations

import sys

import pytest
import torch

import stoker
from models import Tiny, batch, loss_of
from stoker.offload.steps.late import AHEAD
from stoker.offload.steps.steps import Steps
from stoker.offload.steps.update import Update

FIRST = 4  # of the steps that are looked at: nothing is learned any more

COMMIT = {("step", "settle", "writing"), ("step", "settle", "commit")}
WAITS = {
    "sync": {*COMMIT, ("step", "decide", "state")},
    "speculate": {
        ("backward", "settle", "writing"),
        ("backward", "settle", "commit"),
        ("backward", "reclaim", "state"),
        ("backward", "backward_ends", "state"),
    },
    "lazy": {*COMMIT, ("forward", "finish", "state")},
}
# where gradients were changed behind backward
AGAIN = {("step", "_forget", "writing"), ("step", "decide", "state")}


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("policy", WAITS)
def test_nothing_is_waited_for_but_what_the_list_says(tmp_path, monkeypatch, policy, clips):
    seen, phase, step, timed = set(), "", -1, Steps.timed

    def noting(self, cause, wait):
        update = getattr(wait, "__self__", None)
        done = isinstance(update, Update) and update.computed  # it is known, so nobody waits
        if step >= FIRST and not done:
            caller = sys._getframe(1).f_code.co_name
            seen.add((phase, "settle" if caller == "wait_written" else caller, cause))
        timed(self, cause, wait)

    monkeypatch.setattr(Steps, "timed", noting)
    # never done before somebody waits for it
    monkeypatch.setattr(Steps, "poll", lambda self: self.closing is None)
    torch.manual_seed(0)
    model = Tiny().to(torch.bfloat16)
    model, opt = stoker.offload(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-3),
        store=f"{tmp_path}/s",
        dram="64MiB",
        policy=policy,
    )
    for step in range(FIRST + 4):
        phase = "forward"
        loss = loss_of(model, batch(step))
        phase = "backward"
        loss.backward()
        phase = "step"
        if clips:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        opt.step()
        opt.zero_grad()
    assert seen == WAITS[policy] | (AGAIN if clips and policy == "speculate" else set())
    step = -1
    opt.close()


def test_a_forward_begins_when_its_first_block_is_updated(tmp_path, monkeypatch):
    """Under lazy: when a block is entered, of the blocks behind it no more are updated than are
    begun ahead."""
    torch.manual_seed(0)
    model = Tiny().to(torch.bfloat16)
    model, opt = stoker.offload(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-3),
        store=f"{tmp_path}/s",
        dram="64MiB",
        policy="lazy",
    )
    late, owed = opt._session.steps.late, []
    start = Steps._start

    def held(self, *args, **named):
        update = start(self, *args, **named)
        update.job = Held(update.job)
        return update

    monkeypatch.setattr(Steps, "_start", held)
    for layer in model.layers:
        layer.register_forward_pre_hook(lambda *_: owed.append(len(late.owed)))
    for step in range(5):
        owed.clear()
        loss_of(model, batch(step)).backward()
        opt.step()
        opt.zero_grad()
    assert owed[0] >= len(model.layers) - 1 - AHEAD
    assert owed == sorted(owed, reverse=True)
    opt.close()


class Held:
    """A job that is never done before somebody waits for it."""

    def __init__(self, job) -> None:
        self._job, self._waited = job, False

    def __getattr__(self, name):
        return getattr(self._job, name)

    def computed(self) -> bool:
        return self._waited

    def wait(self) -> None:
        self._job.wait()
        self._waited = True
