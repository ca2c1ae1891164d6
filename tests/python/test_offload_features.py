"""What a user of stoker.offload() expects to work, and the sentences where something cannot."""

from __future__ import annotations

import copy
import errno
import gc
import io
import os
import pickle
import random
import re
import shutil
import sys
import types
import typing
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import reference
import stoker
from kill_run import Position as Loader
from models import Skips, Tiny, batch, loss_of
from stoker import _core, errors
from stoker.offload.run import access
from stoker.offload.activations.activations import MODES as ACTIVATIONS
from stoker.offload.model.blocks import partition
from stoker.offload.activations.forms import FORMS
from stoker.offload.gradients.gradients import Gradients
from stoker.offload.observe.ledger import Ledger
from stoker.offload.model.moments import MODES as MOMENTS
from stoker.offload.model.algorithm import algorithm_of
from stoker.offload.division.layout import smallest_mib
from stoker.offload.run.choices import POLICIES
from stoker.offload.run.step_record import StepRecord

DRAM = "8MiB"
TIGHT = "tight"  # the smallest budget that works, so that weights are paged
SNUG = "snug"  # the smallest in which all gradients stay in memory


def tiny(dtype=torch.float32, **kwargs) -> Tiny:
    torch.manual_seed(0)
    return Tiny(**{"layers": 4, **kwargs}).to(dtype)


def wide() -> Tiny:
    """Large enough that its smallest budget does not hold all of its weights."""
    return tiny(width=128)


def adamw(model, **kwargs):
    return torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad],
        **{"lr": 3e-3, "weight_decay": 0.1, **kwargs},
    )


@pytest.fixture
def offload(tmp_path):
    """stoker.offload() into a store of the test's own; closed at the end."""
    opened = []

    def start(model, opt=None, path="store", **kwargs):
        options = {"store": f"{tmp_path}/{path}", "dram": DRAM, "policy": "speculate", **kwargs}
        opt = opt if opt is not None else adamw(model)
        if options["dram"] == TIGHT:
            options["dram"] = smallest(model, opt, **options)
        if options["dram"] == SNUG:
            blocks = partition(model, model.parameters())
            mib = smallest_mib(blocks, algorithm_of(opt), 1 << 17, spills=False)
            options["dram"] = f"{mib}MiB"
        model, opt = stoker.offload(model, opt, **options)
        opened.append(opt)
        return model, opt

    yield start
    for opt in opened:
        opt.close()
    gc.collect()


def smallest(model, opt, **options) -> str:
    with pytest.raises(errors.OverBudget) as error:
        stoker.offload(model, opt, **{**options, "dram": "2MiB"})
    return re.search(r'the smallest budget that works is dram="(\d+MiB)"', str(error.value)).group(
        1
    )


def train_step(model, opt, step, **kwargs):
    loss = loss_of(model, batch(step, **kwargs))
    loss.backward()
    opt.step()
    opt.zero_grad()
    return loss.item()


def weights(model) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_same(ours: dict, theirs: dict) -> None:
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert torch.equal(ours[name], value), name


def both(offload, make, loop, *, options=adamw, **kwargs):
    """Runs `loop(model, opt)` on the un-offloaded control and offloaded; results and weights must
    be equal, bit for bit."""
    control = make()
    expected = loop(control, reference.ReferenceOptimizer(options(control)))
    ours = make()
    ours, opt = offload(ours, options(ours), **kwargs)
    got = loop(ours, opt)
    assert got == expected
    assert_same(weights(ours), weights(control))
    return ours, opt, control


def test_the_signature_names_what_there_is():
    hints = typing.get_type_hints(stoker.offload)
    for name, values in {
        "policy": POLICIES,
        "moments": MOMENTS,
        "activations": ACTIVATIONS,
        "activations_form": FORMS,
    }.items():
        assert set(typing.get_args(hints[name])) == set(values), name
    assert all(f'"{policy}":' in stoker.offload.__doc__ for policy in POLICIES)


# -- state_dict() ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_dict_at_every_moment(offload, dtype):
    control, model = tiny(dtype), tiny(dtype)
    theirs = reference.ReferenceOptimizer(adamw(control))
    model, opt = offload(model)
    assert_same(weights(model), weights(control))
    for step in range(3):
        for each, its in ((control, theirs), (model, opt)):
            loss_of(each, batch(step)).backward()
        # the update has run ahead, and is not visible
        assert_same(weights(model), weights(control))
        theirs.step(), opt.step()
        assert_same(weights(model), weights(control))  # decided, not yet closed
        assert_same(model.layers[1].state_dict(), control.layers[1].state_dict())
        theirs.zero_grad(), opt.zero_grad()
    held = model.state_dict()
    before = {name: value.clone() for name, value in held.items()}
    train_step(model, opt, 9)
    # a snapshot
    assert_same(
        {k: v for k, v in held.items() if k != "seen"},
        {k: v for k, v in before.items() if k != "seen"},
    )
    for value in held.values():
        value.zero_()
    assert all(
        value.abs().sum() > 0
        for name, value in model.state_dict().items()
        if name.endswith("weight")
    )


def test_load_state_dict_and_torch_save(offload):
    source = tiny()
    train_step(source, adamw(source), 0)
    file = io.BytesIO()
    torch.save(source.state_dict(), file)
    model, opt = offload(nn.Module.train(tiny()))
    train_step(model, opt, 1)
    file.seek(0)
    model.load_state_dict(torch.load(file))
    assert_same(weights(model), weights(source))
    with torch.no_grad():
        assert torch.equal(model.eval()(batch(0)), source.eval()(batch(0)))
    again = io.BytesIO()
    torch.save(model.state_dict(), again)
    again.seek(0)
    assert_same(torch.load(again), weights(source))
    with pytest.raises(RuntimeError, match="Missing key"):
        model.load_state_dict({})
    train_step(model.train(), opt, 2)


def test_state_dict_on_a_full_disk_is_an_error_and_not_the_end(offload, tmp_path, monkeypatch):
    model, opt = offload(tiny())
    train_step(model, opt, 0)

    def full(descriptor, offset, size):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(
            errors.OutOfSpace,
            match=rf"needs \d+ MiB .* in {tmp_path}/store, which has no room.*Free some space",
        ):
            model.state_dict()
    train_step(model, opt, 1)
    held = model.state_dict()
    assert not list((tmp_path / "store").glob("stoker-state-*"))
    assert all(value.untyped_storage().nbytes() for value in held.values())


def test_load_state_dict_is_one_commit_or_none(offload):
    model, opt = offload(tiny())
    train_step(model, opt, 0)
    opt.flush()
    store, before, other = opt._session.planes.store, weights(model), weights(tiny(torch.float64))
    version = store.info()["committed"]
    model.load_state_dict(other)
    assert store.info()["committed"] == version + 1
    assert_same(weights(model), weights(tiny()))
    model.layers[1].load_state_dict(
        {name: value + 1 for name, value in model.layers[1].state_dict().items()}
    )
    assert store.info()["committed"] == version + 2
    after = weights(model)
    assert torch.equal(after["layers.1.up.weight"], tiny().state_dict()["layers.1.up.weight"] + 1)

    def broken(*_):
        raise KeyboardInterrupt

    handle = model.layers[2].register_load_state_dict_post_hook(broken)
    with pytest.raises(KeyboardInterrupt):
        model.load_state_dict(before)
    handle.remove()
    train_step(model, opt, 1)  # what broke off is in nobody's way
    opt.flush()
    assert store.info()["committed"] == version + 3
    model.load_state_dict(after)
    assert_same(weights(model), after)


def test_load_state_dict_between_backward_and_step(offload):
    """What was speculated consumed the old weights."""

    def loop(model, opt):
        other = tiny(layers=4).state_dict()
        other = {
            name: value * 2 if value.is_floating_point() else value for name, value in other.items()
        }
        train_step(model, opt, 0)
        loss_of(model, batch(1)).backward()
        model.load_state_dict(other)
        opt.step()
        opt.zero_grad()
        return train_step(model, opt, 2)

    both(offload, tiny, loop)


def test_load_state_dict_by_assignment_is_refused(offload):
    model, opt = offload(tiny())
    with pytest.raises(errors.InvalidArgument, match="assign"):
        model.load_state_dict(tiny().state_dict(), assign=True)
    train_step(model, opt, 0)


