"""The model computes on another device: same bits, whenever its copies happen; the device's memory
stays under its cap."""

from __future__ import annotations

import copy
import ctypes
import sys
import time

import pytest
import torch

import stoker
from fake_link import FakeLink
from models import Skips, batch, loss_of
from stoker.offload.gradients.device_gradients import DeviceGradients
from stoker.offload.paging.device_pager import DevicePager
from stoker.plan.outlook import gpu_memory
from test_offload_equality import (
    CASES,
    SMALL,
    control,
    make,
    no_clip,
    offloaded,
    own_clip,
    poison,
    same,
    torch_clip,
    train,
)  # noqa: F401

STEPS = 12


@pytest.fixture(params=["lazy", "eager"])
def link(request, monkeypatch):
    made = FakeLink(request.param == "lazy")
    monkeypatch.setattr(sys.modules["stoker.offload.open"], "open_link", lambda device: made)
    return made


@pytest.mark.parametrize("policy", ["sync", "speculate", "lazy"])
@pytest.mark.parametrize("case", CASES)
def test_bit_equal(tmp_path, link, case, policy):
    seen, state, _ = control(steps=STEPS, **CASES[case])
    ours, model, opt = offloaded(f"{tmp_path}/s", policy, steps=STEPS, **CASES[case])
    assert ours == seen
    same(model, opt, state, "sgd" if case == "sgd" else "adamw")
    assert link.uploads > STEPS and link.downloads > STEPS
    opt.close()
    assert link.pinned is None


@pytest.mark.parametrize("policy", ["sync", "speculate", "lazy"])
def test_the_plan_knows_what_stays_on_the_device(tmp_path, link, policy):
    """The gradients of the whole step, and as many weights as the pager gives itself."""
    model, original = make(torch.bfloat16)
    model, opt = stoker.offload(model, original, store=f"{tmp_path}/s", dram=SMALL, policy=policy)
    for step in range(2):  # the second has lazy updates under way
        loss_of(model, batch(step)).backward()
        blocks, pager = opt._session.blocks, opt._session.pager
        held = sum(param.grad.nbytes for param in model.parameters())
        planned = gpu_memory(blocks, 16, 1 << 30)["classes"]
        padding = planned["gradients"] - held
        assert (
            0
            <= padding
            < 4096 * len([unit for block in blocks for unit in block.units])
            < 0.1 * held
        )
        assert planned["weights"] == min(pager.capacity, sum(block.slot_bytes for block in blocks))
        opt.step()
        opt.zero_grad()
    opt.close()


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("policy", ["sync", "speculate", "lazy"])
def test_checkpointed_segments(tmp_path, link, reentrant, policy):
    settings = dict(dtype=torch.bfloat16, clip=torch_clip, segments=2, reentrant=reentrant)
    seen, state, _ = control(steps=STEPS, **settings)
    ours, model, opt = offloaded(f"{tmp_path}/s", policy, steps=STEPS, **settings)
    assert ours == seen
    same(model, opt, state)
    opt.close()


def test_host_memory_that_a_copy_reads_is_not_given_away(tmp_path, link, monkeypatch):
    """A slot leaves host memory as soon as its copy was asked for, and what is free is
    overwritten."""
    upload = DevicePager._upload

    def then_evict(self, slot, *args):
        done = upload(self, slot, *args)
        self.evict(slot.block)
        return done

    def scorched(self, block):
        arena, taken = self.planes.arena, []
        while arena.largest_free:
            taken.append(arena.take(arena.largest_free))
            ctypes.memset(taken[-1].address, 0xFF, taken[-1].size)
        taken.clear()
        return show(self, block)

    show = DevicePager._show
    monkeypatch.setattr(DevicePager, "_show", scorched)
    monkeypatch.setattr(DevicePager, "_upload", then_evict)
    seen, state, _ = control(steps=STEPS, dtype=torch.float32, clip=no_clip)
    ours, model, opt = offloaded(
        f"{tmp_path}/s", "speculate", steps=STEPS, dtype=torch.float32, clip=no_clip
    )
    assert ours == seen
    same(model, opt, state)
    opt.close()


def test_speculation_keeps_what_it_did(tmp_path, link):
    _, _, opt = offloaded(f"{tmp_path}/s", "speculate", torch.bfloat16, no_clip, 5)
    total = opt.ledger.summary()
    assert total["redone"] == 0 and total["kept"] == 5 * len(opt._session.steps.units)
    opt.close()


