"""Sharded models: several processes, each with a store of its own, whose steps are made by all of
them or by none.

Processes are killed with kill -9 at random moments, and at each place of the protocol
(docs/ranks.md).
"""

from __future__ import annotations

import random
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch

import fsdp_run
from fsdp_run import Group
from stoker import errors
from stoker.offload.ranks.agreement import judge

BF16, F32 = torch.bfloat16, torch.float32
KILLED = -signal.SIGKILL


def steps(told: list[dict]) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in told if "step" in line}


def ends(told: list[list[dict]]) -> list[str]:
    return [next((line["end"] for line in lines if "end" in line), "") for lines in told]


def complete(group: Group) -> list[list[dict]]:
    told = group.finish()
    assert group.codes() == [0] * len(told), [lines[-2:] for lines in told]
    return told


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """What uninterrupted runs tell, by world and steps."""
    known: dict = {}

    def run(world: int, count: int) -> list[list[dict]]:
        if (world, count) not in known:
            folder = tmp_path_factory.mktemp("whole")
            known[world, count] = complete(
                Group(folder, world, fsdp_run.train, store=f"{folder}/store", steps=count)
            )
            assert all(ends(known[world, count]))
        return known[world, count]

    return run


# -- the same bits ---------------------------------------------------------------------------------


def test_two_processes_train_as_in_memory(tmp_path):
    """With torch's own fused AdamW over float32 shards, else with our kernels."""
    cases = [
        (F32, fsdp_run.Tiny, (), "sync", 1, "torch", "torch", {}),
        (F32, fsdp_run.Tiny, (), "speculate", 2, None, "torch", {}),
        (BF16, fsdp_run.Tiny, (), "sync", 2, "torch", "kernels", {}),
        (BF16, fsdp_run.Tiny, (), "speculate", 1, None, "kernels", {}),
        (BF16, fsdp_run.Tiny, (), "auto", 2, "own", "kernels", {}),
    ]
    told = complete(
        Group(tmp_path, 2, fsdp_run.compare, store=str(tmp_path / "stores"), cases=cases)
    )
    for lines in told:
        # they are in memory, and never read
        assert [line["weights_read"] for line in lines if "case" in line] == [0] * len(cases)
        # updates ran during backward
        assert lines[1]["kept"] > 0 and lines[3]["kept"] > 0 and lines[3]["redone"] == 0


def test_under_the_smallest_budget(tmp_path):
    """New weights that do not fit the arena go over the disk, and nothing else changes."""
    cases = [
        (BF16, fsdp_run.Tiny, (), policy, 1, None, "kernels", {"layers": 8, "width": 160})
        for policy in ("sync", "speculate")
    ]
    for lines in complete(
        Group(tmp_path, 2, fsdp_run.compare, store=str(tmp_path / "stores"), cases=cases)
    ):
        assert [line["weights_read"] > 0 for line in lines if "case" in line] == [True] * len(cases)


def test_four_processes_train_as_in_memory(tmp_path):
    """Also with shards of uneven lengths, empty ones, and frozen parameters."""
    cases = [
        (BF16, fsdp_run.Odd, (), "sync", 1, "own", "kernels", {}),
        (
            BF16,
            fsdp_run.Odd,
            ("layers.0.up.weight", "head.weight"),
            "speculate",
            2,
            "torch",
            "kernels",
            {},
        ),
        (F32, fsdp_run.Odd, (), "auto", 1, None, "torch", {}),
    ]
    complete(Group(tmp_path, 4, fsdp_run.compare, store=str(tmp_path / "stores"), cases=cases))


# -- kill -9 ---------------------------------------------------------------------------------------


