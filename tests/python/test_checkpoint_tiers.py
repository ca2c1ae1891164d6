"""stoker.Checkpoints: several stores, going back, tied weights, and the end of a program."""

from __future__ import annotations

import inspect
import json
import os
import signal
import subprocess
import sys
import threading
import time
import types
import urllib.request
from pathlib import Path

import pytest
import torch
from torch import nn

import stoker
from checkpoint_run import made, train
from faults import ONE_THREAD
from stoker import errors
from stoker.checkpoint import checkpoints as whole
from stoker.checkpoint.manifest import MANIFEST, Manifest, hash_of
from stoker.checkpoint.pace import FAILURES_EVERY, Pace
from stoker.checkpoint.reading import Reader
from stoker.checkpoint.workspace import Tier
from stoker.ckpt import cli


def checkpoints(store, **kwargs) -> stoker.Checkpoints:
    return stoker.Checkpoints(store, **{"staging": "64MiB", **kwargs})


def steps_in(folder: Path) -> list[int]:
    return sorted(int(each.parent.name[5:11]) for each in folder.glob("step-*/MANIFEST.json"))


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    path.write_bytes(data)


@pytest.fixture
def broken(monkeypatch):
    """Copies to the store "broken" fail."""
    really = whole.copy_checkpoint

    def copy(source, to, *given, **more):
        if to.composition.endswith("/broken"):
            raise errors.IoError("the link is down")
        really(source, to, *given, **more)

    monkeypatch.setattr(whole, "copy_checkpoint", copy)


def test_a_copy_that_comes_second_leaves_the_first_one(tmp_path, monkeypatch):
    model = nn.Linear(4, 4)
    with checkpoints(tmp_path / "run") as ckpt:
        ckpt.save(1, model=model).wait()
    really, meanwhile = Tier.put_manifest, [True]

    def put_manifest(tier, *given):
        if meanwhile and meanwhile.pop():  # another program copies the same one, and is faster
            assert cli.main(["cp", str(tmp_path / "run"), str(tmp_path / "far")]) == 0
        really(tier, *given)

    monkeypatch.setattr(Tier, "put_manifest", put_manifest)
    assert cli.main(["cp", str(tmp_path / "run"), str(tmp_path / "far")]) != 0
    assert steps_in(tmp_path / "far") == [1]
    assert cli.main(["verify", str(tmp_path / "far"), "--all"]) == 0


def test_a_store_that_fails_takes_no_copy_from_the_others(tmp_path, broken, caplog):
    model = nn.Linear(4, 4)
    ckpt = checkpoints(tmp_path / "run", also=[f"{tmp_path}/broken", f"{tmp_path}/sound"])
    handle = ckpt.save(1, model=model)
    handle.wait("durable")  # this disk has it, whatever happens to the copies
    handle.wait(f"{tmp_path}/sound")
    with pytest.raises(errors.IoError, match="link is down"):
        handle.wait(f"dir:{tmp_path}/broken")
    handle.wait("durable")
    with pytest.raises(errors.InvalidArgument, match="takes one of"):
        handle.wait("elsewhere")
    with pytest.raises(errors.IoError, match="link is down"):
        ckpt.close()
    assert "step 1 is saved, but copying it or removing old ones failed" in caplog.text
    assert steps_in(tmp_path / "sound") == [1] == steps_in(tmp_path / "run")


def test_a_slow_store_gets_fewer_copies_and_the_newest_at_the_end(tmp_path):
    model = nn.Linear(4, 4)
    with checkpoints(tmp_path / "run", every="auto", also=[f"{tmp_path}/slow"]) as ckpt:
        ckpt.save(1, model=model).wait(f"{tmp_path}/slow")
        ckpt.wait()
        ckpt._copying[f"dir:{tmp_path}/slow"].persist = 3600.0  # it took long
        handle = ckpt.save(2, model=model, force=True)
        with pytest.raises(errors.NotFound, match="step 2 was not copied to .*slow"):
            handle.wait(f"{tmp_path}/slow")
        ckpt.wait()
        assert steps_in(tmp_path / "slow") == [1] and steps_in(tmp_path / "run") == [1, 2]
    assert steps_in(tmp_path / "slow") == [1, 2]


