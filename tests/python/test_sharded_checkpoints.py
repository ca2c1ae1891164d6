"""Checkpoints of a sharded model: saved by some ranks, restored by others."""

from __future__ import annotations

import itertools
import json
import math
import random
import re
import shutil
import time
from pathlib import Path

import pytest
import torch

import sharded_run
import stoker
from fsdp_run import Group
from stoker.checkpoint.manifest import Manifest
from stoker.ckpt import cli as ckpt_cli
from stoker.errors import Mismatch


def ran(tmp_path, world: int, work, **options) -> list[list[dict]]:
    group = Group(tmp_path, world, work, **options)
    told = group.finish()
    assert group.codes() == [0] * world, told
    return told


class Alone:
    """What one process without ranks tells."""

    def __init__(self) -> None:
        self.lines: list[dict] = []

    def __call__(self, **what) -> None:
        self.lines.append(json.loads(json.dumps(what)))


def loaded(tmp_path, world: int, folder: Path, **options) -> list[list[dict]]:
    if world == 0:
        tell = Alone()
        sharded_run.load(tell, 0, 0, folder, **options)
        return [tell.lines]
    return ran(tmp_path, world, sharded_run.load, store=folder, **options)


def same_as(saved, told) -> None:
    for (line,) in told:
        assert line["digests"] == saved[0][0]["digests"] and line["step"] == 3
        assert line["extra"]["note"] == saved[0][0].get("note", line["extra"]["note"])


def test_two_ranks_save_and_others_restore(tmp_path):
    folder = tmp_path / "run"
    saved = ran(tmp_path, 2, sharded_run.save, store=folder)
    for world in (0, 2, 3):
        told = loaded(tmp_path, world, folder)
        same_as(saved, told)
        assert told[0][0]["extra"] == {"note": [0, 2]}
        if world == 2:  # the same ranks go on with the same losses
            assert [each[0]["losses"] for each in told] == [each[0]["losses"] for each in saved]
    (made,) = folder.glob("step-*")
    names = {each.name for each in made.iterdir()}
    assert {f"model-0000{n}-of-00002.safetensors" for n in (1, 2)} <= names
    assert {"state-00000.pack", "state-00001.pack"} <= names
    sizes = [(made / f"model-0000{n}-of-00002.safetensors").stat().st_size for n in (1, 2)]
    assert max(sizes) < 1.5 * min(sizes)  # by balanced bytes
    manifest = Manifest.parse((made / "MANIFEST.json").read_bytes(), "here")
    assert manifest.sharded and "rng.1" in manifest.objects
    assert {"also.weight", "again.weight"} <= set(manifest.aliases)
    assert sum(len(cut["parts"]) == 2 for cut in manifest.sharded.values()) >= 2


def test_one_process_saves_and_ranks_restore(tmp_path):
    folder = tmp_path / "run"
    tell = Alone()
    sharded_run.save(tell, 0, 0, folder, dtype="bfloat16")
    same_as([tell.lines], loaded(tmp_path, 2, folder, dtype="bfloat16"))


def test_frozen_files_are_taken_over(tmp_path):
    folder = tmp_path / "run"
    told = ran(tmp_path, 2, sharded_run.freezes, store=folder)
    steps = [[each[i] for each in told] for i in range(5)]
    wrote = [sum(each["wrote"] for each in step) for step in steps]
    taken = [sum(each["taken"] for each in step) for step in steps]
    made = [next(folder.glob(f"step-00000{i}-*")) for i in range(1, 6)]
    sizes = lambda paths: sum(path.stat().st_size for path in paths)
    all_of_them = [sizes(each.glob("*.safetensors")) for each in made]
    assert [a + b for a, b in zip(wrote, taken)] == all_of_them
    assert taken[0] == taken[3] == 0  # the first, and the one behind a damaged one
    assert wrote[1] == wrote[4] == all_of_them[0] - taken[1]
    assert 0 < taken[2] < taken[1] == taken[4]  # the file with the edited weight was written
    inodes = [{path.name: path.stat().st_ino for path in each.iterdir()} for each in made]
    linked = [path for path in made[1].iterdir() if inodes[0].get(path.name) == path.stat().st_ino]
    assert len(linked) == 2 and sizes(linked) == taken[1]  # one a rank
    for folder_of, step in zip(made, steps):
        with stoker.Checkpoints(folder) as ckpt:
            weights = next(ckpt.readers(int(folder_of.name[5:11]))).weights()
        for name, was in step[0]["digests"].items():
            if name.endswith(" "):
                assert sharded_run.digest(weights[name.strip()]) == was, name


