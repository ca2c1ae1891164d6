"""The compiled core as Python sees it: memory that tensors share, stores, and the offload session
against torch."""

from __future__ import annotations

import gc
import signal
import threading
import time

import pytest
import torch

from stoker import _core
from stoker.errors import (
    Busy,
    Corruption,
    InvalidArgument,
    Mismatch,
    NotFound,
    OutOfSpace,
    OverBudget,
    StokerError,
)

MIB = 1 << 20
TILE = 32 << 10  # the smallest tile, so that small blocks have several


@pytest.fixture
def runtime():
    return _core.Runtime(threads=2, budget_bytes=512 * MIB)


@pytest.fixture
def arena(runtime):
    return runtime.arena(32 * MIB)


@pytest.fixture(params=["memory", "local"])
def store(request, runtime, tmp_path):
    if request.param == "memory":
        return runtime.open_store("memory:")
    return runtime.open_store(
        f"local:{tmp_path}", create=True, capacity_bytes=64 * MIB, holder="test_core"
    )


def tensor_of(buffer, dtype):
    return torch.from_dlpack(buffer).view(dtype)


# ---- memory


def test_tensor_shares_the_buffer(arena):
    buffer = arena.take(8192)
    tensor = torch.from_dlpack(buffer)
    assert (
        tensor.dtype == torch.uint8
        and tensor.shape == (8192,)
        and tensor.data_ptr() == buffer.address
    )
    tensor[5] = 77
    assert memoryview(buffer)[5] == 77
    assert torch.frombuffer(buffer, dtype=torch.uint8)[5] == 77


def test_memory_returns_with_the_last_alias_of_the_storage(arena):
    buffer = arena.take(4096)
    tensor = tensor_of(buffer, torch.float32)
    view = tensor[10:20].view(2, 5).t()
    assert arena.used == 4096 and buffer.shared
    del tensor, buffer
    gc.collect()
    assert arena.used == 4096, "a view still aliases the storage"
    detached = view.detach()
    del view
    assert arena.used == 4096
    del detached
    gc.collect()
    assert arena.used == 0


def test_memory_stays_while_only_the_handle_lives(arena):
    buffer = arena.take(4096)
    tensor = torch.from_dlpack(buffer)
    del tensor
    assert arena.used == 4096 and not buffer.shared
    buffer.release()
    assert arena.used == 0
    with pytest.raises(InvalidArgument):
        buffer.address


def test_memory_kept_by_autograd_is_not_free(arena):
    buffer = arena.take(4096)
    weight = tensor_of(buffer, torch.float32)[:64].view(8, 8)
    x = torch.ones(2, 8, requires_grad=True)
    out = (x @ weight).sum()
    del weight
    buffer.release()
    assert arena.used == 4096, "the graph saved a view of it"
    out.backward()
    del out
    gc.collect()
    assert arena.used == 0


def test_unused_capsule_gives_its_memory_back(arena):
    capsule = arena.take(4096).__dlpack__()
    assert arena.used == 4096
    del capsule
    assert arena.used == 0


def test_last_alias_may_die_on_another_thread(arena):
    holder = [torch.from_dlpack(arena.take(4096))]
    thread = threading.Thread(target=holder.clear)
    thread.start()
    thread.join()
    assert arena.used == 0


def test_over_budget_is_a_memory_error_with_a_sentence(runtime, arena):
    with pytest.raises(OverBudget, match="32.0 MiB|32 MiB") as caught:
        arena.take(64 * MIB)
    assert isinstance(caught.value, MemoryError) and isinstance(caught.value, StokerError)
    with pytest.raises(OverBudget):
        runtime.arena(1 << 40)
    assert runtime.budget_used >= 32 * MIB


def test_tensors_outlive_every_python_object_of_the_runtime():
    runtime = _core.Runtime(engine="posix", threads=1, budget_bytes=64 * MIB)
    tensor = torch.from_dlpack(runtime.arena(2 * MIB).take(4096))
    del runtime
    gc.collect()
    tensor.fill_(3)
    assert int(tensor.sum()) == 3 * 4096


# ---- store


def test_transaction_is_all_or_nothing(store):
    txn = store.begin()
    txn.resize("meta/state", 5)
    txn.write_bytes("meta/state", 0, b"hello")
    assert txn.read_bytes("meta/state", 0, 5) == b"hello"
    assert not store.exists("meta/state")
    version = txn.commit("durable").wait()
    assert version == store.info()["committed"] == store.stat("meta/state")["version"]
    del txn
    assert store.read_bytes("meta/state") == b"hello"
    second = store.begin()
    second.write_bytes("meta/state", 0, b"J")
    second.abandon()
    assert store.read_bytes("meta/state") == b"hello"
    with pytest.raises(InvalidArgument):
        second.commit()