def test_auto_never_waits_for_a_copy_to_a_slow_store(tmp_path, monkeypatch):
    model, go = nn.Linear(4, 4), []
    really = whole.copy_checkpoint

    def copy(*given, **more):
        while not go:
            time.sleep(0.01)
        really(*given, **more)

    monkeypatch.setattr(whole, "copy_checkpoint", copy)
    with checkpoints(tmp_path / "run", every="auto", also=[f"{tmp_path}/slow"]) as ckpt:
        ckpt.save(1, model=model).wait()
        ckpt._pace._last = -1e9  # a save pays
        assert ckpt.save(2, model=model) is None
        go.append(True)
        ckpt.wait()
        ckpt._pace._last = -1e9
        assert ckpt.save(3, model=model) is not None


def test_the_time_between_failures_is_learned_from_restarts(tmp_path):
    assert Pace(7200).failures_every == 7200
    pace = Pace(None)
    assert pace.failures_every == pytest.approx(FAILURES_EVERY, rel=0.01)
    pace.restarted({"ran_seconds": 3600.0, "restarts": 8})
    assert pace.failures_every == pytest.approx((FAILURES_EVERY + 3600) / 10, rel=0.01)
    pace.restarted({"ran_seconds": "x", "restarts": -1})  # of another version
    pace.restarted({"ran_seconds": 10**400, "restarts": 1})
    pace.restarted({"ran_seconds": 1, "restarts": 10**400})
    assert pace.restarts == 9

    model = nn.Linear(4, 4)
    for process in range(3):
        with checkpoints(tmp_path / "run", every="auto") as ckpt:
            found = ckpt.restore(model=model)
            ckpt.restore(model=model)  # counts once
            assert ckpt._pace.restarts == process == (found is not None) * process
            assert (ckpt._pace.restart > 0) == (process > 0)
            handle = ckpt.save(process + 1, model=model)
            handle.wait()
            ran = ckpt._pace.ran
        text = (tmp_path / "run" / handle.folder / MANIFEST).read_bytes()
        writer = Manifest.parse(text, "here").writer
        assert writer["restarts"] == process and 0 < writer["ran_seconds"] <= ran


def test_who_goes_back_keeps_what_is_saved_then(tmp_path, caplog, capsys):
    model = nn.Linear(4, 4)
    with checkpoints(tmp_path / "run", keep=2) as ckpt:
        for step in (180, 190, 200):
            ckpt.save(step, model=model).wait()
        ckpt.wait()
        assert ckpt.restore(model=model, step=190).step == 190
        ckpt.save(195, model=model).wait()
    assert steps_in(tmp_path / "run") == [195, 200]  # the last two that were saved
    with checkpoints(tmp_path / "run", keep=2) as ckpt:
        assert ckpt.restore(model=model).step == 195
        assert ckpt.restore(model=model, step=200).step == 200
        ckpt.save(196, model=model).wait()
    assert steps_in(tmp_path / "run") == [195, 196]
    assert "counts as newer" not in caplog.text
    assert cli.main(["rm", f"{tmp_path}/run", "--after", "195"]) == 0
    assert capsys.readouterr().out.count("removed  step-000196-") == 1
    assert cli.main(["rm", f"{tmp_path}/run", "--after", "196"]) == 1
    with checkpoints(tmp_path / "run") as ckpt:
        assert ckpt.restore(model=model).step == 195


def test_attempts_are_counted_over_all_stores(tmp_path):
    model = nn.Linear(4, 4)
    with checkpoints(tmp_path / "backup") as ckpt:
        for _ in range(3):
            ckpt.save(5, model=model).wait()
    with checkpoints(tmp_path / "new", also=[f"{tmp_path}/backup"]) as ckpt:
        ckpt.restore(model=model)
        with torch.no_grad():
            model.bias.fill_(7)
        handle = ckpt.save(5, model=model)  # the newest of this step
    with checkpoints(tmp_path / "new", also=[f"{tmp_path}/backup"]) as ckpt:
        assert ckpt.restore(model=model).folder == handle.folder


