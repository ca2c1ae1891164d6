"""What the disk gives while cores are busy: `stoker bench io` beside nothing, beside cores that
only compute, and beside cores that only copy memory.

    .venv/bin/python bench/beside.py --dir out/bench          (about eight minutes; writes
    bench/results/beside.json)

A training step reads and writes at once, beside arithmetic that streams through memory; the floor
that ratios are taken to assumes rates of a disk that does one of both, beside resting cores. This
tells how much of the distance to the floor is the machine's.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COMPUTING = "x = 1.0\nwhile True: x = x * 1.0000001 + 1e-9"
# 256 MiB each: no cache holds them
COPYING = (
    "import torch\ntorch.set_num_threads(1)\na, b = torch.ones(2, 64 << 20)\nwhile True: a.copy_(b)"
)
LOADS = {
    "nothing": [],
    "computing, 1 core": [COMPUTING],
    "computing, 2 cores": [COMPUTING] * 2,
    "copying, 1 core": [COPYING],
    "copying, 2 cores": [COPYING] * 2,
}


def measure(directory: str, programs: list[str], seconds: float) -> dict[str, dict[str, float]]:
    """Rates in GB/s, ours and fio's, by operation and block, beside these programs."""
    beside = [subprocess.Popen([sys.executable, "-c", program]) for program in programs]
    try:
        time.sleep(3.0 if programs else 0.0)  # until they have touched their memory
        command = [
            ROOT / ".venv/bin/stoker",
            "bench",
            "io",
            directory,
            "--seconds",
            str(seconds),
            "--repetitions",
            "2",
            "--file-size",
            "1GiB",
            "--json",
        ]
        results = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)[
            "results"
        ]
        if any(process.poll() is not None for process in beside):
            raise SystemExit("a program that was to keep a core busy ended early")
    finally:
        for process in beside:
            process.kill()
            process.wait()
    return {
        f"{each['op']} {each['block_bytes'] >> 20} MiB": {
            "ours": each["ours_gbps"],
            "fio": each["fio_gbps"],
        }
        for each in results
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--dir", default="out/bench", help="the folder whose disk is measured (default: out/bench)"
    )
    parser.add_argument(
        "--rounds",
        type=int,
        default=3,
        help="how often each load is measured, in turn (default: 3)",
    )
    parser.add_argument(
        "--seconds", type=float, default=0.6, help="length of one run (default: 0.6)"
    )
    args = parser.parse_args()
    Path(args.dir).mkdir(parents=True, exist_ok=True)
    found: dict[str, dict[str, dict[str, list[float]]]] = {
        name: defaultdict(lambda: {"ours": [], "fio": []}) for name in LOADS
    }
    for number in range(args.rounds):
        for name, programs in LOADS.items():
            print(
                f"round {number + 1} of {args.rounds}: beside {name}", file=sys.stderr, flush=True
            )
            for what, rates in measure(args.dir, programs, args.seconds).items():
                for side, rate in rates.items():
                    found[name][what][side].append(rate)
    rows = []
    for name, by in found.items():
        for run, sides in by.items():
            rates = {f"{side}_gbps": statistics.median(each) for side, each in sides.items()}
            rows.append(
                {
                    "beside": name,
                    "run": run,
                    **rates,
                    **{f"{side}_gbps_all": each for side, each in sides.items()},
                }
            )
    result = {
        "machine": {"cpu": platform.machine(), "cores": os.cpu_count()},
        "rounds": args.rounds,
        "seconds_a_run": args.seconds,
        "rows": rows,
    }
    (ROOT / "bench/results/beside.json").write_text(json.dumps(result, indent=1) + "\n")
    print(
        "| beside | "
        + " | ".join(found["nothing"])
        + " |\n|"
        + "---|" * (len(found["nothing"]) + 1)
    )
    for name in LOADS:
        print(
            f"| {name} | "
            + " | ".join(f"{row['ours_gbps']:.2f}" for row in rows if row["beside"] == name)
            + " |"
        )


if __name__ == "__main__":
    main()
