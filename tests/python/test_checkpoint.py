"""stoker.Checkpoints: what is saved comes back, whatever happens in between."""

from __future__ import annotations

import copy
import os
import random
import signal
import subprocess
import sys
import shutil
import threading
import types
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import stoker
from checkpoint_run import made, train
from faults import ONE_THREAD
from stoker import errors
from stoker.checkpoint import Edited, parts, planes, windows
from stoker.checkpoint import pace as pace_module
from stoker.checkpoint.manifest import well_formed
from stoker.checkpoint.pace import COPY_SHARE, Pace, Rests
from stoker.checkpoint.reading import Reader
from stoker.ckpt import cli as ckpt_cli

HERE = Path(__file__).parent


@pytest.fixture
def folder(tmp_path):
    return f"dir:{tmp_path}/checkpoints"


def checkpoints(store, **kwargs) -> stoker.Checkpoints:
    return stoker.Checkpoints(store, **{"staging": "64MiB", **kwargs})


def copied(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_same(model: nn.Module, expected: dict[str, torch.Tensor]) -> None:
    found = model.state_dict()
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def flip(path: Path, at: int) -> None:
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 0x10]))


@pytest.fixture
def held(monkeypatch):
    """Tensors give no byte to a save until this event is set."""
    event = threading.Event()
    place = parts.Tensor.place

    def wait(self, at):
        assert event.wait(60)
        return place(self, at)

    monkeypatch.setattr(parts.Tensor, "place", wait)
    yield event
    event.set()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_restored_run_goes_on_with_the_same_bits(folder, dtype):
    model, opt = made()
    model.to(dtype)
    scheduler = torch.optim.lr_scheduler.StepLR(opt, 2)

    def steps(model, opt, scheduler, numbers):
        for step in numbers:
            torch.manual_seed(step)
            model(torch.randn(4, 600, dtype=dtype)).float().square().mean().backward()
            opt.step()
            opt.zero_grad()
            scheduler.step()

    steps(model, opt, scheduler, range(3))
    with checkpoints(folder) as ckpt:
        ckpt.save(3, model=model, optimizer=opt, extra={"scheduler": scheduler, "best": 1.5})
        steps(model, opt, scheduler, range(3, 6))  # while it is written
        expected = copied(model)
        other, other_opt = made()
        other.to(dtype)
        other_scheduler = torch.optim.lr_scheduler.StepLR(other_opt, 2)
        restored = ckpt.restore(
            model=other, optimizer=other_opt, extra={"scheduler": other_scheduler}
        )
    assert (restored.step, restored.extra) == (3, {"best": 1.5})
    steps(other, other_opt, other_scheduler, range(3, 6))
    assert_same(other, expected)


def test_the_next_step_waits_until_the_state_has_left_memory(folder, held):
    model, opt = made()
    train(model, opt, 0)
    expected = copied(model)
    with checkpoints(folder) as ckpt:
        handle = ckpt.save(1, model=model, optimizer=opt)
        stepping = threading.Thread(target=train, args=(model, opt, 1))
        stepping.start()
        stepping.join(0.3)
        assert stepping.is_alive() and not handle.done("copied")
        assert torch.equal(model[0].weight, expected["0.weight"])
        held.set()
        stepping.join(60)
        handle.wait()
        other, other_opt = made()
        ckpt.restore(model=other, optimizer=other_opt)
    assert_same(other, expected)  # buffers too, which forward has changed meanwhile


def test_a_tensor_that_the_loop_edits_fails_the_save_by_its_name(folder, held, caplog):
    model, opt = made()
    train(model, opt, 0)
    with checkpoints(folder) as ckpt:
        handle = ckpt.save(1, model=model, optimizer=opt)
        with torch.no_grad():
            model[2].weight.mul_(2)
        held.set()
        with pytest.raises(Edited, match=r"2\.weight was changed while it was being saved"):
            handle.wait()
        assert "2.weight" in caplog.text  # at once, not only when somebody asks
        with pytest.raises(Edited):
            ckpt.save(2, model=model, optimizer=opt)
        ckpt.save(2, model=model, optimizer=opt).wait()  # and then it works again
        assert ckpt.restore().step == 2


def test_what_may_be_edited_at_once_is_copied_first(folder, held):
    model, opt = made()
    expected = copied(model)
    with checkpoints(folder, staging="full") as ckpt:
        handle = ckpt.save(1, model=model, optimizer=opt)
        with torch.no_grad():
            for param in model.parameters():
                param.zero_()
        held.set()
        handle.wait()
        other, _ = made()
        ckpt.restore(model=other)
    assert_same(other, expected)


def test_tied_weights_are_written_once_and_tied_again(folder):
    def tied():
        model = nn.ModuleDict(
            {"embed": nn.Embedding(500, 64), "head": nn.Linear(64, 500, bias=False)}
        )
        model["head"].weight = model["embed"].weight
        return model

    model = tied()
    with checkpoints(folder) as ckpt:
        ckpt.save(1, model=model).wait()
        reader = next(ckpt.readers())
        assert reader.manifest.aliases == {"head.weight": "embed.weight"}
        assert list(reader.tensors()) == ["embed.weight"]
        other = tied()
        ckpt.restore(model=other)
        assert_same(other, copied(model))
        apart = tied()
        apart["head"].weight = nn.Parameter(torch.zeros(500, 64))
        with pytest.raises(errors.Mismatch, match="head.weight tied to embed.weight"):
            ckpt.restore(model=apart)


def test_another_model_is_refused_before_anything_changes(folder):
    model, opt = made()
    with checkpoints(folder) as ckpt:
        ckpt.save(1, model=model, optimizer=opt).wait()
        other = nn.Sequential(nn.Linear(600, 900), nn.BatchNorm1d(900), nn.Linear(900, 601))
        before = copied(other)
        with pytest.raises(errors.Mismatch, match=r"2\.\w+ as float32 \[60"):
            ckpt.restore(model=other)
        with pytest.raises(
            errors.Mismatch, match=r"it holds 2\.bias, 2\.weight, which this model lacks"
        ):
            ckpt.restore(model=other[:2])
        with pytest.raises(errors.Mismatch, match="no optimizer.0; it has optimizer, rng"):
            ckpt.restore(optimizer=[opt])
        assert_same(other, before)


def test_little_staging_is_enough_for_files_of_many_chunks(folder, tmp_path):
    """To write, to read back what is kept, to copy to another tier, and to restore."""
    model = nn.Linear(2000, 3000)  # 24 MB: six chunks, where four fit
    with checkpoints(folder, staging="1MiB", keep=1, also=[f"dir:{tmp_path}/also"]) as ckpt:
        for step in (1, 2, 3):
            ckpt.save(step, model=model).wait()
        expected = copied(model)
        with torch.no_grad():
            model.weight.zero_()
        assert ckpt.restore(model=model).step == 3
    assert_same(model, expected)
    assert ckpt_cli.main(["verify", "--all", f"dir:{tmp_path}/also"]) == 0


def test_other_groups_are_refused_before_anything_changes(folder):
    model, opt = made()
    other, _ = made()
    halves = list(other.parameters())
    with torch.no_grad():
        halves[0].add_(1)
    two = torch.optim.AdamW([{"params": halves[:1]}, {"params": halves[1:]}])
    with checkpoints(folder) as ckpt:
        ckpt.save(1, model=model, optimizer=opt).wait()
        before = copied(other)
        with pytest.raises(errors.Mismatch, match="has groups of"):
            ckpt.restore(model=other, optimizer=two)
        assert_same(other, before)