def order(where: str, **what) -> None:
    """Tells s3_server.py what it is to do wrong."""
    endpoint = where.partition("endpoint=")[2].partition("&")[0]
    data = json.dumps({"clear": False, **what}).encode()
    urllib.request.urlopen(urllib.request.Request(f"{endpoint}/_control", data=data)).close()


LOST = {"method": "PUT", "times": 1, "match": "MANIFEST"}
DENIED = {**LOST, "kind": "status", "status": 403, "code": "AccessDenied", "match": "pack"}


@pytest.mark.parametrize("conditions", [True, False])
def test_a_bucket_that_answers_badly_loses_no_checkpoint(s3, conditions):
    """Each save is whole, or says that it failed."""
    model, opt = made()
    order(s3, conditions=conditions)
    with checkpoints(s3, keep=2) as ckpt:
        ckpt.save(1, model=model, optimizer=opt).wait()
        kinds = ("close_after", "close")  # it was done, and it was not
        for step, fault in enumerate([*({**LOST, "kind": kind} for kind in kinds), DENIED], 2):
            train(model, opt, step)
            order(s3, conditions=conditions, faults=[fault])
            ckpt.save(step, model=model, optimizer=opt)
            error = None
            try:
                ckpt.wait()
            except errors.StokerError as caught:
                error = caught
            assert (error is not None) == (fault is DENIED), (fault, error)
            order(s3, conditions=conditions, faults=[])
            other, _ = made()
            assert ckpt.restore(model=other).step == (step - 1 if error else step)
            if error is None:
                expected = model.state_dict()
                for name, value in other.state_dict().items():
                    assert torch.equal(value, expected[name]), (name, fault)
            for name in ckpt._tiers[0].names():
                Reader(ckpt._tiers[0], name, ckpt._ring, []).verify()


class Tied(nn.Module):
    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
        if tied:
            self.b.weight = self.a.weight


def test_weights_that_lie_apart_are_not_tied_in_silence(tmp_path):
    apart = Tied(False)
    with checkpoints(tmp_path / "run") as ckpt:
        ckpt.save(1, model=apart).wait()
        tied = Tied(True)
        before = tied.a.weight.clone()
        with pytest.raises(
            errors.Mismatch, match=r"has different values for a\.weight and b\.weight"
        ):
            ckpt.restore(model=tied)
        assert torch.equal(tied.a.weight, before)
        with torch.no_grad():
            apart.b.weight.copy_(apart.a.weight)
        ckpt.save(2, model=apart).wait()
        assert ckpt.restore(model=tied).step == 2
        assert torch.equal(tied.a.weight, apart.a.weight)


def test_a_file_that_has_a_tied_weight_once_fills_both_names(tmp_path):
    from safetensors.torch import save_file

    tied = Tied(True)
    save_file({"a.weight": tied.a.weight.detach()}, tmp_path / "model.safetensors")
    assert cli.main(["import", f"{tmp_path}/run", f"{tmp_path}/model.safetensors"]) == 0
    with checkpoints(tmp_path / "run") as ckpt:
        other = Tied(True)
        assert ckpt.restore(model=other).step == 0
        assert torch.equal(other.b.weight, tied.a.weight)
        with pytest.raises(errors.Mismatch, match=r"lacks b\.weight"):
            ckpt.restore(model=Tied(False))


def test_what_was_plain_comes_back_plain(tmp_path):
    class Mean:
        def state_dict(self):
            return {"value": 3.0, "count": 7}

    model = nn.Linear(4, 4)
    with checkpoints(tmp_path / "run") as ckpt:
        ckpt.save(1, model=model, extra={"mean": Mean(), "note": {"value": 1}}).wait()
        found = ckpt.restore(model=model).extra
        assert found == {"mean": {"value": 3.0, "count": 7}, "note": {"value": 1}}
        with pytest.raises(errors.InvalidArgument, match="do not pass extra.note"):
            ckpt.restore(model=model, extra={"note": {}})


