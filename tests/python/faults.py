"""What the tests of faults share: the command, small stores whose bytes are known, file systems
that are full or read-only."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

COMMAND = Path(sys.executable).parent / "stoker"
# the models are tiny: a second thread would only wait for the first
ONE_THREAD = {**os.environ, "OMP_NUM_THREADS": "1"}

# Makes the store of argv[1]: w/1 of 200,000 bytes and w/2 of 70,000, the snapshot "good", then w/1
# anew.
_SMALL_STORE = """
import sys
from stoker import _core
runtime = _core.Runtime(threads=1, budget_bytes=64 << 20)
store = runtime.open_store(
    sys.argv[1], create=True, capacity_bytes=8 << 20, chunk_bytes=65536, holder="a test"
)
def put(key, data):
    txn = store.begin()
    txn.resize(key, len(data))
    txn.write_bytes(key, 0, data)
    txn.commit("durable").wait()
put("w/1", b"A" * 200_000)
put("w/2", b"B" * 70_000)
store.snapshot("good").wait()
put("w/1", b"C" * 200_000)
store.close()
"""


def run(*words: str | Path, command: Path = COMMAND, **options) -> subprocess.CompletedProcess[str]:
    """The installed command, to its end."""
    options = {"env": ONE_THREAD, "timeout": 300, **options}
    return subprocess.run([command, *map(str, words)], capture_output=True, text=True, **options)


def refused(status: int, *words: str | Path, **options) -> str:
    """The one sentence on stderr with which a command ends; never a traceback."""
    done = run(*words, **options)
    assert done.returncode == status, done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr.strip().splitlines()[-1]


def make_small_store(folder: Path) -> Path:
    done = subprocess.run(
        [sys.executable, "-c", _SMALL_STORE, str(folder)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return folder


def volume(store: Path) -> Path:
    return store / "stoker.volume"


def flip(path: Path, at: int) -> None:
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 0x10]))


def find(path: Path, needle: bytes) -> list[int]:
    """Where `needle` starts on a block of 4096 bytes."""
    raw = path.read_bytes()
    return [at.start() for at in re.finditer(re.escape(needle), raw) if at.start() % 4096 == 0]


def fsck(store: Path) -> tuple[int, dict]:
    done = run("fsck", store, "--json")
    return done.returncode, json.loads(done.stdout)


@contextmanager
def mounted(what: list[str], where: Path) -> Iterator[Path]:
    """A file system that a test may fill or write-protect. Skips where mounting is not
    permitted."""
    where.mkdir()
    try:
        done = subprocess.run(["mount", *what, str(where)], capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("there is no mount command here")
    if done.returncode != 0:
        pytest.skip(f"mounting a file system is not permitted here: {done.stderr.strip()}")
    try:
        yield where
    finally:
        subprocess.run(["umount", "-l", str(where)], check=True)


@contextmanager
def small_disk(folder: Path, mebibytes: int) -> Iterator[Path]:
    """An ext4 of its own in a file."""
    image = folder / "disk.img"
    with open(image, "wb") as file:
        file.truncate(mebibytes << 20)
    try:
        subprocess.run(
            ["mkfs.ext4", "-q", "-F", "-m", "0", str(image)], check=True, capture_output=True
        )
    except (FileNotFoundError, subprocess.CalledProcessError):
        pytest.skip("mkfs.ext4 cannot be run here")
    with mounted(["-o", "loop", str(image)], folder / "disk") as disk:
        yield disk


class Throttle:
    """A control group whose transfers to a block device can be slowed down, by whichever version of
    the kernel's interface has block devices here."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def enter(self) -> None:
        """This process belongs to it from now on, and what it starts."""
        (self.folder / "cgroup.procs").write_text(str(os.getpid()))

    def limit(self, disk: Path, bytes_per_s: int) -> None:
        """The device that the file system at `disk` lies on moves no more from now on, of reads and
        of writes."""
        number = os.stat(disk).st_dev
        device = f"{os.major(number)}:{os.minor(number)}"
        if (self.folder / "io.max").exists():
            (self.folder / "io.max").write_text(f"{device} rbps={bytes_per_s} wbps={bytes_per_s}")
        else:
            for kind in ("read", "write"):
                (self.folder / f"blkio.throttle.{kind}_bps_device").write_text(
                    f"{device} {bytes_per_s}"
                )


def _block_device_controllers() -> Iterator[Path]:
    """The folders in which groups can be made whose block devices are limited."""
    with open("/proc/mounts") as mounts:
        for line in mounts:
            _, where, kind, options, *_ = line.split()
            if kind == "cgroup" and "blkio" in options.split(","):
                yield Path(where)
            if (
                kind == "cgroup2"
                and "io" in (Path(where) / "cgroup.controllers").read_text().split()
            ):
                (Path(where) / "cgroup.subtree_control").write_text("+io")
                yield Path(where)


@contextmanager
def throttle() -> Iterator[Throttle]:
    """Skips where this kernel, or this container, cannot slow block devices down."""
    try:
        parent = next(_block_device_controllers(), None)
        if parent is None:
            pytest.skip("no control group governs block devices here")
        group = parent / f"stoker-test-{os.getpid()}"
        group.mkdir()
    except OSError as error:
        pytest.skip(f"control groups for block devices cannot be made here: {error}")
    try:
        if (
            not (group / "io.max").exists()
            and not (group / "blkio.throttle.write_bps_device").exists()
        ):
            pytest.skip("this kernel cannot throttle block devices")
        yield Throttle(group)
    finally:
        group.rmdir()


def fill(disk: Path) -> Path:
    """Takes all space that is left; remove the file that comes back to make room."""
    ballast = disk / "ballast"
    with open(ballast, "wb", buffering=0) as file:
        size = 1 << 20
        while size >= 1:
            try:
                if file.write(bytes(size)) < size:
                    size //= 2
            except OSError:
                size //= 2
        os.fsync(file.fileno())
    return ballast
