"""Whether `stoker curm replay --scheme choose` keeps up with the best fixed scheme: the table of
docs/curm.md.

    .venv/bin/python bench/choose.py [--seeds 11,12,13] [--device ssd] [--code 6+3] [--form safe]

Generates traces of each profile, plays them by every scheme on the modelled cluster, and prints for
each profile the worst of the seeds, as Markdown. Nothing is timed: the figures are the same on any
machine.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

COMMAND = Path(sys.executable).parent / "stoker"
# vm takes long as a whole
PROFILES = {"hm": 0, "rsrch": 0, "mds": 0, "wdev": 0, "vm": 40_000, "postmark": 0, "oltp": 0}
FIXED = ("fo", "fl", "pl", "plr", "parix", "vdl", "curm")
RATES = ("updates_per_second", "drained_updates_per_second")
Rates = dict[str, tuple[float, ...]]  # by scheme


def stoker(*words: str) -> str:
    return subprocess.run(
        [COMMAND, "curm", *words], capture_output=True, text=True, check=True
    ).stdout


def rates(trace: Path, device: str, code: str, form: str) -> Rates:
    """Updates a second by scheme, without and with what is folded at the end."""
    found = {}
    for scheme in ("all", "choose"):
        words = ["--scheme", scheme, "--device", device, "--code", code, "--form", form, "--json"]
        answer = json.loads(stoker("replay", str(trace), *words))
        for row, more in zip(answer["results"], answer["more"], strict=True):
            both = {**row, **more}
            found[row["scheme"]] = tuple(both[rate] for rate in RATES)
    return found


def beside(found: Rates, scheme: str, at: int) -> tuple[float, str]:
    """How far the scheme is above the best fixed one (1 is alike), and which one that is."""
    best = max(FIXED, key=lambda fixed: found[fixed][at])
    return found[scheme][at] / found[best][at], best


def main() -> int:
    parser = argparse.ArgumentParser(description="choose beside the best fixed scheme")
    parser.add_argument("--seeds", default="11,12,13", help="of the traces (default: %(default)s)")
    parser.add_argument("--device", default="ssd", choices=("ssd", "hdd"))
    parser.add_argument("--code", default="6+3")
    parser.add_argument("--form", default="safe", choices=("safe", "published"))
    arguments = parser.parse_args()
    print("| trace | `choose` | the best fixed | folded at the end | the best fixed |")
    print("|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for profile, requests in PROFILES.items():
            played = []
            for seed in arguments.seeds.split(","):
                trace = Path(folder) / f"{profile}_{seed}.csv"
                size = ["--requests", str(requests)] if requests else []
                trace.write_text(stoker("generate", profile, "--seed", seed, *size))
                played.append(rates(trace, arguments.device, arguments.code, arguments.form))
            cells = []
            for at in range(len(RATES)):
                worst, best = min(beside(found, "choose", at) for found in played)
                cells += [f"{100 * (worst - 1):+.1f} %", best]
            print(f"| {profile} | {' | '.join(cells)} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