def test_a_model_without_memory_is_not_restored_in_silence(tmp_path):
    model = nn.Linear(4, 4)
    with checkpoints(tmp_path / "run") as ckpt:
        ckpt.save(1, model=model).wait()
        with torch.device("meta"):
            empty = nn.Linear(4, 4)
        with pytest.raises(errors.Mismatch, match="weight of the model is on the meta device"):
            ckpt.restore(model=empty)
        empty.to_empty(device="cpu")
        ckpt.restore(model=empty)
        assert torch.equal(empty.weight, model.weight)


def test_weights_in_a_store_are_neither_saved_nor_restored_as_placeholders(tmp_path):
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    opt = torch.optim.AdamW(model.parameters())
    with checkpoints(tmp_path / "run") as ckpt:
        ckpt.save(1, model=model).wait()
        store = tmp_path / "store"
        model, opt = stoker.offload(model, opt, store=store, dram="64MiB", checkpoints=ckpt)
        with pytest.raises(errors.InvalidArgument, match="give save.. the optimizer"):
            ckpt.save(2, model=model)
        with pytest.raises(errors.Mismatch, match="restore by stoker.offload"):
            ckpt.restore(model=model)
        ckpt.save(2, model=model, optimizer=opt).wait()
        opt.close()


def test_a_run_that_got_sigterm_waits_no_longer_than_its_grace(tmp_path, monkeypatch):
    model, go = nn.Linear(4, 4), threading.Event()
    monkeypatch.setattr(whole, "copy_checkpoint", lambda *_, **__: go.wait(60))
    with pytest.raises(SystemExit) as ended:  # noqa: SIM117
        with checkpoints(tmp_path / "run", grace=60.0, also=[f"{tmp_path}/slow"]) as ckpt:
            os.kill(os.getpid(), signal.SIGTERM)
            try:
                ckpt.save(1, model=model)
            finally:
                ckpt._ends -= 59.5
    assert ended.value.code == 143 and steps_in(tmp_path / "run") == [1]
    assert ckpt._thread.is_alive()  # a copy that takes longer is given up
    go.set()
    ckpt._thread.join()


def test_a_run_whose_grace_is_over_ends_beside_its_save(tmp_path):
    """Its thread is in C++ then, or on its way out of there."""
    script = f"""
import os, signal, stoker, torch
from stoker import _core
from stoker.checkpoint.workspace import Tier
memory = torch.ones(1 << 16)
def endless(*given):
    while True:
        _core.xxh3_128(memory.data_ptr(), memory.nbytes)
Tier.write_chunks = endless
ckpt = stoker.Checkpoints({str(tmp_path / "run")!r}, staging="64MiB", grace=1.0)
model = torch.nn.Linear(4, 4)
os.kill(os.getpid(), signal.SIGTERM)
ckpt.save(1, model=model)
"""
    ran = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=ONE_THREAD, timeout=60
    )
    assert ran.returncode == 143, (ran.returncode, ran.stderr[-2000:])
    assert "was not saved" in ran.stderr


def test_a_program_that_ends_without_close_waits_for_its_save(tmp_path):
    script = f"""
import stoker, torch
from stoker.checkpoint import parts
import time
read = parts.Bytes.read
def slow(*given):
    time.sleep(1.0)
    read(*given)
parts.Bytes.read = slow
ckpt = stoker.Checkpoints({str(tmp_path / "run")!r}, staging="64MiB")
model = torch.nn.Linear(4, 4)
opt = torch.optim.AdamW(model.parameters())
ckpt.save(1, model=model, optimizer=opt)
"""
    ran = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=ONE_THREAD, timeout=60
    )
    assert ran.returncode == 0 and "waiting for the save of step 1" in ran.stderr, ran.stderr
    assert steps_in(tmp_path / "run") == [1]


