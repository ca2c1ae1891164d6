"""Copies of checkpoints that take fewer bytes in a slow store: all that works with plain ones works
with them, and no damage of them is believed."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import stoker
from stoker import errors
from stoker.checkpoint import commits, reduction
from stoker.checkpoint.manifest import (
    CHUNK,
    MANIFEST,
    REDUCED_TABLE,
    TABLE,
    File,
    Manifest,
    Name,
    Stored,
    Table,
    dump_reduced,
    hash_of,
    parse_reduced,
)
from stoker.checkpoint.reading import Reader
from stoker.checkpoint.workspace import Tier
from stoker.ckpt.cli import main

PACK, SMALL = "state-00000.pack", "state-00000.pack.reduced"


def made(seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(512, 256), nn.Linear(256, 8))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(model: nn.Module, opt: torch.optim.Optimizer) -> None:
    model(torch.randn(8, 512)).square().mean().backward()
    opt.step()
    opt.zero_grad()


def values(model: nn.Module, opt: torch.optim.Optimizer) -> list[torch.Tensor]:
    states = opt.state_dict()["state"].values()
    return [*model.state_dict().values(), *(v for each in states for v in each.values())]


def checkpoints(store, **more) -> stoker.Checkpoints:
    return stoker.Checkpoints(store, **{"staging": "64MiB", **more})


def folder_in(store: Path) -> Path:
    return max(store.glob("step-*"))


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> tuple[Path, list[torch.Tensor]]:
    """Folders `run` and, reduced, `far` with a checkpoint, and its values."""
    top = tmp_path_factory.mktemp("reduced")
    model, opt = made()
    train(model, opt)
    with checkpoints(top / "run", also=[str(top / "far")], reduce="on") as ckpt:
        ckpt.save(1, model=model, optimizer=opt).wait(f"{top}/far")
        assert ckpt.costs.reduced_bytes > 100_000
    return top, values(model, opt)


@pytest.fixture
def copy(saved, tmp_path) -> Path:
    shutil.copytree(saved[0], tmp_path / "top")
    return tmp_path / "top"


def loads(store: Path, expected: list[torch.Tensor], also: tuple = ()) -> list[str]:
    """The warnings of a restore, which gives the same bits."""
    model, opt = made(1)
    train(model, opt)
    with checkpoints(store, also=[str(each) for each in also]) as ckpt:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            assert ckpt.restore(model=model, optimizer=opt).step == 1
    assert all(torch.equal(a, b) for a, b in zip(values(model, opt), expected, strict=True))
    return [str(each.message) for each in said]


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    path.write_bytes(data)


def test_packs_get_smaller_and_come_back(saved):
    top, expected = saved
    near, far = folder_in(top / "run"), folder_in(top / "far")
    assert {each.name for each in far.iterdir()} == {
        MANIFEST,
        TABLE,
        REDUCED_TABLE,
        "model.safetensors",
        SMALL,
    }
    for plain in (TABLE, "model.safetensors"):  # which others read
        assert (near / plain).read_bytes() == (far / plain).read_bytes()
    assert (far / SMALL).stat().st_size * 1.1 < (near / PACK).stat().st_size
    manifest = json.loads((far / MANIFEST).read_bytes())
    assert manifest["version"] == 3
    assert manifest["reduced"] == {PACK: (far / SMALL).stat().st_size}
    assert loads(top / "far", expected) == []


def test_the_command_works_with_them(copy, saved, capsys, tmp_path):
    far, plain = str(copy / "far"), tmp_path / "plain"

    def run(*arguments) -> str:
        assert main([str(each) for each in arguments]) == 0
        return capsys.readouterr().out

    assert "sound" in run("verify", far)
    assert "reduced to" in run("show", far)
    assert "0 of 4 tensors differ" in run("diff", far, copy / "run")
    run("cp", far, tmp_path / "same")  # as it is
    assert (folder_in(tmp_path / "same") / SMALL).exists()
    run("cp", far, plain, "--reduce", "off")
    for name in (PACK, TABLE, MANIFEST, "model.safetensors"):
        there = (folder_in(plain) / name).read_bytes()
        assert there == (folder_in(copy / "run") / name).read_bytes()
    run("cp", plain, far)  # is there, as it is
    assert main(["cp", str(plain), far, "--reduce", "off"]) != 0
    assert "is there already, with --reduce on" in capsys.readouterr().err
    run("cp", plain, tmp_path / "all", "--reduce", "all")
    assert (folder_in(tmp_path / "all") / "model.safetensors.reduced").exists()
    assert loads(tmp_path / "all", saved[1]) == []
    run("export", tmp_path / "all", tmp_path / "out", "--everything")
    assert {each.name for each in (tmp_path / "out").iterdir()} == {
        each.name for each in folder_in(copy / "run").iterdir()
    }
    shutil.copytree(tmp_path / "out", tmp_path / "again" / folder_in(plain).name)
    assert loads(tmp_path / "again", saved[1]) == []
    assert "keeps" in run("gc", far, "--last", "1")


def test_every_changed_byte_is_found(copy):
    """Of what is stored, padding and tables included."""
    folder = folder_in(copy / "far")
    rng = random.Random(15)
    with checkpoints(copy / "far") as ckpt:

        def sound() -> bool:
            try:
                Reader(ckpt._tiers[0], Name.of(folder.name), ckpt._ring, []).verify()
            except (errors.Corruption, errors.NotFound):
                return False
            return True

        assert sound()
        for name in (SMALL, REDUCED_TABLE, MANIFEST):
            data = (folder / name).read_bytes()
            places = [*rng.sample(range(len(data)), min(len(data), 40)), len(data) - 1]
            for at in places:
                flip(folder / name, at)
                assert not sound(), f"{name} {at}"
                (folder / name).write_bytes(data)
            for cut in (b"", data[: len(data) // 2], data[:-1], data + b"\0"):
                (folder / name).write_bytes(cut)
                assert not sound(), f"{name} of {len(cut)} bytes"
            (folder / name).unlink()
            assert not sound(), f"without {name}"
            (folder / name).write_bytes(data)
        assert sound()


def test_damage_is_mended_from_the_other_store_whatever_it_has(copy, saved, caplog):
    near, far = folder_in(copy / "run"), folder_in(copy / "far")
    flip(near / PACK, 70_000)
    assert loads(copy / "run", saved[1], also=(copy / "far",)) == []
    assert "these bytes were read from dir:" in caplog.text
    caplog.clear()
    flip(near / PACK, 70_000)  # well again
    flip(far / SMALL, 5000)
    assert loads(copy / "far", saved[1], also=(copy / "run",)) == []
    assert "these bytes were read from dir:" in caplog.text
    os.remove(far / SMALL)
    assert loads(copy / "far", saved[1], also=(copy / "run",)) == []
    flip(near / MANIFEST, 50)  # its files lie there as they are
    assert loads(copy / "far", saved[1], also=(copy / "run",)) == []


def test_damage_that_nobody_mends_is_told(copy):
    flip(folder_in(copy / "far") / SMALL, 5000)
    model, opt = made()
    with checkpoints(copy / "far") as ckpt, pytest.warns(UserWarning, match="pack between byte"):
        with pytest.raises(errors.Corruption, match="none of the checkpoints"):
            ckpt.restore(model=model, optimizer=opt)


def test_an_unchanged_file_is_taken_over_as_it_lies_there(tmp_path, monkeypatch):
    model, opt = made()
    model[0].requires_grad_(False)
    far, frozen = tmp_path / "far", "model-00002-of-00002.safetensors"
    really, written = reduction.Reduction.write, []

    def write(self, to, name, reader, file, *more):
        written.append(file.name)
        return really(self, to, name, reader, file, *more)

    monkeypatch.setattr(reduction.Reduction, "write", write)
    with checkpoints(tmp_path / "run", also=[str(far)], reduce="all") as ckpt:
        for step in (1, 2):
            train(model, opt)
            ckpt.save(step, model=model, optimizer=opt).wait(str(far))
    assert len(list(far.glob(f"step-*/{frozen}.reduced"))) == 2
    assert written.count(frozen) == 1 and written.count(PACK) == 2
    assert main(["verify", str(far), "--all"]) == 0


def test_auto_decides_by_measured_rates(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(reduction, "CHUNK", 4096)  # small files count
    caplog.set_level("INFO", logger="stoker")
    model, opt = made()
    far = tmp_path / "far"
    with checkpoints(tmp_path / "run", also=[str(far)], keep=9) as ckpt:
        rates = ckpt._reduction.stores

        def copied(step: int) -> bool:
            train(model, opt)
            ckpt.save(step, model=model, optimizer=opt).wait()
            ckpt.wait()
            return (folder_in(far) / SMALL).exists()

        assert not copied(1)  # nothing is known of the store
        assert list(rates) == [f"dir:{far}"]
        rates[f"dir:{far}"] = 1.0
        assert copied(2)
        assert ckpt._reduction.ratio > 1.1 and ckpt._reduction.codec > 0
        assert "reduced: the store takes 1 B/s" in caplog.text
        rates[f"dir:{far}"] = 1e15
        assert not copied(3)
        assert "as it is: the store takes" in caplog.text
        rates[f"dir:{far}"] = 1.0
        ckpt._reduction.since[f"dir:{far}"] = 10
        assert not copied(4), "a store that was slow once is measured again"
        assert rates[f"dir:{far}"] > 1.0 and ckpt._reduction.since[f"dir:{far}"] == 0
    with pytest.raises(errors.InvalidArgument, match="reduce='much': give one of"):
        checkpoints(tmp_path / "other", reduce="much")


def test_a_bucket_takes_them(tmp_path, s3):
    bucket, state = s3, made()
    train(*state)
    expected = [each.clone() for each in values(*state)]
    with checkpoints(tmp_path / "run", also=[bucket], reduce="on") as ckpt:
        ckpt.save(1, model=state[0], optimizer=state[1]).wait(bucket)
        assert ckpt.costs.reduced_bytes > 100_000
    assert loads(bucket, expected) == []


def test_what_does_not_get_smaller_stays_as_it_is(tmp_path):
    noise = torch.randint(0, 256, (300_000,), dtype=torch.uint8)
    with checkpoints(tmp_path / "run", also=[f"{tmp_path}/far"], reduce="on") as ckpt:
        ckpt.save(1, extra={"noise": {"a": noise}}).wait(f"{tmp_path}/far")
    same = folder_in(tmp_path / "far")
    assert (same / PACK).exists() and not (same / REDUCED_TABLE).exists()
    assert json.loads((same / MANIFEST).read_bytes())["version"] == 1


def table_of(chunks: list[list[Stored]], files: list[File], sizes: dict[str, int]):
    data = dump_reduced(chunks)
    tables = [Table(TABLE, 0, ""), Table(REDUCED_TABLE, len(data), hash_of(data).hex())]
    return data, Manifest(1, 1, "00000000", 0.0, files=files, tables=tables, reduced=sizes)


def test_no_table_makes_a_reader_fail_otherwise():
    files = [File("a", CHUNK + 9000, 2), File("b", 5, 1), File("c", CHUNK, 1)]
    good = [
        [Stored(bytes(16), 0, 8192, 4), Stored(bytes(16), 8192, 9000, 0)],
        [Stored(bytes(16), 0, 4096, 2)],
    ]
    sizes = {"a": 8192 + 9000, "c": 4096}
    data, manifest = table_of(good, files, sizes)
    assert list(parse_reduced(data, manifest, "here").values()) == good
    rng = random.Random(15)
    refused = 0
    for _ in range(2000):
        bad = bytearray(data)
        for _ in range(rng.randrange(1, 3)):
            bad[rng.randrange(len(bad))] = rng.randrange(256)
        bad = bytes(bad[: rng.choice([len(bad), len(bad), rng.randrange(len(bad))])])
        manifest.tables[1] = Table(REDUCED_TABLE, len(data), hash_of(bad).hex())
        try:
            parse_reduced(bad, manifest, "here")
        except (errors.Corruption, errors.Mismatch):
            refused += 1
    assert refused > 500


def test_a_manifest_that_breaks_a_rule_is_refused(saved):
    text = (folder_in(saved[0] / "far") / MANIFEST).read_bytes()
    good = json.loads(text)
    del good["digest"]

    def parse(value: dict) -> Manifest:
        head = json.dumps(value, separators=(",", ":")).encode()[:-1]
        return Manifest.parse(
            head + b',"digest":"' + hash_of(head).hex().encode() + b'"}\n', "here"
        )

    assert parse(good).reduced
    for wrong in (
        {"version": 1},
        {"reduced": {}},
        {"reduced": []},
        {"reduced": {"other": 5}},
        {"reduced": {PACK: 0}},
        {"reduced": {PACK: 1 << 40}},
        {"reduced": {PACK: "x"}},
        {"tables": good["tables"][:1]},
        {"tables": good["tables"][::-1]},
    ):
        with pytest.raises(errors.Corruption, match="here"):
            parse({**good, **wrong})


def test_random_damage_behind_right_hashes_is_an_error_of_its_own(copy):
    """The codec's input, where even the hash of what is stored agrees."""
    folder = folder_in(copy / "far")
    rng = random.Random(15)
    data = (folder / SMALL).read_bytes()
    with checkpoints(copy / "far") as ckpt:
        reader = Reader(ckpt._tiers[0], Name.of(folder.name), ckpt._ring, [])
        (stored,) = reader._reduced[PACK]
        found = 0
        for _ in range(100):
            bad = bytearray(data)
            for _ in range(3):
                bad[rng.randrange(len(bad))] = rng.randrange(256)
            (folder / SMALL).write_bytes(bad)
            hash_now = hash_of(bytes(bad[: stored.bytes]))
            reader._reduced[PACK] = [Stored(hash_now, 0, stored.bytes, stored.width)]
            try:
                reader.verify()
            except errors.Corruption:
                found += 1
        assert found >= 95  # the rest falls into padding