def test_deep_copy_is_an_ordinary_model(offload):
    model, opt = offload(tiny())
    train_step(model, opt, 0)
    twin = copy.deepcopy(model)
    assert_same(weights(twin), weights(model))
    assert not torch.isnan(loss_of(twin, batch(1)))
    kept = weights(twin)
    train_step(model, opt, 1)
    assert_same(weights(twin), kept)
    train_step(twin, torch.optim.SGD(twin.parameters(), lr=0.1), 1)


def test_pickle_is_a_sentence(offload):
    model, opt = offload(tiny())
    for what in (model, model.layers[0], next(model.parameters())):
        with pytest.raises(errors.StokerError, match=r"state_dict\(\)"):
            pickle.dumps(what)
    with pytest.raises(errors.StokerError, match=r"state_dict\(\)"):
        pickle.dumps(opt)


# -- the optimizer's state -------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_full_state_is_that_of_torch(offload, dtype):
    control, model = tiny(dtype), tiny(dtype)
    model, opt = offload(model)
    theirs = adamw(control)
    ours = reference.ReferenceOptimizer(adamw(control))
    for step in range(3):
        train_step(model, opt, step)
        train_step(control, ours, step)
    train_step(tiny(dtype), theirs, 0)
    full = opt.state_dict(full=True)
    assert set(full) == {"state", "param_groups"}
    assert full["param_groups"][0]["params"] == list(range(len(list(model.parameters()))))
    for index, param in enumerate(control.parameters()):
        assert torch.equal(full["state"][index]["exp_avg"].flatten(), ours.moment(param, "m"))
        assert torch.equal(full["state"][index]["exp_avg_sq"].flatten(), ours.moment(param, "v"))
        assert full["state"][index]["step"] == 3
    # it goes into torch's own optimizer, and back
    back = adamw(tiny(dtype))
    back.load_state_dict(full)
    light = opt.state_dict()
    assert light["state"] == {} and light["stoker"]["step"] == 3
    train_step(model, opt, 3)
    with pytest.raises(errors.Mismatch, match="step 3"):
        opt.load_state_dict(light)
    opt.load_state_dict(opt.state_dict())
    opt.load_state_dict(full)
    again = opt.state_dict(full=True)
    for index, entry in full["state"].items():
        for name, value in entry.items():
            assert torch.equal(again["state"][index][name], value), name


@pytest.mark.parametrize("policy", ["sync", "speculate", "lazy"])
@pytest.mark.parametrize(
    ("dtype", "kind"), [(torch.float32, "adamw"), (torch.bfloat16, "adamw"), (torch.float32, "sgd")]
)
def test_a_full_state_of_before_the_first_step_resets(offload, dtype, kind, policy):
    make_opt = (
        adamw
        if kind == "adamw"
        else lambda model: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, dampening=0.5)
    )
    control, model = tiny(dtype), tiny(dtype)
    theirs = reference.ReferenceOptimizer(make_opt(control))
    model, opt = offload(model, make_opt(model), policy=policy)
    before = opt.state_dict(full=True)
    assert before["state"] == {}
    for step in range(3):
        assert train_step(model, opt, step) == train_step(control, theirs, step)
    for each in (model, control):
        loss_of(each, batch(3)).backward()  # and what was speculated with the old state is void
    opt.load_state_dict(before)
    for entry in theirs.state.values():
        entry["step"] = 0
        for plane in "mv":
            entry[f"kept_{plane}"].zero_()
    assert opt.state_dict(full=True)["state"] == {}
    for each in (opt, theirs):
        each.step(), each.zero_grad()
    if kind == "adamw":
        assert {entry["step"].item() for entry in opt.state_dict(full=True)["state"].values()} == {
            1.0
        }
    for step in range(4, 7):
        assert train_step(model, opt, step) == train_step(control, theirs, step)
    assert_same(weights(model), weights(control))


def test_a_parameter_that_a_full_state_lacks_begins_anew(offload):
    """As in torch, in the next run of the store too."""
    model, opt = offload(tiny())
    for step in range(3):
        train_step(model, opt, step)
    full = opt.state_dict(full=True)
    del full["state"][2]
    opt.load_state_dict(full)
    opt.close()
    model, opt = offload(tiny(), resume=True)
    loaded = opt.state_dict(full=True)["state"]
    assert loaded.keys() == full["state"].keys()
    train_step(model, opt, 3)
    after = opt.state_dict(full=True)["state"]
    assert {index: entry["step"].item() for index, entry in after.items()} == {
        index: 1.0 if index == 2 else 4.0 for index in after
    }
    fresh = adamw(tiny())
    opt.load_state_dict(fresh.state_dict())
    assert opt.state_dict(full=True)["state"] == {}


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_state_from_before_is_taken_over(offload, kind):
    def make_opt(model):
        if kind == "sgd":
            return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        return adamw(model, fused=True)

    control, model = tiny(), tiny()
    theirs, ours = make_opt(control), make_opt(model)
    for step in range(3):
        train_step(control, theirs, step), train_step(model, ours, step)
    model, ours = offload(model, ours)
    for step in range(3, 6):
        train_step(control, theirs, step), train_step(model, ours, step)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, control.state_dict()[name], rtol=1e-4, atol=1e-5)
    full, expected = (each["state"] for each in (ours.state_dict(full=True), theirs.state_dict()))
    assert {index: entry.keys() for index, entry in full.items()} == {
        index: entry.keys() for index, entry in expected.items()
    }
    for index, entry in expected.items():
        for name, value in entry.items():
            torch.testing.assert_close(full[index][name], value, rtol=1e-3, atol=1e-5)


def test_plain_sgd_has_no_state(offload):
    plain = lambda model: torch.optim.SGD(model.parameters(), lr=0.05)
    for dtype, path in ((torch.float32, "f"), (torch.bfloat16, "b")):
        both(
            offload,
            lambda dtype=dtype: tiny(dtype),
            lambda model, opt: [train_step(model, opt, step) for step in range(3)],
            options=plain,
            dram="24MiB",
            path=path,
        )


def test_groups_and_options(offload):
    model, opt = offload(tiny())
    with pytest.raises(errors.InvalidArgument, match="add the group first"):
        opt.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
    assert isinstance(opt, torch.optim.Optimizer)
    assert len(opt.param_groups[0]["params"]) == len(list(model.parameters()))


@pytest.mark.parametrize("before", [True, False])
def test_schedulers(offload, before):
    def loop(model, opt, scheduler):
        lrs = []
        for step in range(4):
            lrs.append(opt.param_groups[0]["lr"])
            train_step(model, opt, step)
            scheduler.step()
        return lrs

    make = lambda opt: torch.optim.lr_scheduler.CosineAnnealingLR(opt, 4)
    control, model = tiny(), tiny()
    theirs = reference.ReferenceOptimizer(adamw(control))
    expected = loop(control, theirs, make(theirs))
    original = adamw(model)
    scheduler = make(original) if before else None
    model, opt = offload(model, original)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert loop(model, opt, scheduler or make(opt)) == expected
    assert_same(weights(model), weights(control))