def test_copies_of_shards_are_written_once(tmp_path):
    folder = tmp_path / "run"
    saved = ran(tmp_path, 2, sharded_run.save, store=folder, mesh=(2, 1))
    (made,) = folder.glob("step-*")
    assert not (made / "state-00001.pack").exists()
    same_as(saved, loaded(tmp_path, 0, folder))


def test_every_rank_hears_which_stores_have_no_copy(tmp_path):
    told = ran(tmp_path, 2, sharded_run.copied, store=tmp_path / "run", also=tmp_path / "far")
    for ((line),) in told:
        durable, passed, failed = line["told"]
        assert durable is None
        assert passed.startswith("NotFound: step 2 was not copied to"), passed
        assert failed.startswith("IoError") and "the link is down" in failed, failed


@pytest.mark.soak
@pytest.mark.parametrize(("first", "then"), list(itertools.product((1, 2, 3, 4), (0, 1, 2, 3, 4))))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_any_ranks_to_any_ranks(tmp_path, first, then, dtype):
    folder = tmp_path / "run"
    saved = ran(tmp_path, first, sharded_run.save, store=folder, dtype=dtype)
    same_as(saved, loaded(tmp_path, then, folder, dtype=dtype))


@pytest.mark.soak
@pytest.mark.parametrize(("first", "then"), [((2, 2), None), (None, (2, 2)), ((4, 1), (1, 4))])
def test_meshes_of_two_dimensions(tmp_path, first, then):
    folder = tmp_path / "run"
    saved = ran(tmp_path, 4, sharded_run.save, store=folder, mesh=first)
    same_as(saved, loaded(tmp_path, 4, folder, mesh=then))


def is_left(tmp_path, folder: Path, digests: dict) -> None:
    (line,) = loaded(tmp_path, 0, folder, steps=1)[0]
    assert line["step"] == 1 and line["digests"] == digests


@pytest.mark.parametrize(
    ("victim", "after"),
    [
        (1, 0),
        pytest.param(1, 1, marks=pytest.mark.soak),
        pytest.param(0, 0, marks=pytest.mark.soak),
        pytest.param(0, 1, marks=pytest.mark.soak),
        pytest.param(0, "manifest", marks=pytest.mark.soak),
    ],
)
def test_kill_9_of_a_rank_leaves_the_checkpoint_before(tmp_path, victim, after):
    folder = tmp_path / "run"
    group = Group(tmp_path, 2, sharded_run.killed, store=folder, victim=victim, after=after)
    told = group.finish()
    codes = group.codes()
    assert codes[victim] == -9 and codes[1 - victim] == 1, told
    assert told[1 - victim][-1]["error"] == "RankLost", told
    is_left(tmp_path, folder, told[1 - victim][0]["digests"])


@pytest.mark.soak
@pytest.mark.parametrize(("world", "kills"), [(2, 20), (4, 10)])
def test_kill_9_at_any_moment_loses_no_checkpoint(tmp_path, world, kills):
    """Of any rank, while others lag; the ranks then go on to the bits of a run without kills."""
    seed = random.randrange(1 << 30)
    print("seed", seed)
    rng, folder, durable = random.Random(seed), tmp_path / "run", 0
    for kill in range(kills):
        straggler = rng.randrange(world) if kill % 2 else None
        options = {"store": folder, "steps": 5000, "straggler": straggler}
        group = Group(tmp_path, world, sharded_run.goes_on, **options)
        group.wait_for(durable + 1)
        time.sleep(rng.uniform(0.0, 0.5))
        group.kill(rng.randrange(world))
        told = group.finish()
        durable = max([durable, *(line.get("step", 0) for lines in told for line in lines)])
        (line,) = loaded(tmp_path, 0, folder, steps=1)[0]
        assert line["step"] >= durable
    steps = line["step"] + 1
    ran(tmp_path, world, sharded_run.goes_on, store=folder, steps=steps)
    ran(tmp_path, world, sharded_run.goes_on, store=tmp_path / "whole", steps=steps)
    ours, theirs = (loaded(tmp_path, 0, tmp_path / each)[0][0] for each in ("run", "whole"))
    assert ours["digests"] == theirs["digests"] and ours["step"] == theirs["step"] == steps


