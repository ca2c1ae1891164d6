"""Reads of an NVMe namespace by three engines, in a virtual machine that emulates the drive.

    .venv/bin/python bench/nvme.py          (about three minutes; writes bench/results/nvme.json and
    its section of docs/numbers.md)

`stoker probe nvme:...` measures `uring` on the block device, passthrough and our driver `vfio`, in
turn, in one guest. QEMU emulates processor, drive and IOMMU: the figures rank what a transfer costs
in instructions and exits, and say nothing about a real drive's speed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "python"))

from guest import FIRST_DRIVE, Guest, drive, kernel  # noqa: E402

STOKER = ROOT / ".venv" / "bin" / "stoker"
FIELDS = (
    "iops",
    "cpu_seconds_per_million",
    "cpu_seconds_per_gb",
    "syscalls_per_transfer",
    "copies_per_transfer",
    "p50_us",
    "p99_us",
    "p999_us",
)


def measure(folder: Path, rounds: int, seconds: float) -> list[dict[str, object]]:
    """The points of all rounds."""
    options = drive(folder, "d", 256)
    with (folder / "d.img").open("r+b") as image:
        for _ in range(256):
            image.write(os.urandom(1 << 20))
    ran = Guest(folder, [STOKER], options).run(
        f"""
        cat /sys/devices/system/clocksource/clocksource0/current_clocksource
        probe() {{ stoker probe --json $* 2>/errors || {{ cat /errors; exit 1; }}; }}
        for round in $(seq {rounds}); do
          while ! ls /dev/ng*n1 > /found 2>&1; do sleep 0.1; done
          probe --seconds {2 * seconds} nvme:$(cat /found)
          stoker nvme bind {FIRST_DRIVE} || exit
          probe --seconds {seconds} nvme:{FIRST_DRIVE}
          stoker nvme unbind {FIRST_DRIVE} || exit
        done""",
        seconds=60 + rounds * 8 * seconds,
    )
    if ran.status != 0:
        raise SystemExit(f"the guest did not come to its end:\n{ran.output}")
    found = re.findall(r"^\{\n.*?^\}$", ran.output.replace("\r", ""), re.M | re.S)
    if len(found) != 2 * rounds:
        raise SystemExit(f"{len(found)} results instead of {2 * rounds}:\n{ran.output}")
    return [point for each in found for point in json.loads(each)["points"]]


def medians(points: list[dict[str, object]]) -> list[dict[str, object]]:
    groups = defaultdict(list)
    for point in points:
        groups[point["engine"], point["block_bytes"], point["depth"]].append(point)
    results = []
    for (engine, block_bytes, depth), group in groups.items():
        result = {"engine": engine, "block_bytes": block_bytes, "depth": depth}
        for field in FIELDS:
            result[field] = statistics.median(point[field] for point in group)
        result["iops_range"] = [f(point["iops"] for point in group) for f in (min, max)]
        results.append(result)
    return results


def ratios(results: list[dict[str, object]]) -> dict[str, dict[str, float]]:
    """IOPS over those of `uring` on the block device, of blocks of 4 KiB by depth."""
    iops = {(r["engine"], r["depth"]): r["iops"] for r in results if r["block_bytes"] == 4096}
    return {
        engine: {
            str(depth): iops[engine, depth] / iops["uring", depth]
            for named, depth in iops
            if named == engine
        }
        for engine in ("passthrough", "vfio")
    }


def table(report: dict[str, object]) -> str:
    lines = [
        "| block | depth | engine | IOPS (range) | CPU s a million | system calls | p50 / p99 us |",
        "|---|---|---|---|---|---|---|",
    ]
    order = {"uring": 0, "passthrough": 1, "vfio": 2}
    for r in sorted(
        report["results"], key=lambda r: (r["block_bytes"], r["depth"], order[r["engine"]])
    ):
        low, high = r["iops_range"]
        lines.append(
            f"| {r['block_bytes'] >> 10} KiB | {r['depth']} | {r['engine']} "
            f"| {r['iops']:.0f} ({low:.0f} to {high:.0f}) | {r['cpu_seconds_per_million']:.0f} "
            f"| {r['syscalls_per_transfer']:.3f} | {r['p50_us']:.0f} / {r['p99_us']:.0f} |"
        )
    return "\n".join(lines)


HEADING = "## Reads of an NVMe namespace (`bench/nvme.py`, bench/results/nvme.json)"


DISTURBED = """**The machine was busy with other work: the ranges are wide, and these figures settle
no goal.**"""


def section(report: dict[str, object]) -> str:
    """What docs/numbers.md says of the report."""
    machine, over = report["machine"], report["iops_over_uring"]
    load = " and ".join(f"{machine[f'load_average_{when}'][0]:.1f}" for when in ("before", "after"))
    goals = [
        f"- `{engine}`, IOPS over those of `uring` on the block device: "
        f"{over[engine]['1']:.2f} at depth 1 and {over[engine]['32']:.2f} at depth 32 "
        f"(goal: at least {goal}; "
        + ("reached" if min(over[engine]["1"], over[engine]["32"]) >= goal else "not reached")
        + ")."
        for engine, goal in (("passthrough", 1.1), ("vfio", 1.5))
    ]
    return "\n".join(
        [
            HEADING,
            "",
            "Emulated: QEMU plays processor, drive and IOMMU. The figures rank what a transfer",
            "costs and say nothing about a real drive. QEMU needs more cores than two, so",
            "whatever else runs decides; ranges tell how much. CPU seconds are of a million",
            "transfers, system calls of one, as the engine counts them.",
            "",
            f"{machine['qemu']}, guest kernel {machine['guest_kernel']}, {machine['host_cores']}"
            f" cores, medians of {report['rounds']} rounds.",
            f"Load average of the machine before and after: {load}.",
            *([] if machine["load_average_before"][0] < 0.5 else ["", DISTURBED]),
            "",
            table(report),
            "",
            *goals,
            "",
        ]
    )


def write_section(report: dict[str, object]) -> None:
    page = ROOT / "docs" / "numbers.md"
    before, found, behind = page.read_text().partition(HEADING)
    if found:
        _, mark, rest = behind.partition("\n## ")
        behind = mark + rest
    else:
        before += "\n"
    page.write_text(before + section(report) + behind)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=6, help="of each engine a round")
    parser.add_argument("--json", type=Path, default=ROOT / "bench" / "results" / "nvme.json")
    arguments = parser.parse_args()
    load_before = os.getloadavg()
    with tempfile.TemporaryDirectory() as folder:
        points = measure(Path(folder), arguments.rounds, arguments.seconds)
    results = medians(points)
    qemu = subprocess.run(["qemu-system-x86_64", "--version"], capture_output=True, text=True)
    report = {
        "emulated": True,
        "machine": {
            "guest_kernel": kernel().modules.name,
            "qemu": qemu.stdout.split("\n")[0],
            "host_kernel": platform.release(),
            "host_cores": os.cpu_count(),
            "load_average_before": load_before,
            "load_average_after": os.getloadavg(),
        },
        "rounds": arguments.rounds,
        "iops_over_uring": ratios(results),
        "results": results,
    }
    arguments.json.write_text(json.dumps(report, indent=2) + "\n")
    write_section(report)
    print(section(report))


if __name__ == "__main__":
    main()