def test_a_damaged_file_is_not_taken_over_once_that_is_known(tmp_path):
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(8, 8))
    model[0].requires_grad_(False)
    with checkpoints(tmp_path / "run", keep=1) as ckpt:
        first = ckpt.save(1, model=model)
        ckpt.wait()
        flip(tmp_path / "run" / first.folder / "model-00002-of-00002.safetensors", 4100)
        second = ckpt.save(2, model=model)  # takes over the damaged file
        with pytest.raises(
            errors.Corruption, match="no old checkpoint is removed, because the newest"
        ):
            ckpt.wait()
        second.wait("durable")
        third = ckpt.save(3, model=model)
        ckpt.wait()
        assert steps_in(tmp_path / "run") == [3]
        assert cli.main(["verify", f"{tmp_path}/run"]) == 0
        assert ckpt.restore(model=model).folder == third.folder


def test_a_damaged_file_of_a_copy_is_not_taken_over_once_that_is_known(tmp_path):
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(8, 8))
    model[0].requires_grad_(False)
    far = tmp_path / "far"
    with checkpoints(tmp_path / "run", keep=1, also=[str(far)]) as ckpt:
        first = ckpt.save(1, model=model)
        ckpt.wait()
        flip(far / first.folder / "model-00002-of-00002.safetensors", 4100)
        ckpt.save(2, model=model)  # takes over the damaged file
        with pytest.raises(
            errors.Corruption, match="no old checkpoint is removed, because the newest"
        ):
            ckpt.wait()
        ckpt.save(3, model=model)
        ckpt.wait()
        assert steps_in(far) == [3] == steps_in(tmp_path / "run")
        assert cli.main(["verify", str(far)]) == 0


def test_close_brings_the_newest_to_all_stores_that_take_it(tmp_path, broken, caplog):
    model = nn.Linear(4, 4)
    also = [f"{tmp_path}/broken", f"{tmp_path}/sound"]
    ckpt = checkpoints(tmp_path / "run", every="auto", also=also)
    for each in also:
        ckpt._copying[f"dir:{each}"].persist = 3600.0
        ckpt._copying[f"dir:{each}"]._last = time.monotonic()
    ckpt.save(1, model=model).wait("durable")
    ckpt.wait()
    assert steps_in(tmp_path / "sound") == []
    with pytest.raises(errors.IoError, match="link is down"):
        ckpt.close()
    assert steps_in(tmp_path / "sound") == [1]
    assert (
        "copying step-000001-" in caplog.text and "broken failed: the link is down" in caplog.text
    )
    ckpt.close()  # nothing is left to do


def test_a_first_store_that_cannot_be_listed_leaves_nothing_to_a_second_close(
    tmp_path, monkeypatch
):
    ckpt = checkpoints(tmp_path / "run", every="auto", also=[f"{tmp_path}/far"])
    ckpt._copying[f"dir:{tmp_path}/far"].persist = 3600.0
    ckpt._copying[f"dir:{tmp_path}/far"]._last = time.monotonic()
    ckpt.save(1, model=nn.Linear(4, 4)).wait("durable")
    ckpt.wait()

    def names() -> list:
        raise errors.IoError("the disk is gone")

    monkeypatch.setattr(ckpt._tiers[0], "names", names)
    with pytest.raises(errors.IoError, match="disk is gone"):
        ckpt.close()
    ckpt.close()


def test_a_lack_of_memory_is_no_damage(tmp_path, monkeypatch):
    """restore() does not go back to an older checkpoint for it."""
    model, opt = made()
    with checkpoints(tmp_path / "run") as ckpt:
        for step in (1, 2):
            train(model, opt, step)
            ckpt.save(step, model=model, optimizer=opt).wait()
        really = torch.empty

        def empty(*size, **given):
            if str(given.get("device")) == "cpu":
                raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
            return really(*size, **given)

        monkeypatch.setattr(torch, "empty", empty)
        with pytest.raises(RuntimeError, match="can't allocate memory") as caught:
            ckpt.restore(model=model, optimizer=opt)
        assert not isinstance(caught.value, errors.StokerError)