def test_errors_have_their_classes(store):
    with pytest.raises(NotFound) as caught:
        store.stat("nothing")
    assert isinstance(caught.value, FileNotFoundError) and "nothing" in str(caught.value)
    first, second = store.begin(), store.begin()
    first.resize("a", 10)
    with pytest.raises(Busy):
        second.resize("a", 10)
    with pytest.raises(InvalidArgument):
        first.commit("maybe")
    with pytest.raises(NotFound):
        store.drop("no such snapshot").wait()


def test_snapshots_keep_what_was(store):
    for text in (b"old", b"new"):
        txn = store.begin()
        txn.resize("a", 3)
        txn.write_bytes("a", 0, text)
        txn.commit().wait()
        if text == b"old":
            store.snapshot("first").wait()
    assert store.read_bytes("a", snapshot="first") == b"old" and store.read_bytes("a") == b"new"
    assert list(store.info()["snapshots"]) == ["first"]


def test_raw_memory_moves_both_ways(arena, store):
    source = torch.from_dlpack(arena.take(MIB))
    source.copy_(torch.randint(0, 256, (MIB,), dtype=torch.uint8))
    txn = store.begin()
    txn.resize("a", MIB)
    txn.write("a", 0, source.data_ptr(), MIB).wait()
    txn.commit().wait()
    del txn
    into = torch.from_dlpack(arena.take(MIB))
    future = store.read("a", 0, into.data_ptr(), MIB, "demand")
    future.wait()
    assert future.ready() and future.error() is None and torch.equal(source, into)


def test_closing_a_store_ends_its_transactions_but_not_its_sessions(runtime, arena, store):
    session = _core.PlaneIo(runtime, store, arena, tiles=1, tile_elements=TILE)
    txn = store.begin()
    txn.resize("a", 10)
    with pytest.raises(Busy):
        store.close()
    session.close()
    assert arena.used == 0
    store.close()
    store.close()
    with pytest.raises(InvalidArgument):
        store.info()
    with pytest.raises(InvalidArgument):
        txn.commit()


# ---- session

HYPER = {
    "algorithm": "adamw",
    "lr": 1e-2,
    "beta1": 0.9,
    "beta2": 0.95,
    "eps": 1e-8,
    "weight_decay": 0.1,
}


