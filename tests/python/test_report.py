"""report.html and its charts."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest

from stoker.offload.machine import CAUSES
from stoker.train.charts import Series, bars, columns, lines, ticks
from stoker.train.report import write_report

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
