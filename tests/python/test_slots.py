"""Batches in memory that CUDA knows. There is no GPU here: a stand-in counts what is registered."""

from __future__ import annotations

import ctypes
import gc
import io

import numpy as np
import pytest
import torch
from PIL import Image

import stoker
from stoker.data import Files, Jpeg, Loader, Rows, Tokens, slots
from stoker.data.images import batch_bytes
from stoker.errors import InvalidArgument, OverBudget, StokerError

from test_loader import Numbers, npy, put


class Cuda:
    """torch.cuda as far as `slots` uses it."""

    def __init__(self) -> None:
        self.status = 0
        self.known: dict[int, int] = {}  # address -> bytes
        self.events, self.copying = 0, False  # copying: no event comes

    def event(self) -> Event:
        return Event(self)

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


class Event:
    def __init__(self, of: Cuda) -> None:
        self._of = of

    def record(self) -> None:
        self._of.events += 1

    def query(self) -> bool:
        return not self._of.copying


@pytest.fixture
def cuda(monkeypatch):
    fake = Cuda()
    monkeypatch.setattr(torch.cuda, "Event", fake.event)
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


@pytest.mark.parametrize("view", [lambda batch: batch, lambda batch: batch[2:, :-1]])
def test_memory_is_not_used_again_while_it_is_copied(store, cuda, view):
    loader = Loader(Tokens(store, "t.npy", 100), batch=8, shuffle=False, ahead=1, pin=True)
    cuda.copying = True
    copied = []  # what a copy on the stream still reads: address, and what is there
    for batch in loader:
        part = view(batch)
        del batch
        copied.append((part.data_ptr(), int(part[0, 0])))
        del part
    assert cuda.events == 8
    assert len({address for address, _ in copied}) == 8
    for address, first in copied:
        assert ctypes.c_int64.from_address(address).value == first
    del loader
    gc.collect()
    assert len(cuda.known) == 1
    cuda.copying = False
    slots._sweep()
    assert cuda.known == {}


def test_images_are_held_while_they_are_copied(store, cuda):
    image = io.BytesIO()
    Image.new("RGB", (20, 20), (255, 0, 0)).save(image, "JPEG")
    for number in range(6):
        put(store, f"i/{number}.jpg", image.getvalue())
    loader = Loader(Files(store, "i/"), batch=2, decode=Jpeg(10), ahead=1, pin=True)
    cuda.copying = True
    places = set()
    for batch in loader:
        places.add(batch["image"].data_ptr())
        del batch
    assert len(places) == 3 and cuda.events == 3
    cuda.copying = False
    loader.close()


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