def test_odd_steps_and_closed_checkpoints_are_told(folder):
    ckpt = checkpoints(folder)
    for step in (1.5, -1, True, "2"):
        with pytest.raises(errors.InvalidArgument, match="not a step number"):
            ckpt.save(step)
    ckpt.close()
    for use in (lambda: ckpt.save(1), ckpt.restore):
        with pytest.raises(errors.InvalidArgument, match="closed"):
            use()


def test_wrappers_leave_no_trace_in_names(folder):
    model, _ = made()
    with checkpoints(folder) as ckpt:
        ckpt.save(1, model=torch.compile(model)).wait()
        other, _ = made()
        with torch.no_grad():
            other[0].weight.zero_()
        ckpt.restore(model=nn.parallel.DataParallel(other))
    assert_same(other, copied(model))


def test_damage_in_the_newest_leads_to_the_older_one_with_a_sentence(folder, tmp_path):
    model, opt = made()
    with checkpoints(folder) as ckpt:
        ckpt.save(1, model=model, optimizer=opt).wait()
        expected = copied(model)
        train(model, opt, 1)
        newest = ckpt.save(2, model=model, optimizer=opt)
        newest.wait()
        flip(tmp_path / "checkpoints" / newest.folder / "model.safetensors", 5000)
        other, other_opt = made()
        with pytest.warns(
            UserWarning, match="step-000002.*model.safetensors between byte 0 and .* is damaged"
        ):
            assert ckpt.restore(model=other, optimizer=other_opt).step == 1
        assert_same(other, expected)
        with (
            pytest.warns(UserWarning),
            pytest.raises(errors.NotFound, match="no tier has an intact checkpoint of step 2"),
        ):
            ckpt.restore(model=other, step=2)


def test_a_damaged_chunk_is_taken_from_another_tier(folder, tmp_path, caplog):
    model, opt = made()
    also = f"dir:{tmp_path}/also"
    with checkpoints(folder, also=[also]) as ckpt:
        train(model, opt, 0)
        handle = ckpt.save(1, model=model, optimizer=opt)
        handle.wait(also)
        for at, tier in ((5000, "checkpoints"), (6_000_000, "also")):
            flip(tmp_path / tier / handle.folder / "state-00000.pack", at)
        other, other_opt = made()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert ckpt.restore(model=other, optimizer=other_opt).step == 1
        assert "these bytes were read from dir:" in caplog.text


def test_damage_leads_to_no_step_that_the_run_went_back_from(folder, tmp_path):
    model, opt = made()
    with checkpoints(folder, keep=20) as ckpt:
        for step in range(1, 5):
            train(model, opt, step)
            ckpt.save(step, model=model, optimizer=opt).wait()
            if step == 2:
                expected = copied(model)
        ckpt.restore(model=model, optimizer=opt, step=2)
        train(model, opt, 9)
        made_anew = ckpt.save(3, model=model, optimizer=opt)
        made_anew.wait()
        weights = next((tmp_path / "checkpoints" / made_anew.folder).glob("*.safetensors"))
        flip(weights, weights.stat().st_size - 5)
        with pytest.warns(UserWarning, match="skipped a checkpoint"):
            assert ckpt.restore(model=model, optimizer=opt).step == 2  # neither 4 nor the first 3
        assert_same(model, expected)
        assert ckpt.restore(model=model, optimizer=opt, step=4).step == 4  # by its number


def test_a_step_that_is_saved_once_more_may_lead_to_the_first(folder, tmp_path):
    model, opt = made()
    with checkpoints(folder, keep=20) as ckpt:
        ckpt.save(1, model=model, optimizer=opt).wait()
        newest = ckpt.save(1, model=model, optimizer=opt)
        newest.wait()
        weights = next((tmp_path / "checkpoints" / newest.folder).glob("*.safetensors"))
        flip(weights, weights.stat().st_size - 5)
        with pytest.warns(UserWarning, match="skipped a checkpoint"):
            assert ckpt.restore(model=model, optimizer=opt).step == 1


def test_what_no_rule_keeps_goes_and_the_newest_never_does(folder):
    model, _ = made()
    with checkpoints(folder, keep=stoker.Keep(last=1, every_steps=4, best=1)) as ckpt:
        for step, metric in ((2, 0.5), (4, 3.0), (5, 1.0), (6, 2.0), (7, float("nan"))):
            ckpt.save(step, model=model, metric=metric, pin=step == 6)
        ckpt.wait()
        assert sorted(reader.manifest.step for reader in ckpt.readers()) == [2, 4, 6, 7]


def test_a_full_store_fails_the_save_and_training_goes_on(tmp_path):
    store = f"local:{tmp_path}/small"
    with stoker.open_store(store, create=True, capacity="48MiB"):
        pass
    model, opt = made()  # 13 MB of state
    with checkpoints(store, keep=10) as ckpt:
        saved = 0
        with pytest.raises(errors.OutOfSpace):
            for step in range(10):
                train(model, opt, step)
                ckpt.save(step, model=model, optimizer=opt).wait()
                saved += 1
        with pytest.raises(errors.OutOfSpace):  # the next call says it again, once
            ckpt.save(99, model=model, optimizer=opt)
        assert saved > 0 and ckpt.restore(model=model, optimizer=opt).step == saved - 1
    with checkpoints(store, keep=1) as ckpt:
        assert ckpt.collect_garbage()
        ckpt.save(20, model=model, optimizer=opt).wait()  # there is room again


def test_a_number_says_when_a_save_is_due(folder):
    model, _ = made()
    with checkpoints(folder, every=3) as ckpt:
        assert [step for step in range(1, 8) if ckpt.save(step, model=model)] == [3, 6]
        assert ckpt.save(7, model=model, force=True)


def test_auto_follows_cost_and_failures():
    pace = Pace(failures_every=7200)
    assert pace.due(0.0)
    pace.saved(0.0, cost=1.0)
    assert pace.interval == pytest.approx(1 + (2 * 7200 + 1) ** 0.5)
    assert not pace.due(120.0) and pace.due(122.0)
    pace.persist = 500.0  # never before the one before is on the disk
    assert not pace.due(499.0)


class Watch:
    """A clock, and an event that nobody sets: to wait for it takes that long."""

    def __init__(self):
        self.now, self.rested, self.hurry = 0.0, 0.0, False

    def __call__(self):
        return self.now

    def wait(self, seconds):
        if not self.hurry:
            self.now, self.rested = self.now + seconds, self.rested + seconds


def copied_with(watch, interval, chunks=10, hurries_at=None):
    """A copy whose chunks take a second each."""
    rests = Rests(chunks, interval, watch, watch)
    for chunk in range(chunks):
        watch.hurry = chunk == hurries_at or watch.hurry
        watch.now += 1.0
        rests.after(1)
    assert rests.rested == pytest.approx(watch.rested)
    return watch


