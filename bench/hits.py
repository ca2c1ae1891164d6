"""What a hit of `cached(local:, dir:)` costs: from disk beside the same reads of a local store,
from memory beside a copy in memory, by turns.

    .venv/bin/python bench/hits.py --dir out/bench --json bench/results/hits.json
    .venv/bin/python bench/hits.py --markdown bench/results/hits.json

With --docs its section of docs/numbers.md is written too.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

import numpy as np

import stoker

sys.path.insert(0, str(Path(__file__).parent))
import tables  # noqa: E402

HEADING = "## Hits of a cache (`bench/hits.py`, bench/results/hits.json)"
BEHIND = "## A cache before a slow store"
MIB = 1 << 20
IN_FLIGHT = 8
DISK_GOAL = 0.95  # of the local store
# "At memory speed" has no number in it: this is where it is called met.
MEMORY_GOAL = 0.9  # of a copy


def fill(store, mib: int) -> None:
    data = np.random.default_rng(1).integers(0, 256, MIB, dtype=np.uint8).tobytes()
    for i in range(mib):
        change = store.begin()
        change.resize(str(i), MIB)
        change.write_bytes(str(i), 0, data)
        change.commit().wait()


def read_all(store, mib: int, into: np.ndarray) -> None:
    """All objects, with some reads under way at any time."""
    under_way: deque = deque()
    for i in range(mib):
        if len(under_way) == IN_FLIGHT:
            under_way.popleft().wait()
        place = into.ctypes.data + i % IN_FLIGHT * MIB
        under_way.append(store.read(str(i), 0, place, MIB, "demand"))
    for each in under_way:
        each.wait()


def rates(ways: dict[str, Callable[[], None]], mib: int, rounds: int) -> dict[str, float]:
    """MiB a second, the median; the first turn warms up."""
    seen: dict[str, list[float]] = {way: [] for way in ways}
    for turn in range(rounds + 1):
        for way, go in ways.items():
            begun = time.perf_counter()
            go()
            if turn:
                seen[way].append(mib / (time.perf_counter() - begun))
    return {way: statistics.median(each) for way, each in seen.items()}


def follow_all(store, mib: int) -> None:
    """So that objects are not asked for at each read, as below a loader."""
    table = np.array([[i, 0, MIB, 1, 0] for i in range(mib)], dtype=np.uint64)
    store.follow(table, keys=[str(i) for i in range(mib)], seed=1)


def measure(folder: Path, mib: int, rounds: int) -> dict:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    with stoker.open_store(f"dir:{folder}/slow", create=True) as slow:
        fill(slow, mib)
    with stoker.open_store(f"local:{folder}/own", create=True, capacity=2 * mib * MIB) as own:
        fill(own, mib)
    cached = f"cached(local:{folder}/fast, dir:{folder}/slow, disk={mib + 64}MiB"
    memory = np.empty(IN_FLIGHT * MIB, np.uint8)
    source = np.random.default_rng(2).integers(0, 256, mib * MIB, dtype=np.uint8)

    def copy() -> None:
        for i in range(mib):
            at = i % IN_FLIGHT * MIB
            memory[at : at + MIB] = source[i * MIB : (i + 1) * MIB]

    # First read with memory for the commits, then opened with so little that none stays there.
    with stoker.open_store(f"{cached}, dram=256MiB)") as store:
        read_all(store, mib, memory)
    with (
        stoker.open_store(f"{cached}, dram=1MiB)") as store,
        stoker.open_store(f"local:{folder}/own") as own,
    ):
        follow_all(store, mib)
        before = store.info()["cache"]
        disk = rates(
            {
                "local": lambda: read_all(own, mib, memory),
                "hits from disk": lambda: read_all(store, mib, memory),
            },
            mib,
            rounds,
        )
        after = store.info()["cache"]
        missed = after["fetched_bytes"] - before["fetched_bytes"]
        in_memory = after["memory_hit_bytes"] - before["memory_hit_bytes"]
    with stoker.open_store(f"{cached}, dram={mib + 256}MiB)") as store:
        follow_all(store, mib)
        read_all(store, mib, memory)
        dram = rates(
            {"copy": copy, "hits from memory": lambda: read_all(store, mib, memory)}, mib, rounds
        )
        from_slots = store.info()["cache"]["hit_bytes"] - mib * MIB
    shutil.rmtree(folder)
    return {
        "cores": os.cpu_count(),
        "load_average": " ".join(f"{load:.2f}" for load in os.getloadavg()),
        "set_mib": mib,
        "in_flight": IN_FLIGHT,
        "mib_per_s": disk | dram,
        "disk_over_local": disk["hits from disk"] / disk["local"],
        "memory_over_copy": dram["hits from memory"] / dram["copy"],
        # What was no hit of its level: these are 0, or the figures are of something else.
        "fetched_bytes": missed,
        "disk_hits_from_memory_bytes": in_memory,
        "memory_hits_from_disk_bytes": from_slots,
    }


def table(result: dict) -> str:
    """For docs/numbers.md."""
    rate = result["mib_per_s"]
    rows = [
        ("disk", "hits from disk", "local", result["disk_over_local"], DISK_GOAL),
        ("memory", "hits from memory", "copy", result["memory_over_copy"], MEMORY_GOAL),
    ]
    head = ["hits from", "MiB/s", "beside", "MiB/s", "ratio", "goal", "met"]
    cells = [
        [
            name,
            f"{rate[hits]:.0f}",
            other,
            f"{rate[other]:.0f}",
            f"{ratio:.2f}",
            goal,
            ratio >= goal,
        ]
        for name, hits, other, ratio, goal in rows
    ]
    return "\n".join(tables.table(head, cells))


def section(result: dict) -> str:
    """What docs/numbers.md says below HEADING."""
    return f"""A hit of `cached(local:, dir:)`, read by turns with what it is measured against.
From disk: the same objects in a local store of its own; the cache has memory for one block, so none
stays there. From memory: a copy of as many bytes in memory.
Objects of 1 MiB, {result["set_mib"]} MiB in all, {result["in_flight"]} reads under way, by a plan,
as a loader reads. Medians.

{table(result)}

No read came from another level than it says. {result["cores"]} cores; load average at the end:
{result["load_average"]}."""


def main(arguments: list[str] | None = None) -> None:
    raw = argparse.RawDescriptionHelpFormatter
    options = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    options.add_argument("--dir", type=Path, default=Path("out/bench"), help="on the disk")
    options.add_argument("--json", type=Path, help="where the result goes")
    options.add_argument("--markdown", type=Path, help="print the table of this result instead")
    options.add_argument("--docs", action="store_true", help="write its section of numbers.md")
    options.add_argument("--mib", type=int, default=512, help="of the set")
    options.add_argument("--rounds", type=int, default=7)
    given = options.parse_args(arguments)
    if given.markdown:
        print(table(json.loads(given.markdown.read_text())))
        return
    result = measure(given.dir / "hits", given.mib, given.rounds)
    if given.json:
        given.json.write_text(json.dumps(result, indent=1) + "\n")
    if given.docs:
        tables.write_section(HEADING, section(result), BEHIND)
    print(table(result))


if __name__ == "__main__":
    main()
