"""bench/checkpoint.py: docs/numbers.md has what it prints, and each system runs to its end."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import load_script

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "bench/checkpoint.py"
RESULT = ROOT / "bench/results/checkpoint.json"
bench = load_script(SCRIPT)


def test_the_section_in_docs_is_of_the_results(capsys):
    bench.main(["--markdown"])
    page = (ROOT / "docs/numbers.md").read_text()
    printed = capsys.readouterr().out
    assert printed in page, "numbers.md does not hold what `bench/checkpoint.py --markdown` prints"
    rows = json.loads(RESULT.read_text())["results"]
    assert [row["system"] for row in rows] == list(bench.SYSTEMS)
    wanted = {"state_bytes", "ranks", *bench.FIGURES, *bench.COUNTS}
    assert all(wanted <= row.keys() for row in rows)


def test_a_goal_that_is_missed_is_called_not_met():
    result = json.loads(RESULT.read_text())
    for row in result["results"]:
        if row["system"].startswith("stoker"):
            row |= {"stall_seconds": 1e3, "slowdown_seconds": 1e3, "paused_seconds": 1e3}
            row |= {"restore_cold_seconds": 1e3, "extra_memory_bytes": 1 << 40}
    result["disk"]["write_new_bytes_per_second"] = 1e9
    goals = bench.section(result).partition("| goal |")[2].splitlines()
    assert [line.endswith("| not met |") for line in goals if line.count("met |")] == [True] * 7


@pytest.mark.parametrize("system", ["stoker", "stoker offloaded", "safetensors"])
def test_a_system_runs_to_its_end(tmp_path, system):
    command = [sys.executable, SCRIPT, "--one", system, tmp_path, "0", "--state-bytes", "24000000"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    row = json.loads(done.stdout.splitlines()[-1])
    assert {*bench.FIGURES, *bench.COUNTS} <= row.keys()
    assert row["bytes_written"] > 24_000_000


def test_a_run_of_some_systems_keeps_the_rows_of_others(tmp_path, monkeypatch):
    row = {name: 1.0 for name in (*bench.FIGURES, *bench.COUNTS, "step_seconds")}
    monkeypatch.setattr(bench, "ceilings", lambda _: {"read_bytes_per_second": 1.0})
    monkeypatch.setattr(bench, "measure", lambda *_: dict(row))
    where = ["--where", str(tmp_path), "--out", str(tmp_path / "out.json"), "--state-bytes", "1000"]
    bench.main([*where, "--systems", "dcp", "stoker"])
    row["stall_seconds"] = 2.0
    bench.main([*where, "--systems", "stoker"])
    made = json.loads((tmp_path / "out.json").read_text())
    rows = {each["system"]: each["stall_seconds"] for each in made["results"]}
    assert list(rows.items()) == [("stoker", 2.0), ("dcp", 1.0)]
    assert "The last run measured stoker" in bench.earlier_rows(made)[0]