@pytest.mark.parametrize("victim", [1, pytest.param(0, marks=pytest.mark.soak)])
def test_a_full_disk_on_one_rank_fails_the_save_on_all(tmp_path, victim):
    told = ran(tmp_path, 2, sharded_run.full_disk, store=tmp_path / "run", victim=victim)
    for rank, (failed, raised, after) in enumerate(told):
        assert failed["failed"] == "OutOfSpace", told
        assert raised["raised"] == ("StokerError" if rank == victim else "OutOfSpace"), told
        assert (f"rank {victim}" in failed["text"]) == (rank != victim)
        assert [name[:11] for name in after["names"]] == ["step-000002"]


def test_sigterm_to_one_rank_ends_all_of_them(tmp_path):
    told = ran(tmp_path, 2, sharded_run.ends, store=tmp_path / "run", victim=1)
    assert told == [[{"code": 143, "at": 3}]] * 2
    assert [each.name[:11] for each in (tmp_path / "run").glob("step-*")] == ["step-000003"]


def test_what_cannot_be_saved_is_a_sentence():
    from stoker.checkpoint import shards
    from stoker.errors import Unsupported

    class Partial:
        def is_shard(self):
            return False

    class Tensor:
        shape, placements = (4, 4), (Partial(),)
        device_mesh = torch.empty(2)

    with pytest.raises(Unsupported, match="w is placed as .*Shard.*Replicate"):
        shards.division("w", Tensor())


def offload(tmp_path, world: int, work, **options) -> list[list[dict]]:
    """Work of sharded_run.py by so many ranks; 0: by one process with the whole model."""
    if world == 0:
        tell = Alone()
        work(tell, 0, 0, **options)
        return [tell.lines]
    return ran(tmp_path, world, work, **options)


SOAK = pytest.mark.soak


def is_in_memory(tmp_path, saved: list[list[dict]], folder: Path, world: int = 0, mesh=None):
    """What ranks saved of an offloaded run, restored by others without a store."""
    given = {"store": folder, "mesh": mesh}
    for (line,) in offload(tmp_path, world, sharded_run.in_memory_load, **given):
        assert line["digests"] == saved[0][0]["digests"] and line["step"] == 3
        assert all(map(math.isfinite, line["losses"]))


@pytest.mark.parametrize(
    ("first", "then", "mesh"),
    [
        (0, 2, None),
        (2, 1, None),
        *(pytest.param(first, then, None, marks=SOAK) for first in (0, 1, 3) for then in (1, 2, 3)),
        *(pytest.param(2, 4, mesh, marks=SOAK) for mesh in ((2, 2), (4, 1), (1, 4))),
    ],
)
def test_an_offloaded_run_goes_into_a_sharded_model_in_memory(tmp_path, first, then, mesh):
    """Each rank takes its part; masters and moments are the same to the bit."""
    folder = tmp_path / "ckpt"
    saved = offload(tmp_path, first, sharded_run.offload_save, store=folder, run=tmp_path / "run")
    is_in_memory(tmp_path, saved, folder, then, mesh)


@pytest.mark.parametrize(
    ("first", "others"),
    [
        (2, (1, 2)),
        (0, (2,)),
        *(pytest.param(first, (0, 1, 2, 3), marks=SOAK) for first in (0, 1, 2, 3)),
    ],
)
def test_offloaded_state_goes_from_any_ranks_to_any(tmp_path, first, others):
    """Masters and moments too; the same ranks go on with the same losses."""
    folder = tmp_path / "ckpt"
    given = {"store": folder, "run": tmp_path / "run"}
    saved = offload(tmp_path, first, sharded_run.offload_save, **given)
    assert all(line["left"] == [] for (line,) in saved)  # the copied step has no name any more
    is_in_memory(tmp_path, saved, folder)
    for then in others:
        given = {"store": folder, "run": tmp_path / f"run-{then}"}
        told = offload(tmp_path, then, sharded_run.offload_load, **given)
        for (line,) in told:
            assert line["digests"] == saved[0][0]["digests"] and line["step"] == 3
        if then == first:
            assert [each[0]["losses"] for each in told] == [each[0]["losses"] for each in saved]


