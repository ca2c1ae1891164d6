"""report.html and its charts."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import urllib.error
import urllib.request
from html.parser import HTMLParser

import pytest

from stoker.errors import InvalidArgument
from stoker.offload.division.machine import CAUSES
from stoker.report import cli as report_cli
from stoker.report import figures
from stoker.report.advice import advice
from stoker.report.charts import Series, bars, columns, lines, ticks
from stoker.report.metrics import Metrics, MetricsServer, parse_address
from stoker.report.page import write_report
from stoker.top import cli as top_cli

STEP = {
    "policy": "speculate",
    "read_bytes": {"weights": 4000, "m": 4000, "v": 4000, "remainder": 2000},
    "written_bytes": {"weights": 2000, "m": 4000, "v": 4000, "remainder": 2000},
    "seconds": 0.9,
    "compute_seconds": 0.7,
    "stall_seconds": {**dict.fromkeys(CAUSES, 0.0), "state": 0.2},
}
PLAN = {
    "parameters": 1000,
    "state_bytes": 12000,
    "policy": "speculate",
    "step": STEP,
    "steps": {"speculate": STEP},
}
SUMMARY = {
    "finished": True,
    "heldout_loss_before": 7.7,
    "heldout_loss_after": 4.9,
    "unigram_entropy": 6.2,
    "steps": 3,
    "parameters": 1000,
    "state_bytes": 12000,
    "dram_cap_bytes": 4000,
    "dram_peak_bytes": 3900,
    "process_peak_bytes": 50_000,
    "bytes_per_parameter_step": 26.0,
    "stall_share": 0.2,
    "seconds": 30.0,
    "tokens_per_second": 100.0,
}


def rows(count: int) -> list[dict]:
    return [
        {
            "step": i,
            "loss": 8.0 - i / count,
            "seconds": 1.0,
            "tokens": 10,
            "policy": "speculate",
            "dram_bytes_peak": 3000 + i,
            "read_bytes": {"weights": 4000, "m": 4000},
            "written_bytes": {"weights": 2000},
            "stall_seconds": {"weights": 0.1, "state": 0.2 * (i % 2)},
        }
        for i in range(1, count + 1)
    ]


class Checker(HTMLParser):
    """Notes unbalanced tags and everything that would leave the file."""

    VOID = {"meta", "line", "circle", "polyline", "rect", "br", "i"}

    def __init__(self) -> None:
        super().__init__()
        self.open, self.outside, self.tags = [], [], []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.open.append(tag)
        self.outside += [
            value
            for name, value in attributes
            if name in ("src", "href") or "url(" in (value or "")
        ]

    def handle_startendtag(self, tag, attributes):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        while self.open and self.open[-1] != tag:
            assert self.open.pop() in self.VOID, f"<{tag}> closes something else"
        assert self.open and self.open.pop() == tag


@pytest.mark.parametrize("count", [0, 1, 2, 500])
def test_the_report_is_one_well_formed_file_without_network(tmp_path, count):
    write_report(
        tmp_path / "report.html",
        rows(count),
        SUMMARY,
        PLAN,
        {"steps": count, "data": ()},
        "the <kernel>",
        " & more",
    )
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    checker = Checker()
    checker.feed(text)
    assert checker.outside == [] and "script" not in checker.tags and "@import" not in text
    assert not re.search(r"https?:", text)
    assert checker.tags.count("svg") == (5 if count else 4)  # without steps: no time chart
    assert "the &lt;kernel&gt;" in text and " &amp; more" in text
    assert "prefers-color-scheme:dark" in text and "nan" not in text.lower().replace("finance", "")
    for figure in ("7.700", "4.900", "6.200", "3.0 x"):
        assert figure in text


def test_every_colour_is_defined(tmp_path):
    ran = rows(3)
    for row in ran:
        row["stall_seconds"] = dict.fromkeys(CAUSES, 0.05)
    write_report(tmp_path / "r.html", ran, SUMMARY, PLAN, {"steps": 3})
    text = (tmp_path / "r.html").read_text(encoding="utf-8")
    used = set(re.findall(r'<(?:rect|i)[^>]* class=[\'"](?:key )?(s\d)[\'"]', text))
    assert len(used) > len(CAUSES) // 2
    for name in used:
        assert f"rect.{name}," in text and f"i.{name}{{" in text and f"--{name}:" in text, name


def test_the_plan_stands_beside_the_steps_of_its_own_process(tmp_path):
    """A resumed run may have another cap: what was planned for it is not compared with steps
    before."""
    ran = rows(6)
    for row in ran[:4]:
        row["written_bytes"] = {"weights": 7_000_000}
    write_report(tmp_path / "r.html", ran, SUMMARY, PLAN, {"steps": 6}, planned_behind=4)
    assert "7.0" not in "".join(
        (tmp_path / "r.html")
        .read_text(encoding="utf-8")
        .split("Bytes a step by class")[1]
        .split("<section")[0]
    )


def test_what_changed_on_the_way_is_told(tmp_path):
    ran = rows(3)
    ran[1]["events"] = [
        {
            "what": "policy",
            "step": 2,
            "policy": "lazy",
            "reason": "clips fire in <40%> of the steps",
        },
        {"what": "order", "step": 2, "call": ["", True, True]},
    ]
    write_report(tmp_path / "r.html", ran, SUMMARY, PLAN, {"steps": 3})
    assert "step 2: policy       lazy from here on: clips fire in &lt;40%&gt; of the steps" in (
        tmp_path / "r.html"
    ).read_text(encoding="utf-8")


def test_a_run_that_was_stopped_says_so(tmp_path):
    write_report(
        tmp_path / "r.html",
        rows(2),
        {**SUMMARY, "heldout_loss_after": None, "finished": False},
        PLAN,
        {"steps": 9},
    )
    text = (tmp_path / "r.html").read_text(encoding="utf-8")
    assert "stopped before its end" in text and "not reached" in text


def test_ticks_are_round_and_cover():
    assert ticks(0, 10) == [0, 2, 4, 6, 8, 10]
    for low, high in ((0.013, 0.87), (4.2, 8.4), (0, 1e9), (3, 3)):
        found = ticks(low, high)
        assert found[0] <= low and found[-1] >= high and len(found) <= 9


def test_columns_keep_their_height_when_steps_are_joined():
    steps = list(range(1, 1001))
    chart = columns(
        steps,
        [
            Series("a", [(s, 2.0) for s in steps], "s0"),
            Series("b", [(s, 1.0) for s in steps], "s1"),
        ],
        "t",
        "x",
        "y",
    )
    heights = [float(h) for h in re.findall(r'<rect class="s0".*?height="([\d.]+)"', chart)]
    assert len(heights) <= 180 and max(heights) - min(heights) < 0.02
    others = [float(h) for h in re.findall(r'<rect class="s1".*?height="([\d.]+)"', chart)]
    assert heights[0] == pytest.approx(2 * others[0], rel=0.01)


def test_a_point_lies_where_its_value_says():
    chart = lines(
        [Series("l", [(0, 0.0), (10, 10.0)], "s0"), Series("p", [(5, 5.0)], "s1")], "t", "x", "y"
    )
    (x1, y1), (x2, y2) = [
        tuple(map(float, p.split(","))) for p in re.search(r'points="([^"]+)"', chart)[1].split()
    ]
    cx, cy = map(float, re.search(r'cx="([\d.]+)" cy="([\d.]+)"', chart).groups())
    assert (
        cx == pytest.approx((x1 + x2) / 2, abs=0.1)
        and cy == pytest.approx((y1 + y2) / 2, abs=0.1)
        and y1 > y2
    )


def test_bars_are_in_proportion():
    chart = bars([("one", [("w", 10.0, "s0")]), ("two", [("w", 20.0, "s0")])], "t", "MB")
    first, second = [float(w) for w in re.findall(r'width="([\d.]+)"', chart)]
    assert (second + 1) == pytest.approx(2 * (first + 1), rel=0.01)


CACHED = "cached(local:/nvme, s3://bucket/data, disk=1GiB)"


def data_rows(count: int, seconds: float = 0.25, **cache: object) -> list[dict]:
    """Steps that wait for reads of one shard from s3 behind a cache, and for checkpoints."""
    return [
        {
            **row,
            "stall_seconds": {"data": seconds, "checkpoint": 0.05},
            "checkpoints": {"saved": row["step"] // 2, "bytes": 10 * row["step"], "seconds": 0.1},
            "process_bytes_peak": 50_000,
            "loaders": {
                "loader": {
                    "batches": 1,
                    "samples": 32,
                    "ahead": 4,
                    "wait_seconds": {"read s3": 0.8 * seconds, "verify": 0.2 * seconds},
                    "bytes": {"s3": 3 << 29, "cache": 1 << 29},
                    "objects": {"s3 shard-7.tar": 0.7 * seconds, "s3 shard-8.tar": 0.1 * seconds},
                    "caches": {
                        CACHED: {
                            "hit_bytes": 1 << 29,
                            "fetched_bytes": 3 << 29,
                            "epoch_fetched_bytes": 2 << 30,
                            "held_bytes": 1 << 30,
                            "usable_bytes": 1 << 30,
                            "off": "",
                            **cache,
                        }
                    },
                }
            },
        }
        for row in rows(count)
    ]


def run_of(folder, rows_: list[dict]) -> str:
    (folder / "ledger.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows_))
    return str(folder)


def test_advice_is_made_from_the_figures():
    told = advice(data_rows(11))
    assert told[0] == (
        "20% of the step waited for reads of shard-7.tar from s3: give the cache 2 GiB more, or "
        "allow 8 batches in flight (ahead=8)."
    )
    assert told[1].startswith("5% of the step waited for checkpoints: save less often")
    assert told[2].startswith("5% of the step waited for the checksums of samples: ")
    assert len(told) == 3


def test_advice_follows_the_cache():
    filling = advice(data_rows(11, held_bytes=1 << 20))[0]
    assert filling.endswith("from s3: allow 8 batches in flight (ahead=8).")
    told = advice(data_rows(11, off="its disk is full"))
    assert "put a cache before it" in told[0] and told[-1] == (
        f"The cache of {CACHED} is off: its disk is full."
    )
    quiet = [{**row, "stall_seconds": {}, "checkpoints": None} for row in data_rows(3, 0.0)]
    assert advice(quiet) == ["Nothing to mend: 100.0% of the time went into computing."]
    assert advice([]) == []


@pytest.mark.parametrize(
    "stage, words",
    [
        ("decode", "images to be decoded: leave the loader a core that training does not use, or"),
        ("transform", "the transform in Python: give it more workers (workers=)"),
        ("collate", "the collate in Python: move it to transform="),
        ("source", "samples of a source in Python: put them into a store"),
        ("hand over", "batches to pass between threads: leave the loader a core"),
    ],
)
def test_each_stage_has_its_advice(stage, words):
    ran = [row | {"stall_seconds": {"data": 0.1}} for row in data_rows(4)]
    for row in ran:
        row["loaders"]["loader"]["wait_seconds"] = {stage: 0.1}
    assert advice(ran)[0].startswith(f"10% of the step waited for {words}")


def test_a_loader_that_used_all_of_its_cores_is_to_have_more():
    ran = [row | {"stall_seconds": {"data": 0.1}} for row in data_rows(4)]
    for row in ran:
        row["loaders"]["loader"] |= {
            "wait_seconds": {"decode": 0.1},
            "threads": 2,
            "cpus": 2,
            "busy_seconds": 1.8 * row["seconds"],
        }
    assert (
        "decoded: let the loader use more cores (cpus=4; it has 2, 90% busy), or" in advice(ran)[0]
    )
    assert figures.pipeline(ran) == (2, 2, pytest.approx(0.9))
    for row in ran:
        row["loaders"]["loader"]["threads"] = 1  # it may take one more by itself
    assert "decoded: leave the loader a core" in advice(ran)[0]
    assert figures.pipeline(data_rows(1)) is None


def test_utilisation_leaves_the_first_step_out():
    ran = rows(3)
    for row, waited in zip(ran, (0.9, 0.2, 0.4), strict=True):
        row["stall_seconds"] = {"data": waited}
    assert figures.utilisation(ran) == pytest.approx(0.7)
    assert figures.utilisation([]) is None


def test_what_batches_cost_is_counted_without_the_first_step():
    ran = data_rows(5, seconds=0.25)
    for row in ran:
        row["seconds"] = 0.5 if row["step"] > ran[0]["step"] else 1000.0
        row["loaders"]["loader"]["late"] = row["step"] % 2
    late = sum(row["step"] % 2 for row in ran[1:])
    assert figures.batches(ran) == (pytest.approx(0.5), late, 4)
    assert figures.batches([]) is None
    assert figures.batches(rows(3)) == (0.0, 0, 0)  # no loader told


def test_waits_for_data_are_never_more_than_the_step_waited():
    row = data_rows(1)[0]
    row["stall_seconds"]["data"] = 0.1  # the account also has an evaluation's
    assert figures.waits(row) == pytest.approx(
        {"checkpoint": 0.05, "data: read s3": 0.08, "data: verify": 0.02}
    )
    row["stall_seconds"]["data"] = 0.3  # it waited for something else as well
    assert figures.waits(row)["data: other"] == pytest.approx(0.05)


def test_checkpoints_of_several_processes_add_up():
    ran = data_rows(4) + data_rows(4)
    assert list(figures.checkpoints(ran))[-1]["saved"] == 4


def test_the_command_writes_a_report_of_any_ledger(tmp_path, capsys):
    assert report_cli.main([run_of(tmp_path, data_rows(30))]) == 0
    assert "shard-7.tar from s3" in capsys.readouterr().out
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    checker = Checker()
    checker.feed(text)
    assert checker.outside == [] and "script" not in checker.tags
    for title in (
        "What to do",
        "Waits for batches by stage and tier",
        "Bytes of samples by tier",
        "Cache hits",
        "Checkpoints",
        "accelerator utilisation",
    ):
        assert title in text
    assert "shard-7.tar" in text and "25.0%" in text
    used = set(re.findall(r'<(?:rect|i)[^>]* class=[\'"](?:key )?(s\d+)[\'"]', text))
    assert all(f"rect.{name}," in text and f"--{name}:" in text for name in used)
    assert report_cli.main([str(tmp_path / "none")]) == 1
    assert "there is no run in" in capsys.readouterr().err


def test_top_prints_once_where_there_is_no_terminal(tmp_path, capsys):
    assert top_cli.main([run_of(tmp_path, data_rows(30))]) == 0
    shown = capsys.readouterr().out
    for part in ("step         30", "data: read s3", "25% of the bytes hit", "15 saved", "advice"):
        assert part in shown
    assert "\x1b" not in shown
    assert top_cli.main([run_of(tmp_path, [])]) == 0
    assert "no step is decided yet" in capsys.readouterr().out


def test_top_draws_again_and_ends_with_ctrl_c(tmp_path):
    run_of(tmp_path, data_rows(3))
    ours, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 100, 0, 0))
    child = subprocess.Popen(
        [sys.executable, "-m", "stoker.top", str(tmp_path), "--every", "0.1"],
        stdin=its,
        stdout=its,
        stderr=its,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )
    os.close(its)
    shown = b""
    while b"step         3," not in shown:
        shown += os.read(ours, 4096)
    run_of(tmp_path, data_rows(4))
    while b"step         4," not in shown:
        shown += os.read(ours, 4096)
    os.write(ours, b"\x03")
    assert child.wait(60) == 0
    os.close(ours)


def test_metrics_are_sums_in_the_text_format():
    metrics = Metrics()
    for row in data_rows(3):
        metrics.add(row)
    server = MetricsServer(metrics, *parse_address("0"))
    assert server.host == "127.0.0.1"
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=30) as got:
            assert got.headers["Content-Type"].startswith("text/plain; version=0.0.4")
            text = got.read().decode()
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(f"http://127.0.0.1:{server.port}/x", timeout=30)
        with pytest.raises(InvalidArgument, match="give another port"):
            MetricsServer(metrics, "127.0.0.1", server.port)
    finally:
        server.close()
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if line[0] != "#")
    assert values["stoker_steps_total"] == "3" and values["stoker_step"] == "3"
    assert float(values['stoker_wait_seconds_total{cause="data: read s3"}']) == pytest.approx(0.6)
    assert values['stoker_sample_bytes_total{tier="s3"}'] == str(3 * (3 << 29))
    assert values[f'stoker_cache_held_bytes{{store="{CACHED}"}}'] == str(1 << 30)
    assert values["stoker_checkpoints_total"] == "1"
    for line in text.splitlines():
        assert re.fullmatch(r"# (HELP|TYPE) \w+ .+|\w+(\{[^}]*\})? [-+.e\d]+", line), line


@pytest.mark.parametrize("address", ["", "x", "70000", "host:", "-1"])
def test_a_wrong_address_for_metrics_is_a_sentence(address):
    with pytest.raises(InvalidArgument, match="is not an address for metrics"):
        parse_address(address)