def test_a_copy_works_its_share_of_the_time_and_no_longer_than_half_an_interval(monkeypatch):
    polite = 9 / COPY_SHARE + 1  # behind the last chunk there is nothing to rest for
    monkeypatch.setattr(pace_module, "REST_AT_MOST", 100.0)
    assert copied_with(Watch(), None).now == pytest.approx(polite)
    assert copied_with(Watch(), 10 * polite).now == pytest.approx(polite)
    assert copied_with(Watch(), 60.0).now == pytest.approx(28.0)  # and no rest behind the last
    assert copied_with(Watch(), 15.0).rested == 0.0  # it would not be done in time
    assert copied_with(Watch(), None, hurries_at=5).now == pytest.approx(5 / COPY_SHARE + 5)
    monkeypatch.undo()  # a chunk that waited for its store is no reason to rest for minutes
    assert copied_with(Watch(), None).rested == pytest.approx(9 * pace_module.REST_AT_MOST)


def test_a_pace_knows_the_time_between_saves():
    pace = Pace(failures_every=7200)
    pace.saved(3.0, cost=1.0)
    assert pace.between is None
    pace.saved(10.0, cost=1.0)
    assert pace.between == 7.0


@pytest.mark.parametrize("waits", ["handle", "save", "close", "optimizer"])
def test_the_copy_of_an_offloaded_run_rests_until_somebody_waits(
    folder, tmp_path, monkeypatch, waits
):
    """One chunk of rest would take longer than this test may."""
    monkeypatch.setattr(pace_module, "COPY_SHARE", 1e-9)
    with checkpoints(folder) as ckpt:
        model, opt = stoker.offload(*made(), store=tmp_path / "run", dram="64MiB", checkpoints=ckpt)
        train(model, opt, 0)
        handle = ckpt.save(1, model=model, optimizer=opt)
        train(model, opt, 1)
        assert not handle.done() and not handle.hurry.is_set()
        if waits == "handle":
            handle.wait(timeout=60)
        elif waits == "save":
            ckpt.save(2, model=model, optimizer=opt)
        elif waits == "close":
            ckpt.close()
        opt.close()
        assert handle.event("durable").wait(60) and handle.hurry.is_set()


def test_the_first_copy_of_a_process_ends_by_itself(folder, tmp_path, monkeypatch):
    """With every="auto" no save is due while one is under way: nobody would hurry it."""
    monkeypatch.setattr(pace_module, "COPY_SHARE", 1e-9)
    with checkpoints(folder, every="auto", failures_every=60) as ckpt:
        model, opt = stoker.offload(*made(), store=tmp_path / "run", dram="64MiB", checkpoints=ckpt)
        train(model, opt, 0)
        handle = ckpt.save(1, model=model, optimizer=opt)
        assert handle.event("durable").wait(60) and not handle.hurry.is_set()
        opt.close()


@pytest.mark.parametrize("given", [{}, {"staging": "full"}])
def test_a_save_of_state_in_memory_never_rests(folder, monkeypatch, given):
    monkeypatch.setattr(pace_module, "COPY_SHARE", 1e-9)
    model, opt = made()
    with checkpoints(folder, **given) as ckpt:
        handle = ckpt.save(1, model=model, optimizer=opt)
        assert handle.event("durable").wait(60) and not handle.hurry.is_set()


@pytest.mark.parametrize(("dtype", "moments"), [(torch.float32, "exact"), (torch.bfloat16, "8bit")])
def test_an_offloaded_run_goes_on_from_its_folder(folder, tmp_path, dtype, moments):
    def model_of():
        torch.manual_seed(0)
        model = nn.Sequential(
            *(
                nn.Sequential(nn.Linear(300, 700), nn.BatchNorm1d(700), nn.Linear(700, 300))
                for _ in range(3)
            )
        )
        model[1][0].weight.requires_grad_(False)
        model[2][0].weight.data = model[2][0].weight.data.t().contiguous().t()
        model.to(dtype)
        return model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])

    def steps(model, opt, numbers):
        for step in numbers:
            torch.manual_seed(step)
            model(torch.randn(4, 300, dtype=dtype)).float().square().mean().backward()
            opt.step()
            opt.zero_grad()

    def everything(model, opt):
        full = opt.state_dict(full=True)["state"]
        state = {f"{i}.{key}": value for i, entry in full.items() for key, value in entry.items()}
        return {
            **copied(model),
            **{key: torch.as_tensor(value).clone() for key, value in state.items()},
        }

    def run(name, **kwargs):
        return stoker.offload(*model_of(), store=tmp_path / name, moments=moments, **kwargs)

    with checkpoints(folder) as ckpt:
        model, opt = run("first", dram="64MiB", snapshots=1, restore=ckpt)  # there is none yet
        steps(model, opt, range(2))
        ckpt.save(2, model=model, optimizer=opt)
        steps(model, opt, range(2, 3))
        ckpt.save(3, model=model, optimizer=opt).wait()
        assert opt._session.planes.store.info()["snapshots"] == {}
        steps(model, opt, range(3, 5))
        expected = everything(model, opt)
        opt.close()

        model, opt = run("second", dram="48MiB", restore=ckpt)
        assert opt.step_count == 3
        steps(model, opt, range(3, 5))
        found = everything(model, opt)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], value) for name, value in expected.items())
        opt.close()

        _, opt = run("second", dram="48MiB", restore=ckpt)  # what is there is newer
        assert opt.step_count == 5
        opt.close()
        _, opt = run("second", dram="48MiB", restore=ckpt.at(2))
        assert opt.step_count == 2
        opt.close()

        plain, plain_opt = model_of()  # the weights by themselves load anywhere
        ckpt.restore(model=plain)
        model, opt = run("third", dram="48MiB", restore=ckpt)
        full, groups = opt.state_dict(full=True)["state"], opt.state_dict()["param_groups"]
        weights = copied(model)
        with pytest.raises(errors.Mismatch, match="restore=ckpt"):
            ckpt.restore(model=plain, optimizer=opt)
        opt.close()
        ckpt.restore(model=plain, optimizer=plain_opt)
        assert_same(plain, weights)
        assert [g["lr"] for g in plain_opt.param_groups] == [g["lr"] for g in groups]
        wide, wide_opt = model_of()  # float32: exact masters, and moments as they are
        wide = wide.float()
        torch.set_default_dtype(torch.bfloat16)
        try:
            ckpt.restore(model=wide, optimizer=wide_opt)
        finally:
            torch.set_default_dtype(torch.float32)
        for number, param in enumerate(wide_opt.param_groups[0]["params"]):
            entry = wide_opt.state[param]
            assert torch.equal(entry["exp_avg"], full[number]["exp_avg"])
            assert torch.equal(entry["exp_avg_sq"], full[number]["exp_avg_sq"])
            assert entry["step"] == full[number]["step"] == 3
            assert entry["step"].dtype == torch.float32
            if dtype == torch.bfloat16:
                assert torch.equal(param, full[number]["master"])
        other = torch.optim.SGD([p for p in plain.parameters() if p.requires_grad], lr=0.1)
        with pytest.raises(errors.Mismatch, match="run of adamw, and the optimizer is SGD"):
            ckpt.restore(model=plain, optimizer=other)


def test_each_save_of_a_small_run_has_its_own_weights(folder, tmp_path):
    """One plane of one chunk: what is read last for a save is what is read first for the next."""
    model = nn.Linear(32, 32, bias=False)
    model, opt = stoker.offload(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        store=tmp_path / "run",
        dram="64MiB",
        snapshots=1,
    )
    with checkpoints(folder) as ckpt:
        expected = {}
        for step in (1, 2):
            model(torch.ones(2, 32)).square().mean().backward()
            opt.step()
            opt.zero_grad()
            # without the model: its weights are a part of the run
            ckpt.save(step, optimizer=opt).wait()
            expected[step] = copied(model)
        assert not torch.equal(*(each["weight"] for each in expected.values()))
        for step, weights in expected.items():
            plain = nn.Linear(32, 32, bias=False)
            ckpt.restore(model=plain, step=step)
            assert_same(plain, weights)
    opt.close()