class Trained:
    """One float32 block under AdamW in a store, and the same parameters under
    torch.optim.AdamW(fused=True)."""

    def __init__(self, runtime, arena, store, sizes=(64 * 700, 16 * 1000, 48 * 64)):
        torch.manual_seed(1)
        self.arena, self.store = arena, store
        self.session = _core.PlaneIo(runtime, store, arena, tiles=2, tile_elements=TILE)
        self.params = [torch.nn.Parameter(torch.randn(size)) for size in sizes]
        self.offsets, at = [], 0
        for size in sizes:
            self.offsets.append(at)
            at += -(-size // 64) * 64
        self.block = self.session.add_block("net", at, "f32", "mv")
        self.bytes = self.session.planes(self.block)["w"]["bytes"]
        self.slot = tensor_of(arena.take(self.bytes), torch.float32)
        self.slot.zero_()
        for offset, param in zip(self.offsets, self.params):
            self.slot[offset : offset + param.numel()] = param.detach()
        txn = store.begin()
        self.session.create_block(self.block, txn)
        self.session.store_weights(self.block, self.slot.data_ptr(), txn).wait()
        txn.commit().wait()
        self.optimizer = torch.optim.AdamW(
            self.params, lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, fused=True
        )
        self.step = 0

    def segments(self, step):
        return [
            _core.Segment(
                i,
                offset,
                param.numel(),
                param.grad.data_ptr(),
                "f32",
                _core.Hyper(**HYPER, step=step),
            )
            for i, (offset, param) in enumerate(zip(self.offsets, self.params))
        ]

    def run(self, commit="durable", in_place=True):
        self.step += 1
        for param in self.params:
            param.grad = torch.randn_like(param)
        txn = self.store.begin()
        self.session.prefetch_state(self.block)
        job = self.session.update(
            self.block,
            self.segments(self.step),
            self.slot.data_ptr(),
            self.slot.data_ptr() if in_place else 0,
            txn,
            hashes=True,
        )
        job.wait_written()
        assert job.hashes() == self.session.hash_many(
            [(p.grad.data_ptr(), p.grad.nbytes) for p in self.params]
        )
        txn.commit(commit).wait()
        self.optimizer.step()
        self.session.fetch_weights(self.block, self.slot.data_ptr()).wait()

    def check(self):
        for offset, param in zip(self.offsets, self.params):
            assert torch.equal(self.slot[offset : offset + param.numel()], param.detach())


def test_session_is_torch_fused_adamw_bit_for_bit(runtime, arena, store):
    trained = Trained(runtime, arena, store)
    for step in range(20):
        trained.run(commit="durable" if step % 3 else "deferred", in_place=step % 2 == 0)
    trained.check()


def test_byte_counts_are_exact(runtime, arena, store):
    trained = Trained(runtime, arena, store)
    before = trained.session.counters()
    trained.run()
    after = trained.session.counters()
    moved = {
        kind: {name: after[kind][name] - before[kind][name] for name in after[kind]}
        for kind in ("read_bytes", "written_bytes")
    }
    plane = trained.bytes
    # weights: fetched after the step
    assert moved["read_bytes"] == {
        "weights": plane,
        "remainder": 0,
        "m": plane,
        "v": plane,
        "other": 0,
    }
    assert moved["written_bytes"] == {
        "weights": plane,
        "remainder": 0,
        "m": plane,
        "v": plane,
        "other": 0,
    }
    assert after["tiles"] - before["tiles"] == -(-plane // 4 // TILE)


def test_retained_state_reads_nothing_and_notices_an_abandoned_step(runtime, arena, store):
    trained = Trained(runtime, arena, store)
    trained.session.retain(trained.block)
    trained.run()
    before = trained.session.counters()["read_bytes"]["m"]
    trained.run()
    assert trained.session.counters()["read_bytes"]["m"] == before
    for param in trained.params:
        param.grad = torch.randn_like(param)
    txn = store.begin()
    trained.session.update(
        trained.block, trained.segments(99), trained.slot.data_ptr(), 0, txn
    ).wait_written()
    txn.abandon()
    trained.run()
    assert trained.session.counters()["read_bytes"]["m"] > before
    trained.check()


def test_gradients_norm_and_scale(runtime, arena, store):
    session = _core.PlaneIo(runtime, store, arena, tiles=1, tile_elements=TILE)
    grads = [torch.randn(200_000), torch.randn(7).bfloat16()]
    spans = [
        (grads[0].data_ptr(), grads[0].numel(), "f32"),
        (grads[1].data_ptr(), grads[1].numel(), "bf16"),
    ]
    sums = session.sum_of_squares(spans)
    for grad, found in zip(grads, sums):
        assert found == pytest.approx(float(grad.double().square().sum()), rel=1e-12)
    scaled = [grad.clone().mul_(torch.tensor(0.37)) for grad in grads]
    session.scale(spans, 0.37)
    assert all(torch.equal(a, b) for a, b in zip(grads, scaled))


def test_a_bad_request_is_refused_at_once(runtime, arena, store):
    trained = Trained(runtime, arena, store)
    for param in trained.params:
        param.grad = torch.zeros_like(param)
    txn = store.begin()
    segments, grad = trained.segments(1), trained.params[0].grad.data_ptr()
    address = trained.slot.data_ptr()
    with pytest.raises(InvalidArgument, match="overlaps"):
        trained.session.update(trained.block, segments[::-1], address, 0, txn)
    with pytest.raises(TypeError):  # a misspelt one would train with a default
        _core.Hyper(**HYPER, step=1, learning_rate=1)
    with pytest.raises(ValueError, match="step"):
        _core.Hyper(**HYPER, step=0)
    assert txn.active_jobs == 0 and txn.poisoned is None
    missing = trained.session.add_block("elsewhere", 100, "bf16")
    with pytest.raises(Mismatch, match="elsewhere"):
        trained.session.check_block(missing)
    job = trained.session.update(
        missing,
        [_core.Segment(0, 0, 64, grad, "f32", _core.Hyper(**HYPER, step=1))],
        0,
        0,
        txn,
    )
    with pytest.raises(NotFound, match="elsewhere"):
        job.wait_written()
    with pytest.raises(NotFound, match="cannot be committed"):
        txn.commit().wait()


def test_a_wait_can_be_interrupted(runtime, arena, store):
    class Alarm(Exception):
        pass

    def ring(*_):
        raise Alarm

    # A job that waits for nothing ends at once, so the signal is raised before: it must surface
    # within a slice of waiting.
    trained = Trained(runtime, arena, store)
    old = signal.signal(signal.SIGALRM, ring)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(Alarm):
            end = time.monotonic() + 5
            while time.monotonic() < end:
                trained.run()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)
