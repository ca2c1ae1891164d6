"""Forks of a process that trains, and its end while a thread trains: nothing hangs or crashes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

RUN = Path(__file__).with_name("lifetime_run.py")


@pytest.mark.parametrize("story", ["workers", "fork", "ends", "daemon"])
def test_story(story: str, tmp_path: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    words = [sys.executable, RUN, story, tmp_path / "store"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=100, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "the end"


def test_what_is_no_place_and_no_key_is_a_sentence(tmp_path: Path) -> None:
    from stoker import _core, errors

    runtime = _core.Runtime(engine="posix")
    store = runtime.open_store(str(tmp_path), create=True, capacity_bytes=1 << 20)
    txn = store.begin()
    txn.resize("a", 10)
    txn.write_bytes("a", 0, b"0123456789")
    for wrong in (
        lambda: txn.write_bytes("a", -1, b"x"),
        lambda: txn.read_bytes("a", -5, 1),
        lambda: txn.read_bytes("a", 0, -1),
        lambda: txn.resize("a", -1),
        lambda: txn.write_bytes("a", 1 << 70, b"x"),
    ):
        with pytest.raises(errors.InvalidArgument, match="a whole number from 0"):
            wrong()
    txn.commit().wait()
    with pytest.raises(errors.InvalidArgument, match="a whole number from 0"):
        store.read_bytes("a", -1)
    for wrong in (
        lambda: store.read_bytes("\ud800"),
        lambda: store.stat("a\ud8ff"),
        lambda: store.list("\ud800"),
        lambda: store.snapshot("\ud800"),
        lambda: store.exists("\ud800"),
        lambda: store.copy("a", "\ud800"),
        lambda: store.begin().require("\ud800", None),
    ):
        with pytest.raises(errors.InvalidArgument, match="surrogate"):
            wrong()
    with pytest.raises(TypeError):
        store.read_bytes("a", "0")
    assert store.read_bytes("a", 3, 2) == b"34"
    store.close()
