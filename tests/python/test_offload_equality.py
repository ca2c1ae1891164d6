"""An offloaded run equals the un-offloaded run with the same kernels bit for bit, whatever the
policy."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import sys

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

import reference
import stoker
from models import Tiny, batch, loss_of
from stoker.offload.division import layout
from stoker.offload.model.blocks import partition
from stoker.offload.model.algorithm import algorithm_of
from stoker.offload.paging.pager import Pager
from stoker.offload.division.layout import smallest_mib
from stoker.offload.gradients.window import Window

STEPS = 200
SMALL = "7MiB"


@pytest.fixture(autouse=True)
def poison(monkeypatch):
    """Memory of an evicted block is overwritten as soon as nothing aliases it; new slots start as
    garbage."""
    evict, take = Pager.evict, Pager.take
    # a rehearsal's has no memory
    real = lambda slot: slot is not None and isinstance(slot.bytes, torch.Tensor)

    def evict_and_poison(self, block):
        slot = self.slots.get(block)
        place = (
            (StorageWeakRef(slot.bytes.untyped_storage()), slot.address, slot.bytes.numel())
            if real(slot) and not slot.loading
            else None
        )
        del slot
        evict(self, block)
        # memory that another owner has taken since must stay: only what is free at this moment is
        # overwritten
        if (
            place
            and place[0].expired()
            and self.planes.arena.largest_free
            and not any(
                s.address == place[1] for s in (*self.slots.values(), *self.staged.values())
            )
        ):
            ctypes.memset(place[1], 0xFF, place[2])

    def take_and_poison(self, *args, **kwargs):
        slot = take(self, *args, **kwargs)
        if real(slot):
            ctypes.memset(slot.address, 0xFF, slot.bytes.numel())
        return slot

    monkeypatch.setattr(Pager, "evict", evict_and_poison)
    monkeypatch.setattr(Pager, "take", take_and_poison)
    vacate = Window._vacate

    def vacate_and_poison(self, place):
        size = place.home.size
        vacate(self, place)
        if isinstance(place.owner, torch.Tensor):
            ctypes.memset(place.address, 0xFF, size)

    monkeypatch.setattr(Window, "_vacate", vacate_and_poison)


@pytest.fixture
def spilled(monkeypatch):
    """As many gradients as can be go to the disk, whatever the memory."""
    choose = layout.choose
    monkeypatch.setattr(layout, "choose", lambda blocks, room: choose(blocks, 0))


def make(dtype, optimizer=torch.optim.AdamW, frozen=False, groups=False, **kwargs):
    torch.manual_seed(0)
    model = Tiny(**kwargs).to(dtype)
    if frozen:
        for param in model.layers[1].parameters():
            param.requires_grad_(False)
        model.layers[2].up.weight.requires_grad_(False)
    options = (
        {"lr": 3e-3, "momentum": 0.9, "weight_decay": 0.01}
        if optimizer is torch.optim.SGD
        else {"lr": 3e-3, "weight_decay": 0.1}
    )
    if groups:
        flat = [p for p in model.parameters() if p.dim() < 2]
        rest = [p for p in model.parameters() if p.dim() >= 2]
        return model, optimizer(
            [{"params": rest}, {"params": flat, "weight_decay": 0.0, "lr": 1e-3}], **options
        )
    return model, optimizer(model.parameters(), **options)


def train(model, opt, clip, steps, accumulate=1, autocast=False, inf_at=(), schedule=True):
    """The user's loop. Returns losses and norms."""
    scheduler = (
        torch.optim.lr_scheduler.LambdaLR(opt, lambda s: 1.0 / (1 + 0.01 * s)) if schedule else None
    )
    seen = []
    for step in range(steps):
        for micro in range(accumulate):
            with (
                torch.autocast(torch.get_default_device().type, dtype=torch.bfloat16)
                if autocast
                else contextlib.nullcontext()
            ):
                loss = loss_of(model, batch(step, micro)) / accumulate
            loss.backward()
            seen.append(loss.item())
        if step in inf_at:
            next(iter(model.parameters())).grad.view(-1)[0] = float("inf")
        norm = clip(model, opt)
        if norm is None or torch.isfinite(torch.as_tensor(norm)):
            opt.step()
            if scheduler:
                scheduler.step()
        seen.append(float(norm) if norm is not None else 0.0)
        opt.zero_grad()
    return seen


