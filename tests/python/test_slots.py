"""Batches in memory that CUDA knows. There is no GPU here: a stand-in counts what is registered."""

from __future__ import annotations

import gc

import numpy as np
import pytest
import torch

import stoker
from stoker.data import Jpeg, Loader, Rows, Tokens, slots
from stoker.data.slots import batch_bytes
from stoker.errors import InvalidArgument, OverBudget, StokerError

from test_loader import Numbers, npy, put


class Cuda:
    """torch.cuda as far as `slots` uses it."""

    def __init__(self) -> None:
        self.status = 0
        self.known: dict[int, int] = {}  # address -> bytes

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802
        if not self.status:
            self.known[address] = size
        return self.status

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        del self.known[address]
        return 0

    def knows(self, tensor: torch.Tensor) -> bool:
        first, last = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        return any(begin <= first and last <= begin + size for begin, size in self.known.items())


@pytest.fixture
def cuda(monkeypatch):
    fake = Cuda()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: fake)
    return fake


@pytest.fixture
def store(tmp_path):
    with stoker.open_store(f"dir:{tmp_path / 'data'}", create=True, dram="64MiB") as opened:
        put(opened, "t.npy", npy(np.arange(6401, dtype=np.uint16)))
        put(opened, "r.npy", npy(np.arange(256, dtype=np.float32).reshape(64, 4)))
        yield opened


def test_batches_are_pinned_as_long_as_somebody_has_them(store, cuda):
    loader = Loader(Tokens(store, "t.npy", 100), batch=8, shuffle=False, pin=True)
    batches = list(loader)
    assert cuda.knows(batches[0]) and len(cuda.known) == 1
    assert torch.equal(torch.cat(batches)[:, :-1].reshape(-1), torch.arange(6400))
    kept = batches[0]
    del batches, loader
    gc.collect()
    assert len(cuda.known) == 1 and kept[0, 5] == 5  # not unmapped below it
    del kept
    gc.collect()
    other = Loader(Rows(store, "r.npy"), batch=8, pin=True)  # looks for what can go
    assert len(cuda.known) == 1 and cuda.knows(next(iter(other)))
    other.close()
    del other
    gc.collect()
    while cuda.known:  # batches that were on their way come back
        slots._sweep()


def test_nothing_is_pinned_unless_it_is_asked_for(store, cuda):
    loader = Loader(Rows(store, "r.npy"), batch=8)
    assert not cuda.knows(next(iter(loader))) and cuda.known == {}
    loader.close()


def test_memory_that_cannot_be_pinned_is_told(store, cuda):
    cuda.status = 2
    with pytest.raises(StokerError, match="2 MiB of host memory could not be pinned.*ulimit -l"):
        Loader(Rows(store, "r.npy"), batch=8, pin=True)
    cuda.status = 0
    large = Rows(store, "r.npy")
    large._all_bytes *= 100_000
    with pytest.raises(OverBudget):
        Loader(large, batch=64, pin=True)
    with pytest.raises(InvalidArgument, match="pin=True needs sources"):
        Loader(Numbers(8), batch=4, pin=True)


def test_pinning_needs_a_gpu(store, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(StokerError, match="pin=True needs a GPU"):
        Loader(Rows(store, "r.npy"), batch=8, pin=True)


def test_what_a_batch_takes(store):
    assert batch_bytes([Tokens(store, "t.npy", 100)], 8, None) == 8 * 101 * 8
    assert batch_bytes([Rows(store, "r.npy")], 8, None) == 8 * 16
    assert batch_bytes([], 8, Jpeg(10)) == 8 * 300
    assert batch_bytes([], 8, Jpeg(10, normalise=((0,) * 3, (1,) * 3))) == 8 * 1200