# -- loops -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
def test_grad_scaler_skips(offload, policy):
    """In the first step too, where nothing is known of the loop yet, twice in a row, and in a pause
    of auto: unscaling is in vain for speculation."""

    def loop(model, opt):
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
        seen = []
        for step in range(10):
            scaler.scale(loss_of(model, batch(step))).backward()
            if step in (0, 2, 3, 8):
                model.head.weight.grad[0, 0] = float("inf")
            scaler.unscale_(opt)
            seen.append(float(nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()
            seen.append(scaler.get_scale())
        return str(seen)

    _, opt, _ = both(offload, tiny, loop, policy=policy)
    assert opt.step_count == 6
    assert opt.ledger.last["policy"] == ("lazy" if policy == "auto" else policy)


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("whose", ["opt", "model"])
def test_zero_grad(offload, to_none, whose):
    def loop(model, opt):
        seen = []
        for step in range(4):
            loss = loss_of(model, batch(step))
            loss.backward()
            if step == 1:  # these gradients are thrown away
                (opt if whose == "opt" else model).zero_grad(set_to_none=to_none)
                loss = loss_of(model, batch(step, 1))
                loss.backward()
            opt.step()
            (opt if whose == "opt" else model).zero_grad(set_to_none=to_none)
            seen.append(loss.item())
        return seen

    both(offload, tiny, loop)


def test_what_an_evaluation_reads_and_takes_is_in_no_row(monkeypatch):
    ledger_module, now = sys.modules[Ledger.__module__], 0.0
    monkeypatch.setattr(ledger_module, "time", types.SimpleNamespace(perf_counter=lambda: now))
    counted = lambda read, written, stalled: {
        "read_bytes": {"weights": read},
        "written_bytes": {"m": written},
        "stall_seconds": {"weights": stalled},
        "kept": 0,
        "redone": 0,
        "wasted": 0,
        "dram_bytes_peak": 0,
    }
    ledger = Ledger()
    ledger.start(counted(5, 5, 0.0))
    ledger.leave(lambda: counted(5, 5, 0.0))
    now = 10.0  # a held-out loss before the training
    ledger.restart(counted(100, 5, 1.0))
    ledger.come_back()
    now = 12.0
    row = ledger.close_step(1, counted(110, 25, 1.5))
    assert (
        row["seconds"],
        row["read_bytes"]["weights"],
        row["written_bytes"]["m"],
        row["stall_seconds"]["weights"],
    ) == (2.0, 10, 20, 0.5)
    now = 13.0  # what was owed is made up for
    ledger.leave(lambda: counted(113, 30, 1.6))
    now = 20.0
    ledger.leave(lambda: pytest.fail("it was left already"))
    ledger.restart(counted(200, 40, 3.0))
    now = 21.0
    ledger.come_back()
    row = ledger.close_step(2, counted(207, 45, 3.1))
    assert (row["seconds"], row["read_bytes"]["weights"], row["written_bytes"]["m"]) == (
        2.0,
        10,
        20,
    )
    assert abs(row["stall_seconds"]["weights"] - 0.2) < 1e-9
    # as of a teacher: nobody says that it was an evaluation
    ledger.leave(lambda: counted(207, 45, 3.1))
    now = 22.0
    ledger.come_back()
    now = 24.0
    assert ledger.close_step(3, counted(210, 45, 3.1))["seconds"] == 3.0
    assert ledger.summary()["seconds"] == 7.0 and ledger.summary()["read_bytes"] == {"weights": 23}


def test_what_happens_apart_is_in_no_row_however_it_ends(monkeypatch):
    ledger_module, now, read = sys.modules[Ledger.__module__], 0.0, 0
    monkeypatch.setattr(ledger_module, "time", types.SimpleNamespace(perf_counter=lambda: now))
    counted = lambda: {
        "read_bytes": {"weights": read},
        "written_bytes": {},
        "stall_seconds": {},
        "kept": 0,
        "redone": 0,
        "wasted": 0,
        "dram_bytes_peak": 0,
    }
    ledger = Ledger()
    ledger.start(counted())
    now, read = 1.0, 10
    with pytest.raises(ZeroDivisionError), ledger.apart(counted):
        now, read = 5.0, 100
        with ledger.apart(counted):
            now = 6.0
        ledger.come_back()  # a call of the model that would train elsewhere
        now = 7.0
        ledger.restart(counted())  # by somebody who does not know of it
        now, read = 8.0, 200
        raise ZeroDivisionError
    now, read = 10.0, 207
    row = ledger.close_step(1, counted())
    assert (row["seconds"], row["read_bytes"]) == (3.0, {"weights": 17})
    with ledger.apart(lambda: None if now > 10.0 else counted()):  # in which everything is closed
        now = 11.0
    ledger.restart(counted())
    now = 12.0
    assert ledger.close_step(2, counted())["seconds"] == 1.0


def test_a_state_dict_and_snapshots_are_a_checkpoint_and_no_computing(
    offload, tmp_path, monkeypatch
):
    """Nothing takes time here but a second for each file that is reserved, each snapshot and each
    that is dropped: 1, 2 and 3 of them."""
    now, taken, reserve = 0.0, [], access._reserve

    def slow(what, run):
        def slowly(*args):
            nonlocal now
            now += 1.0
            taken.append(what)
            return run(*args)

        return slowly

    monkeypatch.setattr(
        sys.modules[Ledger.__module__], "time", types.SimpleNamespace(perf_counter=lambda: now)
    )
    monkeypatch.setattr(access, "_reserve", slow("reserve", reserve))
    model, opt = offload(tiny(), snapshots=1)
    store = opt._session.planes.store
    opt._session.snapshots._store = types.SimpleNamespace(
        info=store.info, snapshot=slow("snapshot", store.snapshot), drop=slow("drop", store.drop)
    )
    rows = []
    opt.ledger.on_step(rows.append)
    for step in range(4):
        train_step(model, opt, step)
        opt.flush()  # kernels that are still at work would be computing
        if step == 0:
            model.layers[0].up.state_dict()
        elif step < 3:
            assert opt.snapshot() == step + 1
        if step == 2:
            opt.drop_snapshot(3)
    assert taken == ["reserve", "snapshot", "drop", "snapshot", "drop"]
    assert (
        [row["stall_seconds"]["checkpoint"] for row in rows]
        == [row["seconds"] for row in rows]
        == [0.0, 1.0, 1.0, 3.0]
    )
    assert all(row["compute_seconds"] == 0.0 for row in rows)


def test_closure(offload):
    def loop(model, opt):
        seen = []
        for step in range(3):

            def closure():
                opt.zero_grad()
                loss = loss_of(model, batch(step))
                loss.backward()
                return loss

            seen.append(opt.step(closure).item())
        return seen

    control, ours = tiny(), tiny()
    theirs = reference.ReferenceOptimizer(adamw(control))
    expected = [train_step(control, theirs, step) for step in range(3)]
    ours, opt = offload(ours)
    assert loop(ours, opt) == expected
    assert_same(weights(ours), weights(control))


def test_evaluation_between_steps_and_before_step(offload):
    def loop(model, opt):
        seen = []
        for step in range(4):
            loss_of(model, batch(step)).backward()
            model.eval()
            with torch.no_grad():
                seen.append(loss_of(model, batch(50 + step)).item())  # the version before this step
            model.train()
            opt.step()
            model.eval()
            with torch.inference_mode():
                seen.append(loss_of(model, batch(50 + step)).item())
            model.train()
            opt.zero_grad()
        return seen

    both(offload, wide, loop, dram=TIGHT)


def test_generation_reads_nothing_it_has(offload):
    model, opt = offload(tiny(), dram="16MiB")
    train_step(model, opt, 0)
    control = tiny()
    train_step(control, reference.ReferenceOptimizer(adamw(control)), 0)

    def generate(m):
        tokens = batch(3)[:, :4]
        with torch.no_grad():
            for _ in range(12):
                tokens = torch.cat([tokens, m(tokens)[:, -1:].argmax(-1)], 1)
        return tokens

    generate(model.eval())
    before = opt._session.counters()["read_bytes"]["weights"]
    assert torch.equal(generate(model), generate(control.eval()))
    assert opt._session.counters()["read_bytes"]["weights"] == before


def test_generation_keeps_a_fixed_part_of_the_weights(offload):
    """Blocks are used round and round. With room for about half of them each pass reads the other
    half, and what is fetched just before its use takes the place of some more; if what was used
    longest ago had to go, which is what comes next, each pass would read all.
    """
    control, model = tiny(layers=20, width=128), tiny(layers=20, width=128)
    snug = smallest_mib(
        partition(model, model.parameters()), algorithm_of(adamw(model)), 1 << 17, spills=False
    )
    model, opt = offload(model, dram=f"{snug + 6}MiB")
    pager, passes = opt._session.pager, []
    model.eval(), control.eval()
    with torch.no_grad():
        tokens = batch(3)[:, :4]
        for _ in range(14):
            before = opt._session.counters()["read_bytes"]["weights"]
            logits = model(tokens)
            passes.append(opt._session.counters()["read_bytes"]["weights"] - before)
            assert torch.equal(logits, control(tokens))
            tokens = torch.cat([tokens, logits[:, -1:].argmax(-1)], 1)
    size = {block: block.slot_bytes for block in opt._session.blocks}
    total, largest, held = (
        sum(size.values()),
        max(size.values()),
        sum(size[block] for block in pager.slots),
    )
    assert total / 3 < held < 2 * total / 3, (held, total)
    # the first pass made the record, the second one found what it left
    again = sum(passes[2:]) / len(passes[2:])
    assert total - held <= again + largest and again <= total - held + 3 * largest < total, (
        passes,
        total,
        held,
        largest,
    )


def test_parts_called_on_their_own(offload):
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder = nn.Sequential(nn.Linear(16, 256), nn.GELU(), nn.Linear(256, 256))
            self.heads = nn.ModuleDict({"a": nn.Linear(256, 16), "b": nn.Linear(256, 16)})

    def make():
        torch.manual_seed(1)
        return Two()

    def loop(model, opt):
        seen = []
        for step in range(6):
            x = torch.randn(4, 16, generator=torch.Generator().manual_seed(step))
            loss = model.heads["ab"[step % 2]](model.encoder(x)).square().mean()
            loss.backward()
            opt.step()
            opt.zero_grad()
            seen.append(loss.item())
        return seen

    both(offload, make, loop, dram=TIGHT)


def test_order_that_departs_from_the_record(offload):
    def make():
        torch.manual_seed(0)
        return Skips(layers=5, width=128)

    def loop(model, opt):
        rng = random.Random(3)
        seen = []
        for step in range(10):
            model.skip = {index for index in range(5) if rng.random() < 0.4}
            seen.append(train_step(model, opt, step))
        return seen

    _, opt, _ = both(offload, make, loop, dram=TIGHT)
    assert any(event["what"] == "order" for event in opt.ledger.events)


def test_two_forwards_before_one_backward(offload):
    def loop(model, opt):
        seen = []
        for step in range(4):
            loss = loss_of(model, batch(step)) + 0.5 * loss_of(model, batch(step, 1))
            loss.backward()
            opt.step()
            opt.zero_grad()
            seen.append(loss.item())
        return seen

    both(offload, wide, loop, dram=TIGHT)


def test_backward_twice(offload):
    def loop(model, opt):
        for step in range(3):
            loss = loss_of(model, batch(step))
            loss.backward(retain_graph=True)
            loss.backward()
            opt.step()
            opt.zero_grad()
        return loss.item()

    both(offload, wide, loop, dram=TIGHT)


def test_backward_after_step_is_an_error(offload):
    model, opt = offload(tiny())
    loss = loss_of(model, batch(0))
    loss.backward(retain_graph=True)
    opt.step()
    with pytest.raises((errors.StokerError, RuntimeError), match="before opt.step"):
        loss.backward()


def test_user_keeps_a_gradient(offload):
    model, opt = offload(tiny())
    loss_of(model, batch(0)).backward()
    held = model.head.weight.grad
    copied = held.clone()
    opt.step()
    opt.zero_grad()
    for step in range(1, 4):
        train_step(model, opt, step)
    assert torch.equal(held, copied)


@pytest.mark.parametrize(
    "between",
    [
        "nothing",
        "held gradients",
        "evaluation",
        "a second forward",
        "zeroed gradients",
        "an abandoned step",
    ],
)
def test_gradient_memory_is_lent_during_forward(offload, monkeypatch, between):
    """State is read ahead into memory of gradients that do not exist then; nobody sees it there."""
    lent = []
    recall = Gradients._recall
    monkeypatch.setattr(
        Gradients, "_recall", lambda self, unit: (lent.append(unit), recall(self, unit))
    )

    def loop(model, opt):
        held, seen = [], []
        for step in range(6):
            if between == "a second forward":
                seen.append(loss_of(model, batch(step, 1)).item())
            loss = loss_of(model, batch(step))
            loss.backward()
            if between == "held gradients":
                held += [
                    (p.grad[:1], p.grad[:1].clone()) for p in model.layers[step % 4].parameters()
                ]
            if between != "an abandoned step" or step % 2:
                opt.step()
            opt.zero_grad(set_to_none=between != "zeroed gradients" or step % 2 == 0)
            if between == "evaluation":
                with torch.no_grad():
                    seen.append(loss_of(model.eval(), batch(step)).item())
                model.train()
            seen.append(loss.item())
        assert all(torch.equal(view, copied) for view, copied in held)
        return seen

    _, opt, _ = both(offload, lambda: tiny(torch.bfloat16, width=256), loop, dram=SNUG)
    assert lent
    assert opt._session.planes.session.counters()["tiles_prefetched"] > 0


@pytest.mark.parametrize("after", [1, 2, 4])
def test_an_interrupt_while_memory_is_lent(offload, monkeypatch, after):
    """Ctrl-C between the core's lend() and its return to Python: the memory is known to be lent all
    the same."""
    make = lambda: tiny(torch.bfloat16, width=256, layers=6)
    control = make()
    expected = reference.ReferenceOptimizer(adamw(control))
    model, opt = offload(make(), dram=SNUG)
    gradients = opt._session.gradients
    core = gradients._session

    class Interrupted:
        left = 0  # calls until one is interrupted; 0: none is

        def __getattr__(self, name):
            return getattr(core, name)

        def lend(self, address, size):
            places = core.lend(address, size)
            if self.left and places:
                self.left -= 1
                if not self.left:
                    raise KeyboardInterrupt
            return places

    between = Interrupted()
    monkeypatch.setattr(gradients, "_session", between)
    interrupts = 0
    for step in range(8):
        loss_of(control, batch(step)).backward()
        # it fires: speculation stops, and tiles stay where they are
        reference.clip(list(control.parameters()), 0.5)
        expected.step()
        expected.zero_grad()
        between.left = after if step == 4 else 0
        try:
            loss_of(model, batch(step)).backward()
        except KeyboardInterrupt:
            interrupts += 1
            loss_of(model, batch(step)).backward()
        opt.clip_grad_norm_(0.5)
        opt.step()
        opt.zero_grad()
        assert_same({**weights(model), "seen": control.seen}, weights(control))
    assert interrupts == 1


@pytest.mark.parametrize("policy", ["speculate", "auto", "lazy"])
def test_stochastic_depth(offload, policy):
    """Each step uses other layers: units that were read ahead get no gradient, and their tiles must
    not starve the others."""

    def make():
        torch.manual_seed(0)
        return Skips(layers=6, width=256).to(torch.bfloat16)

    def loop(model, opt):
        rng, seen = random.Random(1), []
        for step in range(25):
            model.skip = {index for index in range(6) if rng.random() >= 0.6}
            seen.append(train_step(model, opt, step))
        return seen

    both(offload, make, loop, dram=TIGHT, policy=policy)


@pytest.mark.parametrize(
    "change", ["scale", "replace", "none", "assign", "lr", "noise in place of data"]
)
def test_changes_between_backward_and_step(offload, change):
    def loop(model, opt):
        seen = []
        for step in range(5):
            loss_of(model, batch(step)).backward()
            param = model.layers[1].up.weight
            if step % 2:
                if change == "scale":
                    param.grad.mul_(0.5)
                elif change == "replace":
                    param.grad = torch.ones_like(param.grad)
                elif change == "none":
                    param.grad = None
                elif change == "assign":
                    param.grad.data = torch.full_like(param.grad, 0.25)
                elif change == "lr":
                    opt.param_groups[0]["lr"] *= 0.5
                else:
                    param.grad.data.view(-1)[7] += 1.0
            opt.step()
            seen.append(opt.param_groups[0]["lr"])
            opt.zero_grad()
        return seen

    both(offload, tiny, loop)


def test_step_without_backward(offload):
    def loop(model, opt):
        opt.step()
        train_step(model, opt, 0)
        opt.step()
        opt.step()
        return train_step(model, opt, 1)

    _, opt, _ = both(offload, tiny, loop)
    opt.flush()
    assert opt.committed_step == opt.step_count == 5


def test_parameters_without_gradients(offload):
    """Unused layers, and layers used in some steps only; their weights decay only with a gradient,
    as in torch."""

    class Partial(Tiny):
        def forward(self, tokens):
            x = self.embed(tokens)
            for layer in self.layers[: self.used]:
                x = layer(x)
            return self.head(self.norm(x))

    def make():
        torch.manual_seed(0)
        return Partial(layers=4, width=128)

    def loop(model, opt):
        seen = []
        for step in range(8):
            model.used = 1 + step % 3
            seen.append(train_step(model, opt, step))
        return seen

    _, opt, _ = both(offload, make, loop, dram=TIGHT)
    full = opt.state_dict(full=True)["state"]
    assert {int(entry["step"]) for entry in full.values()} == {2, 5, 8}


def test_interrupted_forward(offload):
    """torch runs no exit hooks after a KeyboardInterrupt; the next forward must not pass for a part
    of that one."""
    model, opt = offload(tiny(), dram=TIGHT)
    control = tiny()
    theirs = reference.ReferenceOptimizer(adamw(control))
    train_step(model, opt, 0), train_step(control, theirs, 0)

    def interrupt(*_):
        raise KeyboardInterrupt

    for layer in (1, 3):
        handle = model.layers[layer].register_forward_pre_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            loss_of(model, batch(1))
        handle.remove()
        model.seen -= 1
        assert train_step(model, opt, 1 + layer) == train_step(control, theirs, 1 + layer)
    assert_same(weights(model), weights(control))
    assert (
        opt.step_count == 3
        and not opt._session.installed.hooks._stack
        and not any(opt._session.pager.entered)
    )


# -- access ----------------------------------------------------------------------------------------


def test_gather(offload):
    model, opt = offload(tiny(), dram=TIGHT)
    train_step(model, opt, 0)
    params = list(model.parameters())
    expected = weights(model)
    with stoker.gather(params):
        assert all(torch.equal(p, expected[n]) for n, p in model.named_parameters())
    loss_of(model, batch(1)).backward()
    with stoker.gather(model.layers[2].up.weight, write=True), torch.no_grad():
        model.layers[2].up.weight.fill_(0.01)
        inside = loss_of(model, batch(1)).item()  # a forward inside sees what the user wrote
        with pytest.raises(errors.InvalidArgument, match="gather"):
            opt.step()
    with torch.no_grad():
        assert loss_of(model, batch(1)).item() == inside
    assert torch.all(model.state_dict()["layers.2.up.weight"] == 0.01)
    opt.zero_grad()
    with pytest.raises(ZeroDivisionError), stoker.gather(params, write=True), torch.no_grad():
        params[0].zero_()
        raise ZeroDivisionError
    assert torch.equal(model.state_dict()["embed.weight"], expected["embed.weight"])
    with pytest.raises(errors.InvalidArgument, match="offloaded model"):
        with stoker.gather(nn.Parameter(torch.zeros(1))):
            pass
    train_step(model, opt, 2)


def test_same_model_again(offload):
    """After close() the weights are in the store only: a resume takes them up, and nothing else
    takes placeholders for weights."""
    model = tiny().to(memory_format=torch.channels_last)
    model, opt = offload(model)
    train_step(model, opt, 0)
    with pytest.raises(errors.InvalidArgument, match="offloaded already"):
        offload(model, adamw(model), path="other")
    expected = weights(model)
    opt.close()
    with pytest.raises(errors.StokerError, match=r"Call state_dict\(\) before close\(\)"):
        model.state_dict()
    with pytest.raises(errors.InvalidArgument, match="resume=True with that store"):
        offload(model, adamw(model), path="other")
    model, opt = offload(model, adamw(model), resume=True)
    assert_same(weights(model), expected)
    train_step(model, opt, 1)
    opt.close()
    halves = [{"params": list(model.parameters())[:3]}, {"params": list(model.parameters())[3:]}]
    with pytest.raises(errors.Mismatch, match="1 parameter groups, but the optimizer has 2"):
        offload(model, torch.optim.AdamW(halves), resume=True)


@pytest.mark.parametrize("policy", ["sync", "speculate", "lazy"])
@pytest.mark.parametrize("through", ["p.grad", "autograd.grad"])
def test_a_penalty_on_gradients(offload, through, policy):
    """backward(create_graph=True): the penalty's graph goes through p.grad, which must stay the
    tensor that torch made."""

    def loop(model, opt):
        losses, params = [], list(model.parameters())
        for step in range(3):
            opt.zero_grad()
            loss = model(torch.full((2, 128), 0.1 * step + 0.1)).square().mean()
            if through == "p.grad":
                loss.backward(create_graph=True)
                grads = [param.grad for param in params]
            else:
                grads = torch.autograd.grad(loss, params, create_graph=True)
            penalty = sum(grad.square().sum() for grad in grads)
            (penalty if step == 2 and through == "p.grad" else loss + penalty).backward()
            opt.step()
            losses.append(penalty.item())
        return losses

    def make():
        torch.manual_seed(0)
        layers = [each for _ in range(6) for each in (nn.Linear(128, 128), nn.Tanh())]
        return nn.Sequential(*layers, nn.Linear(128, 1))

    both(offload, make, loop, policy=policy)


# -- unusual models --------------------------------------------------------------------------------


class Outside(nn.Module):
    """Uses weights of modules that it does not call."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.embed = nn.Embedding(96, 64)
        self.other = nn.Linear(64, 512)
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))
        self.wide = nn.ModuleList(nn.Linear(64, 1024) for _ in range(4))
        self.extra = nn.ParameterList([torch.randn(64) * 0.1, torch.randn(64) * 0.1])
        self.head = nn.Linear(64, 96)
        self.where = where

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        for wide in self.wide:
            x = x + torch.tanh(wide(x)[..., :64])
        if self.where == "linear":
            x = x + torch.tanh(
                F.linear(F.linear(x, self.other.weight, self.other.bias), self.other.weight.t())
            )
        elif self.where == "matmul":
            x = x + (x @ self.layers[2].weight).tanh() + self.other.weight.mean()
        elif self.where == "data":
            x = x + self.layers[1].bias.data + self.other.bias.sum()
        return self.head(x + self.extra[0] * self.extra[1])


@pytest.mark.parametrize("where", ["linear", "matmul", "data"])
def test_weights_used_outside_their_module(offload, where):
    def make():
        torch.manual_seed(0)
        return Outside(where)

    def loop(model, opt):
        seen = []
        for step in range(4):
            seen.append(train_step(model, opt, step))
            with torch.no_grad():
                seen.append(loss_of(model.eval(), batch(step)).item())
            model.train()
        return seen

    _, opt, _ = both(offload, make, loop, dram="9MiB")
    assert any(event["what"] == "pinned" for event in opt.ledger.events)


@pytest.mark.parametrize("kind", ["layer", "attention", "encoder"])
def test_transformer_modules(offload, kind):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(96, 64)
            layer = lambda: nn.TransformerEncoderLayer(64, 4, 256, dropout=0.0, batch_first=True)
            self.body = {
                "layer": layer,
                "attention": lambda: nn.MultiheadAttention(64, 4, batch_first=True),
                "encoder": lambda: nn.TransformerEncoder(layer(), 3, enable_nested_tensor=False),
            }[kind]()
            self.head = nn.Linear(64, 96)

        def forward(self, tokens):
            x = self.embed(tokens)
            x = self.body(x, x, x, need_weights=False)[0] if kind == "attention" else self.body(x)
            return self.head(x)

    def make():
        torch.manual_seed(0)
        return Model()

    def loop(model, opt):
        return [train_step(model, opt, step) for step in range(4)]

    model, opt, control = both(offload, make, loop, dram=TIGHT)
    for _ in range(3):  # torch has other kernels for this, and hooks keep it from taking them
        with torch.no_grad():
            torch.testing.assert_close(
                model.eval()(batch(7)), control.eval()(batch(7)), rtol=1e-4, atol=1e-5
            )
    assert not any(event["what"] == "pinned" for event in opt.ledger.events)


def test_sequential_with_convolutions_and_batch_norm(offload, tmp_path):
    def make():
        torch.manual_seed(0)
        layers = [
            nn.Conv2d(3, 16, 3),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(32 * 4 * 4, 8),
        ]
        return nn.Sequential(*layers).to(memory_format=torch.channels_last)

    def steps(model, opt, first, last):
        for step in range(first, last):
            x = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(step)).to(
                memory_format=torch.channels_last
            )
            model(x).square().mean().backward()
            opt.step()
            opt.zero_grad()

    control = make()
    steps(control, torch.optim.AdamW(control.parameters(), lr=1e-3, fused=True), 0, 6)
    model = make()
    model, opt = offload(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    steps(model, opt, 0, 3)
    opt.close()
    model = make()
    model, opt = offload(model, torch.optim.AdamW(model.parameters(), lr=1e-3), resume=True)
    assert int(model[1].num_batches_tracked) == 3
    steps(model, opt, 3, 6)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, control.state_dict()[name], rtol=1e-4, atol=1e-6)
        assert value.stride() == control.state_dict()[name].stride()


def test_recurrent_and_scalar_parameters(offload):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(96, 32)
            self.rnn = nn.LSTM(32, 32, num_layers=2, batch_first=True)
            self.scale = nn.Parameter(torch.tensor(1.5))
            self.head = nn.Linear(32, 96)

        def forward(self, tokens):
            return self.head(self.rnn(self.embed(tokens))[0] * self.scale)

    def make():
        torch.manual_seed(0)
        return Model()

    both(offload, make, lambda model, opt: [train_step(model, opt, step) for step in range(4)])


def test_empty_parameters(offload):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.empty = nn.Parameter(torch.zeros(0, 4))
            self.head = nn.Linear(8, 8)

        def forward(self, x):
            return self.head(x) + self.empty.sum()

    model, opt = offload(Model())
    for _ in range(3):
        model(torch.ones(1, 8)).sum().backward()
        opt.step()
        opt.zero_grad()
    assert model.state_dict()["empty"].shape == (0, 4)


def test_sparse_gradients(offload):
    def make(sparse):
        torch.manual_seed(0)
        return nn.Sequential(nn.Embedding(100, 16, sparse=sparse), nn.Linear(16, 4))

    results = []
    for sparse in (False, True):
        model = make(sparse)
        model, opt = offload(model, torch.optim.SGD(model.parameters(), lr=0.1), path=str(sparse))
        for _ in range(3):
            model(torch.arange(5)).square().sum().backward()
            opt.clip_grad_norm_(0.1)
            opt.step()
            opt.zero_grad()
        results.append(weights(model))
    assert_same(*results)


# -- what offload() refuses ------------------------------------------------------------------------


@pytest.mark.parametrize("amount", [2e7, -5, 0, "0", True, None, 1 << 70])
def test_amounts_of_memory_that_are_none_are_sentences(offload, tmp_path, amount):
    """Each names its argument."""
    with pytest.raises(
        errors.InvalidArgument, match="^dram: .* is not an amount of memory; give a whole number"
    ):
        offload(tiny(), dram=amount)
    with pytest.raises(errors.InvalidArgument, match="^dram: .* is not an amount of memory"):
        stoker.build(tiny, store=tmp_path / "built", dram=amount)
    if amount is not None:
        with pytest.raises(
            errors.InvalidArgument, match="^device_memory: .* is not an amount of memory"
        ):
            offload(tiny(), path="other", device_memory=amount)


@pytest.mark.parametrize("seconds", [0, -1, 2.5, True, "300"])
def test_a_patience_that_is_none_is_a_sentence(offload, tmp_path, seconds):
    sentence = (
        "^stall_seconds: .* is not a time to wait for a disk; give a whole number of seconds, at"
        " least 1"
    )
    with pytest.raises(errors.InvalidArgument, match=sentence):
        offload(tiny(), stall_seconds=seconds)
    with pytest.raises(errors.InvalidArgument, match=sentence):
        stoker.build(tiny, store=tmp_path / "built", dram=DRAM, stall_seconds=seconds)
    assert os.listdir(tmp_path) == []  # nothing was made


def test_the_patience_for_a_disk_can_be_chosen(offload, tmp_path, monkeypatch):
    given, real = [], _core.Runtime

    def noting(**how):
        given.append(how["stall_seconds"])
        return real(**how)

    monkeypatch.setattr(_core, "Runtime", noting)
    model = stoker.build(tiny, store=tmp_path / "store", dram=DRAM, stall_seconds=6)
    offload(model, stall_seconds=7)
    offload(tiny(), path="other")
    assert given == [6, 7, 300]


def test_an_amount_of_memory_is_any_whole_number(offload):
    model, opt = offload(tiny(), dram=torch.tensor(16 << 20))
    train_step(model, opt, 0)
    assert opt._session.planes.dram_bytes == 16 << 20


def test_sentences_about_optimizers(offload):
    model = tiny()
    cases = [
        (torch.optim.RMSprop(model.parameters()), "RMSprop cannot be offloaded"),
        (adamw(model, amsgrad=True), r"AdamW\(amsgrad=True\)"),
        (
            torch.optim.AdamW([*model.parameters(), nn.Parameter(torch.zeros(2))]),
            "1 parameters that are not the model's",
        ),
    ]
    for opt, sentence in cases:
        with pytest.raises(errors.InvalidArgument, match=sentence):
            offload(model, opt)
    with pytest.raises(errors.InvalidArgument, match="convert the model first"):
        offload(tiny(torch.float16))
    with pytest.raises(errors.InvalidArgument, match="'fast' is not one of auto, sync, speculate"):
        offload(model, policy="fast")
    with pytest.raises(errors.InvalidArgument, match="dram"):
        offload(model, dram="7 potatoes")
    frozen = tiny()
    opt = torch.optim.AdamW(frozen.parameters())
    frozen.requires_grad_(False)
    with pytest.raises(errors.InvalidArgument, match="nothing to train"):
        offload(frozen, opt)
    with torch.device("meta"):
        meta = Tiny(layers=2)
    with pytest.raises(errors.InvalidArgument, match=r"meta device.*stoker.build\(\)"):
        offload(meta, path="meta")
    offload(model)  # what was refused took nothing
    assert not any(torch.isnan(value).any() for value in model.state_dict().values())


@pytest.mark.parametrize("resumes", [False, True])
def test_a_model_on_the_meta_device(offload, tmp_path, resumes):
    """Its weights come from a folder of safetensors, or from the store of a run; optimizer and
    users keep the parameters they have."""
    from safetensors.torch import save_file

    source = tiny(torch.bfloat16)
    save_file(source.state_dict(), tmp_path / "weights.safetensors")
    control = tiny(torch.bfloat16)
    theirs = reference.ReferenceOptimizer(adamw(control))
    with torch.device("meta"):
        model = Tiny(layers=4).to(torch.bfloat16)
    kept, its = list(model.parameters()), adamw(model)
    save_file(
        {name: value for name, value in source.state_dict().items() if name != "seen"},
        tmp_path / "other.safetensors",
    )
    with pytest.raises(
        errors.InvalidArgument,
        match=(
            r"buffer seen is on the meta device, and its values are not in .*include_buffers=False"
        ),
    ):
        offload(model, its, weights=tmp_path / "other.safetensors")
    with pytest.raises(errors.OverBudget):
        offload(model, its, weights=tmp_path / "weights.safetensors", dram="2MiB")
    with pytest.raises(
        errors.InvalidArgument,
        match=r"parameter embed.weight is on the meta device.*stoker.build\(\)",
    ):
        offload(model, its)  # no longer there, but still without values
    model, opt = offload(model, its, weights=tmp_path / "weights.safetensors")
    assert all(a is b for a, b in zip(kept, model.parameters()))
    for step in range(2):
        assert train_step(model, opt, step) == train_step(control, theirs, step)
    if resumes:
        opt.close()
        with torch.device("meta"):
            model = Tiny(layers=4).to(torch.bfloat16)
        model, opt = offload(model, resume=True)
    for step in range(2, 4):
        assert train_step(model, opt, step) == train_step(control, theirs, step)
    assert_same(weights(model), weights(control))


def test_sentences_about_stores(offload, tmp_path):
    with pytest.raises(errors.NotFound, match="holds no run to resume"):
        offload(tiny(), resume=True)
    model, opt = offload(tiny())
    with pytest.raises(errors.Busy, match=str(os.getpid())):
        offload(tiny())
    opt.close()
    with pytest.raises(errors.AlreadyExists, match="resume=True"):
        offload(tiny())
    with pytest.raises(errors.Mismatch, match="holds another model"):
        offload(tiny(width=128), resume=True)
    other = tiny()
    with pytest.raises(errors.Mismatch, match="adamw state, but the optimizer is sgd"):
        offload(other, torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9), resume=True)
    for again in (
        lambda: opt.step(),
        lambda: opt.flush(),
        lambda: opt.state_dict(),
        lambda: opt.clip_grad_norm_(1.0),
    ):
        with pytest.raises(errors.StokerError, match="was closed"):
            again()
    opt.close()
    offload(tiny(), resume=True)


@pytest.mark.parametrize(
    ("then", "now", "sentence"),
    [
        (0.9, 0.0, "was trained with momentum, but this optimizer has none"),
        (0.0, 0.9, "was trained without momentum, but this optimizer has some"),
    ],
)
def test_a_resume_with_other_momentum_is_told_so(offload, then, now, sentence):
    model, other = tiny(), tiny()
    offload(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=then))[1].close()
    with pytest.raises(errors.Mismatch, match=sentence):
        offload(other, torch.optim.SGD(other.parameters(), lr=0.1, momentum=now), resume=True)


@pytest.mark.parametrize("make", [tiny, wide])
def test_smallest_budget_is_the_smallest(offload, make):
    """The budget that the message names works for training, and one MiB less does not get as far as
    that."""
    model, opt = offload(make(), dram=TIGHT)
    mib = opt.plan()["dram"]["cap"] >> 20
    for step in range(3):
        train_step(model, opt, step)
    opt.close()
    with pytest.raises(errors.OverBudget, match=rf'dram="{mib}MiB"'):
        offload(make(), dram=f"{mib - 1}MiB", path="other")


def test_conversion_after_offload(offload):
    model, opt = offload(tiny())
    with pytest.raises(errors.InvalidArgument, match="convert the model first"):
        loss_of(model.bfloat16(), batch(0))
    model, opt = offload(tiny(), path="second")
    model.layers[0].requires_grad_(False)
    with pytest.raises(errors.InvalidArgument, match="before offloading"):
        loss_of(model, batch(0))


# -- resume ----------------------------------------------------------------------------------------


class Counter(Loader):
    """Follows the optimizer: moves on after step()."""

    __iter__ = __next__ = property()


def journey(model, opt, attach: bool, steps: int, stop_after: int | None = None):
    """A usual loop. Returns what each step saw: data, noise, learning rate, average, loss."""
    scheduler = torch.optim.lr_scheduler.LambdaLR(opt, lambda s: 1 / (1 + 0.5 * s))
    loader, counter = Loader(), Counter()
    if attach:
        opt.attach(scheduler=scheduler, loader=loader, counter=counter)
    seen = {}
    while (index := next(loader)) < steps:
        noise = torch.rand(()).item() + random.random()
        loss = loss_of(model, batch(index)) * noise
        loss.backward()
        opt.step()
        seen[counter.next] = (index, noise, opt.param_groups[0]["lr"], loss.item())
        if index == stop_after:
            return seen
        scheduler.step()
        counter.next += 1
        opt.zero_grad()
    return seen


@pytest.mark.parametrize("resumed_path", ["crashed", "store"])
def test_resume_is_never_off_by_one(offload, tmp_path, resumed_path):
    """Killed between step() and scheduler.step(): that step is gone, and everything else stands at
    the one before."""
    torch.manual_seed(7), random.seed(7)
    control = tiny()
    torch.manual_seed(7), random.seed(7)
    expected = journey(control, reference.ReferenceOptimizer(adamw(control)), False, 7)
    model, opt = offload(tiny())
    torch.manual_seed(7), random.seed(7)
    seen = journey(model, opt, True, 7, stop_after=4)
    if resumed_path == "crashed":
        shutil.copytree(tmp_path / "store", tmp_path / "crashed")  # what a kill leaves
        at = 4
    else:
        opt.zero_grad()
        opt.close()  # flushed before the scheduler stepped: all as it was at that moment
        at = 5
    torch.manual_seed(99), random.seed(99)
    model, opt = offload(tiny(), path=resumed_path, resume=True)
    assert opt.step_count == opt.committed_step == at
    rest = journey(model, opt, True, 7)
    if at == 4:
        assert {**seen, **rest} == expected
        assert_same(weights(model), weights(control))
    else:
        assert [row[0] for row in rest.values()] == [5, 6]


def test_an_interrupt_in_a_loaders_state_dict_decides_nothing(offload):
    """It was read behind the decision once: closing then committed the step with the position of
    the one before."""

    class Slow(Loader):
        interrupted = False

        def state_dict(self):
            if self.interrupted:
                raise KeyboardInterrupt
            return super().state_dict()

    control = tiny()
    theirs = reference.ReferenceOptimizer(adamw(control))
    model, opt = offload(tiny())
    loader = Slow()
    opt.attach(loader=loader)
    for step in range(2):
        assert train_step(model, opt, next(loader)) == train_step(control, theirs, step)
    loader.interrupted = True
    with pytest.raises(KeyboardInterrupt):
        train_step(model, opt, next(loader))
    loader.interrupted = False
    assert opt.step_count == 2
    opt.close()
    model, opt = offload(tiny(), resume=True)
    opt.attach(loader=(loader := Loader()))
    assert opt.step_count == opt.committed_step == loader.next == 2
    model.seen.copy_(control.seen)  # a buffer that saw the forward of the undecided step
    assert train_step(model, opt, next(loader)) == train_step(control, theirs, 2)
    assert_same(weights(model), weights(control))


def test_a_resume_with_groups_in_another_order_is_refused(offload, monkeypatch):
    """Each group would go on with the hyperparameters of the other."""

    def grouped(model, order=(0, 1), move=()):
        params = dict(model.named_parameters())
        small = [name for name, param in params.items() if (param.ndim < 2) != (name in move)]
        groups = [
            {"params": [params[name] for name in params if name not in small], "weight_decay": 0.5},
            {"params": [params[name] for name in small], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW([groups[i] for i in order], lr=3e-3)

    def begin(path):
        model = tiny()
        model, opt = offload(model, grouped(model), path=path)
        train_step(model, opt, 0)
        opt.close()

    begin("new")
    swapped, moved, right = tiny(), tiny(), tiny()
    with pytest.raises(
        errors.Mismatch,
        match=(
            "has norm.weight in parameter group 1, but .* has it in group 0: .* in the same order"
        ),
    ):
        offload(moved, grouped(moved, move=["norm.weight"]), path="new", resume=True)
    with pytest.raises(errors.Mismatch, match="in the same order"):
        offload(swapped, grouped(swapped, order=(1, 0)), path="new", resume=True)
    model, opt = offload(right, grouped(right), path="new", resume=True)
    assert [group["weight_decay"] for group in opt.param_groups] == [0.5, 0.0]
    record_of = StepRecord.model
    monkeypatch.setattr(
        StepRecord,
        "model",
        lambda self: {key: value for key, value in record_of(self).items() if key != "groups"},
    )
    begin("old")  # a run made before groups were noted goes on as ever
    model = tiny()
    model, opt = offload(model, grouped(model), path="old", resume=True)
    assert opt.step_count == 1


def test_a_resume_that_attaches_less_warns_at_its_first_step(offload):
    model, opt = offload(tiny())
    opt.attach(loader=Loader(), counter=Counter())
    train_step(model, opt, 0)
    opt.close()
    model, opt = offload(tiny(), resume=True)
    opt.attach(loader=Loader())
    with pytest.warns(
        UserWarning,
        match=(
            r"holds the state of counter, but nothing of that name is"
            r" attached.*opt.attach\(counter="
        ),
    ) as told:
        train_step(model, opt, 1)
    assert told[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train_step(model, opt, 2)


def test_hooks_of_the_optimizer_go_on_running(offload):
    """Those registered before stoker.offload() and after it, of every kind that torch knows."""
    model, called = tiny(), []
    opt = adamw(model)
    opt.register_step_pre_hook(lambda *about: called.append("step begins"))
    opt.register_state_dict_post_hook(lambda opt, state: {**state, "more": 1})
    opt.register_load_state_dict_pre_hook(lambda opt, state: called.append(f"load {state['more']}"))
    model, opt = offload(model, opt)
    opt.register_step_post_hook(lambda *about: called.append("step ends"))
    opt.register_state_dict_pre_hook(lambda opt: called.append("save"))
    opt.register_load_state_dict_post_hook(lambda opt: called.append("loaded"))
    train_step(model, opt, 0)
    opt.load_state_dict(opt.state_dict())
    assert called == ["step begins", "step ends", "save", "load 1", "loaded"]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"activations_form": "sparse"}, "activations='keep' stores none"),
        (
            {"activations_form": "bf16", "activations": "recompute"},
            "activations='recompute' stores none",
        ),
        ({"device_memory": "1GiB"}, "device_memory= caps the weights on an accelerator"),
    ],
)
def test_an_option_that_would_do_nothing_is_refused(offload, options, sentence):
    with pytest.raises(errors.InvalidArgument, match=sentence):
        offload(tiny(), **options)


def test_resume_under_another_thread_count_warns(offload):
    model, opt = offload(tiny())
    train_step(model, opt, 0)
    opt.close()
    torch.set_num_threads(2)
    try:
        with pytest.warns(UserWarning, match="threads 1 -> 2.*not bit for bit"):
            model, opt = offload(tiny(), resume="auto")
    finally:
        torch.set_num_threads(1)
    train_step(model, opt, 1)


def test_attach_refuses_what_it_cannot_record(offload):
    model, opt = offload(tiny())
    with pytest.raises(
        errors.InvalidArgument, match="tracker cannot be attached: a int has no state_dict"
    ):
        opt.attach(tracker=3)

    class Odd(Loader):
        def state_dict(self):
            return {"file": object()}

    with pytest.raises(errors.InvalidArgument, match=r"odd.file is a object"):
        opt.attach(odd=Odd())
    train_step(model, opt, 0)
    train_step(model, opt, 1)


# -- faults ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["sync", "speculate", "lazy"])
def test_a_full_store_loses_one_step(offload, policy):
    """Data writes fail for want of space: OutOfSpace, the step before is intact, and training goes
    on once there is room."""
    model, opt = offload(tiny(), dram="16MiB", policy=policy)
    control = tiny()
    theirs = reference.ReferenceOptimizer(adamw(control))
    for step in range(2):
        train_step(model, opt, step), train_step(control, theirs, step)
    opt.flush()
    store = opt._session.planes.store
    fill(store)
    with pytest.raises(errors.OutOfSpace):
        for step in range(2, 6):
            train_step(model, opt, step)
    lost = opt.step_count
    assert lost == opt.committed_step == 2
    opt.zero_grad()
    with torch.no_grad():
        assert loss_of(model.eval(), batch(0)).item() == loss_of(control.eval(), batch(0)).item()
    ours = weights(model)
    assert_same({**ours, "seen": control.seen}, weights(control))
    empty(store)
    model.train(), control.train()
    control.seen.copy_(model.seen)  # buffers are the model's own: they saw the lost forward
    for step in range(2, 5):
        assert train_step(model, opt, step) == train_step(control, theirs, step)
    assert_same(weights(model), weights(control))
    opt.flush()
    assert opt.committed_step == 5


@pytest.mark.parametrize("policy", ["sync", "speculate", "lazy"])
@pytest.mark.parametrize("at", [0, 2])
def test_a_lost_step_takes_back_all_that_belongs_to_it(offload, at, policy):
    """The commit of step `at` fails when its record finds no room, with the next batch drawn and
    the schedule moved on. After room was made the very same loop goes on, and ends with the bits of
    a run that nothing happened to.
    """
    torch.manual_seed(7), random.seed(7)
    control = tiny()
    torch.manual_seed(7), random.seed(7)
    expected = journey(control, reference.ReferenceOptimizer(adamw(control)), False, 5)
    torch.manual_seed(7), random.seed(7)
    rng = torch.get_rng_state(), random.getstate()
    model = tiny()
    torch.set_rng_state(rng[0]), random.setstate(rng[1])
    model, opt = offload(model, dram="16MiB", policy=policy)
    scheduler, loader, counter = (
        torch.optim.lr_scheduler.LambdaLR(opt, lambda s: 1 / (1 + 0.5 * s)),
        Loader(),
        Counter(),
    )
    opt.attach(scheduler=scheduler, loader=loader, counter=counter)
    store, seen, failed = opt._session.planes.store, {}, []
    while (index := next(loader)) < 5:
        noise = torch.rand(()).item() + random.random()
        try:
            loss = loss_of(model, batch(index)) * noise
        except errors.OutOfSpace:
            failed.append(index)
            assert (
                opt.step_count
                == opt.committed_step
                == counter.next
                == loader.next
                == scheduler.last_epoch
                == model.seen
                == at
            )
            assert {opt._session.record.updates.get(param, 0) for param in opt._session.params} == {
                at
            }
            assert opt.param_groups[0]["lr"] == 3e-3 / (1 + 0.5 * at)
            empty(store)
            continue
        loss.backward()
        opt.step()
        seen[counter.next] = (index, noise, opt.param_groups[0]["lr"], loss.item())
        if index == at and not failed:
            fill(store, 4096)
        scheduler.step()
        counter.next += 1
        opt.zero_grad()
    assert failed == [at + 1] and seen == expected
    assert_same(weights(model), weights(control))


def empty(store) -> None:
    txn = store.begin()
    for entry in store.list("garbage"):
        txn.remove(entry["key"])
    txn.commit("durable").wait()


def fill(store, least: int = 1 << 16) -> None:
    """Takes what space there is, to the last `least` bytes."""
    size, index = 32 << 20, 0
    while size >= least:
        try:
            txn = store.begin()
            txn.resize(f"garbage/{index}", size, 1 << 16)
            for offset in range(0, size, 1 << 16):
                txn.write_bytes(f"garbage/{index}", offset, b"x" * min(size, 1 << 16))
            txn.commit("deferred").wait()
            index += 1
        except errors.OutOfSpace:
            txn.abandon()
            size //= 2


@pytest.mark.parametrize(
    "wrong",
    [
        *({"resume": value} for value in ("no", "false", 1, None)),
        *({"snapshots": value} for value in (-1, 1.5, True, "1")),
        *({"accumulate": value} for value in (0, -2, 1.5, True)),
        {"store": ""},
        {"dram": 1 << 60},
    ],
)
def test_arguments_that_are_none_are_sentences_and_make_nothing(tmp_path, wrong):
    model = nn.Linear(4, 4)
    options = {"store": tmp_path / "run", "dram": DRAM, **wrong}
    name = next(iter(wrong))
    with pytest.raises(errors.InvalidArgument, match=f"^{name}: "):
        stoker.offload(model, adamw(model), **options)
    if name in ("snapshots", "dram"):
        with pytest.raises(errors.InvalidArgument, match=f"^{name}: "):
            stoker.build(lambda: nn.Linear(4, 4), **options)
    assert os.listdir(tmp_path) == []


def test_an_optimizer_is_not_copied_and_a_closed_one_says_so(tmp_path):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    initial = {name: value.clone() for name, value in model.state_dict().items()}
    model, opt = stoker.offload(model, adamw(model), store=tmp_path / "run", dram=DRAM)
    state = opt.state_dict(full=True)
    for way in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(errors.Unsupported, match="state_dict.*Checkpoints"):
            way(opt)
    opt.close()
    uses = [
        lambda: opt.load_state_dict(state),
        lambda: model.load_state_dict(initial),
        opt.plan,
        lambda: model[0].load_state_dict({}),
        lambda: opt.snapshots,
        opt.snapshot,
        opt.setting,
        lambda: opt.drop_snapshot(1),
        opt.restart_ledger,
        lambda: opt.attach(),
        opt.step,
    ]
    for use in uses:
        with pytest.raises(errors.StokerError, match="closed"):
            use()


def test_a_module_under_several_names_is_a_block_of_the_first_name():
    """In each process; else the stores of ranks, and of a run and its resume, would differ."""
    model = torch.nn.Module()
    for number in range(6):
        layer = torch.nn.Linear(2, 2)
        for name in ("first", "second", "third", "fourth"):
            setattr(model, f"{name}{number}", layer)
    names = [block.name for block in partition(model, model.parameters())]
    assert names == [f"first{number}" for number in range(6)]
