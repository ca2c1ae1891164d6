"""bench/dir.py runs, and docs/numbers.md has its table."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "bench/dir.py"
RESULT = ROOT / "bench/results/dir.json"


def test_the_page_holds_the_table_of_the_result():
    words = [sys.executable, PROGRAM, "--markdown", RESULT]
    printed = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    assert printed in (ROOT / "docs/numbers.md").read_text()


def test_a_small_run_measures_every_case(tmp_path):
    small = ["--mib", "1", "--rounds", "1", "--dir", tmp_path, "--json", tmp_path / "result"]
    subprocess.run([sys.executable, PROGRAM, *small], check=True, capture_output=True)
    rows = json.loads((tmp_path / "result").read_text())["results"]
    cases = {(row["store"], row["operation"]) for row in rows}
    operations = ("put", "get", "replace")
    assert cases == {(store, each) for store in ("dir", "local") for each in operations}
    assert all(row["gb_per_second"] > 0 for row in rows)
