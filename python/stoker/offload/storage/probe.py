"""What the disks under a store can do, and which folders share one."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

from stoker.errors import StokerError


def disk_rates(directory: str, seconds: float = 8.0) -> dict[str, float]:
    """Bytes a second, reading, writing and both, at the best block size and depth, by `stoker
    probe`."""
    command = shutil.which("stoker", path=os.path.dirname(sys.executable)) or "stoker"
    try:
        done = subprocess.run(
            [command, "probe", directory, "--json", "--seconds", str(seconds)],
            capture_output=True,
            text=True,
        )
    except OSError as error:
        raise StokerError(
            f"the disk of {directory} cannot be measured: the command `stoker` cannot be started"
            f" ({error.strerror}); install stoker in this Python"
        ) from error
    if done.returncode != 0:
        raise StokerError(
            f"stoker probe {directory} failed: {done.stderr.strip().removeprefix('stoker: ')}"
        )
    return json.loads(done.stdout)["best_bytes_per_second"]


def file_system(directory: str) -> int:
    return os.stat(directory).st_dev


def by_disk(directories: list[str]) -> list[list[str]]:
    """Those of several directories that are on one file system together: they share its rates and
    its room."""
    together: dict[int, list[str]] = {}
    for directory in directories:
        together.setdefault(file_system(directory), []).append(directory)
    return list(together.values())
