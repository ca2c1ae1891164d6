"""`stoker train` as its users meet it: a whole small run, resumes, signals, mistakes."""

from __future__ import annotations

import argparse
import errno
import json
import os
import re
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from dataclasses import asdict, fields
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import stoker
from stoker import errors
from stoker.offload.division.machine import CAUSES
from stoker.offload.planning import products
from stoker.report import cli as report_cli
from stoker.top import cli as top_cli
from stoker.train import trainer
from stoker.train.cli import _make_absolute, _sentence, default_out, main, parser
from stoker.train.progress import TrainingProgress
from stoker.train.saving import Saving
from stoker.data.corpus import find_text_files
from stoker.train.settings import QUICK, Settings, human_bytes, resolve, write_json
from stoker.train.stop import Stopped
from stoker.train.trainer import WARM_UP

SMALL = [
    "--vocabulary",
    "300",
    "--layers",
    "2",
    "--hidden",
    "64",
    "--heads",
    "2",
    "--feed-forward",
    "128",
    "--window",
    "32",
    "--batch",
    "4",
    "--warmup",
    "2",
    "--eval-windows",
    "8",
    "--sample-tokens",
    "4",
    "--dram",
    "64MiB",
    "--precision",
    "float32",
]
SUMMARY_KEYS = {
    "heldout_loss_before",
    "heldout_loss_after",
    "unigram_entropy",
    "steps",
    "parameters",
    "state_bytes",
    "dram_cap_bytes",
    "dram_peak_bytes",
    "process_peak_bytes",
    "bytes_per_parameter_step",
    "stall_share",
    "seconds",
}
LINE_KEYS = {
    "step",
    "loss",
    "seconds",
    "tokens",
    "read_bytes",
    "written_bytes",
    "stall_seconds",
    "dram_bytes_peak",
    "policy",
    "committed",
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    rng = np.random.default_rng(2)
    words = [
        "".join(chr(97 + c) for c in rng.integers(0, 26, rng.integers(2, 8))) for _ in range(200)
    ]
    for index in range(30):
        text = "\n".join(" ".join(words[w] for w in rng.zipf(1.5, 10) % 200) for _ in range(50))
        (folder / f"{index:02}.txt").write_text(text, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("cache")


def arguments(corpus: Path, cache: Path, out: Path, steps: int, *more: str) -> list[str]:
    return [
        "--out",
        str(out),
        "--data",
        str(corpus),
        "--cache",
        str(cache),
        "--steps",
        str(steps),
        *SMALL,
        *more,
    ]


def command(*args: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "stoker.train", *args], capture_output=True, text=True, timeout=300
    )


def ledger(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "ledger.jsonl").read_text().splitlines()]


