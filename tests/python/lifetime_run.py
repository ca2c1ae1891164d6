"""A process of its own for test_lifetime.py, which asks it for one story: python lifetime_run.py
STORY STORE."""

from __future__ import annotations

import gc
import os
import re
import signal
import sys
import threading
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


class Data(torch.utils.data.Dataset):
    """`look`: what a worker does with the model; its outcome comes with the items."""

    def __init__(self, model, look) -> None:
        self.model, self.look = model, look

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int):
        return batch(index, size=1)[0], self.look(self.model)


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


def workers(store: str) -> None:
    """DataLoader workers while training; the closed store is free, though they still live."""
    model, opt = offloaded(store)

    def look(model) -> str:
        weight = model.layers[0].qkv.weight
        assert weight.shape == (3 * 64, 64) and weight.dtype == torch.float32
        assert weight.numel() == 3 * 64 * 64
        return sentence_of(lambda: weight.sum())

    workers = {"num_workers": 2, "persistent_workers": True, "multiprocessing_context": "fork"}
    loader = torch.utils.data.DataLoader(Data(model, look), batch_size=2, **workers)
    for tokens, said in loader:
        assert all("forked this one" in each for each in said), said
        loss_of(model, tokens).backward()
        opt.step()
        opt.zero_grad()
    opt.close()
    again, opt = offloaded(store, resume=True)
    assert opt.step_count == 4
    train(again, opt, range(4, 5))
    opt.close()
    del loader


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
            assert re.search("forked this one|the parent process opened this", said), said
        assert tuple(weight.shape) == (96, 64) and weight.requires_grad
        opt.close()
        opt.close()

    assert in_child(child) == 0

    def drops_it() -> None:
        nonlocal model, opt, weight
        model = opt = weight = None
        gc.collect()

    assert in_child(drops_it) == 0
    train(model, opt, range(2, 4))  # nothing has changed for the parent
    assert torch.isfinite(loss_of(model, batch(9)))
    lives = os.fork()
    if lives == 0:
        time.sleep(60)
        os._exit(0)
    opt.close()
    again, opt = offloaded(store, resume=True)
    assert opt.step_count == 4
    opt.close()
    os.kill(lives, signal.SIGKILL)
    os.waitpid(lives, 0)


def ends(store: str) -> None:
    """A fork that ends as a program does: its interpreter ends too."""
    model, opt = offloaded(store)
    train(model, opt, range(1))
    pid = os.fork()
    if pid == 0:
        sys.exit(0)
    for _ in range(300):
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            assert os.waitstatus_to_exitcode(status) == 0
            break
        time.sleep(0.05)
    else:
        os.kill(pid, signal.SIGKILL)
        raise AssertionError("the forked process did not end")
    train(model, opt, range(1, 2))
    opt.close()


def daemon(store: str) -> None:
    """The program ends while a daemon thread trains."""
    model, opt = offloaded(store)
    train(model, opt, range(1))
    threading.Thread(target=train, args=(model, opt, range(1, 1_000_000)), daemon=True).start()
    while opt.step_count < 5:
        time.sleep(0.01)


if __name__ == "__main__":
    {"workers": workers, "fork": fork, "ends": ends, "daemon": daemon}[sys.argv[1]](sys.argv[2])
    print("the end")
