"""Checkpoints on a disk that fails, is full, or does only a part of what it is asked."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import checkpoint_fault_run
from faults import ONE_THREAD


@pytest.fixture(scope="module")
def told(tmp_path_factory, faulty_disk) -> dict[str, dict]:
    """What became of each case of checkpoint_fault_run.py."""
    done = subprocess.run(
        [sys.executable, checkpoint_fault_run.__file__, tmp_path_factory.mktemp("faulty")],
        capture_output=True,
        text=True,
        timeout=300,
        env={**ONE_THREAD, "LD_PRELOAD": faulty_disk},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    return {row["case"]: row for row in rows}


@pytest.mark.parametrize(
    ("case", "error", "text"),
    [("writes fail", "IoError", "Input/output error"), ("the disk is full", "OutOfSpace", "")],
)
def test_a_save_that_fails_says_so_and_the_next_one_is_whole(told, case, error, text):
    row = told[case]
    assert row["met"] > 0 and row["error"] == error and text in row["text"]
    assert row["newest"] == 1 and row["last"] == 3
    assert row["folders"] == [
        "step-000001",
        "step-000003",
    ]  # nothing is left of the one that failed


def test_short_writes_are_made_whole(told):
    row = told["writes are short"]
    assert row["met"] > 0 and "error" not in row
    assert row["newest"] == 2 and row["last"] == 3


def test_what_cannot_be_read_is_passed_over(told):
    row = told["reads fail"]
    assert row["met"] > 0 and row["step"] == 1
    assert "skipped a checkpoint" in row["said"][0] and "Input/output error" in row["said"][0]


def test_short_reads_are_made_whole(told):
    row = told["reads are short"]
    assert row["met"] > 0 and row["step"] == 2 and not row["said"]