@SOAK
def test_moments_that_share_scales_go_to_as_many_ranks(tmp_path):
    folder = tmp_path / "ckpt"
    given = {"store": folder, "moments": "8bit"}
    saved = ran(tmp_path, 2, sharded_run.offload_save, run=tmp_path / "run", **given)
    told = ran(tmp_path, 2, sharded_run.offload_load, run=tmp_path / "again", **given)
    assert [each[0]["digests"] for each in told] == [each[0]["digests"] for each in saved]
    assert [each[0]["losses"] for each in told] == [each[0]["losses"] for each in saved]
    is_in_memory(tmp_path, saved, folder)
    with pytest.raises(Mismatch, match=r"with 2 ranks, as it was saved"):
        sharded_run.offload_load(Alone(), 0, 0, run=tmp_path / "alone", **given)


@pytest.mark.parametrize(("first", "then"), [(0, 2), (2, 1)])
def test_groups_that_share_scales_go_whole_to_other_ranks(tmp_path, first, then):
    """Codes and scales as they are, over the borders of cells; in memory they are decoded."""
    given = {"store": tmp_path / "ckpt"}
    work = sharded_run.shares_scales
    saved = offload(tmp_path, first, work, run=tmp_path / "run", steps=2, **given)
    before = saved[0][0]["digests"]
    for store, memory in offload(tmp_path, then, work, run=tmp_path / "again", **given):
        assert store == {"digests": before, "step": 2}
        assert memory["memory"].items() <= before.items()


def test_a_group_that_shares_a_scale_is_not_cut(tmp_path):
    """The error says what to do; nothing was changed, and the same ranks restore it."""
    given = {"store": tmp_path / "ckpt", "odd": True}
    work = sharded_run.shares_scales
    offload(tmp_path, 0, work, run=tmp_path / "run", steps=1, **given)
    group = Group(tmp_path, 2, work, run=tmp_path / "again", **given)
    for (line,) in group.finish():
        assert line["error"] == "Mismatch" and "each 256 elements share a scale" in line["text"]
        assert "with 1 ranks, as it was saved, or into memory" in line["text"]


@pytest.mark.parametrize("victim", [pytest.param(0, marks=SOAK), 1])
def test_kill_9_of_a_rank_that_copies_its_step(tmp_path, victim):
    """The checkpoint before stands; the run goes on at the step that all ranks had named, and the
    name that the dead rank left goes."""
    folder, run = tmp_path / "ckpt", tmp_path / "run"
    given = {"store": folder, "run": run}
    group = Group(tmp_path, 2, sharded_run.dies_in_save, victim=victim, **given)
    told = group.finish()
    codes = group.codes()
    assert codes[victim] == -9 and codes[1 - victim] == 1, told
    assert told[1 - victim][-1]["error"] == "RankLost", told
    tell = Alone()
    sharded_run.offload_load(tell, 0, 0, folder, tmp_path / "alone", steps=1)
    assert tell.lines[0]["step"] == 1 and tell.lines[0]["digests"] == told[0][0]["digests"]
    for lines in ran(tmp_path, 2, sharded_run.goes_on_and_saves, **given):
        assert lines[0]["step"] == 2 and lines[0]["digests"] == told[0][1]["second"]
        assert lines[1]["left"] == []


