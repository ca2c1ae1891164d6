"""Forks of a process that trains: nothing there hangs, crashes or touches what is the parent's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

RUN = Path(__file__).with_name("lifetime_run.py")


@pytest.mark.parametrize("story", ["fork"])
def test_story(story: str, tmp_path: Path) -> None:
    words = [sys.executable, RUN, story, tmp_path / "store"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, capture_output=True, text=True, timeout=100, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "the end"
