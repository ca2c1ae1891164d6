"""bench/cache.py: docs/numbers.md has what it prints, the goals are met, and it can miss them."""

from __future__ import annotations

import json
from pathlib import Path

from scripts import load_script

ROOT = Path(__file__).resolve().parents[2]
RESULT = ROOT / "bench/results/cache.json"
bench = load_script(ROOT / "bench/cache.py")


def test_the_tables_in_docs_are_of_the_results(capsys):
    bench.main(["--markdown", str(RESULT)])
    printed = capsys.readouterr().out
    page = (ROOT / "docs/numbers.md").read_text()
    assert printed in page, "numbers.md does not hold what `bench/cache.py --markdown` prints"


def test_a_goal_that_is_missed_is_called_not_met():
    result = json.loads(RESULT.read_text())
    for row in result["results"]:
        row["fetched_over_bound"] = 1.06
    lines = [line for line in bench.both_tables(result).splitlines() if " 1.060 " in line]
    assert len(lines) > 15
    assert all(line.endswith("| NO |") for line in lines)


def test_a_cache_that_is_read_for_real_fetches_less_than_one_without_a_plan(tmp_path):
    written = tmp_path / "cache.json"
    sizes = ["--size", "4MiB", "--block", "64KiB", "--blocks", "256", "--epochs", "2"]
    bench.main(["--dir", str(tmp_path), "--json", str(written), "--plain", *sizes])
    rows = json.loads(written.read_text())["results"]
    assert {row["source"] for row in rows} == {"simulated", "real"}
    least = {
        (row["regime"], row["cache_share"]): row["fetched_over_bound"]
        for row in rows
        if row["policy"] == "LRU"
    }
    for row in rows:
        if row["source"] == "real":  # its fills lag behind where the machine is busy
            assert row["fetched_over_bound"] < least[row["regime"], row["cache_share"]], row
        elif row["policy"] == "plan":
            assert row["fetched_over_bound"] <= row["goal"], row
        else:
            assert row["fetched_over_bound"] > 1.05, row
    assert [path for path in tmp_path.iterdir() if path != written] == [], "nothing is left"
