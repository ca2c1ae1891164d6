"""The Chrome trace of one step against what the ledger says of it."""

from __future__ import annotations

import json

import models
import pytest
import stoker
import torch
from stoker.errors import InvalidArgument
from stoker.offload.planning.products import TYPES
from stoker.trace.cli import main


@pytest.fixture
def training(tmp_path):
    torch.manual_seed(0)
    model = models.Tiny(width=256).bfloat16()
    model, opt = stoker.offload(
        model,
        torch.optim.AdamW(model.parameters()),
        store=str(tmp_path / "store"),
        dram="23MiB",
        policy="speculate",
    )

    def step(number: int) -> dict:
        models.loss_of(model, models.batch(number)).backward()
        opt.step()
        opt.zero_grad()
        return opt.ledger.last

    yield opt, step
    opt.close()


def spans(content: dict, row: str) -> list[dict]:
    rows = {
        event["tid"]
        for event in content["traceEvents"]
        if event["name"] == "thread_name" and event["args"]["name"].startswith(row)
    }
    return [
        event for event in content["traceEvents"] if event["ph"] == "X" and event["tid"] in rows
    ]


def test_a_trace_holds_the_disk_the_kernels_and_the_blocks_of_one_step(training, tmp_path):
    opt, step = training
    step(0), step(1)
    opt.flush()
    before = opt._session.planes.session.counters()["tiles"]
    opt.trace(tmp_path / "trace.json")
    with pytest.raises(InvalidArgument, match="traced already"):
        opt.trace(tmp_path / "other.json")
    row = step(2)
    tiles = opt._session.planes.session.counters()["tiles"] - before
    content = json.loads((tmp_path / "trace.json").read_text())
    assert content["otherData"] == {"step": 3, "policy": "speculate", "dropped_spans": 0}
    blocks = [span["name"] for span in spans(content, "training thread, block")]
    order = [opt._session.blocks[i].name for i in opt._session.pager.recorder.order.uses]
    assert [name for name in blocks if name != "step()"] == order and blocks[-1] == "step()"
    kernels = spans(content, "kernel thread")
    assert sum(span["name"].startswith("update ") for span in kernels) == tiles > 0
    assert all(span["dur"] >= 0 for span in kernels)
    disk = spans(content, "disk")
    assert {"prefetch read", "write back write"} <= {span["name"] for span in disk}
    read = sum(span["args"]["bytes"] for span in disk if span["name"].endswith(" read"))
    # the last of them were begun in the step before
    assert read >= 0.5 * sum(row["read_bytes"].values()) > 0
    for track in {span["tid"] for span in disk}:  # a row shows one operation at a time
        lane = sorted(
            (span["ts"], span["ts"] + span["dur"]) for span in disk if span["tid"] == track
        )
        assert all(first[1] <= second[0] + 1e-3 for first, second in zip(lane, lane[1:]))
    counters = [event["args"] for event in content["traceEvents"] if event["ph"] == "C"]
    assert (
        counters
        and all(each["waiting"] >= 0 and each["in service"] >= 0 for each in counters)
        and counters[-1] == {"waiting": 0, "in service": 0}
    )


def test_only_one_step_is_traced_and_nothing_stays_behind(training, tmp_path):
    opt, step = training
    opt.trace(tmp_path / "trace.json")
    step(0)
    written = (tmp_path / "trace.json").read_bytes()
    step(1)
    assert (tmp_path / "trace.json").read_bytes() == written
    session = opt._session
    assert (
        not session.tracing.on
        and session.ledger.waiting._spans is None
        and session.pager.recorder._on_use is None
    )
    assert session.runtime.core.stop_trace() == ([], 0)


def test_a_trace_that_cannot_be_written_names_the_file_and_the_step_stands(training, tmp_path):
    opt, step = training
    opt.trace(tmp_path / "none" / "trace.json")
    with pytest.raises(OSError, match="none"):
        step(0)
    opt.zero_grad()
    assert opt.step_count == 1
    step(1)
    opt.flush()
    assert opt.committed_step == 2


# -- the command -----------------------------------------------------------------------------------

SMALL = ["--layers", "2", "--width", "64", "--vocabulary", "256", "--dram", "16MiB"]


@pytest.mark.parametrize("policy", ["speculate", "lazy"])
def test_the_command_writes_the_trace_of_its_last_step(tmp_path, capsys, policy):
    out = tmp_path / "trace.json"
    assert main(["--out", str(out), "--dir", str(tmp_path), "--policy", policy, *SMALL]) == 0
    precision, said = capsys.readouterr().err.splitlines()
    chosen = precision.split()[1].rstrip(":")
    assert precision.startswith("precision ") and chosen in TYPES
    assert said.startswith(f"written      {out}: step 4, ") and said.endswith(
        f" s, policy {policy}"
    )
    content = json.loads(out.read_text())
    assert content["otherData"] == {"step": 4, "policy": policy, "dropped_spans": 0}
    blocks = [span["name"] for span in spans(content, "training thread, block")]
    assert (
        set(blocks) == {"embed", "layers.0", "layers.1", "norm", "head", "step()"}
        and blocks[0] == "embed"
        and blocks[-1] == "step()"
    )
    # lazy updates of the step before may have been made ahead of the trace
    if policy == "speculate":
        kernels = {span["name"].partition(" [")[0] for span in spans(content, "kernel thread")}
        assert kernels >= {f"update {block}/{chosen}" for block in set(blocks) - {"step()"}}
    assert any(
        span["name"].endswith(" write") and span["args"]["bytes"] > 0
        for span in spans(content, "disk")
    )
    assert list(tmp_path.iterdir()) == [out], "the store is thrown away"


def test_the_command_says_what_is_wrong(tmp_path, capsys):
    for words, said in (
        (["--out", str(tmp_path / "none" / "t.json"), "--dir", str(tmp_path)], "none/t.json"),
        (["--dir", str(tmp_path / "none")], "none"),
        (["--dir", str(tmp_path), "--dram", "1MiB"], "the smallest budget that works"),
    ):
        assert main([*SMALL, *words]) == 1
        *precision, shown = capsys.readouterr().err.splitlines()
        assert shown.startswith("stoker trace: ") and said in shown
        assert len(precision) == ("--dram" in words)  # measured where the paths are right
    with pytest.raises(SystemExit) as ended:
        main([*SMALL, "--dram", "lots"])
    assert ended.value.code == 2 and "--dram" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