def test_gradient_memory_is_lent_during_forward(tmp_path, link, monkeypatch):
    recalled = []
    recall = DeviceGradients._recall
    monkeypatch.setattr(
        DeviceGradients, "_recall", lambda self, unit: (recalled.append(unit), recall(self, unit))
    )
    how = dict(dtype=torch.bfloat16, clip=own_clip, width=256)
    seen, state, _ = control(steps=STEPS, **how)
    ours, model, opt = offloaded(f"{tmp_path}/s", "speculate", steps=STEPS, dram="48MiB", **how)
    assert ours == seen and recalled and opt._session.planes.session.counters()["tiles_prefetched"]
    same(model, opt, state)
    opt.close()


def test_the_cap_on_the_device_holds(tmp_path, link, monkeypatch):
    """With room for two blocks at a time the others are copied again; with room for all, each is
    copied once a step."""
    held = []
    upload = DevicePager._upload

    def watched(self, *args, **kwargs):
        done = upload(self, *args, **kwargs)
        held.append(sum(image.bytes.numel() for image in self.images.values()))
        return done

    monkeypatch.setattr(DevicePager, "_upload", watched)
    uploads = {}
    for cap in ("448KiB", "64MiB"):
        model, original = make(torch.bfloat16)
        model, opt = stoker.offload(
            model, original, store=f"{tmp_path}/{cap}", dram=SMALL, device_memory=cap
        )
        train(model, opt, no_clip, 3)
        before, held[:] = link.uploads, []
        train(model, opt, no_clip, 2)
        uploads[cap] = (link.uploads - before) / 2
        assert max(held) <= opt._session.pager.capacity
        blocks = len(opt._session.blocks)
        opt.close()
    assert uploads["64MiB"] == blocks < uploads["448KiB"] <= 2 * blocks


def test_of_what_is_used_round_and_round_a_fixed_part_stays_on_the_device(tmp_path, link):
    """As on the host: with room for seven of ten layers, of the others and one more each pass
    copies as many as it must."""
    model, opt = stoker.offload(
        *make(torch.bfloat16, width=256, layers=10),
        store=f"{tmp_path}/s",
        dram="160MiB",
        device_memory="11MiB",
    )
    model.eval()
    uploads = []
    with torch.no_grad():
        for _ in range(10):
            before = link.uploads
            model(batch(0)[:, :-1])
            uploads.append(link.uploads - before)
    assert max(uploads) >= 10 and 3 <= sum(uploads[2:]) / 8 <= 7, uploads
    opt.close()


def test_a_cap_below_one_use_is_refused(tmp_path, link):
    model, original = make(torch.bfloat16)
    with pytest.raises(stoker.errors.OverBudget, match="device_memory="):
        stoker.offload(model, original, store=f"{tmp_path}/s", dram=SMALL, device_memory="64KiB")


def test_weights_can_be_read_and_written_between_steps(tmp_path, link):
    model, original = make(torch.bfloat16)
    model, opt = stoker.offload(model, original, store=f"{tmp_path}/s", dram=SMALL)
    train(model, opt, no_clip, 2)
    weight = model.layers[3].up.weight
    with stoker.gather(weight, write=True):
        weight.data.fill_(0.5)
    with stoker.gather(weight):
        assert torch.equal(weight.detach(), torch.full_like(weight, 0.5))
    assert torch.equal(model.state_dict()["layers.3.up.weight"], torch.full_like(weight, 0.5))
    twin = copy.deepcopy(model)
    model.load_state_dict(twin.state_dict())
    model.eval()
    twin.eval()
    assert torch.equal(loss_of(model, batch(7)), loss_of(twin, batch(7)))
    opt.close()


def test_a_run_goes_on_bit_for_bit_on_another_device(tmp_path, link, monkeypatch):
    def some(name, steps, **how):
        model, opt = stoker.offload(
            *make(torch.bfloat16), store=f"{tmp_path}/{name}", dram=SMALL, **how
        )
        losses = []
        for step in steps:
            loss = loss_of(model, batch(step))
            loss.backward()
            losses.append(loss.item())
            opt.step()
            opt.zero_grad()
        opt.close()
        return losses

    whole = some("a", range(8))
    begun = some("b", range(4))
    monkeypatch.setattr(sys.modules["stoker.offload.open"], "open_link", lambda device: None)
    assert begun + some("b", range(4, 8), resume=True) == whole


