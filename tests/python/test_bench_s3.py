"""bench/s3.py: what runs without its peers, and that docs/numbers.md has its tables."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import load_script

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "bench/s3.py"
RESULT = ROOT / "bench/results/s3.json"
MIB = 1 << 20

bench = load_script(PROGRAM)


def test_the_page_holds_the_table_of_the_result(capsys):
    page = (ROOT / "docs/numbers.md").read_text()
    print(bench.table(json.loads(RESULT.read_text())))
    assert capsys.readouterr().out in page, (
        "docs/numbers.md does not hold what `bench/s3.py --markdown bench/results/s3.json` prints"
    )


def test_the_result_has_every_case_once():
    rows = json.loads(RESULT.read_text())["results"]
    case = ("system", "operation", "server", "object_bytes")
    assert len({tuple(row[name] for name in case) for row in rows}) == len(rows)
    for size in (64 << 10, 8 * MIB, 1024 * MIB):
        of_size = [row for row in rows if row["object_bytes"] == size]
        got = {(row["system"], row["operation"]) for row in of_size if row["server"] == "radosgw"}
        assert {(each, "get") for each in (*bench.OURS, *bench.PEERS)} <= got
        assert {(each, "put") for each in ("stoker", "boto3", "obstore")} <= got
    for row in rows:
        if row["system"] == "stoker":
            part = 8 * MIB if row["operation"] == "get" else 16 * MIB
            each = -(-row["object_bytes"] // part)
            each += 2 if each > 1 and row["operation"] == "put" else 0  # it begins and it ends
            # Opening the store and warming up are two; some reads are hedged.
            assert row["objects"] * each + 2 <= row["requests"] <= 1.05 * row["objects"] * each + 4


@pytest.mark.parametrize("operation", ["put", "get"])
def test_one_run_of_each_operation(operation, s3):
    endpoint = s3.partition("endpoint=")[2].partition("&")[0]
    for each in ["put", "get"] if operation == "get" else ["put"]:
        case = ["stoker", each, str(64 << 10), "4", endpoint, "bucket"]
        done = subprocess.run(
            [sys.executable, PROGRAM, "--one", *case], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout).keys() == {"gb_per_second", "cpu_seconds_per_gb"}
