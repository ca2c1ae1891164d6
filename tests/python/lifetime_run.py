"""A process of its own for test_lifetime.py, which asks it for one story: python lifetime_run.py STORY STORE."""

from __future__ import annotations

import os
import signal
import sys
import time

import torch

import stoker
from models import Tiny, batch, loss_of
from stoker import errors


def offloaded(store: str, **kwargs):
    torch.manual_seed(0)
    model = Tiny(layers=4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return stoker.offload(model, optimizer, store=store, dram="8MiB", **kwargs)


def train(model, opt, steps: range) -> None:
    for step in steps:
        loss_of(model, batch(step)).backward()
        opt.step()
        opt.zero_grad()


def sentence_of(look) -> str:
    try:
        look()
    except errors.StokerError as error:
        return str(error)
    return "no error"


def in_child(what) -> int:
    """The exit status of a fork that does this, or minus the signal that ended it."""
    pid = os.fork()
    if pid == 0:
        status = 9
        try:
            what()
            status = 0
        finally:
            os._exit(status)
    for _ in range(300):
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return -99


def fork(store: str) -> None:
    """What a forked process may do with the model, its optimizer and the store."""
    model, opt = offloaded(store)
    train(model, opt, range(2))
    weight = model.head.weight

    def child() -> None:
        for look in (
            lambda: weight.sum(),
            lambda: weight[0, 0].item(),
            lambda: weight.data.clone(),
            lambda: weight.detach().numpy(),
            lambda: torch.nn.functional.linear(torch.zeros(1, 64), weight),
            lambda: model(batch(0)[:, :-1]),
            lambda: model.state_dict(),
            lambda: opt.step(),
            lambda: opt.flush(),
            lambda: opt.state_dict(),
            lambda: stoker.gather([weight]).__enter__(),
        ):
            said = sentence_of(look)
            assert "forked this one" in said, said
        assert tuple(weight.shape) == (96, 64) and weight.requires_grad
        opt.close()
        opt.close()

    assert in_child(child) == 0

    train(model, opt, range(2, 4))  # nothing has changed for the parent
    assert torch.isfinite(loss_of(model, batch(9)))
    opt.close()


if __name__ == "__main__":
    {"fork": fork}[sys.argv[1]](sys.argv[2])
    print("the end")