def kill_at_random(
    folder: Path, whole: list[list[dict]], count: int, kills: int, policy: str
) -> None:
    world = len(whole)
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    rng = random.Random(seed)
    seen: dict[int, float] = {}
    reached, committed, killed = 0, 0, 0
    for kill in range(kills + 1):
        group = Group(
            folder, world, fsdp_run.train, store=f"{folder}/store", steps=count, policy=policy
        )
        if kill < kills:  # steps are left for the kills to come
            group.wait_for(
                min(
                    count - 1 - 2 * (kills - kill),
                    reached + rng.randrange(0, max(2, (count - reached) // (kills - kill) * 2)),
                )
            )
            time.sleep(rng.random() * 0.02)
            for rank in rng.sample(range(world), rng.randrange(1, world + 1)):
                group.kill(rank)
        told = group.finish()
        killed += KILLED in group.codes()
        for lines in told:
            error = next((line for line in lines if "error" in line), None)
            assert error is None or error["error"] in (
                "RankLost",
                "RuntimeError",
                "DistNetworkError",
                "DistBackendError",
            ), error
        at = {line["at"] for lines in told for line in lines if "at" in line}
        assert len(at) <= 1, f"ranks resumed at {at}"
        assert all(committed <= step <= reached + 1 for step in at), (at, committed, reached)
        for lines, theirs in zip(told, whole):
            for step, loss in steps(lines).items():
                assert loss == steps(theirs)[step], f"step {step} after {kill} kills"
            committed = max(
                [committed, *(line["committed"] for line in lines if "committed" in line)]
            )
            reached = max([reached, *steps(lines)])
        seen |= steps(told[0])
    print(f"{killed} of {kills} kills came before the end")
    assert killed >= kills * 3 // 4  # else this shows little: the others found nobody
    assert at, "the last run went on from a step"
    assert seen == steps(whole[0])
    assert group.codes() == [0] * world, [lines[-2:] for lines in told]
    assert ends(told) == ends(whole)


def test_killed_ranks_go_on_alike(tmp_path, whole):
    kill_at_random(tmp_path, whole(2, 12), 12, 3, "auto")


@pytest.mark.soak
@pytest.mark.parametrize(
    ("world", "policy"), [(2, "sync"), (2, "speculate"), (4, "sync"), (4, "auto")]
)
def test_killed_ranks_go_on_alike_for_long(tmp_path, whole, world, policy):
    kill_at_random(tmp_path, whole(world, 60), 60, 20, policy)


# What is killed, and at which step the next opening must find all ranks; None where what is killed
# decides nothing.
CHAIN = [
    ([("made", 1, 1)], 0),  # the run is made on one rank, and not on the other
    ([("ready", 0, 1)], 0),
    ([("before commit", 0, 2), ("behind commit", 1, 2)], 1),  # step 2 on rank 1 alone: it goes back
    ([("met", 1, 1)], 1),  # killed behind going back
    ([("opening", 0, 1)], 1),
    ([("behind commit", (0, 1), 1)], 2),  # on both, and neither heard of the other
    ([("before agreeing", 0, 1), ("before agreeing", 1, 1)], 3),
    # 1 may have passed, and go on alone until its next collective
    ([("behind agreeing", 0, 2)], 4),
    ([("behind keeping", 1, 2)], None),
    ([("before deciding", 1, 2)], None),
    ([("behind deciding", 0, 1), ("before commit", 1, 1)], None),
]


def kill_through(chain: list, tmp_path: Path, theirs: list[list[dict]], count: int) -> None:
    """One run through all of it, one after the other; each time it goes on from a step that all
    ranks had."""
    expected = None
    for faults, then in [*chain, ([], None)]:
        group = Group(
            tmp_path, 2, fsdp_run.train, store=f"{tmp_path}/store", steps=count, faults=faults
        )
        told = group.finish()
        for _, where, _ in faults:
            for rank in where if isinstance(where, tuple) else (where,):
                assert group.codes()[rank] == KILLED, (faults, told)
        at = {line["at"] for lines in told for line in lines if "at" in line}
        assert len(at) <= 1
        if at and expected is not None:
            assert at == {expected}, faults
        for lines, whole_lines in zip(told, theirs):
            for step, loss in steps(lines).items():
                assert loss == steps(whole_lines)[step], (faults, step)
        expected = then
    assert group.codes() == [0, 0], told
    assert ends(told) == ends(theirs)


def test_killed_between_the_commits_of_two_ranks(tmp_path, whole):
    kill_through(
        [([("before commit", 0, 3), ("behind commit", 1, 3)], 2)], tmp_path, whole(2, 8), 8
    )


@pytest.mark.soak
def test_killed_at_each_point_of_the_protocol(tmp_path, whole):
    kill_through(CHAIN, tmp_path, whole(2, 12), 12)


# -- failures that are no crash --------------------------------------------------------------------


def test_a_step_that_one_rank_cannot_commit_is_taken_back_by_all(tmp_path, whole):
    """Rank 1's store is full at the commit of step 3. All raise that, are at step 2 again, and the
    same loop goes on with the same bits."""
    told = complete(
        Group(tmp_path, 2, fsdp_run.train, store=f"{tmp_path}/store", steps=8, full=(1, 4))
    )
    for rank, lines in enumerate(told):
        caught = [line for line in lines if "caught" in line]
        assert [(line["caught"], line["at"]) for line in caught] == [("OutOfSpace", 2)], lines
        assert caught[0]["text"].startswith("rank 1: ") == (rank == 0)
    assert ends(told) == ends(whole(2, 8))


def test_what_a_lost_step_left_gathered_is_not_trained_on(tmp_path, whole):
    told = complete(
        Group(tmp_path, 2, fsdp_run.train, store=f"{tmp_path}/store", steps=8, full=(1, 4), look=3)
    )
    assert [
        [(line["caught"], line["at"]) for line in lines if "caught" in line] for lines in told
    ] == [[("StokerError", 2)]] * 2
    assert [line["text"] for lines in told for line in lines if "caught" in line] == [
        text + "ValueError: there is none, says the test" for text in ("rank 1: ", "")
    ]
    assert ends(told) == ends(whole(2, 8))


@pytest.mark.parametrize(("point", "at"), [("update fails", 3), ("weights fail", 2)])
def test_what_fails_on_one_rank_is_raised_by_all(tmp_path, whole, point, at):
    """An update that fails is undone everywhere before the step counts; new weights that do not
    reach the shards lose a step that did."""
    told = complete(
        Group(
            tmp_path,
            2,
            fsdp_run.train,
            store=f"{tmp_path}/store",
            steps=8,
            faults=[(point, 0, at + 1 if point == "update fails" else at)],
            policy="auto",
        )
    )
    for rank, lines in enumerate(told):
        caught = [line for line in lines if "caught" in line]
        kind, step, text = (
            ("IoError", 3, "the disk")
            if point == "update fails"
            else ("StokerError", 1, "RuntimeError: the device")
        )
        assert [line["caught"] for line in caught] == [kind], lines
        assert caught[0]["at"] == step
        assert (
            caught[0]["text"]
            == ("" if rank == 0 else "rank 0: ") + text + " is broken, says the test"
        )
    assert ends(told) == ends(whole(2, 8))


def test_a_rank_that_cannot_go_back_says_so_from_then_on(tmp_path):
    group = Group(
        tmp_path,
        2,
        fsdp_run.train,
        store=f"{tmp_path}/store",
        steps=8,
        full=(1, 4),
        faults=[("going back fails", 0, 1)],
    )
    told = group.finish()
    assert group.codes() == [1, 1]
    caught = [next(line for line in lines if "caught" in line) for lines in told]
    assert [(line["caught"], line["committed"]) for line in caught] == [
        ("IoError", 2),
        ("OutOfSpace", 2),
    ]
    assert (
        told[0][-1]["error"] == "RankLost"
        and "rank 0 could not go back to step 2" in told[0][-1]["text"]
    )


@pytest.mark.parametrize(
    ("point", "at"),
    [
        ("interrupted at a point", 6),
        ("interrupted behind deciding", 2),
        ("interrupted committing", 3),
    ],
)
def test_ctrl_c_on_one_rank_waits_for_nobody(tmp_path, point, at):
    """Its own error leaves that rank at once, where the others have gone on already; the process
    group would wait for longer than the test does."""
    group = Group(
        tmp_path,
        2,
        fsdp_run.train,
        limit=10 * fsdp_run.LIMIT,
        store=f"{tmp_path}/store",
        steps=8,
        faults=[(point, 1, at)],
    )
    told = group.finish()
    assert group.codes() == [1, 1]
    assert told[1][-1]["error"] == "KeyboardInterrupt"
    assert told[0][-1]["error"] in ("RankLost", "RuntimeError", "DistBackendError"), told[0][-1]


def test_nobody_waits_for_ever_for_a_rank_that_hangs(tmp_path, whole):
    group = Group(
        tmp_path,
        2,
        fsdp_run.train,
        limit=5,
        store=f"{tmp_path}/store",
        steps=8,
        faults=[("hangs", 1, 3)],
    )
    group.processes[0].join(100)
    group.kill(1)
    told = group.finish()
    assert (told[0][-1].get("error"), group.codes()) == ("RankLost", [1, KILLED])
    assert (
        "rank 0 does not hear from all other ranks any more" in told[0][-1]["text"]
        and "start them again with resume=True" in told[0][-1]["text"]
    )
    assert "while it waited at 'commit of step 3'; stoker.offload(), step()" in told[0][-1]["text"]
    told = complete(Group(tmp_path, 2, fsdp_run.train, store=f"{tmp_path}/store", steps=8))
    assert {lines[0]["at"] for lines in told} == {3}
    assert ends(told) == ends(whole(2, 8))


# -- what is refused -------------------------------------------------------------------------------


def test_what_a_sharded_model_cannot_have(tmp_path):
    told = complete(Group(tmp_path, 2, fsdp_run.refuse, store=str(tmp_path / "store")))
    expected = {
        "lazy": ("InvalidArgument", "gathers weights earlier"),
        "activations": ("InvalidArgument", "stay in memory"),
        "snapshots": ("InvalidArgument", "snapshots=0"),
        "device": ("InvalidArgument", "leave out device="),
        "memory": ("InvalidArgument", "give a folder"),
        "part": ("InvalidArgument", "is not sharded while others are"),
        "hybrid": ("InvalidArgument", "no HSDP"),
        "gather": ("Unsupported", "before stoker.offload"),
        "plan": ("Unsupported", "no plan"),
        "snapshot": ("InvalidArgument", "leave snapshots=0 for a sharded model"),
        "reference": ("Mismatch", "Continue from step 1"),
        "state": ("Unsupported", "before stoker.offload"),
        "in place": ("InvalidArgument", "make it before stoker.offload"),
        "load": ("InvalidArgument", "make it before stoker.offload"),
        "assign": ("InvalidArgument", "leave assign off"),
        "again": ("InvalidArgument", "offloaded already"),
        "parent": ("Mismatch", "one process with the whole model"),
        "there": ("AlreadyExists", "pass resume=True"),
        "nothing": ("NotFound", "holds no run"),
    }
    for lines in told:
        refused = {
            line["what"]: (line["refused"], line.get("text", ""))
            for line in lines
            if "what" in line
        }
        assert refused.keys() == expected.keys()
        for what, (kind, words) in expected.items():
            assert refused[what][0] == kind and words in refused[what][1], (what, refused[what])
        assert "opt.snapshot()" not in refused["reference"][1]  # which would be refused, too
        assert lines[-1]["end"] == lines[-1]["before"]  # the weights outlive close()


def test_stores_that_do_not_belong_together(tmp_path):
    """Every rank says why, and none of them hangs or trains."""

    def refused(world: int, store: Path) -> set[str]:
        group = Group(tmp_path, world, fsdp_run.train, store=str(store))
        told = group.finish()
        assert group.codes() == [1] * world, told
        assert [line.get("error") for lines in told for line in lines] == ["Mismatch"] * world
        return {line["text"] for lines in told for line in lines}

    run, other = tmp_path / "run", tmp_path / "other"
    complete(Group(tmp_path, 2, fsdp_run.train, store=str(run), steps=1))
    old = shutil.copytree(run / "rank-1", tmp_path / "old")
    complete(Group(tmp_path, 2, fsdp_run.train, store=str(run), steps=4))
    (sentence,) = refused(4, run)
    assert "was made by 2 processes, but now there are 4" in sentence
    shutil.copytree(run, other)
    shutil.rmtree(other / "rank-0")
    (sentence,) = refused(2, other)
    assert "rank 0 finds no run in" in sentence and "at step 4" in sentence
    shutil.rmtree(other / "rank-0")
    shutil.copytree(run / "rank-1", other / "rank-0")
    (sentence,) = refused(2, other)
    assert "belongs to rank 1, but rank 0 opened it" in sentence
    shutil.rmtree(run / "rank-1")
    shutil.copytree(old, run / "rank-1")
    (sentence,) = refused(2, run)
    assert "is at step 1, the one in" in sentence and "an old copy" in sentence


def holds(
    path: str,
    rank: int,
    step: int,
    agreed: tuple = (),
    run: str | None = "r",
    world: int | None = 2,
    timeline: str = "t",
    restored: str | None = None,
    run_before: str | None = None,
) -> dict:
    """`restored`: the timeline of its step, which came from a checkpoint."""
    steps_here = {step, *agreed} if run else set()
    timelines = {str(each): timeline for each in steps_here}
    return {
        "path": path,
        "run": run,
        "world": world,
        "rank": rank,
        "step": step,
        "agreed": list(agreed),
        "restored": restored is not None,
        "timelines": timelines | ({str(step): restored} if restored else {}),
        "before": {str(each): timeline for each in agreed},
        "before_that": {"run": run_before or run},
    }


def test_the_judgement():
    nothing = {
        "path": "/b",
        "run": None,
        "world": None,
        "rank": None,
        "step": 0,
        "agreed": [],
        "restored": False,
        "timelines": {},
        "before": {},
    }
    assert judge([nothing, nothing]) is None
    assert judge([holds("/a", 0, 0), nothing]) is None  # never made everywhere
    # two attempts at making it
    assert judge([holds("/a", 0, 0), holds("/b", 1, 0, run="s")]) is None
    assert judge([holds("/a", 0, 0, (0,)), holds("/b", 1, 0)]) == 0
    assert judge([holds("/a", 0, 7, (6,)), holds("/b", 1, 7, (6, 7))]) == 7
    assert judge([holds("/a", 0, 8, (7,)), holds("/b", 1, 7, (6,))]) == 7
    assert judge([holds("/a", 0, 1, (0,)), holds("/b", 1, 0)]) == 0
    # filled from a checkpoint: by one rank, all of them, all with names of older steps, one of them
    # only where a run was, also at the same step, or in two attempts; and one that went on
    assert judge([holds("/a", 0, 9, restored="x"), nothing]) is None
    assert judge([holds("/a", 0, 9, restored="x"), holds("/b", 1, 9, restored="x")]) == 9
    assert judge([holds("/a", 0, 9, restored="x"), holds("/b", 1, 9, restored="y")]) is None
    both = [holds("/a", 0, 9, (4,), restored="x"), holds("/b", 1, 9, (4,), restored="x")]
    assert judge(both) == 9
    assert judge([both[0], holds("/b", 1, 4, (4,))]) == 4
    assert judge([holds("/a", 0, 4, (4,), restored="x"), holds("/b", 1, 4, (4,))]) == 4
    assert judge([both[0], holds("/b", 1, 9, (4,), restored="y")]) == 4
    came = holds("/a", 0, 9, (4,), restored="x", run="s", run_before="r")  # of another run
    assert judge([came, holds("/b", 1, 4, (4,))]) == 4
    assert judge([both[0], holds("/b", 1, 10, (9,), timeline="x")]) == 9
    for found, words in [
        ([holds("/a", 0, 0, (0,)), nothing], "rank 1 finds no run in /b"),
        # a lost store that a checkpoint filled, while others did not commit it
        ([holds("/a", 0, 8, (8,)), holds("/b", 1, 4, restored="x")], "rank 1 finds no run in /b"),
        ([both[0], nothing], "rank 1 finds no run in /b.*pass restore="),
        ([holds("/a", 0, 3, (3,), world=None), nothing], "made by one process"),
        ([holds("/a", 0, 0, world=None), nothing], "made by one process"),
        (
            [holds("/a", 0, 3, (3,), world=4), holds("/b", 1, 3, (3,), world=4)],
            "made by 4 processes, but now there are 2",
        ),
        ([holds("/a", 1, 3, (3,)), holds("/b", 0, 3, (3,))], "belongs to rank 1, but rank 0"),
        ([holds("/a", 0, 3, (3,)), holds("/b", 1, 3, (3,), run="s")], "different runs"),
        ([holds("/a", 0, 8, (8,)), holds("/b", 1, 7, (7,))], "an old copy"),
        ([holds("/a", 0, 9, (7,)), holds("/b", 1, 7, (7,))], "an old copy"),
        ([holds("/a", 0, 8, (7,)), holds("/b", 1, 7, (6,), timeline="u")], "continuations"),
    ]:
        with pytest.raises(errors.Mismatch, match=words):
            judge(found)
