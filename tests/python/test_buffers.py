"""Buffers in the store: raw, written where they changed, and counted. Older stores go on."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import stoker
from stoker.offload.storage import record
from stoker.offload.storage.buffers import KEY, OLD_KEY, Buffers
from stoker.offload.division.layout import MIB
from stoker.offload.storage.planes import put

POLICIES = ["sync", "speculate", "lazy"]


class Counting(nn.Module):
    """A small layer with a large buffer, a counter, and one of each awkward kind."""

    def __init__(self, size: int = 2 * MIB) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(64, 64), nn.BatchNorm1d(64)
        self.register_buffer("table", torch.arange(size, dtype=torch.float32))
        self.register_buffer("mask", torch.ones(4, 4, dtype=torch.bool).tril().t())
        self.register_buffer("none", torch.empty(0, 3))
        self.register_buffer("scale", torch.ones((), dtype=torch.bfloat16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.layer(x)) * self.scale


def train(model: nn.Module, opt: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        model(torch.randn(8, 64)).square().mean().backward()
        opt.step()
        opt.zero_grad()


def offloaded(model: nn.Module, path: str, **options):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return stoker.offload(model, optimizer, store=path, dram="64MiB", **options)


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    equal = (torch.equal(left[name], right[name]) for name in left)
    return left.keys() == right.keys() and all(equal)


class Written:
    """Stands for a transaction, and keeps what it is given."""

    def __init__(self) -> None:
        self.pieces: list[tuple[int, int]] = []

    def resize(self, key: str, size: int) -> None:
        self.size = size

    def write_bytes(self, key: str, offset: int, data: bytes) -> None:
        self.pieces.append((offset, len(data)))


def test_only_chunks_that_changed_are_written():
    model = Counting()
    hashes = lambda spans: [bytes(_bytes_at(*span)) for span in spans]
    buffers = Buffers(lambda: dict(model.named_buffers()), hashes)
    first, idle, one, other = Written(), Written(), Written(), Written()
    buffers.stage(first)
    buffers.stage(idle)
    model.table.data[3 * MIB // 2] = 7.0  # in the seventh MiB, by a way that torch does not count
    buffers.stage(one)
    model.register_buffer("late", torch.ones(3))
    buffers.stage(other)
    assert sum(size for _, size in first.pieces) == first.size >= 8 * MIB and not idle.pieces
    assert [size for _, size in one.pieces] == [MIB]
    assert sum(size for _, size in other.pieces) == other.size > first.size


def _bytes_at(address: int, size: int) -> bytes:
    import ctypes

    return ctypes.string_at(address, size)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_resume_has_the_buffers_of_the_committed_step(tmp_path, policy):
    torch.manual_seed(0)
    model, opt = offloaded(Counting(), f"{tmp_path}/s", policy=policy)
    train(model, opt, 3)
    opt.flush()
    expected = values(model)
    store = opt._session.planes.store
    version = store.stat(KEY)["version"]
    assert not store.exists(OLD_KEY) and b"base64" not in store.read_bytes("meta/state")
    assert len(store.read_bytes("meta/state")) < MIB // 4
    model.eval()
    train(model, opt, 1)  # changes no buffer
    opt.flush()
    assert store.stat(KEY)["version"] == version
    opt.close()
    model, opt = offloaded(Counting(), f"{tmp_path}/s", policy=policy, resume=True)
    assert same(values(model), expected)
    opt.close()


def test_buffers_are_in_the_capacity(tmp_path):
    model, opt = offloaded(Counting(14 * MIB), f"{tmp_path}/s")
    assert opt.plan()["buffers"] >= 56 * MIB
    for _ in range(3):
        model.table.add_(1.0)
        train(model, opt, 1)
    opt.flush()
    opt.close()


def test_a_store_with_buffers_as_json_goes_on(tmp_path):
    torch.manual_seed(0)
    model, opt = offloaded(Counting(), f"{tmp_path}/s", snapshots=1)
    train(model, opt, 2)
    opt.flush()
    expected = values(model)
    store = opt._session.planes.store
    state = record.load(store.read_bytes("meta/state"))
    about = record.load(store.read_bytes("meta/model"))
    txn = store.begin()
    put(txn, "meta/state", record.dump({**state, "buffers": True}))
    put(txn, "meta/model", record.dump({**about, "format": 1}))
    put(txn, OLD_KEY, record.dump(expected))
    txn.remove(KEY)
    txn.commit("durable").wait()
    opt.close()

    model, opt = offloaded(Counting(), f"{tmp_path}/s", resume=True, snapshots=1)
    assert same(values(model), expected)
    opt.snapshot()
    train(model, opt, 2)
    opt.flush()
    store, now = opt._session.planes.store, values(model)
    assert store.exists(KEY) and not store.exists(OLD_KEY)
    assert record.load(store.read_bytes("meta/model"))["format"] == 2
    saved = opt.state_dict()
    opt._session.snapshots.go_back(2)
    assert same(values(model), expected) and not same(now, expected)
    train(model, opt, 1)
    opt.flush()
    assert record.load(store.read_bytes("meta/model"))["format"] == 2 and saved
    opt.close()
