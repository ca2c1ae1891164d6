"""What a process takes, as the kernel counts it. Needs no package at all: bench/peers runs it in
other systems' processes."""

from __future__ import annotations

import re
import threading
import time


class PeakMemory(threading.Thread):
    """The peak of RssAnon + RssShmem + HugetlbPages, sampled every 25 ms; beside it that of VmRSS,
    which leaves reserved large pages out.

    Not more often: each sample takes the interpreter away from the step that is measured.
    """

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak, self.resident_peak, self._on = 0, 0, True
        self.start()

    def run(self) -> None:
        while self._on:
            status = open("/proc/self/status").read()
            kib = {name: int(n) for name, n in re.findall(r"^(\w+):\s+(\d+) kB$", status, re.M)}
            self.peak = max(
                self.peak, 1024 * (kib["RssAnon"] + kib["RssShmem"] + kib["HugetlbPages"])
            )
            self.resident_peak = max(self.resident_peak, 1024 * kib["VmRSS"])
            time.sleep(0.025)

    def stop(self) -> int:
        self._on = False
        self.join()
        return self.peak


def process_io() -> tuple[int, int]:
    """(read_bytes, write_bytes) that this process caused on devices."""
    fields = dict(line.split(": ") for line in open("/proc/self/io").read().splitlines())
    return int(fields["read_bytes"]), int(fields["write_bytes"])
