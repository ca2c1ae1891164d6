"""`stoker serve` measured: processes that read one cached set, and a cached 1 MiB read through the
socket beside the same read in the process that has the store.

    python bench/serve.py FOLDER [--gib 4] [--readers 8] [--out bench/results/serve.json]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

import stoker

MIB = 1 << 20
COMMAND = str(Path(sys.executable).parent / "stoker")


def machine() -> dict:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.split(": ")[1] for line in lines if line.startswith("model name")), "")
    return {
        "kernel": os.uname().release,
        "cpu": model,
        "cores": os.cpu_count(),
        "stoker": stoker.__version__,
    }


def pss(pid: int) -> int:
    """Bytes of memory of a process, each page shared out among those who map it."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("the kernel tells no Pss")


def serve(where: str, socket: str, memory: int, pinned: int) -> subprocess.Popen:
    command = [COMMAND, "serve", where, "--listen", f"unix:{socket}"]
    command += ["--memory", str(memory), "--pinned", str(pinned)]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    server.stdout.readline()
    return server


def fill(store, mib: int) -> None:
    data = np.random.default_rng(1).integers(0, 256, MIB, dtype=np.uint8).tobytes()
    for first in range(0, mib, 64):
        change = store.begin()
        for i in range(first, min(first + 64, mib)):
            change.resize(str(i), MIB)
            change.write_bytes(str(i), 0, data)
        change.commit().wait()


def one_copy(folder: Path, mib: int, readers: int) -> dict:
    socket, where = str(folder / "socket"), f"local:{folder}/store"
    with stoker.open_store(where, create=True, capacity=2 * mib * MIB) as store:
        fill(store, mib)
    server = serve(where, socket, mib * MIB, 256 * MIB)
    empty = pss(server.pid)
    reads = (
        "import sys, stoker\n"
        "with stoker.open_store('unix:' + sys.argv[1]) as store:\n"
        "    for i in range(int(sys.argv[2])): store.view(str(i), 0, 1 << 20).sum()\n"
        "    print('read', flush=True); sys.stdin.read()\n"
    )
    running = [
        subprocess.Popen(
            [sys.executable, "-c", reads, socket, str(mib)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        for _ in range(readers)
    ]
    for each in running:
        each.stdout.readline()
    found = {
        "set_bytes": mib * MIB,
        "readers": readers,
        "server_pss_before": empty,
        "server_pss": pss(server.pid),
        "readers_pss": [pss(each.pid) for each in running],
    }
    found["sum_pss"] = found["server_pss"] + sum(found["readers_pss"])
    idle = subprocess.Popen(
        [sys.executable, "-c", "import sys, stoker; print(1, flush=True); sys.stdin.read()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    idle.stdout.readline()
    found["idle_python_pss"] = pss(idle.pid)
    for each in [*running, idle]:
        each.stdin.close()
        each.wait()
    server.terminate()
    server.wait()
    return found


def microseconds(read, rounds: int) -> list[float]:
    times = []
    for i in range(rounds):
        begun = time.perf_counter()
        read(str(i % 64))
        times.append((time.perf_counter() - begun) * 1e6)
    return times


def by_turns(served, own) -> dict[str, list[float]]:
    into = np.empty(MIB, np.uint8)
    where = into.ctypes.data
    ways = {
        "read inside": lambda key: own.read(key, 0, where, MIB, "demand").wait(),
        "read through the socket": lambda key: served.read(key, 0, where, MIB, "demand").wait(),
        "view through the socket": lambda key: served.view(key, 0, MIB),
    }
    for store in (served, own):
        fill(store, 64)
    times: dict[str, list[float]] = {way: [] for way in ways}
    for turn in range(11):  # the first fills the blocks
        for way, read in ways.items():
            took = microseconds(read, 64)
            if turn:
                times[way] += took
    return times


def latency(folder: Path) -> dict:
    socket = str(folder / "latency")
    server = serve("memory:", socket, 128 * MIB, 256 * MIB)
    with (
        stoker.open_store(f"unix:{socket}") as served,
        stoker.open_store("memory:", create=True) as own,
    ):
        times = by_turns(served, own)
    server.terminate()
    server.wait()
    medians = {way: statistics.median(each) for way, each in times.items()}
    inside = medians["read inside"]
    return {
        "median_us": medians,
        "p90_us": {way: statistics.quantiles(each, n=10)[8] for way, each in times.items()},
        "over_inside": {way: each / inside for way, each in medians.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gib", type=float, default=4)
    parser.add_argument("--readers", type=int, default=8)
    parser.add_argument("--out", type=Path, default=Path("bench/results/serve.json"))
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    result = {
        "machine": machine(),
        "load_average": " ".join(f"{load:.2f}" for load in os.getloadavg()),
        "latency": latency(given.folder),
        "one_copy": one_copy(given.folder, int(given.gib * 1024), given.readers),
    }
    given.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
