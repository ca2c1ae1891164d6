"""Disks that stop answering, fail, or are gone under a run: a named error that tells what to do,
and the last committed step, whole."""

from __future__ import annotations

import fcntl
import json
import os
import re
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import faulty_disk_run
from faults import ONE_THREAD, fsck, small_disk

HERE = os.path.dirname(__file__)
STEPS = 30
# from the kernel's ext4.h; with the flag below the file system fails everything from then on
EXT4_IOC_SHUTDOWN = 0x8004587D
NO_LOG_FLUSH = 2


def start(store: Path, policy: str) -> subprocess.Popen:
    command = [
        sys.executable,
        os.path.join(HERE, "disk_fault_run.py"),
        str(store),
        str(STEPS),
        policy,
        "exact",
    ]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=HERE
    )


def until(process: subprocess.Popen, start: str) -> list[str]:
    """The lines up to the first one that starts so; fails if there is none within two minutes."""
    timer = threading.Timer(120, process.kill)
    timer.start()
    lines = []
    for line in process.stdout:
        lines.append(line.rstrip())
        if line.startswith(start):
            timer.cancel()
            return lines
    timer.cancel()
    pytest.fail(f"no line {start!r}; " + "\n".join(lines[-5:]) + process.stderr.read()[-2000:])


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> str:
    """The digest of an undisturbed run, whatever its policy."""
    return until(start(tmp_path_factory.mktemp("whole") / "store", "sync"), "digest")[-1]


def goes_on(store: Path, policy: str, failed: list[str]) -> str:
    """Checks the store and resumes the run; its last line."""
    status, report = fsck(store)
    assert status == 0, report
    decided = [int(re.match(r"step (\d+)", line)[1]) for line in failed if line.startswith("step")]
    assert decided[-1] - 2 <= report["committed_step"] <= decided[-1] + 1
    return until(start(store, policy), "digest")[-1]


@pytest.fixture
def freeze():
    """freeze(DISK): its writes do not come back until thaw() or the end of the test."""
    frozen = []

    def freeze(disk: Path) -> None:
        if subprocess.run(["fsfreeze", "-f", str(disk)], capture_output=True).returncode != 0:
            pytest.skip("file systems cannot be frozen here")
        frozen.append(disk)

    def thaw() -> None:
        while frozen:
            subprocess.run(["fsfreeze", "-u", str(frozen.pop())], check=True)

    freeze.thaw = thaw
    yield freeze
    thaw()


@pytest.mark.parametrize("policy", ["speculate", "lazy"])
def test_a_disk_that_does_not_answer_is_named_then_an_error_and_the_run_goes_on_later(
    tmp_path, freeze, whole, policy
):
    with small_disk(tmp_path, 300) as disk:
        store = disk / "store"
        process = start(store, policy)
        lines = until(process, "step 5 ")
        freeze(disk)
        lines += until(process, "error")
        freeze.thaw()
        assert (
            "error IoError ETIMEDOUT" in lines[-1]
            and str(store) in lines[-1]
            and "start again" in lines[-1]
        )
        _, err = process.communicate(timeout=60)
        assert process.returncode == 0, err
        assert re.search(
            r"has not answered for [12] s; it is waited for, and given up with an error after 2 s"
            r" \(stall_seconds sets that\)",
            err,
        ), err
        assert goes_on(store, policy, lines) == whole


def test_a_disk_that_hesitates_costs_nothing(tmp_path, freeze, whole):
    with small_disk(tmp_path, 300) as disk:
        process = start(disk / "store", "speculate")
        until(process, "step 5 ")
        freeze(disk)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(1.3)
        freeze.thaw()
        last = until(process, "digest")[-1]
        process.communicate(timeout=60)
        assert last == whole


@pytest.mark.parametrize("policy", ["sync", "speculate", "lazy"])
def test_a_disk_that_is_gone_is_an_error_and_the_run_goes_on_when_it_is_back(
    tmp_path, whole, policy
):
    with small_disk(tmp_path, 300) as disk:
        store = disk / "store"
        process = start(store, policy)
        lines = until(process, "step 5 ")
        folder = os.open(disk, os.O_RDONLY)
        try:
            fcntl.ioctl(folder, EXT4_IOC_SHUTDOWN, struct.pack("I", NO_LOG_FLUSH))
        except OSError as error:
            pytest.skip(f"this kernel cannot shut a file system down: {error}")
        finally:
            os.close(folder)
        lines += until(process, "error")
        assert "error IoError EIO" in lines[-1] and str(store) in lines[-1]
        _, err = process.communicate(timeout=60)
        assert process.returncode == 0, err
        while subprocess.run(["umount", str(disk)], capture_output=True).returncode != 0:
            time.sleep(0.1)  # the kernel lets go of a ring's files a little after its process
        subprocess.run(["mount", "-o", "loop", str(tmp_path / "disk.img"), str(disk)], check=True)
        assert goes_on(store, policy, lines) == whole


@pytest.fixture(scope="module")
def faulty(tmp_path_factory, faulty_disk) -> dict[tuple, dict]:
    """What became of each case and policy of faulty_disk_run.py."""
    folder = tmp_path_factory.mktemp("faulty")
    environment = {**ONE_THREAD, "LD_PRELOAD": faulty_disk}
    done = subprocess.run(
        [sys.executable, faulty_disk_run.__file__, folder],
        capture_output=True,
        text=True,
        timeout=300,
        env=environment,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    return {(row["case"], row["policy"]): row for row in rows}


@pytest.mark.parametrize("policy", faulty_disk_run.POLICIES)
@pytest.mark.parametrize("case", faulty_disk_run.CASES)
def test_a_faulty_disk_is_a_named_error_and_the_same_bits_afterwards(faulty, case, policy):
    told, at = faulty[case, policy], faulty_disk_run.AT
    assert told["digest"] == faulty["well", "sync"]["digest"]
    assert (told["met"] > 0) == (case != "well")
    if case in ("well", "reads are short"):
        assert told["error"] is None
        return
    kind, number, text = told["error"]
    assert kind == "IoError" and told["named"] in text, text
    if case == "one of two volumes is gone":
        assert number == "EIO" and at - 1 <= told["committed"] <= at + 1
        return
    assert told["committed"] == at  # the run went on in the same process
    assert re.search(r"reading m, tile \d", text), text
    assert (
        number == "EIO"
        if case.endswith("cannot be read")
        else "the file ends before that; it was cut short" in text
    )