def test_names_that_older_stokers_took_keep_their_files(tmp_path, monkeypatch):
    monkeypatch.setattr("stoker.checkpoint.state.check_name", lambda name, taken: None)
    text = b"the same again" * 1000
    for i, taken in enumerate(("notes.reduced", REDUCED_TABLE)):
        near, far = tmp_path / f"near{i}", tmp_path / f"far{i}"
        with checkpoints(near) as ckpt:
            ckpt.save(1, files={"notes": text, taken: b"mine"}).wait()
        assert main(["cp", str(near), str(far), "--reduce", "all"]) == 0
        assert main(["verify", str(far)]) == 0
        assert (folder_in(far) / "notes").read_bytes() == text
        assert (folder_in(far) / taken).read_bytes() == b"mine"


@pytest.mark.parametrize("how", ["off", "on"])
def test_a_failed_copy_keeps_no_memory_while_its_error_lives(tmp_path, monkeypatch, how):
    really = Tier.write_chunks

    def write_chunks(self, key, size, chunks, ring, *given):
        def full():
            with contextlib.closing(chunks):
                for at, length, fill in chunks:
                    yield at, length, fill if at == 0 else fails

        def fails(address):
            raise errors.IoError("the store is full")

        mine = full() if PACK in key and "far" in self.composition else chunks
        really(self, key, size, mine, ring, *given)

    monkeypatch.setattr(Tier, "write_chunks", write_chunks)
    state = {"a": torch.zeros(20 << 20, dtype=torch.uint8)}
    far = [f"{tmp_path}/far{i}" for i in range(2)]
    with checkpoints(tmp_path / "run", also=far, reduce=how, staging="16MiB") as ckpt:
        free, kept = len(ckpt._ring._free), []
        for step in (1, 2):
            kept.append(ckpt.save(step, extra={"state": state}))
            with pytest.raises(errors.IoError, match="the store is full"):
                ckpt.wait()
            assert len(ckpt._ring._free) == free
        monkeypatch.undo()
    assert len(list((tmp_path / "run").glob(f"step-*/{MANIFEST}"))) == 2


