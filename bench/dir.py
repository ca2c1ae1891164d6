"""GET and PUT of large objects of a dir: store beside a local: one on the same disk, in turn.

    .venv/bin/python bench/dir.py --dir out/bench --json bench/results/dir.json
    .venv/bin/python bench/dir.py --markdown bench/results/dir.json

`put` makes new objects, on space that neither store had written before; `replace` puts others in
their places. A PUT begins with the transaction and ends with the durable commit. Bytes come from
memory that was touched before and is aligned, so both stores move them by direct I/O. Figures are
medians; `range` is the least and the most.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import os
import statistics
import tempfile
import time
from pathlib import Path

import stoker

MIB = 1 << 20
STORES = ("dir", "local")
OPERATIONS = ("put", "get", "replace")


def measure(folder: Path, megabytes: int, rounds: int) -> list[dict]:
    size = megabytes * MIB
    memory = mmap.mmap(-1, size)
    memory.write(os.urandom(MIB) * megabytes)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    speeds: dict[tuple[str, str], list[float]] = {}

    def timed(operation: str, name: str, work) -> None:
        began = time.perf_counter()
        work()
        speeds.setdefault((operation, name), []).append(size / 1e9 / (time.perf_counter() - began))

    def put(store, key: str) -> None:
        change = store.begin()
        change.resize(key, size)
        change.write(key, 0, address, size)
        change.commit().wait()

    with (
        stoker.open_store(f"dir:{folder}/dir", create=True) as plain,
        stoker.open_store(
            f"local:{folder}/local", create=True, capacity=(rounds + 3) * size
        ) as local,
    ):
        stores = {"dir": plain, "local": local}
        for operation in OPERATIONS:
            for round_ in range(rounds + 1):  # the first one warms up
                # Who comes second may meet what the disk still does for the first.
                for name in STORES if round_ % 2 else STORES[::-1]:
                    store, key = stores[name], f"{round_}"
                    if operation == "get":
                        timed("get", name, lambda: store.read(key, 0, address, size).wait())
                    else:
                        timed(operation, name, lambda: put(store, key))
    return [
        {
            "store": name,
            "operation": operation,
            "object_bytes": size,
            "gb_per_second": round(statistics.median(each[1:]), 4),
            "range": [round(min(each[1:]), 4), round(max(each[1:]), 4)],
        }
        for (operation, name), each in speeds.items()
    ]


def table(result: dict) -> str:
    """For docs/numbers.md."""
    rows = {(row["operation"], row["store"]): row for row in result["results"]}
    lines = ["| operation | dir | local | dir / local |", "|---|---|---|---|"]
    for operation in OPERATIONS:
        speeds = [rows[operation, name]["gb_per_second"] for name in STORES]
        share = f"{speeds[0] / speeds[1]:.2f}"
        lines.append(f"| {operation} | {speeds[0]:.2f} GB/s | {speeds[1]:.2f} GB/s | {share} |")
    return "\n".join(lines)


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    options = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    options.add_argument(
        "--dir", type=Path, default=Path("out/bench"), help="on the disk to measure"
    )
    options.add_argument("--json", type=Path, help="where the result goes")
    options.add_argument("--markdown", type=Path, help="print the table of this result instead")
    options.add_argument("--mib", type=int, default=256)
    options.add_argument("--rounds", type=int, default=7)
    given = options.parse_args()
    if given.markdown:
        print(table(json.loads(given.markdown.read_text())))
        return
    given.dir.mkdir(parents=True, exist_ok=True)
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(dir=given.dir) as folder:
        results = measure(Path(folder), given.mib, given.rounds)
    result = {"cores": os.cpu_count(), "kernel": os.uname().release, "rounds": given.rounds}
    result |= {"load_average": f"{load:.2f}", "results": results}
    if given.json:
        given.json.write_text(json.dumps(result, indent=1) + "\n")
    print(table(result))


if __name__ == "__main__":
    main()