@pytest.mark.parametrize("older", [pytest.param(False, marks=SOAK), True])
def test_kill_9_between_the_stores_that_a_restore_fills(tmp_path, older):
    """Rank 1 dies when rank 0 may commit. The next opening mixes nothing, and restores anew."""
    folder, run = tmp_path / "ckpt", tmp_path / "run"
    saved = ran(tmp_path, 3, sharded_run.offload_save, store=folder, run=tmp_path / "first")
    if older:  # a run is there already, at a step before
        given = {"store": tmp_path / "other", "run": run, "steps": 0}
        ran(tmp_path, 2, sharded_run.offload_save, **given)
    given = {"store": folder, "run": run}
    group = Group(tmp_path, 2, sharded_run.dies_in_restore, victim=1, **given)
    told = group.finish()
    assert group.codes() == [1, -9], told
    assert told[0][-1]["error"] == "RankLost", told
    for (line,) in ran(tmp_path, 2, sharded_run.offload_load, **given):
        assert line["digests"] == saved[0][0]["digests"] and line["step"] == 3


@pytest.mark.parametrize("dies", [False, pytest.param(True, marks=SOAK)])
def test_one_lost_store_takes_all_ranks_back_to_the_checkpoint(tmp_path, dies):
    """The others have newer steps. Without restore= it is refused; with it all go back alike."""
    given = {"store": tmp_path / "ckpt", "run": tmp_path / "run"}
    saved = ran(tmp_path, 2, sharded_run.offload_save, **given)  # two steps more than are saved
    if not dies:  # what is not needed is not read
        assert [line["step"] for (line,) in ran(tmp_path, 2, sharded_run.blind, **given)] == [5, 5]
    shutil.rmtree(tmp_path / "run" / "rank-1")
    if dies:
        group = Group(tmp_path, 2, sharded_run.dies_in_restore, victim=1, **given)
        told = group.finish()
        assert group.codes() == [1, -9], told
    told = ran(tmp_path, 2, sharded_run.lost_store, **given)
    for rank, (refused, line) in enumerate(told):
        assert "rank 1 finds no run in" in refused["text"] and "restore=" in refused["text"]
        assert line["digests"] == saved[0][0]["digests"] and line["step"] == 3
        assert line["losses"] == saved[rank][0]["losses"]
        assert line["run"] == told[0][1]["run"]
    assert ["All ranks go back to step 3" in each for each in told[0][1]["said"]] == [True]
    (line,) = ran(tmp_path, 2, sharded_run.offload_load, **given)[0]
    assert line["step"] == 5  # all have newer steps again: these win


@pytest.mark.parametrize("dies", [False, pytest.param(True, marks=SOAK)])
def test_ranks_that_went_back_never_return_by_themselves(tmp_path, dies):
    """Not after a restore that was cut off halfway, nor where a rank lost its store later."""
    given = {"store": tmp_path / "ckpt", "run": tmp_path / "run"}
    run = ran(tmp_path, 2, sharded_run.goes_back, saves=3, **given)[0][0]["run"]
    if dies:
        group = Group(tmp_path, 2, sharded_run.goes_back, to=1, victim=1, **given)
        assert group.finish()[0][-1]["error"] == "RankLost" and group.codes() == [1, -9]
    told = ran(tmp_path, 2, sharded_run.goes_back, to=1, saves=0, **given)
    for (line,) in told:
        assert line["at"] == 1 and line["run"] == told[0][0]["run"] != run
        assert line["left"] == {run: 1}
    shutil.rmtree(tmp_path / "run" / "rank-1")
    for (line,) in ran(tmp_path, 2, sharded_run.goes_back, **given):  # the newest saved is step 3
        assert line["at"] == 1 and line["left"] == {told[0][0]["run"]: 0, run: 1}
    given["run"] = tmp_path / "new"
    if dies:
        (line,) = ran(tmp_path, 2, sharded_run.goes_back, **given)[0]
        assert line["at"] == 2 and run in line["left"]