def test_a_killed_copy_leaves_nothing_beside_a_later_one(saved, tmp_path, monkeypatch):
    """In whichever form the two are, and also where the later one was killed behind its manifest,
    or ended before the other."""
    run, far = str(saved[0] / "run"), tmp_path / "far"
    copy = lambda how: main(["cp", run, str(far), "--reduce", how])
    names = {"off": {PACK}, "on": {SMALL, REDUCED_TABLE}}
    really = Tier.put_manifest
    for killed, later in (("on", "off"), ("off", "on")):
        with monkeypatch.context() as patched:  # as kill -9 before the manifest
            patched.setattr(Tier, "put_manifest", fails)
            patched.setattr(Tier, "remove_quietly", lambda *_: None)
            assert copy(killed) != 0
        left = {each.name for each in folder_in(far).iterdir()}
        assert names[killed] <= left and MANIFEST not in left
        assert copy(later) == 0
        left = {each.name for each in folder_in(far).iterdir()}
        assert names[later] <= left and not names[killed] & left
        loads(far, saved[1])
        with monkeypatch.context() as patched:  # as kill -9 behind the manifest
            shutil.rmtree(far)
            patched.setattr(Tier, "put_manifest", fails)
            patched.setattr(Tier, "remove_quietly", lambda *_: None)
            assert copy(killed) != 0
            patched.setattr(Tier, "put_manifest", really)
            patched.setattr(commits, "tidy", lambda *_: None)
            assert copy(later) == 0
        assert names[killed] <= {each.name for each in folder_in(far).iterdir()}
        assert copy(later) == 0  # which finds it there
        assert not names[killed] & {each.name for each in folder_in(far).iterdir()}
        loads(far, saved[1])
        shutil.rmtree(far)
    meanwhile = [True]

    def put_manifest(tier, *given):
        if meanwhile and meanwhile.pop():  # another program copies it plain, and is faster
            with monkeypatch.context() as patched:  # before this one has written
                patched.setattr(commits, "tidy", lambda *_: None)
                assert copy("off") == 0
        really(tier, *given)

    monkeypatch.setattr(Tier, "put_manifest", put_manifest)
    assert copy("on") != 0
    assert not names["on"] & {each.name for each in folder_in(far).iterdir()}
    loads(far, saved[1])


def fails(*_) -> None:
    raise errors.IoError("the program was killed")


def test_another_checkpoint_of_the_same_name_mends_nothing(copy, tmp_path):
    """Its manifest and tables are in order, but it has fewer chunks."""
    with checkpoints(tmp_path / "near", also=[f"{tmp_path}/far"], reduce="on") as ckpt:
        state = {"a": torch.zeros(CHUNK + 4096, dtype=torch.uint8)}
        ckpt.save(1, extra={"state": state}).wait(f"{tmp_path}/far")
    near, far = folder_in(tmp_path / "near"), folder_in(tmp_path / "far")
    forged = Manifest.parse((folder_in(copy / "far") / MANIFEST).read_bytes(), "here")
    forged.attempt, forged.id = (name := Name.of(near.name)).attempt, name.id
    shutil.rmtree(far)
    shutil.copytree(folder_in(copy / "far"), far)
    (far / MANIFEST).write_bytes(forged.dump())
    flip(near / PACK, CHUNK + 5)
    with checkpoints(tmp_path / "near", also=[f"{tmp_path}/far"]) as ckpt:
        with pytest.warns(UserWarning, match="is damaged"):
            with pytest.raises(errors.Corruption, match="none of the checkpoints"):
                ckpt.restore()