def test_the_command_says_what_is_damaged_before_anything_goes(tmp_path, capsys):
    def run(*arguments) -> tuple[int, str]:
        status = cli.main([str(each) for each in arguments])
        told = capsys.readouterr()
        return status, told.out + told.err

    model = nn.Linear(300, 300)
    store, other = tmp_path / "run", tmp_path / "other"
    with checkpoints(store) as ckpt:
        handles = [ckpt.save(step, model=model) for step in (1, 2)]
    newest = store / handles[1].folder
    assert run("cp", store, other)[0] == 0
    flip(other / handles[1].folder / "model.safetensors", 5000)
    status, told = run("cp", store, other)  # it is there, but not sound
    assert status == 1 and "is damaged" in told
    status, told = run("export", store, tmp_path / "out", "--everything")
    assert status == 0
    assert (tmp_path / "out" / MANIFEST).read_bytes() == (newest / MANIFEST).read_bytes()

    flip(newest / "model.safetensors", 5000)
    status, told = run("gc", store, "--last", 1)
    assert status == 1 and "no old checkpoint is removed, because the newest one is damaged" in told
    assert steps_in(store) == [1, 2]
    flip(newest / "model.safetensors", 5000)

    flip(newest / MANIFEST, 20)
    status, told = run("verify", store)  # not only the newest that opens
    assert status == 1 and "DAMAGED" in told and f"{handles[0].folder}: sound" in told
    (tmp_path / "empty").mkdir()
    status, told = run("verify", "--all", tmp_path / "empty")
    assert status == 1 and "holds no checkpoint" in told


def test_a_manifest_from_the_future_is_told_and_kept(tmp_path):
    model = nn.Linear(4, 4)
    with checkpoints(tmp_path / "run", keep=1) as ckpt:
        first = ckpt.save(1, model=model)
        ckpt.wait()
        manifest = tmp_path / "run" / first.folder / MANIFEST
        head = manifest.read_bytes().rpartition(b',"digest":')[0]
        head = head.replace(b'"version":1', b'"version":9', 1)
        manifest.write_bytes(head + b',"digest":"' + hash_of(head).hex().encode() + b'"}\n')
        with (
            pytest.warns(UserWarning, match="has format 9"),
            pytest.raises(errors.Mismatch, match="has format 9.*use a newer Stoker"),
        ):
            ckpt.restore(model=model)
        ckpt.save(2, model=model)
        ckpt.wait()
        assert steps_in(tmp_path / "run") == [1, 2]  # nobody removes what it cannot read


@pytest.mark.soak
def test_a_model_is_trained_by_a_compiled_step_while_it_is_saved(tmp_path):
    model, opt = made()
    step = torch.compile(opt.step, backend="eager")
    with checkpoints(tmp_path / "run") as ckpt:
        for at in range(3):
            train(model, opt, at)
        model(torch.randn(4, 600)).square().mean().backward()
        was = {name: value.clone() for name, value in model.state_dict().items()}
        ckpt.save(1, model=model, optimizer=opt)
        step()
        ckpt.wait()
        ckpt.restore(model=model, optimizer=opt)
        for name, value in model.state_dict().items():
            assert torch.equal(value, was[name]), name


def test_a_path_of_lightning_holds_what_was_saved_last(tmp_path, monkeypatch):
    """Also where it held a later step of another run, as "last.ckpt" may."""
    try:
        from stoker.integrations.lightning import StokerCheckpointIO
    except ImportError:  # Lightning is not installed: its base class has no code that is used
        base = types.ModuleType("lightning.fabric.plugins")
        base.CheckpointIO = object
        monkeypatch.setitem(sys.modules, "lightning.fabric.plugins", base)
        from stoker.integrations.lightning import StokerCheckpointIO

        del sys.modules["stoker.integrations.lightning"]
    files, path = StokerCheckpointIO(staging="16MiB"), tmp_path / "last.ckpt"
    for step in (500, 7, 7):
        value = torch.full((300,), float(step))
        files.save_checkpoint({"state_dict": {"w": value}, "global_step": step, "note": step}, path)
        assert steps_in(path) == [step]
        found = files.load_checkpoint(path)
        assert found["note"] == step and torch.equal(found["state_dict"]["w"], value)
    files.remove_checkpoint(path)
    assert not path.exists()