@pytest.mark.parametrize("how", ["a backward that breaks off", "a copy that fails"])
def test_copies_that_nobody_waited_for_end_before_their_memory_is_lent(
    tmp_path, link, monkeypatch, how
):
    # by the first of the next backward, state was read into the lent memory
    land = DeviceGradients.land
    monkeypatch.setattr(
        DeviceGradients,
        "land",
        lambda self, *args: (time.sleep(0.02), link.finish(), land(self, *args)),
    )
    losses = {}
    for place, broken in (
        ("whole", ()),
        ("broken", (3,) if how == "a copy that fails" else (3, 4, 5)),
    ):
        model, original = make(torch.bfloat16, width=256)
        model, opt = stoker.offload(
            model, original, store=f"{tmp_path}/{place}", dram="48MiB", policy="speculate"
        )
        for step in range(8):
            if step in broken:
                handle = None
                if how == "a copy that fails":
                    link.failing = "download"
                else:
                    handle = model.layers[1].norm2.weight.register_post_accumulate_grad_hook(
                        _break_off
                    )
                with pytest.raises(RuntimeError):
                    loss_of(model, batch(step)).backward()
                if handle is not None:
                    handle.remove()
                opt.zero_grad()
            loss = loss_of(model, batch(step))
            loss.backward()
            losses.setdefault(place, []).append(loss.item())
            opt.step()
            opt.zero_grad()
        assert opt._session.planes.session.counters()["tiles_prefetched"]
        opt.close()
    assert losses["broken"] == losses["whole"]


def _break_off(_param):
    raise RuntimeError("out of memory, say")


def test_an_offload_that_fails_leaves_the_model_whole(tmp_path, link):
    """What could not be pinned is tried again with less; the weights are still there."""
    model, original = make(torch.bfloat16)
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    link.failing = "pin"
    with pytest.raises(RuntimeError, match="failed at pin"):
        stoker.offload(model, original, store=f"{tmp_path}/a", dram=SMALL)
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())
    model, opt = stoker.offload(model, original, store=f"{tmp_path}/a", dram=SMALL)
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())
    opt.close()


def test_a_device_that_does_not_answer_leaves_the_store_free(tmp_path, link, monkeypatch):
    model, opt = stoker.offload(*make(torch.bfloat16), store=f"{tmp_path}/s", dram=SMALL)
    train(model, opt, no_clip, 2)
    link.lazy = True
    loss_of(model, batch(2))  # copies are under way
    link.failing = "wait"
    with pytest.raises(RuntimeError, match="failed at wait"):
        opt.close()
    monkeypatch.setattr(sys.modules["stoker.offload.open"], "open_link", lambda device: None)
    model, opt = stoker.offload(
        *make(torch.bfloat16), store=f"{tmp_path}/s", dram=SMALL, resume=True
    )
    assert opt.step_count == 2
    opt.close()


def test_a_default_device_of_torch_moves_nothing_of_ours(tmp_path):
    """Scripts for GPUs set it; what Stoker keeps in host memory says so. The meta device stands for
    one here."""
    model, opt = stoker.offload(*make(torch.bfloat16), store=f"{tmp_path}/s", dram=SMALL)
    train(model, opt, no_clip, 2)
    with torch.device("meta"):
        weights = model.state_dict()
        full = opt.state_dict(full=True)
    assert all(value.device.type == "cpu" for value in weights.values())
    assert all(
        entry["exp_avg"].device.type == "cpu" and entry["master"].device.type == "cpu"
        for entry in full["state"].values()
    )
    with torch.device("meta"):
        opt.load_state_dict(full)
    opt.close()
    model, original = make(torch.bfloat16)
    with torch.device("meta"):
        model, opt = stoker.offload(model, original, store=f"{tmp_path}/t", dram=SMALL)
    train(model, opt, no_clip, 1)
    opt.close()


def test_gradients_of_blocks_that_were_not_used_are_filled_in(tmp_path, link):
    """They land where the gradients lie that a late update of the step before still wants."""
    losses = {}
    for policy in ("sync", "lazy"):
        torch.manual_seed(0)
        model = Skips(layers=6).to(torch.bfloat16)
        model, opt = stoker.offload(
            model,
            torch.optim.AdamW(model.parameters(), lr=3e-3),
            store=f"{tmp_path}/{policy}",
            dram=SMALL,
            policy=policy,
        )
        for step in range(8):
            model.skip = {step % 6, (step + 2) % 6}
            loss = loss_of(model, batch(step))
            loss.backward()
            losses.setdefault(policy, []).append(loss.item())
            for param in model.parameters():
                if param.grad is None:
                    param.grad = torch.zeros(param.shape, dtype=param.dtype)
            opt.clip_grad_norm_(1.0)
            opt.step()
            opt.zero_grad()
        opt.close()
    assert losses["lazy"] == losses["sync"]


def test_what_torch_cannot_use_is_refused(tmp_path):
    for device, why in (("mps", "cpu or cuda"), ("cuda:63", "torch sees")):
        model, original = make(torch.bfloat16)
        with pytest.raises(stoker.errors.InvalidArgument, match=why):
            stoker.offload(model, original, store=f"{tmp_path}/s", dram=SMALL, device=device)