def test_the_number_of_a_save_is_not_the_step_of_its_run(tmp_path):
    """save() takes any number: that of an epoch, say. Ranks agree on the run's own count."""
    given = {"store": tmp_path / "ckpt", "run": tmp_path / "run"}
    saved = ran(tmp_path, 2, sharded_run.counts_otherwise, steps=2, label=50, **given)
    given["run"] = tmp_path / "again"
    group = Group(tmp_path, 2, sharded_run.dies_behind_restore, victim=1, **given)
    told = group.finish()
    assert group.codes() == [1, -9], told
    told = ran(tmp_path, 2, sharded_run.counts_otherwise, steps=3, label=60, **given)
    for line, _ in told:  # rank 0 went back to what both had
        assert line["step"] == 2 and line["digests"] == saved[0][1]["digests"]
        assert line["names"] == ["agreed-2"]
    given["store"] = tmp_path / "older"  # of which step 50 is a run at step 2
    shutil.copytree(tmp_path / "ckpt", given["store"], ignore=shutil.ignore_patterns("*-000060-*"))
    for line, _ in ran(tmp_path, 2, sharded_run.counts_otherwise, steps=0, label=51, **given):
        assert line["step"] == 5 and line["digests"] == told[0][1]["digests"]


@pytest.mark.parametrize("victim", [pytest.param(0, marks=SOAK), 1])
def test_a_rank_that_cannot_read_its_store_fails_the_save_on_all(tmp_path, victim):
    """The others hear of it at once, and do not wait for its weights."""
    given = {"store": tmp_path / "ckpt", "run": tmp_path / "run", "victim": victim}
    told = ran(tmp_path, 2, sharded_run.cannot_read_its_store, **given)
    for rank, (failed, after) in enumerate(told):
        assert failed["failed"] == "Corruption" and "a bit is flipped" in failed["text"], told
        assert (f"rank {victim}" in failed["text"]) == (rank != victim)
        assert [name[:11] for name in after["names"]] == ["step-000001"]


def test_a_copied_step_that_keeps_its_name_fails_no_save(tmp_path):
    given = {"store": tmp_path / "ckpt", "run": tmp_path / "run", "victim": 1}
    for (line,) in ran(tmp_path, 2, sharded_run.drops_no_name, **given):
        assert [name[:11] for name in line["names"]] == ["step-000001"]


@pytest.mark.parametrize("offloads", [False, True])
def test_ranks_that_want_different_checkpoints_are_told(tmp_path, offloads):
    """Of folders that they do not share, and of different steps: all raise, none begins anew."""
    folder, given = str(tmp_path / "ckpt"), {}
    if offloads:
        given = {"run": tmp_path / "again"}
        ran(tmp_path, 2, sharded_run.offload_save, store=folder, run=tmp_path / "run")
    else:
        ran(tmp_path, 2, sharded_run.save, store=folder)
    stores = [folder, str(tmp_path / "mine")]
    for (line,) in ran(tmp_path, 2, sharded_run.restores_of, stores=stores, **given):
        assert line["failed"] == "Corruption", line
        assert "rank 1 does not find step-000003" in line["text"], line
        assert "give all ranks one folder or bucket that they share" in line["text"]
    stores, steps = [folder, folder], [3, 2]
    for (line,) in ran(tmp_path, 2, sharded_run.restores_of, stores=stores, steps=steps, **given):
        assert line["failed"] == "Mismatch", line
        assert "different steps (3, 2)" in line["text"], line


def test_each_rank_gets_its_own_random_state_also_without_the_model(tmp_path, capsys):
    given = {"store": tmp_path / "ckpt", "run": tmp_path / "run"}
    told = ran(tmp_path, 2, sharded_run.asks_for_a_part, **given)
    for (line,) in told:
        assert line["now"] == line["then"] and line["extra"] == {"note": 5}
    assert told[0][0]["now"] != told[1][0]["now"]
    assert ckpt_cli.main(["show", str(tmp_path / "ckpt")]) == 0
    assert ", 2 ranks\n" in capsys.readouterr().out


@pytest.mark.parametrize("again", [False, True])
def test_a_save_by_one_rank_alone_says_what_is_missing(tmp_path, again):
    """In the log while it waits, and in the error."""
    given = {"store": tmp_path / "ckpt", "again": again}
    group = Group(tmp_path, 2, sharded_run.saves_alone, limit=8, **given)
    (line,), _ = group.finish()
    rule = r"save\(\) and restore\(\) of stoker.Checkpoints must be called by every rank"
    assert re.search(rule, line["text"])
    assert any(re.search(f"rank 0 has waited 0.5 s .*; {rule}", each) for each in line["said"])
