"""docs/numbers.md has the tables of bench/results/coded.json."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "bench/coded.py"
RESULT = ROOT / "bench/results/coded.json"


def test_the_page_holds_the_tables_of_the_result():
    words = [sys.executable, PROGRAM, "--markdown", RESULT]
    printed = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    assert printed in (ROOT / "docs/numbers.md").read_text()