def test_files_beside_the_model_have_names_of_their_own(folder, tmp_path):
    model, _ = made()
    with checkpoints(folder) as ckpt:
        for wrong in ("MANIFEST.json", "model.safetensors", "state-00000.pack", "../a", "a/b", ""):
            with pytest.raises(errors.InvalidArgument, match="files= cannot hold"):
                ckpt.save(1, model=model, files={wrong: b"x"})
        handle = ckpt.save(1, files={"tokenizer.json": b"{}"})
        handle.wait()
    assert (tmp_path / "checkpoints" / handle.folder / "tokenizer.json").read_bytes() == b"{}"


def test_an_offloaded_run_without_room_is_refused_at_once(folder, tmp_path):
    model, opt = stoker.offload(*made(), store=tmp_path / "run", dram="64MiB")
    with (
        checkpoints(folder) as ckpt,
        pytest.raises(
            errors.InvalidArgument, match="is too small to keep a step while a checkpoint copies"
        ),
    ):
        ckpt.save(1, model=model, optimizer=opt)
    opt.close()


@pytest.mark.parametrize("kills", [3, pytest.param(50, marks=pytest.mark.soak)])
def test_a_killed_run_loses_no_checkpoint(tmp_path, kills):
    seed = random.randrange(1 << 30)
    print("seed", seed)
    rng = random.Random(seed)
    folder, durable, step = tmp_path / "run", 0, 0
    command = [sys.executable, HERE / "checkpoint_run.py"]
    for _ in range(kills):
        run = subprocess.Popen(
            [*command, folder, "5000"], stdout=subprocess.PIPE, text=True, env=ONE_THREAD
        )
        first = run.stdout.readline()
        threading.Timer(
            rng.uniform(0.0, 0.6), lambda run=run: os.kill(run.pid, signal.SIGKILL)
        ).start()
        lines = [first, *run.stdout]
        run.wait()
        durable = max([durable, *(int(line) for line in lines if line.strip())])
        with checkpoints(folder) as ckpt:
            model, opt = made()
            step = ckpt.restore(model=model, optimizer=opt).step
            assert step >= durable
    # With two threads torch's own first AdamW step differs between processes, in about one of 15.
    whole = [*command, tmp_path / "unkilled", str(step)]
    subprocess.run(whole, check=True, stdout=subprocess.DEVNULL, env=ONE_THREAD)
    with checkpoints(tmp_path / "unkilled") as ckpt:
        expected, _ = made()
        assert ckpt.restore(model=expected).step == step
    assert_same(model, copied(expected))


def test_a_folder_with_other_things_in_it_is_left_alone(folder, tmp_path):
    model, _ = made()
    notes = tmp_path / "checkpoints" / "step-notes"
    notes.mkdir(parents=True)
    (notes / "a").write_text("mine")
    (tmp_path / "checkpoints" / "readme").write_text("mine")
    with checkpoints(folder, keep=1) as ckpt:
        for step in range(3):
            ckpt.save(step, model=model).wait()
    assert (notes / "a").read_text() == "mine"
    assert (tmp_path / "checkpoints" / "readme").read_text() == "mine"


def test_what_a_cut_off_save_left_goes_with_the_next(folder, tmp_path):
    model, _ = made()
    left = tmp_path / "checkpoints" / "step-000001-000001-00000000"
    left.mkdir(parents=True)
    (left / "model.safetensors").write_bytes(b"half")
    with checkpoints(folder) as ckpt:
        assert ckpt.restore() is None
        ckpt.save(1, model=model)
        ckpt.wait()
        assert not (left / "model.safetensors").exists()
        assert ckpt.restore().folder.startswith("step-000001-000002-")


def test_a_slow_writer_cannot_commit_what_another_removes(folder):
    model, _ = made()
    with checkpoints(folder) as slow, checkpoints(folder, keep=1) as quick:
        begun, go_on = threading.Event(), threading.Event()
        put = slow._tiers[0].put_manifest

        def later(*args):
            begun.set()
            assert go_on.wait(60)
            put(*args)

        slow._tiers[0].put_manifest = later
        handle = slow.save(1, model=model)
        assert begun.wait(60)
        for step in (2, 3):
            quick.save(step, model=model)
        quick.wait()
        go_on.set()
        with pytest.raises(errors.Conflict):
            handle.wait()
        assert [reader.manifest.step for reader in quick.readers()] == [3]
        slow._failed = None


def test_no_sound_checkpoint_is_an_error_and_not_a_new_run(folder, tmp_path):
    model, opt = made()
    with checkpoints(folder) as ckpt:
        handle = ckpt.save(1, model=model, optimizer=opt)
        handle.wait()
        flip(tmp_path / "checkpoints" / handle.folder / "model.safetensors", 9000)
        with (
            pytest.warns(UserWarning),
            pytest.raises(errors.Corruption, match="none of the checkpoints"),
        ):
            ckpt.restore(model=model, optimizer=opt)


def test_nothing_whole_goes_before_the_newest_was_read_back(folder, tmp_path, monkeypatch):
    model, _ = made()
    with checkpoints(folder, keep=1) as ckpt:
        ckpt.save(1, model=model)
        ckpt.wait()
        put = ckpt._tiers[0].put_manifest

        def damage(name, data, files):  # what was written is not what is on the disk
            put(name, data, files)
            flip(tmp_path / "checkpoints" / str(name) / "model.safetensors", 9000)

        monkeypatch.setattr(ckpt._tiers[0], "put_manifest", damage)
        ckpt.save(2, model=model)
        with pytest.raises(errors.Corruption):
            ckpt.wait()
        with pytest.warns(UserWarning):
            assert ckpt.restore(model=model).step == 1


def test_a_second_save_waits_for_the_first(folder, held):
    model, opt = made()
    with checkpoints(folder) as ckpt:
        first = ckpt.save(1, model=model, optimizer=opt)
        threading.Timer(0.2, held.set).start()
        second = ckpt.save(2, model=model, optimizer=opt)
        assert first.done()
        second.wait()


def test_a_step_that_may_be_in_a_graph_finds_its_state_copied(folder, held):
    model, _ = made()
    opt = torch.optim.AdamW(model.parameters(), capturable=True)
    with checkpoints(folder) as ckpt:
        threading.Timer(0.2, held.set).start()
        assert ckpt.save(1, model=model, optimizer=opt).done("copied")


