"""Bad input and faults: each ends in a sentence that says what to do, and nothing that was
committed is lost.

Faults meet real processes. What `stoker train` refuses before its first step is asked of it in this
process, as starting torch takes longer than all the rest; test_command.py tests the way from the
command to Python.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from faults import (
    COMMAND,
    ONE_THREAD,
    fill,
    find,
    flip,
    fsck,
    make_small_store,
    mounted,
    refused,
    run,
    small_disk,
    volume,
)
from stoker.train.cli import main

if not COMMAND.exists():
    pytest.skip(
        "the stoker command is not installed beside this Python: run `make build`",
        allow_module_level=True,
    )

TINY = [
    "--vocabulary",
    "300",
    "--layers",
    "1",
    "--hidden",
    "32",
    "--heads",
    "2",
    "--feed-forward",
    "64",
    "--window",
    "16",
    "--batch",
    "2",
    "--warmup",
    "2",
    "--eval-windows",
    "2",
    "--sample-tokens",
    "0",
    "--dram",
    "16MiB",
]
ENDLESS = "100000"  # steps of a run that is to be stopped


# -- training runs ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    for index in range(8):
        lines = (
            " ".join(f"word{(index * 7 + line * word) % 31}" for word in range(12))
            for line in range(60)
        )
        (folder / f"{index}.txt").write_text("\n".join(lines), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def train(corpus, cache):
    """The options of a tiny `stoker train`."""
    return lambda out, *more: [
        *TINY,
        "--data",
        str(corpus),
        "--cache",
        str(cache),
        "--out",
        str(out),
        *more,
    ]


def start(words: list[str], errors: Path) -> subprocess.Popen:
    with open(errors, "wb") as file:
        return subprocess.Popen(
            [COMMAND, *words], stderr=file, stdout=subprocess.DEVNULL, env=ONE_THREAD
        )


def train_refused(*words: str | Path, status: int = 1) -> str:
    """The one sentence with which `stoker train` refuses `words`, in this process."""
    shown = io.StringIO()
    with contextlib.redirect_stderr(shown):
        assert main([str(word) for word in words]) == status, shown.getvalue()
    assert "Traceback" not in shown.getvalue()
    return shown.getvalue().strip().splitlines()[-1]


def wait_for_step(process: subprocess.Popen, out: Path, step: int) -> None:
    ledger, limit = out / "ledger.jsonl", time.monotonic() + 200
    while process.poll() is None and time.monotonic() < limit:
        if ledger.exists() and ledger.read_bytes().count(b"\n") >= step:
            return
        time.sleep(0.01)
    process.kill()
    pytest.fail(f"step {step} of {out} was not reached")


def steps_told(out: Path) -> int:
    return (out / "ledger.jsonl").read_bytes().count(b"\n")


@pytest.fixture(scope="module")
def killed(train, tmp_path_factory) -> Path:
    """The folder of a run that kill -9 ended in the middle of a step."""
    out = tmp_path_factory.mktemp("killed") / "run"
    process = start(["train", *train(out, "--steps", ENDLESS)], out.parent / "errors")
    wait_for_step(process, out, 4)
    process.kill()
    process.wait()
    return out


@pytest.fixture
def run_copy(killed, tmp_path) -> Path:
    """A copy of that run, its store with it, to damage."""
    subprocess.run(["cp", "-r", "--sparse=always", killed, tmp_path / "run"], check=True)
    stored = tmp_path / "run" / "run.json"
    stored.write_text(
        stored.read_text().replace(f'"steps": {ENDLESS}', f'"steps": {steps_told(killed) + 3}')
    )
    return tmp_path / "run"


def test_fsck_of_a_store_killed_in_a_step_is_clean_and_tells_the_step(killed):
    status, report = fsck(killed / "store")
    assert status == 0 and report["clean"] and report["problems"] == []
    # a step is told before it is committed
    assert 0 <= steps_told(killed) - report["committed_step"] <= 1
    assert (
        run("fsck", killed / "store")
        .stdout.splitlines()[-1]
        .endswith(f"committed step {report['committed_step']}")
    )


@pytest.mark.soak  # test_train_cli.py has it in short
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_commits_and_a_resume_goes_on(train, run_copy, tmp_path, number):
    stored = run_copy / "run.json"
    stored.write_text(re.sub(r'"steps": \d+', f'"steps": {ENDLESS}', stored.read_text()))
    before = fsck(run_copy / "store")[1]["committed_step"]
    process = start(["train", "--out", str(run_copy), "--resume"], tmp_path / "errors")
    wait_for_step(process, run_copy, before + 3)
    process.send_signal(number)
    assert process.wait(120) == 128 + number, (tmp_path / "errors").read_text()
    shown = (tmp_path / "errors").read_text()
    committed = fsck(run_copy / "store")[1]["committed_step"]
    assert committed == steps_told(run_copy) >= before + 3
    assert (
        f"step {committed} of {ENDLESS} is committed; --resume goes on" in shown
        and "Traceback" not in shown
    )
    assert json.loads((run_copy / "summary.json").read_text())["steps"] == committed


@pytest.mark.parametrize("after", [0.0, 0.03, 0.4, 1.0])
def test_an_interrupt_while_it_starts_is_no_traceback(train, tmp_path, after):
    """Or later: on a busy machine it may come when the run is under way, but never behind its
    end."""
    process = start(["train", *train(tmp_path / "run", "--steps", ENDLESS)], tmp_path / "errors")
    time.sleep(after)
    process.send_signal(signal.SIGINT)
    assert process.wait(200) in (130, -signal.SIGINT)
    assert "Traceback" not in (tmp_path / "errors").read_text()


# -- input -----------------------------------------------------------------------------------------


def test_a_bad_corpus_is_named(train, corpus, tmp_path):
    assert f"{tmp_path}/gone does not exist" in train_refused(
        *train(tmp_path / "a", "--data", str(tmp_path / "gone"))
    )
    bad = tmp_path / "bad"
    bad.mkdir()
    (bad / "text.txt").symlink_to("/proc/self/mem")  # a file that not even root can read
    shown = train_refused(*train(tmp_path / "b", "--data", str(bad)))
    assert f"{bad}/text.txt cannot be read" in shown and "leave it out" in shown
    shown = train_refused(*train(tmp_path / "c", "--window", "100000"))
    assert "fewer than one window of 100000" in shown and "smaller --window" in shown


def test_a_damaged_token_file_is_named_and_rebuilt_on_request(train, cache, killed, tmp_path):
    own = tmp_path / "cache"
    shutil.copytree(cache, own)
    tokens = next(own.glob("*/*.tokens"))
    flip(tokens, tokens.stat().st_size // 2)
    shown = train_refused(*train(tmp_path / "flipped", "--steps", "1", "--cache", str(own)))
    assert str(tokens) in shown and "block" in shown and "--rebuild-tokens" in shown
    # neither run.json nor a store, which would be in the way of the next try
    assert not list((tmp_path / "flipped").rglob("*.*"))
    tokens.write_bytes(tokens.read_bytes()[:-100])
    shown = train_refused(*train(tmp_path / "flipped", "--steps", "1", "--cache", str(own)))
    assert str(tokens) in shown and "--rebuild-tokens" in shown
    done = run(
        "train",
        *train(tmp_path / "flipped", "--steps", "1", "--cache", str(own), "--rebuild-tokens"),
    )
    assert done.returncode == 0, done.stderr


# -- the store of a run ----------------------------------------------------------------------------


def test_a_store_of_another_run_or_model_is_refused_and_left_as_it_is(train, run_copy, tmp_path):
    store, before = run_copy / "store", volume(run_copy / "store").stat().st_size
    shown = train_refused(*train(tmp_path / "new", "--steps", "1", "--store", str(store)))
    assert str(store) in shown and "holds another run" in shown and "--store" in shown
    # it did not slip in
    assert "no run to resume" in train_refused("--out", str(tmp_path / "new"), "--resume")
    stored = run_copy / "run.json"
    stored.write_text(stored.read_text().replace('"hidden": 32', '"hidden": 64'))
    shown = train_refused("--out", str(run_copy), "--resume")
    assert str(store) in shown and "another model" in shown
    assert fsck(store)[0] == 0 and volume(store).stat().st_size == before


def test_a_store_in_use_names_the_holder_and_goes_on_afterwards(run_copy):
    hold = (
        "import sys; from stoker import _core; r = _core.Runtime(threads=1, budget_bytes=1 << 24);"
        " s = r.open_store(sys.argv[1], holder='the night run, pid 77'); print('open', flush=True);"
        " sys.stdin.read()"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", hold, run_copy / "store"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert other.stdout.readline() == b"open\n"
        for shown in (
            refused(1, "ls", run_copy / "store"),
            refused(1, "fsck", run_copy / "store"),
            train_refused("--out", run_copy, "--resume"),
        ):
            assert "in use by the night run, pid 77" in shown and "wait until it ends" in shown
    finally:
        other.communicate()
    assert fsck(run_copy / "store")[0] == 0


def test_a_training_run_says_who_it_is(run_copy, tmp_path):
    stored = run_copy / "run.json"
    stored.write_text(re.sub(r'"steps": \d+', f'"steps": {ENDLESS}', stored.read_text()))
    told = steps_told(run_copy)
    process = start(["train", "--out", str(run_copy), "--resume"], tmp_path / "errors")
    try:
        wait_for_step(process, run_copy, told + 2)
        assert f"in use by stoker.train, pid {process.pid};" in refused(1, "ls", run_copy / "store")
    finally:
        process.kill()
        process.wait()


def test_a_full_store_stops_the_step_and_goes_on_after_room_is_made(run_copy):
    ballast = """