def no_clip(model, opt):
    return None


CLIP = 1.7  # fires in some of the steps of these models, and not in others


def torch_clip(model, opt, limit=None):
    return torch.nn.utils.clip_grad_norm_(model.parameters(), limit or CLIP)


def own_clip(model, opt, limit=None):
    if hasattr(opt, "clip_grad_norm_"):
        return opt.clip_grad_norm_(limit or CLIP)
    return reference.clip([p for p in model.parameters() if p.requires_grad], limit or CLIP)


CLIPS = {"torch": torch_clip, "own": own_clip}


class Bursts:
    """A clip that fires in four steps of forty, one after the other."""

    def __init__(self, clip: str) -> None:
        self.clip, self.step, self.fired = CLIPS[clip], 0, 0

    def __call__(self, model, opt):
        limit = 0.01 if 30 <= self.step % 40 < 34 else 1e9
        norm = self.clip(model, opt, limit)
        self.fired += bool(norm > limit)
        self.step += 1
        return norm


def control(dtype, clip, steps, **kwargs):
    loop = {k: kwargs.pop(k) for k in ("accumulate", "autocast", "inf_at") if k in kwargs}
    moments = kwargs.pop("moments", "exact")
    model, original = make(dtype, **kwargs)
    opt = reference.ReferenceOptimizer(original, moments, model)
    seen = train(model, opt, clip, steps, **loop)
    state = {
        name: (p.detach(), reference.master(opt, p), opt.moment(p, "m"), opt.moment(p, "v"))
        for name, p in model.named_parameters()
    }
    return seen, state, model


def offloaded(path, policy, dtype, clip, steps, dram=SMALL, **kwargs):
    loop = {k: kwargs.pop(k) for k in ("accumulate", "autocast", "inf_at") if k in kwargs}
    declared, moments = kwargs.pop("declared", None), kwargs.pop("moments", "exact")
    model, original = make(dtype, **kwargs)
    model, opt = stoker.offload(
        model, original, store=path, dram=dram, policy=policy, accumulate=declared, moments=moments
    )
    seen = train(model, opt, clip, steps, **loop)
    opt.flush()
    return seen, model, opt


def same(model, opt, expected, algorithm="adamw"):
    full = opt.state_dict(full=True)["state"]
    order = [p for group in opt.param_groups for p in group["params"]]
    states = {id(p): full.get(i) for i, p in enumerate(order)}
    with stoker.gather(list(model.parameters())):
        for name, param in model.named_parameters():
            weight, master, m, v = expected[name]
            entry = states.get(id(param))
            assert torch.equal(param.detach(), weight), f"weights of {name}"
            assert (entry is None) == (not param.requires_grad), f"state of {name}"
            if entry is None:
                continue
            if param.dtype == torch.bfloat16:
                assert torch.equal(
                    opt._session.stored.master(param) if algorithm == "sgd" else entry["master"],
                    master,
                ), f"master of {name}"
            if algorithm == "sgd":
                assert torch.equal(entry["momentum_buffer"].flatten(), m), f"momentum of {name}"
            else:
                assert torch.equal(entry["exp_avg"].flatten(), m), f"m of {name}"
                assert torch.equal(entry["exp_avg_sq"].flatten(), v), f"v of {name}"


CASES = {
    "bf16": dict(dtype=torch.bfloat16, clip=no_clip),
    "f32": dict(dtype=torch.float32, clip=no_clip),
    "torch_clip": dict(dtype=torch.bfloat16, clip=torch_clip),
    "own_clip": dict(dtype=torch.bfloat16, clip=own_clip),
    "own_clip_f32": dict(dtype=torch.float32, clip=own_clip),
    "infs": dict(dtype=torch.bfloat16, clip=torch_clip, inf_at=(3, 20, 21, 120)),
    "accumulate": dict(dtype=torch.bfloat16, clip=torch_clip, accumulate=4),
    "autocast": dict(dtype=torch.float32, clip=torch_clip, autocast=True),
    "autocast_frozen": dict(dtype=torch.float32, clip=torch_clip, autocast=True, frozen=True),
    "frozen": dict(dtype=torch.bfloat16, clip=torch_clip, frozen=True),
    "tied": dict(dtype=torch.bfloat16, clip=own_clip, tied=True),
    "groups": dict(dtype=torch.bfloat16, clip=own_clip, groups=True),
    "adam": dict(dtype=torch.float32, clip=torch_clip, optimizer=torch.optim.Adam),
    "sgd": dict(dtype=torch.bfloat16, clip=torch_clip, optimizer=torch.optim.SGD),
    "together": dict(
        dtype=torch.bfloat16,
        clip=torch_clip,
        accumulate=2,
        inf_at=(3, 20, 21, 120, 555),
        frozen=True,
        tied=True,
        groups=True,
    ),
}


