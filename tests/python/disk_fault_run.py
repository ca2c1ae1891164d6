"""kill_run.py with a short patience for its disk: `python disk_fault_run.py STORE STEPS POLICY
MOMENTS`. Prints the error it ends with."""

from __future__ import annotations

import errno
import sys

import kill_run
from stoker.errors import StokerError

if __name__ == "__main__":
    try:
        kill_run.main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:], stall_seconds=2)
    except StokerError as error:
        print(
            f"error {type(error).__name__} {errno.errorcode.get(error.errno, 0)} {error}",
            flush=True,
        )
