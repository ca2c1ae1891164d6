"""`stoker bench plan` without its measuring: what is repeated, what counts, the page."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from stoker.bench import plan

ROOT = Path(__file__).parents[2]


def row(miss: float, moved: float, at: plan.Row = plan.SETTINGS[0]) -> dict:
    item = lambda planned, measured: {
        "planned": planned,
        "measured": measured,
        "miss": planned / measured - 1,
    }
    compared = {
        "seconds": item(1 + miss, 1.0),
        "read_bytes": item(4e8, 4e8),
        "written_bytes": item(3e8, 3e8),
    }
    return {
        **asdict(at),
        "parameters": 27_000_000,
        "steps": 20,
        "compared": compared,
        "seconds_range": [0.9, 1.1],
        "disk_moved": moved,
    }


def test_a_row_is_counted_only_where_the_disk_held_still():
    rows = [row(0.1, 0.02), row(0.2, 0.05), row(0.01, 0.11), row(-0.14, 0.10)]
    assert plan.judged(rows) == (2, 3)
    assert (
        plan.verdict(rows)
        == "2 of 3 settings within 15% of the measured seconds. Not counted: 1 during which the"
        " disk moved by more than 10%"
    )
    assert plan.verdict(rows[:2]) == "1 of 2 settings within 15% of the measured seconds"
    shown = [
        line for line in plan.markdown({"rows": rows}).splitlines() if line.startswith("| 27 M")
    ]
    assert [line.endswith("| 11%: not counted |") for line in shown] == [False, False, True, False]
    assert [("the disk moved by 11%" in plan.line(each)) for each in rows] == [
        False,
        False,
        True,
        False,
    ]


def test_rows_are_repeated_while_the_disk_moves(monkeypatch, capsys):
    """The first row holds still at once, the second at the last try, the third never: it is shown
    and not counted."""
    moves = iter([0.01, 0.3, 0.2, 0.03, 0.3, 0.2, 0.4])
    monkeypatch.setattr(
        plan, "measure", lambda at, dtype, steps, directory, seconds: row(0.05, next(moves), at)
    )
    assert plan.main(["--rows", "3", "--repeat", "2", "--json"]) == 0
    assert next(moves, None) is None
    said = capsys.readouterr()
    result = json.loads(said.out)
    assert [each["disk_moved"] for each in result["rows"]] == [0.01, 0.03, 0.4]
    assert (result["within_goal"], result["counted"]) == (2, 2)
    assert (
        said.err.splitlines()[-1]
        == "2 of 2 settings within 15% of the measured seconds. Not counted: 1 during which the"
        " disk moved by more than 10%"
    )


def test_the_page_in_docs_is_of_the_result(capsys):
    kept = ROOT / "bench" / "results" / "plan.json"
    page = (ROOT / "docs" / "numbers.md").read_text()
    assert page.count(plan.TITLE) == 1
    assert plan.main(["--markdown", str(kept)]) == 0
    assert capsys.readouterr().out in page, (
        "docs/numbers.md does not hold what `stoker bench plan --markdown bench/results/plan.json`"
        " prints"
    )
    result = json.loads(kept.read_text())
    assert (result["within_goal"], result["counted"]) == plan.judged(result["rows"])


def test_a_result_that_is_not_there_is_a_sentence(tmp_path, capsys):
    assert plan.main(["--markdown", str(tmp_path / "none.json")]) == 1
    assert "none.json" in capsys.readouterr().err