def weights(out: Path) -> bytes:
    return (out / "export" / "model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def whole(corpus, cache, tmp_path_factory) -> Path:
    """An uninterrupted run of 12 steps, for all tests to compare with."""
    out = tmp_path_factory.mktemp("whole") / "run"
    done = command(*arguments(corpus, cache, out, 12, "--json"))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == json.loads((out / "summary.json").read_text())
    (out / "stderr.txt").write_text(done.stderr)
    return out


@pytest.fixture
def killed_at_work(corpus, cache, tmp_path) -> Path:
    """The folder of a run that kill -9 ended after a few steps."""
    out = tmp_path / "run"
    process = subprocess.Popen(
        [sys.executable, "-m", "stoker.train", *arguments(corpus, cache, out, 100_000)],
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_for_step(process, out, 3)
    process.kill()
    process.communicate()
    return out


# -- a whole run -----------------------------------------------------------------------------------


def test_a_run_leaves_what_it_promises(whole):
    summary = json.loads((whole / "summary.json").read_text())
    assert summary.keys() >= SUMMARY_KEYS and summary["finished"]
    assert summary["steps"] == 12 and summary["dram_cap_bytes"] == 64 << 20
    assert summary["heldout_loss_after"] < summary["heldout_loss_before"]
    assert summary["dram_peak_bytes"] <= summary["dram_cap_bytes"] < summary["process_peak_bytes"]
    # 2 + 2 + 4 + 4 bytes, planes padded to 4 KiB
    assert summary["state_bytes"] >= 12 * summary["parameters"]
    lines = ledger(whole)
    assert [line["step"] for line in lines] == list(range(1, 13))
    for line in lines:
        assert line.keys() >= LINE_KEYS
        assert line["tokens"] == 128 and line["committed"] <= line["step"]
        assert {"weights", "remainder", "m", "v"} <= line["written_bytes"].keys()
        (account,) = line["loaders"].values()
        assert account["batches"] == 1 and account["samples"] == 4
        assert line["checkpoints"].keys() >= {"saved", "bytes", "seconds"}
    assert lines[-1]["loss"] < lines[0]["loss"]
    report = (whole / "report.html").read_text()
    assert "Training report" in report and "accelerator utilisation" in report


def test_a_run_that_goes_on_is_scraped_watched_and_reported(corpus, cache, tmp_path, capsys):
    out = tmp_path / "run"
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "stoker.train", "--metrics", str(port)),
            *arguments(corpus, cache, out, 100_000),
        ],
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_for_step(process, out, 3)
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
            metrics = answer.read().decode()
        assert top_cli.main([str(out)]) == 0
    finally:
        process.kill()
        process.communicate()
    assert 'stoker_batches_total{loader="loader"}' in metrics and "\nstoker_loss " in metrics
    assert " of 100000, " in capsys.readouterr().out
    assert report_cli.main([str(out)]) == 0
    report = (out / "report.html").read_text()
    assert "as its ledger stands now" in report and "Memory against the cap" in report
    assert "planned" in report