import sys
from stoker import _core
from stoker.errors import OutOfSpace

store = _core.Runtime(threads=1, budget_bytes=64 << 20).open_store(sys.argv[1])
piece, n = bytes(range(1, 256)) * 4112, 0
while sys.argv[2] == "fill":
    txn = store.begin()
    try:
        txn.resize(f"ballast/{n}", len(piece)); txn.write_bytes(f"ballast/{n}", 0, piece)
        txn.commit("deferred").wait()
    except OutOfSpace:
        if len(piece) < 4096: break
        piece = piece[:len(piece) // 2]
    n += 1
txn = store.begin()
if sys.argv[2] == "free":
    for thing in store.list("ballast/"): txn.remove(thing["key"])
txn.commit("durable").wait()
store.close()
"""
    store = run_copy / "store"
    before = fsck(store)[1]["committed_step"]
    subprocess.run([sys.executable, "-c", ballast, store, "fill"], check=True, timeout=120)
    done = run("train", "--out", run_copy, "--resume")
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert f"step {before} of" in done.stderr and "full" in done.stderr.splitlines()[-1]
    status, report = fsck(store)
    assert status == 0 and report["committed_step"] == before
    subprocess.run([sys.executable, "-c", ballast, store, "free"], check=True, timeout=120)
    done = run("train", "--out", run_copy, "--resume")
    assert done.returncode == 0, done.stderr


# -- disks that are full or read-only --------------------------------------------------------------


def test_a_store_on_a_full_disk_is_a_sentence_and_leaves_nothing(train, tmp_path):
    with small_disk(tmp_path, 40) as disk:
        shown = train_refused(
            *train(tmp_path / "run", "--steps", "1", "--store", str(disk / "store"))
        )
        assert str(disk / "store") in shown and "No space left" in shown
        assert not list(disk.rglob("stoker.volume"))


def test_a_disk_that_fills_up_under_a_run_costs_no_step(run_copy, tmp_path):
    stored = run_copy / "run.json"
    stored.write_text(
        re.sub(r'"steps": \d+', f'"steps": {ENDLESS}', stored.read_text()).replace(
            '"store": ""', f'"store": "{run_copy / "store"}"'
        )
    )
    with small_disk(tmp_path, 16) as disk:
        out = disk / "run"
        out.mkdir()
        for name in ("run.json", "ledger.jsonl"):
            shutil.copy(run_copy / name, out)
        fsck_before = fsck(run_copy / "store")[1]["committed_step"]
        process = start(["train", "--out", str(out), "--resume"], tmp_path / "errors")
        wait_for_step(process, out, fsck_before + 2)
        ballast = fill(disk)
        assert process.wait(120) == 1
        shown = (tmp_path / "errors").read_text()
        assert (
            "No space left" in shown.splitlines()[-1]
            and "make room" in shown
            and "Traceback" not in shown
        )
        committed = fsck(run_copy / "store")[1]["committed_step"]
        assert committed >= fsck_before + 1
        ballast.unlink()
        stored = json.loads((out / "run.json").read_text())
        stored["settings"]["steps"] = committed + 2
        (out / "run.json").write_text(json.dumps(stored))
        done = run("train", "--out", out, "--resume")
        assert done.returncode == 0, done.stderr
        assert fsck(run_copy / "store")[1]["committed_step"] == committed + 2
        assert [
            json.loads(line)["step"] for line in (out / "ledger.jsonl").read_text().splitlines()
        ] == list(range(1, committed + 3))


def test_a_read_only_folder_is_a_sentence(train, tmp_path):
    with mounted(["-t", "tmpfs", "-o", "ro", "tmpfs"], tmp_path / "ro") as folder:
        shown = train_refused(*train(folder / "run", "--steps", "1"))
        assert str(folder) in shown and "Read-only file system" in shown
        shown = train_refused(
            *train(tmp_path / "run", "--steps", "1", "--store", str(folder / "store"))
        )
        assert str(folder) in shown and "Read-only file system" in shown


# -- damaged stores --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pristine(tmp_path_factory) -> Path:
    return make_small_store(tmp_path_factory.mktemp("small") / "s")


@pytest.fixture
def small(pristine, tmp_path) -> Path:
    subprocess.run(["cp", "-r", "--sparse=always", pristine, tmp_path / "s"], check=True)
    return tmp_path / "s"


def test_a_flipped_bit_names_object_and_chunk_and_the_snapshot_still_opens(small, tmp_path):
    extents = find(volume(small), b"C" * 4096)
    flip(volume(small), extents[0] + 1000)
    shown = refused(1, "export", small, "w/1", tmp_path / "x")
    assert "'w/1'" in shown and re.search(r"chunk \d", shown)
    assert not (tmp_path / "x").exists() and not list(tmp_path.glob("*.partial"))
    status, report = fsck(small)
    assert status == 1 and len(report["problems"]) == 1 and "w/1" in report["problems"][0]
    assert report["advice"] == [
        "the current version is damaged, snapshot 'good' is whole: `stoker ls` and `stoker export`"
        " read it with --snapshot good"
    ]
    assert (
        "snapshot 'good' has an earlier form of it" in shown
        and "\nto do: the current version" in run("fsck", small).stdout
    )
    assert run("export", small, "w/1", tmp_path / "good", "--snapshot", "good").returncode == 0
    assert (tmp_path / "good").read_bytes() == b"A" * 200_000
    assert run("export", small, "w/2", tmp_path / "other").returncode == 0


def test_a_flipped_bit_in_a_journal_is_mended_from_the_other_copy(small, tmp_path):
    frames = find(volume(small), b"SKL1")
    flip(volume(small), frames[0] + 80)
    status, report = fsck(small)
    assert (
        status == 1
        and any("journal" in problem for problem in report["problems"])
        and "--repair-map" in report["advice"][0]
    )
    assert (
        run("export", small, "w/1", tmp_path / "x").returncode == 0
        and (tmp_path / "x").read_bytes() == b"C" * 200_000
    )
    done = run("fsck", small, "--repair-map")
    assert done.returncode == 0 and "repaired" in done.stdout, done.stdout + done.stderr
    assert fsck(small)[0] == 0


def test_both_journals_damaged_is_said_and_not_guessed(small):
    for frame in find(volume(small), b"SKL1"):
        flip(volume(small), frame + 80)
    for words in ("ls", "fsck"):
        shown = refused(1, words, small)
        assert (
            str(small) in shown and "journal" in shown and "restore the store from a copy" in shown
        )


def test_a_flipped_bit_in_a_header_is_mended_from_the_other_copy(small):
    flip(volume(small), 40)
    status, report = fsck(small)
    assert status == 1 and "header" in report["problems"][0]
    assert run("fsck", small, "--repair-map").returncode == 0 and fsck(small)[0] == 0


@pytest.mark.parametrize("left", [0, 100, 70_000])
def test_a_truncated_volume_is_named(small, left):
    with open(volume(small), "r+b") as file:
        file.truncate(left)
    for words in (("ls",), ("fsck",)):
        assert str(small) in refused(1, *words, small)


def test_a_volume_that_lost_its_end_still_reads(small, tmp_path):
    """What is left of it is read; fsck tells what is gone."""
    with open(volume(small), "r+b") as file:
        file.truncate(60 << 20)
    assert run("ls", small).returncode == 0
    assert run("export", small, "w/1", tmp_path / "x").returncode == 0
    assert (tmp_path / "x").read_bytes() == b"C" * 200_000
    status, report = fsck(small)
    assert status == 1 and str(small) in " ".join(report["problems"])