def test_sigterm_saves_at_the_end_of_the_step_and_a_second_one_ends_at_once(tmp_path):
    def begun():
        command = [sys.executable, HERE / "checkpoint_run.py", tmp_path / "run", "500", "60"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        run = subprocess.Popen([*command], text=True, env=ONE_THREAD, bufsize=1, **pipes)
        assert run.stdout.readline() == "1\n"
        run.stdin.write("\n")
        assert run.stdout.readline() == "2\n"
        run.send_signal(signal.SIGTERM)
        told = run.stderr.readline()
        while "SIGTERM" not in told:
            told = run.stderr.readline()
        assert "saving at the end of this step, within 60 s" in told
        return run

    run = begun()
    run.send_signal(signal.SIGTERM)  # the step has not ended
    run.communicate()
    assert run.returncode == -signal.SIGTERM
    assert not list((tmp_path / "run").glob("step-*/MANIFEST.json"))

    run = begun()
    told = run.communicate("\n")[1]
    assert run.returncode == 128 + signal.SIGTERM, told
    assert f"the run ends at step 2, saved as dir:{tmp_path}/run/step-000002-" in told
    with checkpoints(tmp_path / "run") as ckpt:
        model, opt = made()
        assert ckpt.restore(model=model, optimizer=opt).step == 2


def test_a_save_that_takes_longer_than_the_grace_is_given_up(folder, held, caplog):
    model, opt = made()
    with checkpoints(folder, every=100) as ckpt:
        with pytest.raises(TimeoutError, match="not durable after"):
            ckpt.save_within(0.05, 1, model=model, optimizer=opt)
        held.set()
    old = signal.getsignal(signal.SIGTERM)
    with checkpoints(folder, every=100, grace=5.0) as ckpt:
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(SystemExit) as ended:
            ckpt.save(2, model=model, optimizer=opt)
        assert ended.value.code == 143 and "the run ends at step 2, saved as" in caplog.text
    assert signal.getsignal(signal.SIGTERM) == old
    with pytest.raises(errors.InvalidArgument, match="grace=0"):
        checkpoints(folder, grace=0)


def test_an_offloaded_step_does_not_wait_for_the_copy(folder, tmp_path, monkeypatch):
    """Its state is copied out of the store; only what is in memory must stay as it is."""
    begin, read = threading.Event(), parts.Plane.read

    def wait(self, *args):
        assert begin.wait(60)
        read(self, *args)

    monkeypatch.setattr(parts.Plane, "read", wait)
    with checkpoints(folder) as ckpt:
        model, opt = stoker.offload(*made(), store=tmp_path / "run", dram="64MiB", checkpoints=ckpt)
        train(model, opt, 0)
        handle = ckpt.save(1, model=model, optimizer=opt)
        train(model, opt, 1)
        opt.flush()
        assert opt.committed_step == 2 and not handle.done()
        threading.Timer(0.2, begin.set).start()
        opt.close()  # waits for the copy, which reads the store
        handle.wait()
        assert ckpt.restore(model=made()[0]).step == 1


@pytest.mark.parametrize("policy", ["sync", "lazy"])
def test_a_save_of_an_offloaded_run_costs_no_write_and_no_flush(folder, tmp_path, policy):
    """Its store's, that is: the step's own journal record has the name, the next one its drop."""
    with checkpoints(folder) as ckpt:
        model, opt = stoker.offload(
            *made(), store=tmp_path / "run", dram="64MiB", checkpoints=ckpt, policy=policy
        )
        store = opt._session.planes.store

        def cost(step, save):
            before = opt._session.runtime.core.io_counters()
            train(model, opt, step)
            if save:
                ckpt.save(step + 1, model=model, optimizer=opt).wait()
                assert store.info()["snapshots"] == {}
            opt.flush()
            after = opt._session.runtime.core.io_counters()
            return {key: after[key] - before[key] for key in ("writes", "syncs")}

        costs = [cost(step, save=step in (2, 3)) for step in range(5)]
        assert costs[2:] == [costs[1]] * 3
        opt.flush()
        ckpt.save(6, model=model, optimizer=opt).wait()  # the step is committed: it has its own
        opt.close()
    with stoker.open_store(f"local:{tmp_path}/run", read_only=True) as store:
        assert store.info()["snapshots"] == {}


def frozen_run() -> tuple[nn.Module, torch.optim.Optimizer]:
    """6 MB that are not trained, and a little that is."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(600, 1200), nn.Linear(1200, 600), nn.Linear(600, 600))
    model[0].requires_grad_(False)
    model[1].requires_grad_(False)
    opt = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.1)
    return model, opt


def test_weights_that_are_not_trained_are_taken_over(folder, tmp_path):
    model, opt = frozen_run()
    frozen = 4 * sum(each.numel() for each in model.parameters() if not each.requires_grad)
    also = f"dir:{tmp_path}/also"
    with checkpoints(folder, keep=1, also=[also]) as ckpt:

        def written(step: int) -> int:
            train(model, opt, step)
            before = ckpt._runtime.io_counters()["written_bytes"]
            ckpt.save(step, model=model, optimizer=opt).wait(also)
            ckpt.wait()
            return ckpt._runtime.io_counters()["written_bytes"] - before

        first, second = written(1), written(2)
        assert first > 2 * frozen and second < frozen  # of both tiers
        assert ckpt.costs.taken_bytes > frozen
        with torch.no_grad():
            model[0].weight[3, 5] += 1  # by the loop: it is found by its hash
        assert written(3) > 2 * frozen
        assert written(4) < frozen
        expected = copied(model)
        for store in (folder, also):
            assert ckpt_cli.main(["verify", "--all", store]) == 0
            other, _ = frozen_run()
            with checkpoints(store) as reader:  # the one before, whose file it was, is gone
                assert reader.restore(model=other).step == 4
            assert_same(other, expected)


def test_damage_to_a_file_that_is_shared_is_found_in_both(folder, tmp_path):
    model, opt = frozen_run()
    with checkpoints(folder, keep=2) as ckpt:
        for step in (1, 2):
            train(model, opt, step)
            ckpt.save(step, model=model, optimizer=opt).wait()
    files = sorted(tmp_path.glob("checkpoints/step-*/model-00002-of-00002.safetensors"))
    if not os.path.samefile(*files):
        pytest.skip("this file system has reflinks, so nothing is shared")
    flip(files[0], 5000)
    with checkpoints(folder) as ckpt, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(errors.Corruption, match="none of the checkpoints"):
            ckpt.restore(model=model)


def test_a_bucket_copies_what_is_not_trained(s3):
    model, opt = frozen_run()
    with checkpoints(s3, keep=1) as ckpt:
        for step in (1, 2):
            assert ckpt.costs.taken_bytes == 0
            train(model, opt, step)
            ckpt.save(step, model=model, optimizer=opt).wait()
        ckpt.wait()
        frozen = 4 * sum(each.numel() for each in model.parameters() if not each.requires_grad)
        assert frozen < ckpt.costs.taken_bytes < frozen + (8 << 10)
        other, _ = frozen_run()
        assert ckpt.restore(model=other).step == 2
        assert_same(other, copied(model))


def small_run(store: Path, **given) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(32, 32, bias=False)
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return stoker.offload(model, opt, store=store, dram="64MiB", **{"snapshots": 1, **given})


def small_steps(model: nn.Module, opt: torch.optim.Optimizer, count: int) -> None:
    for _ in range(count):
        model(torch.ones(1, 32)).sum().backward()
        opt.step()
        opt.zero_grad()


def test_two_runs_in_one_save_are_refused(folder, tmp_path):
    """Their weights may have the same names, and no store takes both back."""
    runs = {number: small_run(tmp_path / number)[1] for number in ("1", "2")}
    with checkpoints(folder) as ckpt:
        with pytest.raises(errors.Unsupported, match=r"optimizer\.1 and optimizer\.2 belong to 2"):
            ckpt.save(1, optimizer=runs)
        ckpt.save(1, optimizer=runs["2"]).wait()
    for opt in runs.values():
        assert opt._session.planes.store.info()["snapshots"] == {}
        opt.close()


def test_a_step_is_that_of_the_run_whatever_save_was_given(folder, tmp_path):
    """An epoch, say: what is newer is told by the run's own count."""
    with checkpoints(folder) as ckpt:
        model, opt = small_run(tmp_path / "first")
        small_steps(model, opt, 3)
        ckpt.save(1, optimizer=opt).wait()
        opt.close()
        model, opt = small_run(tmp_path / "second")
        small_steps(model, opt, 2)
        opt.close()
        model, opt = small_run(tmp_path / "second", restore=ckpt)
        assert opt.step_count == 3
        ckpt.save(100, optimizer=opt).wait()
        small_steps(model, opt, 2)
        expected = copied(model)
        opt.close()
        model, opt = small_run(tmp_path / "second", restore=ckpt)
        assert opt.step_count == 5  # a newer step in the store wins
        assert_same(model, expected)
        opt.close()


def test_a_newer_step_of_another_run_is_not_taken_for_this_one(folder, tmp_path, caplog):
    with checkpoints(folder) as ckpt:
        model, opt = small_run(tmp_path / "first")
        run = opt._session.record.lineage.run
        small_steps(model, opt, 2)
        ckpt.save(2, optimizer=opt).wait()
        opt.close()
        (said,) = next(ckpt.readers()).manifest.offloaded.values()
        assert said["model"]["run"] == run
        model, opt = small_run(tmp_path / "other")
        small_steps(model, opt, 1)
        opt.close()
        model, opt = small_run(tmp_path / "newer")
        small_steps(model, opt, 3)
        expected, another = copied(model), opt._session.record.lineage.run
        opt.close()
        for which in (ckpt, ckpt.at(2)):
            with pytest.raises(errors.Mismatch, match="another run.*leave out restore=") as caught:
                small_run(tmp_path / "newer", restore=which)
            assert run in str(caught.value) and another in str(caught.value)
        model, opt = small_run(tmp_path / "newer", resume=True)
        assert_same(model, expected)
        opt.close()
        model, opt = small_run(tmp_path / "empty", restore=ckpt)
        assert (
            opt._session.record.lineage.run == run
        )  # a lineage: what is newer here is of this run
        small_steps(model, opt, 1)
        opt.close()
        model, opt = small_run(tmp_path / "empty", restore=ckpt)
        assert opt.step_count == 3
        opt.close()
        assert "restore= replaced" not in caplog.text
        model, opt = small_run(tmp_path / "other", restore=ckpt)  # it is older
        assert opt.step_count == 2 and opt._session.record.lineage.run == run
        assert "restore= replaced step 1 in" in caplog.text
        opt.close()
        model, opt = small_run(tmp_path / "empty", restore=ckpt.at(2))
        assert opt.step_count == 2 and "restore= replaced step 3 in" in caplog.text
        opt.close()


@pytest.mark.parametrize("how", ["a checkpoint", "a snapshot"])
def test_steps_that_a_run_went_back_from_win_only_by_their_number(folder, tmp_path, how):
    with checkpoints(folder, keep=9) as ckpt:
        model, opt = small_run(tmp_path / "run")
        first = opt._session.record.lineage.run
        small_steps(model, opt, 2)
        reference = opt.state_dict()
        opt.snapshot()
        ckpt.save(2, optimizer=opt).wait()
        small_steps(model, opt, 2)
        ckpt.save(4, optimizer=opt).wait()
        if how == "a snapshot":
            opt.load_state_dict(reference)
        else:
            opt.close()
            model, opt = small_run(tmp_path / "run", restore=ckpt.at(2))
        lineage = opt._session.record.lineage
        assert opt.step_count == 2 and lineage.run != first and lineage.left == {first: 2}
        small_steps(model, opt, 1)
        expected = copied(model)
        opt.close()
        model, opt = small_run(tmp_path / "run", restore=ckpt)  # nothing was saved since
        assert opt.step_count == 3 and opt._session.record.lineage == lineage
        assert_same(model, expected)
        ckpt.save(3, optimizer=opt).wait()
        opt.close()
        for store in ("run", "empty"):
            model, opt = small_run(tmp_path / store, restore=ckpt)
            assert opt.step_count == 3 and opt._session.record.lineage == lineage
            assert_same(model, expected)
            opt.close()
        model, opt = small_run(tmp_path / "empty", restore=ckpt.at(4))  # its number names it
        assert opt.step_count == 4
        assert opt._session.record.lineage.left == {lineage.run: 0, first: 4}
        opt.close()
        model, opt = small_run(tmp_path / "empty", restore=ckpt)  # and it is left, as well
        assert opt.step_count == 4
        opt.close()


def test_a_store_that_lacks_the_way_back_is_brought_along_or_refused(folder, tmp_path):
    """A run went back elsewhere. What this store has of the steps that were given up is not lost in
    silence."""
    with checkpoints(folder, keep=9) as ckpt:
        model, opt = small_run(tmp_path / "here")
        small_steps(model, opt, 1)
        opt.close()
        shutil.copytree(tmp_path / "here", tmp_path / "older")
        model, opt = small_run(tmp_path / "here", resume=True)
        small_steps(model, opt, 1)
        ckpt.save(2, optimizer=opt).wait()
        small_steps(model, opt, 2)
        opt.close()
        model, opt = small_run(tmp_path / "there", restore=ckpt.at(2))
        small_steps(model, opt, 1)
        ckpt.save(3, optimizer=opt).wait()
        opt.close()
        with pytest.raises(errors.Mismatch, match="holds step 4 .*which went back to step 2 of it"):
            small_run(tmp_path / "here", restore=ckpt)
        for store, which in (("older", ckpt), ("here", ckpt.at(3))):
            model, opt = small_run(tmp_path / store, restore=which)
            assert opt.step_count == 3
            opt.close()


def test_two_checkpoints_of_one_run_do_not_take_each_others_step(folder, tmp_path, monkeypatch):
    begin, read = threading.Event(), parts.Plane.read

    def wait(self, *args):
        assert begin.wait(60)
        read(self, *args)

    monkeypatch.setattr(parts.Plane, "read", wait)
    model, opt = small_run(tmp_path / "run")
    with checkpoints(folder) as one, checkpoints(f"dir:{tmp_path}/far") as two:
        small_steps(model, opt, 1)
        first = one.save(1, optimizer=opt)
        small_steps(model, opt, 1)
        threading.Timer(0.2, begin.set).start()
        second = two.save(2, optimizer=opt)  # waits for the first to have read its step
        first.wait()
        second.wait()
    opt.close()


def test_checkpoints_that_are_closed_begin_no_run_anew(folder, tmp_path):
    _, opt = small_run(tmp_path / "run")
    with checkpoints(folder) as ckpt:
        ckpt.save(1, optimizer=opt).wait()
    opt.close()
    with pytest.raises(errors.InvalidArgument, match="this Checkpoints object is closed"):
        small_run(tmp_path / "again", restore=ckpt)


def test_sgd_goes_on_in_memory_with_what_was_attached(folder, tmp_path):
    model, opt = small_run(tmp_path / "run")
    source = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(source, 2)
    opt.attach(scheduler=scheduler)
    with checkpoints(folder) as ckpt:
        small_steps(model, opt, 2)
        scheduler.step()
        small_steps(model, opt, 1)
        ckpt.save(3, optimizer=opt, extra={"note": "x"}).wait()
        small_steps(model, opt, 2)
        expected = copied(model)
        opt.close()
        again = nn.Linear(32, 32, bias=False)
        plain = torch.optim.SGD(again.parameters(), lr=0.5, momentum=0.9)
        found = ckpt.restore(model=again, optimizer=plain)
    assert found.extra["note"] == "x" and found.extra["scheduler"]["last_epoch"] == 1
    small_steps(again, plain, 2)
    torch.testing.assert_close(again.state_dict(), expected)


class Parts(nn.Module):
    """`unused` never gets a gradient, so its parameters have no state."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, 300), nn.Linear(300, 64, bias=False)
        self.unused = nn.Linear(64, 64)

    def forward(self, values):
        return self.last(self.first(values).tanh())


OPTIMIZERS = {
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.1),
    "momentum": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9, dampening=0.5),
    "adam": lambda groups: torch.optim.Adam(groups, lr=0.01, weight_decay=0.01),
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=0.01),
}


def grouped(kind: str, seed: int):
    """Three parameter groups, one of them empty."""
    torch.manual_seed(seed)
    model = Parts()
    groups = [
        {"params": [model.first.weight, model.first.bias, model.unused.weight]},
        {"params": [], "lr": 0.5},
        {"params": [model.last.weight, model.unused.bias], "lr": 0.02 * (seed + 1)},
    ]
    return model, OPTIMIZERS[kind](groups)


@pytest.mark.parametrize("offloads", [False, True])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_an_optimizer_in_memory_gets_groups_and_state_back(folder, tmp_path, kind, offloads):
    """With an empty group, and parameters that have no state."""

    def steps(model, opt, numbers):
        for step in numbers:
            torch.manual_seed(step)
            model(torch.randn(4, 64)).square().sum().backward()
            opt.step()
            opt.zero_grad()

    model, opt = grouped(kind, 0)
    again, theirs = grouped(kind, 1)
    with checkpoints(folder) as ckpt:
        if offloads:
            given = {"store": tmp_path / "run", "dram": "64MiB", "checkpoints": ckpt}
            model, opt = stoker.offload(model, opt, **given)
        steps(model, opt, range(2))
        saved = copied(model)
        expected = copy.deepcopy(opt.state_dict(full=True) if offloads else opt.state_dict())
        ckpt.save(2, model=model, optimizer=opt).wait()
        if offloads:
            opt.close()
        ckpt.restore(model=again, optimizer=theirs)
    assert_same(again, saved)
    found = theirs.state_dict()
    assert [group["lr"] for group in found["param_groups"]][1:] == [0.5, 0.02]
    assert [group["params"] for group in found["param_groups"]] == [[0, 1, 2], [], [3, 4]]
    stateful = {number for number, entry in found["state"].items() if entry}
    assert stateful == (set() if kind == "sgd" else {0, 1, 3})
    for number, entry in found["state"].items():
        for key, value in entry.items():
            assert torch.equal(torch.as_tensor(expected["state"][number][key]), value), key
    steps(again, theirs, range(2, 4))
    if not offloads:
        steps(model, opt, range(2, 4))
        assert_same(again, copied(model))


def test_a_checkpoint_of_a_run_in_memory_says_how_to_go_on(folder, tmp_path):
    model = nn.Linear(32, 32, bias=False)
    with checkpoints(folder) as ckpt:
        ckpt.save(1, model=model).wait()
        with pytest.raises(errors.Mismatch, match=r"call ckpt\.restore\(.*\) first, and then"):
            small_run(tmp_path / "run", restore=ckpt)


def test_a_restore_does_not_write_over_a_run_of_another_model(folder, tmp_path):
    other = nn.Linear(16, 16)
    given = {"store": tmp_path / "other", "dram": "64MiB"}
    other, opt = stoker.offload(other, torch.optim.SGD(other.parameters(), lr=0.1), **given)
    expected = copied(other)
    opt.close()
    with checkpoints(folder) as ckpt:
        model, opt = small_run(tmp_path / "run")
        small_steps(model, opt, 1)
        ckpt.save(1, optimizer=opt).wait()
        opt.close()
        with pytest.raises(errors.Mismatch, match="the store .* holds another model"):
            small_run(tmp_path / "other", restore=ckpt)
    other = nn.Linear(16, 16)
    opt = torch.optim.SGD(other.parameters(), lr=0.1)
    other, opt = stoker.offload(other, opt, resume=True, **given)
    assert_same(other, expected)
    opt.close()


def test_a_restore_takes_what_is_saved_while_it_reads(folder):
    """Another process trains on, and what was the newest goes."""
    model, opt = made()
    with checkpoints(folder, keep=1) as writer, checkpoints(folder) as reader:
        writer.save(1, model=model, optimizer=opt).wait()
        tier = reader._tiers[0]
        names, listed = tier.names, []

        def then_goes():
            found = names()
            if not listed:
                listed.append(found)
                train(model, opt, 1)
                writer.save(2, model=model, optimizer=opt)
                writer.wait()
            return found

        tier.names = then_goes
        other, other_opt = made()
        with pytest.warns(UserWarning, match="step-000001.* is not a checkpoint") as told:
            assert reader.restore(model=other, optimizer=other_opt).step == 2
        assert told[0].filename == __file__  # the line that called restore()
        assert_same(other, copied(model))


def test_a_save_that_cannot_begin_holds_no_step(folder, tmp_path, monkeypatch):
    """Else close() would wait for a copy that nobody makes."""
    model, opt = small_run(tmp_path / "run")
    small_steps(model, opt, 1)
    with checkpoints(folder) as ckpt:
        with pytest.raises(errors.InvalidArgument, match="metric='high' is not a number"):
            ckpt.save(1, optimizer=opt, metric="high")
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", lambda self: {}["no thread"])
            with pytest.raises(KeyError, match="no thread"):
                ckpt.save(1, optimizer=opt)
        assert all(done.is_set() for done, _ in opt._session.reads._under_way)
        assert opt._session.planes.store.info()["snapshots"] == {}
        ckpt.save(1, optimizer=opt, metric=torch.tensor(0.5)).wait()
    opt.close()


@pytest.mark.parametrize("window", [windows.WINDOW, 8 << 20])
def test_a_restore_into_a_store_reads_in_windows(folder, tmp_path, monkeypatch, window):
    """Planes of 9 MB, and smaller ones. In a window no chunk of a file is read twice."""
    reads = []
    begin = Reader._begin
    monkeypatch.setattr(
        Reader,
        "_begin",
        lambda self, file, i, buffer: reads.append((file.name, i)) or begin(self, file, i, buffer),
    )
    monkeypatch.setattr(windows, "WINDOW", window)

    def run(name, **given):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(1500, 1500), nn.Linear(1500, 3))
        opt = torch.optim.AdamW(model.parameters())
        return stoker.offload(model, opt, store=tmp_path / name, dram="96MiB", **given)

    with checkpoints(folder) as ckpt:
        model, opt = run("one", checkpoints=ckpt)
        model(torch.ones(2, 1500)).square().mean().backward()
        opt.step()
        ckpt.save(1, model=model, optimizer=opt).wait()
        expected = opt.state_dict(full=True)
        opt.close()
        reads.clear()
        model, opt = run("two", restore=ckpt)
        found = opt.state_dict(full=True)
        opt.close()
    for key, state in expected["state"].items():
        assert all(torch.equal(state[name], found["state"][key][name]) for name in state)
    turns = -(-4 * 10_000_000 // window) + 1
    assert len(reads) <= len(set(reads)) + 2 * turns
    assert window == 8 << 20 or len(reads) == len(set(reads)) + 1  # the windows turn once


@pytest.mark.parametrize("chunk", [0, -1, "4096", (8 << 20) + 1])
def test_a_restore_refuses_chunks_that_no_plane_has(folder, chunk):
    model, opt = made()
    with checkpoints(folder) as ckpt:
        ckpt.save(1, model=model, optimizer=opt).wait()
        with windows.Windows(next(ckpt.readers()), None, None, ckpt._runtime) as into:
            with pytest.raises(errors.Corruption, match="a plane has chunks of"):
                into.steps(100, chunk)


BROKEN_RUNS = {
    "no weights": lambda run: run["objects"].pop(next(k for k in run["objects"] if k[0] == "w")),
    "no size": lambda run: run["objects"][next(iter(run["objects"]))].pop("bytes"),
    "a size of letters": lambda run: next(iter(run["objects"].values())).update(bytes="many"),
    "no part": lambda run: run["objects"][
        next(k for k in run["objects"] if k.startswith("m/"))
    ].pop("part"),
    "few weights": lambda run: run["objects"][
        next(k for k in run["objects"] if k.startswith("w/"))
    ].update(bytes=64),
    "no model": lambda run: run.pop("model"),
    "no step": lambda run: run["state"].pop("step"),
}


@pytest.mark.parametrize("change", BROKEN_RUNS)
def test_a_run_that_breaks_the_format_is_damage(folder, tmp_path, monkeypatch, change):
    run_in = planes.run_in

    def broken(reader):
        run = copy.deepcopy(run_in(reader))
        BROKEN_RUNS[change](run)
        return run

    with checkpoints(folder) as ckpt:
        model, opt = stoker.offload(*made(), store=tmp_path / "run", dram="64MiB", checkpoints=ckpt)
        train(model, opt, 0)
        ckpt.save(1, model=model, optimizer=opt).wait()
        opt.close()
        monkeypatch.setattr(planes, "run_in", broken)
        with pytest.warns(UserWarning, match="skipped a checkpoint"):
            with pytest.raises(errors.Corruption, match="none of the checkpoints"):
                stoker.offload(*made(), store=tmp_path / "two", dram="64MiB", restore=ckpt)


def test_a_run_that_breaks_the_format_is_damage_in_memory_too(folder, tmp_path, monkeypatch):
    with checkpoints(folder) as ckpt:
        model, opt = stoker.offload(*made(), store=tmp_path / "run", dram="64MiB", checkpoints=ckpt)
        ckpt.save(1, model=model, optimizer=opt).wait()
        opt.close()
        monkeypatch.setattr(planes, "run_in", lambda reader: {"state": {}})
        model, opt = made()
        with pytest.warns(UserWarning, match="breaks the format of a run"):
            with pytest.raises(errors.Corruption, match="none of the checkpoints"):
                ckpt.restore(model=model, optimizer=opt)


def test_errors_of_stoker_are_no_damage():
    with pytest.raises(errors.Mismatch, match="another model"):
        with well_formed("here", "a run"):
            raise errors.Mismatch("another model")
    with pytest.raises(errors.Corruption, match="here: the manifest breaks the format of a run"):
        with well_formed("here", "a run"):
            raise KeyError("step")
    with pytest.raises(RuntimeError, match="allocate memory"):
        with well_formed("here", "a run"):
            raise RuntimeError("you tried to allocate memory")


def test_a_run_goes_back_where_frozen_weights_fill_its_store(folder, tmp_path):
    """The store has room for frozen weights once. A restore writes none that it has."""

    def run(**given):
        torch.manual_seed(0)
        layers = [nn.Linear(2048, 2048, bias=False).requires_grad_(False) for _ in range(10)]
        model = nn.Sequential(*layers, nn.Linear(2048, 8))
        left = [param for param in model.parameters() if param.requires_grad]
        opt = torch.optim.AdamW(left, lr=1e-2)
        return stoker.offload(model, opt, store=tmp_path / "run", dram="128MiB", **given)

    def step(model, opt):
        model(torch.ones(2, 2048)).square().sum().backward()
        opt.step()
        opt.zero_grad()

    with checkpoints(folder) as ckpt:
        model, opt = run(checkpoints=ckpt)
        step(model, opt)
        expected = copied(model)
        ckpt.save(1, model=model, optimizer=opt).wait()
        step(model, opt)
        ckpt.save(2, model=model, optimizer=opt).wait()
        opt.close()
        model, opt = run(restore=ckpt.at(1))
        assert opt.step_count == 1
        assert_same(model, expected)
        opt.close()


def test_what_is_read_to_be_compared_has_ended_before_its_memory_goes(folder):
    """Ctrl-C comes in the wait for it."""

    class Read:
        waits = 0

        def wait(self):
            self.waits += 1
            if self.waits == 1:
                raise KeyboardInterrupt

    read = Read()
    store = types.SimpleNamespace(read=lambda *_: read)
    with checkpoints(folder) as ckpt:
        with pytest.raises(KeyboardInterrupt):
            with windows.Windows(None, store, None, ckpt._runtime) as into:
                into.room("w/unit", 0, 64, 64, frozen=True)
    assert read.waits == 2


@pytest.mark.parametrize("where", ["before", "in start()"])
def test_a_save_that_is_interrupted_as_it_begins_holds_no_step(
    folder, tmp_path, monkeypatch, where
):
    """Ctrl-C: before there is a thread, or when it runs already and goes on."""
    with checkpoints(folder) as ckpt:
        model, opt = stoker.offload(*made(), store=tmp_path / "run", dram="64MiB", checkpoints=ckpt)
        train(model, opt, 0)
        real = threading.Thread.start

        def start(thread):
            if thread.name == "stoker checkpoint":
                if where == "in start()":
                    real(thread)
                raise KeyboardInterrupt
            real(thread)

        monkeypatch.setattr(threading.Thread, "start", start)
        with pytest.raises(KeyboardInterrupt):
            ckpt.save(1, model=model, optimizer=opt)
        monkeypatch.undo()
        ckpt.wait()
        there = [each.manifest.step for each in ckpt.readers()]
        assert there == ([1] if where == "in start()" else [])
        train(model, opt, 1)
        ckpt.save(2, model=model, optimizer=opt).wait(timeout=60)
        opt.close()


def test_a_restore_does_not_write_over_a_run_of_another_optimizer(folder, tmp_path):
    def other(**given):
        model = nn.Linear(32, 32, bias=False)
        opt = torch.optim.AdamW(model.parameters())
        return stoker.offload(model, opt, store=tmp_path / "other", dram="64MiB", **given)

    model, opt = other()
    small_steps(model, opt, 3)
    expected = copied(model)
    opt.close()
    with checkpoints(folder) as ckpt:
        model, opt = small_run(tmp_path / "run")
        small_steps(model, opt, 1)
        ckpt.save(1, optimizer=opt).wait()
        opt.close()
        with pytest.raises(errors.Mismatch, match=r"holds another run: of adamw .* is of sgd with"):
            other(restore=ckpt.at(1))
    model, opt = other(resume=True)
    assert opt.step_count == 3
    assert_same(model, expected)
    opt.close()


def test_a_local_store_that_is_not_there_says_how_to_make_it(tmp_path):
    with pytest.raises(errors.InvalidArgument, match="first: stoker create local:.*--capacity"):
        checkpoints(f"local:{tmp_path}/new")