def test_metrics_at_a_port_that_is_taken_are_a_sentence(corpus, cache, tmp_path, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        words = arguments(corpus, cache, tmp_path / "run", 2, "--metrics", str(port))
        assert main(words) == 1
    assert "give another port" in capsys.readouterr().err and not (tmp_path / "run").exists()


def test_a_run_shows_the_plan_before_its_first_step(whole):
    shown = (whole / "stderr.txt").read_text()
    for words in (
        "M parameters",
        "x the memory cap",
        "on disk",
        "in memory",
        "reads",
        "writes",
        "unigram entropy",
        "continuation",
    ):
        assert words in shown
    assert shown.index("writes") < shown.index("step 1/12")


def test_a_run_ends_with_the_plan_beside_what_was_measured(whole):
    shown, rows, compared = (
        (whole / "stderr.txt").read_text(),
        ledger(whole),
        json.loads((whole / "summary.json").read_text())["plan"],
    )
    assert "not planned" not in shown
    policy = re.search(r"^takes .* policy (\w+) \(", shown, re.M)[1]
    assert policy == rows[0]["policy"], "what is announced is what runs"
    assert list(compared) == ["seconds", "read_bytes", "written_bytes", "compute_seconds", *CAUSES]
    counted = rows[WARM_UP:]
    mean = lambda pick: sum(map(pick, counted)) / len(counted)
    measured = {
        "seconds": statistics.median(row["seconds"] for row in counted),
        "read_bytes": statistics.median(sum(row["read_bytes"].values()) for row in counted),
        "written_bytes": mean(lambda row: sum(row["written_bytes"].values())),
        "compute_seconds": mean(lambda row: row["compute_seconds"]),
        **{cause: mean(lambda row: row["stall_seconds"][cause]) for cause in CAUSES},
    }
    assert {name: item["measured"] for name, item in compared.items()} == measured
    for item in compared.values():
        assert item["miss"] == (
            item["planned"] / item["measured"] - 1 if item["measured"] else None
        )
    assert sum(compared[name]["planned"] for name in ("compute_seconds", *CAUSES)) == pytest.approx(
        compared["seconds"]["planned"]
    )
    # a step's may end in the next
    assert compared["written_bytes"]["planned"] == pytest.approx(
        compared["written_bytes"]["measured"], rel=0.25
    )
    table = shown[shown.index("planned   measured") :]
    for name, label in (("seconds", "a step"), ("compute_seconds", "computing")):
        planned, took, miss = re.search(
            rf"^{label} +([\d.]+) s +([\d.]+) s(.*)$", table, re.M
        ).groups()
        assert (planned, took) == (
            f"{compared[name]['planned']:.3f}",
            f"{compared[name]['measured']:.3f}",
        )
        assert miss.strip() == (f"{compared[name]['miss']:+.0%}" if name == "seconds" else "")
    for name, label in (("read_bytes", "read"), ("written_bytes", "written")):
        if compared[name]["measured"]:
            assert re.search(
                rf"^{label} +{human_bytes(compared[name]['planned'])}"
                rf" +{human_bytes(compared[name]['measured'])}",
                table,
                re.M,
            )


def test_the_live_line_tells_the_shares_of_what_was_waited_for(whole):
    rows, shown = ledger(whole), (whole / "stderr.txt").read_text()
    seconds = sum(row["seconds"] for row in rows)
    shares = {cause: sum(row["stall_seconds"][cause] for row in rows) / seconds for cause in CAUSES}
    waiting, named = re.search(
        r"^step 12/12: loss [\d.]+, \d+ tokens/s, (\d+%) waiting(?: \(([^)]*)\))?, 0 s left$",
        shown,
        re.M,
    ).groups()
    assert waiting == f"{sum(shares.values()):.0%}"
    told = dict(part.rsplit(" ", 1) for part in named.split(", ")) if named else {}
    assert told == {cause: f"{share:.0%}" for cause, share in shares.items() if share >= 0.005}


def test_shares_are_of_all_steps_so_far_the_largest_first(capsys):
    progress = TrainingProgress(0, 3)
    for step, waited in enumerate(
        ({"state": 0.02, "commit": 0.06, "data": 0.004}, {"state": 0.38}, {}), 1
    ):
        progress.measured(1.0, waited)
        progress.step(step, 2.5, 128)
    lines = [line for line in capsys.readouterr().err.splitlines()]
    assert (
        "8% waiting (commit 6%, state 2%), " in lines[0]
        and "15% waiting (state 13%, commit 2%), 0 s left" in lines[-1]
    )
    quiet = TrainingProgress(0, 1)
    quiet.measured(1.0, {"state": 0.0})
    quiet.step(1, 2.5, 128)
    assert ", 0% waiting, 0 s left" in capsys.readouterr().err


def test_the_export_is_what_was_trained(whole):
    transformers = pytest.importorskip("transformers")
    words = transformers.AutoTokenizer.from_pretrained(whole / "export")
    model = transformers.AutoModelForCausalLM.from_pretrained(whole / "export")
    out = model.generate(
        **words("the ", return_tensors="pt", return_token_type_ids=False),
        max_new_tokens=5,
        min_new_tokens=5,
    )
    assert (
        out.shape[1] > 5
        and model.num_parameters() == json.loads((whole / "summary.json").read_text())["parameters"]
    )


# -- resume and signals ----------------------------------------------------------------------------


def wait_for_step(process: subprocess.Popen, out: Path, step: int) -> None:
    limit = time.monotonic() + 120
    while time.monotonic() < limit and process.poll() is None:
        if (out / "ledger.jsonl").exists() and len(
            (out / "ledger.jsonl").read_text().splitlines()
        ) >= step:
            return
        time.sleep(0.01)
    pytest.fail(f"step {step} was not reached: {process.communicate()[1]}")


def assert_equals(out: Path, whole: Path) -> None:
    assert [(line["step"], line["loss"]) for line in ledger(out)] == [
        (line["step"], line["loss"]) for line in ledger(whole)
    ]
    assert weights(out) == weights(whole)
    ours, theirs = (json.loads((folder / "summary.json").read_text()) for folder in (out, whole))
    for key in ("heldout_loss_before", "heldout_loss_after", "unigram_entropy", "steps"):
        assert ours[key] == theirs[key]


@pytest.mark.parametrize("number, status", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_behind_a_committed_step_and_a_resume_gives_the_same_bits(
    corpus, cache, whole, tmp_path, number, status
):
    out = tmp_path / "run"
    process = subprocess.Popen(
        [sys.executable, "-m", "stoker.train", *arguments(corpus, cache, out, 12)],
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_for_step(process, out, 3)
    process.send_signal(number)
    shown = process.communicate(timeout=120)[1]
    assert process.returncode == status, shown
    steps = len(ledger(out))
    assert f"step {steps} of 12 is committed; --resume goes on" in shown
    summary = json.loads((out / "summary.json").read_text())
    assert summary["steps"] == steps and (steps == 12 or not summary["finished"])
    if number == signal.SIGTERM and steps < 12:  # the last step was saved as well
        assert f"checkpoint   of step {steps} in dir:{out}/checkpoints" in shown
        shutil.rmtree(out / "store")
    done = command("--out", str(out), "--resume")
    assert done.returncode == 0, done.stderr
    assert f"at step {steps} of 12" in done.stderr
    assert_equals(out, whole)
    # the plan is this process's, and so are the steps beside it
    own = [line["seconds"] for line in ledger(out)[steps:]]
    if own:
        assert json.loads((out / "summary.json").read_text())["plan"]["seconds"][
            "measured"
        ] == statistics.median(own[3:] or own)


def test_kills_anywhere_cost_at_most_the_uncommitted_step(corpus, cache, whole, tmp_path):
    out = tmp_path / "run"
    begun = arguments(corpus, cache, out, 12)
    for step in (1, 6):
        process = subprocess.Popen(
            [sys.executable, "-m", "stoker.train", *begun], stderr=subprocess.PIPE, text=True
        )
        wait_for_step(process, out, step)
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stderr.close()
        lines = ledger(out)
        assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
        begun = ["--out", str(out), "--resume"]
    done = command("--out", str(out), "--resume")
    assert done.returncode == 0, done.stderr
    assert_equals(out, whole)


def test_a_ledger_line_that_finds_no_room_costs_neither_the_step_nor_the_line(
    corpus, cache, whole, tmp_path
):
    """The step is committed all the same, with what moves on after it: the resumed run is the
    uninterrupted one, bit for bit."""
    full = """
import errno, os, sys
from stoker.train.cli import main

calls, sync = [], os.fdatasync

def fills_up(descriptor):
    calls.append(descriptor)
    if len(calls) == 5:
        raise OSError(errno.ENOSPC, "No space left on device")
    sync(descriptor)

os.fdatasync = fills_up
sys.exit(main(sys.argv[1:]))
"""
    out = tmp_path / "run"
    done = subprocess.run(
        [sys.executable, "-c", full, *arguments(corpus, cache, out, 12)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode != 0 and "step 5 of 12 is committed" in done.stderr, done.stderr
    assert (
        f"{out}/ledger.jsonl cannot be used (No space left on device)"
        in done.stderr.splitlines()[-1]
    )
    assert [line["step"] for line in ledger(out)] == [1, 2, 3, 4]
    done = command("--out", str(out), "--resume")
    assert done.returncode == 0 and "at step 5 of 12" in done.stderr, done.stderr
    assert_equals(out, whole)


def test_a_run_whose_store_is_gone_does_not_begin_anew_by_itself(killed_at_work, capsys):
    steps = max(line["committed"] for line in ledger(killed_at_work))
    before = (killed_at_work / "ledger.jsonl").read_bytes()
    shutil.move(killed_at_work / "store", killed_at_work / "elsewhere")
    shutil.move(killed_at_work / "checkpoints", killed_at_work / "away")
    for _ in range(2):  # the first call made an empty store there
        shown = refused(capsys, "--out", str(killed_at_work), "--resume")
        assert (
            f"{killed_at_work}/store is empty, but {steps} steps" in shown
            and "--overwrite" in shown
        )
    assert (killed_at_work / "ledger.jsonl").read_bytes() == before


def test_a_run_whose_store_is_gone_goes_on_from_its_newest_checkpoint(
    corpus, cache, whole, tmp_path
):
    out = tmp_path / "run"
    begun = arguments(corpus, cache, out, 12, "--checkpoint-every", "3")
    process = subprocess.Popen(
        [sys.executable, "-m", "stoker.train", *begun], stderr=subprocess.PIPE, text=True
    )
    wait_for_step(process, out, 8)
    process.kill()
    process.communicate()
    lines = len(ledger(out))
    saved = max(
        int(path.parent.name.split("-")[1]) for path in out.glob("checkpoints/*/MANIFEST.json")
    )
    assert saved in (3, 6, 9) and saved <= lines
    shutil.rmtree(out / "store")
    done = command("--out", str(out), "--resume")
    assert done.returncode == 0, done.stderr
    assert f"resumed      at step {saved} of 12" in done.stderr
    assert "checkpoints  every 3 steps to" in done.stderr and "MB each" in done.stderr
    assert_equals(out, whole)
    costs = json.loads((out / "summary.json").read_text())["checkpoints"]
    assert (
        costs["saved"] == len([step for step in (3, 6, 9, 12) if step > saved])
        and costs["bytes"] > 0
    )
    assert len(list(out.glob("checkpoints/*/MANIFEST.json"))) == 2


def test_a_new_run_does_not_save_beside_the_checkpoints_of_another(
    corpus, cache, whole, tmp_path, capsys
):
    before = sorted((whole / "checkpoints").rglob("*"))
    given = arguments(corpus, cache, tmp_path / "run", 2)
    shown = refused(capsys, *given, "--checkpoints", str(whole / "checkpoints"))
    assert "holds checkpoints of another run" in shown and "another --checkpoints" in shown
    assert not (tmp_path / "run" / "run.json").exists()
    assert before and sorted((whole / "checkpoints").rglob("*")) == before
    shown = refused(capsys, *given, "--checkpoint-every", "0", status=2)
    assert "must be auto, off or a number of steps, not 0" in shown


def test_a_run_without_checkpoints_stays_so(corpus, cache, whole, tmp_path, capsys):
    """Its store was made without room for the step that is copied; so was that of an older Stoker's
    run."""
    out = tmp_path / "run"
    assert main(arguments(corpus, cache, out, 2, "--checkpoint-every", "off")) == 0
    assert "checkpoints  off" in capsys.readouterr().err and not (out / "checkpoints").exists()
    assert json.loads((out / "summary.json").read_text())["checkpoints"] == {}
    older = json.loads((whole / "run.json").read_text())["settings"]
    del older["checkpoints"], older["checkpoint_every"]
    assert resolve({}, older).checkpoint_every == "off"
    (out / "summary.json").unlink()
    shown = refused(capsys, "--out", str(out), "--resume", "--checkpoint-every", "auto")
    assert "is too small to keep a step while a checkpoint copies" in shown


def test_a_checkpoint_that_fails_does_not_end_the_run(tmp_path, monkeypatch):
    saving = Saving(Settings(checkpoint_every="1"), tmp_path, resume=False)

    def full(*_args, **_kwargs):
        raise errors.OutOfSpace("the disk is full")

    monkeypatch.setattr(saving.checkpoints, "save", full)
    assert saving.stepped(SimpleNamespace(step_count=1)) == ["no checkpoint: the disk is full"]
    saving.close()


def test_a_full_disk_is_named_whatever_was_being_written(tmp_path, monkeypatch):
    """open() names its file in the error; what is written behind it must, too."""

    def full(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError) as failed:
        write_json(tmp_path / "x.json", {})
    assert (
        f"{tmp_path}/.x.json.partial cannot be used (No space left on device): make room"
        in _sentence(failed.value)
    )


def test_a_finished_run_says_so(whole):
    before = (whole / "summary.json").read_bytes()
    done = command("--out", str(whole), "--resume", "--json")
    assert done.returncode == 0 and "is finished: 12 steps" in done.stderr
    assert (
        json.loads(done.stdout) == json.loads(before)
        and (whole / "summary.json").read_bytes() == before
    )


def test_overwrite_begins_anew(corpus, cache, tmp_path):
    out = tmp_path / "run"
    for more in ([], ["--overwrite"]):
        done = command(*arguments(corpus, cache, out, 2, *more))
        assert done.returncode == 0, done.stderr
        assert [line["step"] for line in ledger(out)] == [1, 2]


def test_lossy_moments(corpus, cache, whole, tmp_path, capsys):
    out = tmp_path / "run"
    done = command(*arguments(corpus, cache, out, 12, "--moments", "8bit"))
    assert done.returncode == 0, done.stderr
    ours, exact = (json.loads((folder / "summary.json").read_text()) for folder in (out, whole))
    assert ours["state_bytes"] < 0.6 * exact["state_bytes"]
    assert (
        ours["last_loss"] != exact["last_loss"]
        and abs(ours["last_loss"] - exact["last_loss"]) < 0.1
    )
    (out / "summary.json").unlink()
    assert "--moments exact (stored: 8bit)" in refused(
        capsys, "--out", str(out), "--resume", "--moments", "exact"
    )


# -- mistakes --------------------------------------------------------------------------------------


def refused(capsys, *args: str, status: int = 1) -> str:
    """The sentence with which a command line is refused."""
    assert main(list(args)) == status
    shown = capsys.readouterr().err
    assert "Traceback" not in shown
    return shown.splitlines()[-1]


def test_mistakes_are_sentences(corpus, cache, whole, tmp_path, capsys):
    out = ["--out", str(tmp_path / "new")]
    assert "there is no run to resume" in refused(capsys, *out, "--resume")
    assert "gone does not exist: give a text file" in refused(
        capsys, *out, "--data", str(tmp_path / "gone")
    )
    (tmp_path / "empty").mkdir()
    assert "no text files found" in refused(
        capsys, *out, "--overwrite", "--data", str(tmp_path / "empty")
    )
    assert "fewer than one window" in refused(
        capsys,
        *out,
        "--overwrite",
        "--data",
        str(corpus),
        "--cache",
        str(cache),
        "--vocabulary",
        "300",
        "--window",
        "100000",
    )
    assert "already holds a run: continue it with --resume" in refused(
        capsys, *arguments(corpus, cache, whole, 12)
    )
    assert "other settings: --seed 3 (stored: 0)" in refused(
        capsys, "--out", str(whole), "--resume", "--seed", "3"
    )
    assert "amount of memory" in refused(capsys, *out, "--overwrite", "--dram", "lots", status=2)
    assert "cpu or cuda" in refused(capsys, *out, "--overwrite", "--device", "mps", status=2)
    assert "tpuu" in refused(capsys, *out, "--overwrite", "--device", "tpuu", status=2)
    if not torch.cuda.is_available():
        assert "no GPU" in refused(capsys, *out, "--overwrite", "--device", "cuda", status=2)
    assert "multiple of twice --heads 3: try --hidden 66" in refused(
        capsys, *out, "--overwrite", "--hidden", "64", "--heads", "3", status=2
    )
    assert not (tmp_path / "new" / "run.json").exists()


def test_without_out_a_finished_run_is_kept_and_an_unfinished_one_is_not_passed_by(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)

    def hold(name: str, finished: bool) -> None:
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "summary.json").write_text(json.dumps({"finished": finished}))

    assert [str(default_out(existing)) for existing in (False, True)] == ["out/train", "out/train"]
    hold("out/train", True)
    assert [str(default_out(existing)) for existing in (False, True)] == [
        "out/train-2",
        "out/train",
    ]
    hold("out/train-2", False)
    assert [str(default_out(existing)) for existing in (False, True)] == [
        "out/train-2",
        "out/train-2",
    ]


def test_a_quick_run_has_small_settings_and_text_that_is_there(tmp_path, monkeypatch):
    """Options that are given still hold, and a resume takes the settings of the run."""
    monkeypatch.chdir(tmp_path)
    seen = []
    keep = lambda settings, out, *_: seen.append((settings, str(out))) or {}
    monkeypatch.setattr("stoker.train.cli._train", keep)
    assert main(["--quick", "--steps", "7"]) == 0
    settings, out = seen[0]
    assert out == "out/quick" and settings.steps == 7 and settings.precision == "float32"
    assert {**asdict(settings), "steps": 60, "data": ()} == asdict(Settings(**QUICK))
    assert sum(file.size_bytes for file in find_text_files(settings.data)) > 1 << 20
    assert main(["--quick", "--data", str(tmp_path)]) == 0
    assert seen[1][0].data == (str(tmp_path),)
    Path("out/quick").mkdir(parents=True)
    write_json(Path("out/quick/run.json"), {"settings": asdict(Settings(hidden=320))})
    assert main(["--quick", "--resume"]) == 0
    assert seen[2][0].hidden == 320


def test_a_wrong_option_is_one_whatever_run_a_user_has_left(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out" / "train").mkdir(parents=True)
    write_json(tmp_path / "out" / "train" / "run.json", {"settings": {}})
    for words in (
        ["--dram", "lots"],
        ["--dram", "lots", "--resume"],
        ["--hidden", "64", "--heads", "3"],
    ):
        assert "stoker train --help" in refused(capsys, *words, status=2)


def test_a_budget_too_small_is_told_before_the_text_is_read(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("stoker.train.trainer.Corpus", None)
    shown = refused(capsys, "--out", str(tmp_path / "run"), "--dram", "1MiB")
    assert (
        re.search(r"the smallest budget that works is --dram \d+MiB$", shown)
        and not (tmp_path / "run").exists()
    )


def test_a_run_keeps_the_type_and_the_steps_that_it_chose(
    corpus, cache, tmp_path, monkeypatch, capsys
):
    """The quicker type, and as many steps as end in time; a resume does not measure them again."""
    known = products.Quickest("float32", {"bfloat16": 2e9, "float32": 40e9})
    monkeypatch.setattr(trainer, "quickest_type", lambda tokens, width: known)
    monkeypatch.setattr(trainer, "STEPS", 5)
    words = [*arguments(corpus, cache, tmp_path / "run", 0), "--precision", "auto"]
    monkeypatch.setattr(
        trainer.Run, "begin", lambda run: (_ for _ in ()).throw(Stopped(signal.SIGINT))
    )
    assert main(words) == 130
    assert (
        "float32: this processor makes 40 GFLOP/s of products in it, and 2 in bfloat16"
        in capsys.readouterr().err
    )
    stored = json.loads((tmp_path / "run" / "run.json").read_text())["settings"]
    assert (stored["precision"], stored["steps"]) == ("float32", 5)
    monkeypatch.undo()
    monkeypatch.setattr(trainer, "quickest_type", None)
    assert (
        main(["--out", str(tmp_path / "run"), "--resume", "--precision", "auto", "--steps", "0"])
        == 0
    )
    shown = capsys.readouterr().err
    assert "0:01 (hours:minutes) for the 5 steps to come" in shown and "step 5/5" in shown
    assert len(ledger(tmp_path / "run")) == 5


def test_paths_are_stored_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given = {"data": ("a", "/b"), "cache": "c", "store": "d,/e", "steps": 1}
    _make_absolute(given)
    assert given == {
        "data": (f"{tmp_path}/a", "/b"),
        "cache": f"{tmp_path}/c",
        "store": f"{tmp_path}/d,/e",
        "steps": 1,
    }
    composed = {"store": "local:/x,/y"}
    _make_absolute(composed)
    assert composed == {"store": "local:/x,/y"}


def test_a_mistake_with_json_is_json(tmp_path, capsys):
    assert main(["--out", str(tmp_path), "--resume", "--json"]) == 1
    assert "no run to resume" in json.loads(capsys.readouterr().out)["error"]


def test_a_changed_corpus_cannot_be_resumed(corpus, cache, tmp_path, capsys):
    copy = tmp_path / "text"
    copy.mkdir()
    for path in corpus.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    out = tmp_path / "run"
    process = subprocess.Popen(
        [sys.executable, "-m", "stoker.train", *arguments(copy, cache, out, 12)],
        stderr=subprocess.DEVNULL,
    )
    limit = time.monotonic() + 120
    while not (out / "ledger.jsonl").exists() and time.monotonic() < limit:
        time.sleep(0.02)
    process.kill()
    process.wait()
    (copy / "00.txt").write_text("other words\n" * 30)
    assert "the corpus has changed since this run began" in refused(
        capsys, "--out", str(out), "--resume"
    )


def test_a_folder_that_cannot_be_written_is_a_sentence(corpus, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert "cannot be used (Not a directory)" in refused(
        capsys, "--out", str(tmp_path / "file" / "run"), "--data", str(corpus)
    )


def test_the_patience_for_a_disk_reaches_the_store(corpus, cache, tmp_path, capsys, monkeypatch):
    given, build = [], stoker.build

    def building(*args, **how):
        given.append(how["stall_seconds"])
        return build(*args, **how)

    def offloading(*args, **how):
        given.append(how["stall_seconds"])
        raise errors.Busy("enough is known")

    monkeypatch.setattr(stoker, "build", building)
    monkeypatch.setattr(stoker, "offload", offloading)
    assert "enough is known" in refused(
        capsys, *arguments(corpus, cache, tmp_path / "run", 2, "--stall-seconds", "7")
    )
    assert given == [7, 7]


# -- help ------------------------------------------------------------------------------------------


def test_every_setting_is_an_option_with_help():
    actions = {action.dest: action for action in parser()._actions}
    for field in fields(Settings):
        action = actions[field.name]
        assert action.help and action.default is argparse.SUPPRESS
        if field.default not in ("", ()):
            assert f"default: {field.default}" in action.help
    for name in ("out", "resume", "json", "overwrite", "rebuild_tokens"):
        assert actions[name].help


def test_help_is_complete_and_ends_well():
    done = command("--help")
    assert done.returncode == 0 and "--resume" in done.stdout and "130 or 143" in done.stdout


# -- faults of the store ---------------------------------------------------------------------------


def test_a_budget_too_small_names_the_smallest_that_works(corpus, cache, tmp_path, capsys):
    out = tmp_path / "run"
    named = set()
    # too small for the store's map, for building the model, for training it
    for budget in ("1000", "300KiB", "2MiB"):
        shown = refused(capsys, *arguments(corpus, cache, out, 2, "--dram", budget))
        named.add(re.search(r"the smallest budget that works is --dram (\w+)$", shown)[1])
        assert not (out / "run.json").exists() and not (out / "store" / "stoker.volume").exists()
    (smallest,) = named
    # what failed to begin left nothing in the way
    done = command(*arguments(corpus, cache, out, 2, "--dram", smallest))
    assert done.returncode == 0, done.stderr
    assert (
        json.loads((out / "summary.json").read_text())["dram_cap_bytes"]
        == int(smallest.removesuffix("MiB")) << 20
    )


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 16 MiB; needs root and the right to mount."""
    place = tmp_path / "disk"
    place.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=16m", "none", str(place)], capture_output=True
    )
    if made.returncode:
        pytest.skip("mounting a small file system is not permitted here")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_a_disk_too_small_for_the_store_is_a_sentence(corpus, cache, small_disk, tmp_path):
    failed = command(
        *arguments(corpus, cache, tmp_path / "run", 2, "--store", str(small_disk / "store"))
    )
    assert failed.returncode == 1 and "Traceback" not in failed.stderr
    assert "cannot reserve" in failed.stderr and "free some space" in failed.stderr


def test_a_store_in_use_is_a_sentence(corpus, cache, tmp_path):
    out = tmp_path / "run"
    process = subprocess.Popen(
        [sys.executable, "-m", "stoker.train", *arguments(corpus, cache, out, 100_000)],
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_for_step(process, out, 1)
    lines = len(ledger(out))
    failed = command("--out", str(out), "--resume")
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=120)
    assert failed.returncode == 1 and "in use" in failed.stderr and "Traceback" not in failed.stderr
    # the run itself was not disturbed
    assert process.returncode == 130 and len(ledger(out)) >= lines