def test_a_manifest_that_met_its_own_write_is_no_conflict():
    """Its first answer was lost, and so was the look; the second try found it there."""
    done, reads = [], []

    class Transaction:
        def require(self, key, tag):
            assert tag is None

        def resize(self, key, size):
            pass

        def write_bytes(self, key, at, data):
            self.data = data

        def commit(self, durability):
            return self

        def wait(self):
            done.append(self.data)
            if len(done) == 1:
                raise errors.InDoubt("the answer was lost")
            raise errors.Conflict("it is there")

    def read_bytes(key):
        reads.append(key)
        if len(reads) == 1:
            raise errors.IoError("the link is down")
        return done[0]

    tier = Tier.__new__(Tier)
    tier.store = types.SimpleNamespace(begin=Transaction, read_bytes=read_bytes)
    tier.put("step-000001-000000-0000", MANIFEST, b"ours", new=True)
    assert len(done) == len(reads) == 2
    with pytest.raises(errors.Conflict):  # of somebody else's, with no doubt
        tier.put("step-000001-000000-0000", MANIFEST, b"other", new=True)


def test_what_was_saved_just_now_stays_also_by_hand(tmp_path):
    """The store holds later steps, of a run that went on from an older one."""
    model = nn.Linear(4, 4)
    with checkpoints(tmp_path, keep=3) as ckpt:
        for step in (100, 110, 120):
            ckpt.save(step, model=model).wait("durable")
    with checkpoints(tmp_path, keep=3) as ckpt:
        ckpt.save(60, model=model, force=True).wait("durable")
        assert not any("step-000060" in each for each in ckpt.collect_garbage())
        assert steps_in(tmp_path) == [60, 110, 120]


@pytest.mark.parametrize("kind", ["local:{}/new", "coded(2+1,{0}/a,{0}/b,{0}/c)"])
def test_a_store_that_needs_a_capacity_is_to_be_made_first(tmp_path, kind):
    store = kind.format(tmp_path)
    with pytest.raises(errors.InvalidArgument) as refused:
        checkpoints(store)
    assert f"stoker create {store} --capacity" in str(refused.value)


def test_another_refusal_of_a_store_asks_for_no_capacity(tmp_path):
    with pytest.raises(errors.InvalidArgument) as refused:
        checkpoints(f"coded(2+1,{tmp_path}/a,{tmp_path}/b)")
    assert "stoker create" not in str(refused.value)


SAVES_THREE_TIMES = """
import sys
from pathlib import Path
import stoker, torch

model = torch.nn.Linear(1024, 2100, bias=False)
folders = sys.argv[1:]
ckpt = stoker.Checkpoints(f"dir:{folders[0]}", keep=1, also=[f"dir:{folders[1]}"])
for step in (1, 2, 3):
    with torch.no_grad():
        model.weight.fill_(step)
    ckpt.save(step, model=model)
    ckpt.wait()
    for folder in folders:
        print(*sorted(each.stat().st_ino for each in large(folder)))
"""


def large(folder):
    return [each for each in Path(folder).rglob("*") if each.stat().st_size >= 8 << 20]


def test_a_save_writes_into_the_space_of_one_that_keep_let_go(tmp_path):
    """In both stores, one of them a copy. Without close(), too, nothing is left when it ends."""
    how = ["stat", "--file-system", "--format=%T", tmp_path]
    if subprocess.check_output(how, text=True).strip() not in ("ext2/ext3", "xfs"):
        pytest.skip("no ext4 and no XFS")
    folders = [tmp_path / "first", tmp_path / "second"]
    script = inspect.getsource(large) + SAVES_THREE_TIMES
    done = subprocess.check_output([sys.executable, "-c", script, *folders], text=True)
    inodes = [set(line.split()) for line in done.splitlines()]
    for first, second, third in (inodes[0::2], inodes[1::2]):
        assert (len(first), len(second)) == (1, 2), "one is kept to be written into"
        assert third == second
    for folder in folders:
        assert len(large(folder)) == 1
        model = nn.Linear(1024, 2100, bias=False)
        with checkpoints(f"dir:{folder}") as ckpt:
            assert ckpt.restore(model=model).step == 3
        assert torch.equal(model.weight, torch.full_like(model.weight, 3.0))