# all steps in every run of the tests; the others in the soak
LONG = ("own_clip", "torch_clip", "infs", "accumulate", "autocast")


@pytest.mark.parametrize("policy", ["sync", "speculate", "auto", "lazy"])
@pytest.mark.parametrize("case", CASES)
def test_bit_equal(tmp_path, case, policy):
    bit_equal(
        f"{tmp_path}/s",
        case,
        policy,
        STEPS if case in LONG and policy in ("sync", "speculate") else STEPS // 8,
    )


@pytest.mark.parametrize(
    ("case", "policy"),
    [
        *((case, "speculate") for case in CASES),
        *((case, policy) for case in ("torch_clip", "infs", "tied") for policy in ("sync", "lazy")),
    ],
)
def test_bit_equal_with_spilled_gradients(tmp_path, spilled, case, policy):
    bit_equal(f"{tmp_path}/s", case, policy, STEPS // 8)


@pytest.mark.soak
@pytest.mark.parametrize("policy", ["sync", "speculate", "auto", "lazy"])
@pytest.mark.parametrize("case", CASES)
def test_bit_equal_with_spilled_gradients_for_long(tmp_path, spilled, case, policy):
    bit_equal(f"{tmp_path}/s", case, policy, STEPS)


@pytest.mark.soak
@pytest.mark.parametrize("policy", ["sync", "speculate", "auto", "lazy"])
@pytest.mark.parametrize("case", CASES)
def test_bit_equal_for_long(tmp_path, case, policy):
    bit_equal(f"{tmp_path}/s", case, policy, STEPS)


# the second one in a burst, three in pauses
BURSTS = dict(dtype=torch.bfloat16, steps=STEPS, layers=3, width=96, inf_at=(3, 32, 45, 120, 199))


@functools.cache
def control_of_bursts(clip):
    bursts = Bursts(clip)
    seen, state, _ = control(clip=bursts, **BURSTS)
    assert bursts.fired == STEPS // 10 + 4  # an Inf passes every limit
    return seen, state


@pytest.mark.parametrize("policy", ["auto", "lazy"])
@pytest.mark.parametrize("clip", CLIPS)
def test_bit_equal_while_clips_fire_in_bursts(tmp_path, clip, policy):
    """A tenth of the steps is clipped, so that auto pauses five times and comes back; in the
    smallest memory, so that most of the state is on the disk."""
    seen, state = control_of_bursts(clip)
    model, opt = make(torch.bfloat16, layers=3, width=96)
    dram = f"{smallest_mib(partition(model, model.parameters()), algorithm_of(opt), 1 << 17)}MiB"
    ours, model, opt = offloaded(f"{tmp_path}/s", policy, clip=Bursts(clip), dram=dram, **BURSTS)
    assert ours == seen
    same(model, opt, state)
    switches = [event["policy"] for event in opt.ledger.events if event["what"] == "policy"]
    assert switches == (["lazy", "speculate"] * 5)[:-1] * (policy == "auto")
    assert opt.ledger.last["read_bytes"]["m"] > 0
    opt.close()


def limit_that_fires(monkeypatch, share, how, steps):
    """Sets a limit that norms pass in about this share of the steps. What is clipped changes the
    norms to come, so it is looked for. Within a factor of two, at most: so 1 % stays far from none,
    and from 10 %."""
    limit = 1e9
    for _ in range(8):
        monkeypatch.setattr(sys.modules[__name__], "CLIP", limit)
        norms = control(torch.bfloat16, how, steps)[0][1::2]
        fired = sum(norm > limit for norm in norms) / steps
        print(f"the limit {limit:.4g} fires in {fired:.1%} of the steps")
        if fired == share or (0 < share < 1 and share / 2 <= fired <= 2 * share):
            return
        limit = min(norms) / 10 if share == 1 else sorted(norms)[int(steps * (1 - share))]
    pytest.fail(f"no limit was found that fires in {share:.0%} of the steps")


@pytest.mark.soak
@pytest.mark.parametrize("policy", ["sync", "speculate", "auto", "lazy"])
def test_all_of_it_together_for_1000_steps(tmp_path, policy):
    """Clips, Infs, accumulation, frozen and tied parameters, groups, and a rate that changes."""
    bit_equal(f"{tmp_path}/s", "together", policy, 1000)


@pytest.mark.soak
@pytest.mark.parametrize("policy", ["sync", "speculate", "auto", "lazy"])
@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("share", [0.0, 0.01, 0.1, 1.0])
def test_clips_that_fire_now_and_then_for_long(tmp_path, monkeypatch, share, clip, policy):
    """1,000 steps in which the clip fires in about this share of them; in none, or in all,
    exactly."""
    steps, how = 1000, CLIPS[clip]
    limit_that_fires(monkeypatch, share, how, steps)
    seen, state, _ = control(torch.bfloat16, how, steps)
    ours, model, opt = offloaded(f"{tmp_path}/s", policy, torch.bfloat16, how, steps)
    assert ours == seen
    same(model, opt, state)
    opt.close()


def bit_equal(store, case, policy, steps):
    seen, state, _ = control(steps=steps, **CASES[case])
    ours, model, opt = offloaded(store, policy, steps=steps, **CASES[case])
    assert ours == seen
    same(model, opt, state, "sgd" if case == "sgd" else "adamw")
    if case in ("torch_clip", "own_clip"):
        norms = [n for n in seen[1::2]]
        fired = sum(n > CLIP for n in norms)
        assert 0 < fired < steps, "the clip must fire in some steps and not in others"
        if policy == "speculate":
            assert opt.ledger.summary()["kept"] > 0
    opt.close()


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("segments", [1, 2, 4, 6])
@pytest.mark.parametrize("policy", ["sync", "speculate", "lazy"])
def test_checkpointed_segments(tmp_path, segments, reentrant, policy):
    bit_equal_in_segments(
        f"{tmp_path}/s",
        segments,
        reentrant,
        policy,
        STEPS if segments == 2 and policy != "lazy" else 10,
    )


@pytest.mark.soak
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("segments", [1, 2, 4, 6])
@pytest.mark.parametrize("policy", ["sync", "speculate", "lazy"])
def test_checkpointed_segments_for_long(tmp_path, segments, reentrant, policy):
    bit_equal_in_segments(f"{tmp_path}/s", segments, reentrant, policy, STEPS)


def bit_equal_in_segments(store, segments, reentrant, policy, steps):
    settings = dict(dtype=torch.bfloat16, clip=torch_clip, segments=segments, reentrant=reentrant)
    seen, state, _ = control(steps=steps, **settings)
    ours, model, opt = offloaded(store, policy, steps=steps, **settings)
    assert ours == seen
    same(model, opt, state)
    opt.close()


def test_speculation_keeps_what_it_did(tmp_path):
    """Without clipping nothing is ever redone, and from the second step on every unit is updated
    during backward."""
    _, _, opt = offloaded(f"{tmp_path}/s", "speculate", torch.bfloat16, no_clip, 10)
    total = opt.ledger.summary()
    units = len([u for b in opt._session.blocks for u in b.updated_units])
    assert total["redone"] == 0 and total["kept"] == units * 10
    opt.close()


def test_nothing_leaks(tmp_path):
    """After training and close() every byte of the arena is free again."""
    model, opt = make(torch.bfloat16)
    model, opt = stoker.offload(model, opt, store=f"{tmp_path}/s", dram=SMALL)
    train(model, opt, no_clip, 5)
    arena = opt._session.planes.arena
    opt.close()
    del opt
    gc.collect()
    assert arena.used == 0
