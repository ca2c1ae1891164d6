"""A coded store beside plain files on the same disk, and traces of updates on both.

    .venv/bin/python bench/coded.py --dir out/bench --json bench/results/coded.json
    .venv/bin/python bench/coded.py --parts upkeep --json bench/results/coded.json
    .venv/bin/python bench/coded.py --markdown bench/results/coded.json

`stoker bench coded` measures; this makes the traces that it plays (`stoker curm generate`, each
profile with seed 1), merges the parts into one file and prints the tables of docs/numbers.md.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

STOKER = Path(sys.executable).parent / "stoker"
PROFILES = ("rsrch", "hm", "wdev", "mds", "vm")


# Each takes less than two minutes, and may be measured by itself: the file keeps the rest.
PARTS = {
    "transfers": ("put", "read", "read_without_m", "read_1mib"),
    "upkeep": ("scrub", "rebuild"),
    "updates": ("updates",),
    "traces": ("traces",),
}


def measure(part: str, given: argparse.Namespace) -> dict:
    with tempfile.TemporaryDirectory(dir=given.dir) as made:
        traces = []
        for profile in given.profiles if part == "traces" else ():
            trace = Path(made) / f"{profile}.csv"
            # About half of the requests of the profiles with the most reads are writes.
            line = (STOKER, "curm", "generate", profile, "--requests", str(3 * given.requests))
            with trace.open("w") as text:
                subprocess.run(line, check=True, stdout=text)
            traces += ["--trace", trace]
        line = [STOKER, "bench", "coded", made, "--json", "--rounds", str(given.rounds)]
        line += ["--size", given.size, "--seconds", str(given.seconds)]
        line += ["--requests", str(given.requests), "--kinds", *PARTS[part], *traces]
        done = subprocess.run(line, check=True, stdout=subprocess.PIPE)
    return json.loads(done.stdout)


def merge(kept: dict, new: dict) -> dict:
    """The new measures in the place of those of the same name; in the order of the parts."""
    merged = {**kept, **new}
    rows = {row["measure"]: row for side in (kept, new) for row in side.get("results", [])}
    order = [kind for kinds in PARTS.values() for kind in kinds]
    merged["results"] = sorted(rows.values(), key=lambda row: order.index(row["measure"]))
    for name in ("updates", "traces"):
        merged[name] = new.get(name) or kept.get(name, [])
    return merged


def middle(runs: list[dict], name: str) -> float:
    return statistics.median(run[name] for run in runs)


def updates(name: str, runs: list[dict]) -> str:
    longest = max(run["max_us"] for run in runs) / 1000
    figures = f"{middle(runs, 'per_second'):.0f} | {middle(runs, 'p50_us'):.0f}"
    return f"| {name} | {figures} | {middle(runs, 'p99_us'):.0f} | {longest:.0f} |"


def tables(result: dict) -> str:
    """For docs/numbers.md."""
    lines = ["| | coded MB/s | plain MB/s | share (range) | goal | met | CPU s/GB |"]
    lines += ["|---|---|---|---|---|---|---|"]
    for row in result["results"]:
        pairs = zip(row["coded_all"], row["plain_all"], strict=True)
        shares = [row["counted_bytes_a_byte"] * coded / plain for coded, plain in pairs]
        share = statistics.median(shares)
        speeds = [row[f"{side}_bytes_per_second"] / 1e6 for side in ("coded", "plain")]
        lines.append(
            f"| {row['what']} | {speeds[0]:.0f} | {speeds[1]:.0f} "
            f"| {share:.2f} ({min(shares):.2f} to {max(shares):.2f}) | {row['goal']} "
            f"| {'yes' if share >= row['goal'] else 'NO'} "
            f"| {row['coded_cpu_seconds_per_gb']:.2f} |"
        )
    for row in result["results"]:
        if used := row.get("plain_used_all"):
            speeds = f"{min(used) / 1e6:.0f} to {max(used) / 1e6:.0f}"
            lines += ["", f"Plain, {row['what'].split(';')[0]}, each looked at: {speeds} MB/s."]
    lines += ["", "| updates of 4 KiB | a second | p50 us | p99 us | longest ms |"]
    lines += ["|---|---|---|---|---|"]
    for row in result["updates"]:
        name = f"{row['writers']} writers, {'whole blocks' if row['aligned'] else 'at any byte'}"
        lines += [updates(f"{name}: {side}", row[side]) for side in ("coded", "plain")]
    if result["traces"]:
        lines += ["", "| trace | bytes | coded / s | plain / s | coded p50, p99 us |"]
        lines[-1] += " plain p50, p99 us | written, flushes |"
        lines += ["|---|---|---|---|---|---|---|"]
    for row in result["traces"]:
        name = Path(row["trace"]).stem
        coded, plain = row["coded"], row["plain"]
        waited = [f"{side['p50_us']:.0f}, {side['p99_us']:.0f}" for side in (coded, plain)]
        lines.append(
            f"| {name} | {row['bytes_an_update']:.0f} | {coded['per_second']:.0f} "
            f"| {plain['per_second']:.0f} | {waited[0]} | {waited[1]} "
            f"| {coded['disk_bytes_an_update']:.0f}, {coded['flushes_an_update']:.2f} |"
        )
    return "\n".join(lines)


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    options = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    options.add_argument(
        "--dir", type=Path, default=Path("out/bench"), help="on the disk to measure"
    )
    options.add_argument("--json", type=Path, help="where the result goes")
    options.add_argument("--markdown", type=Path, help="print the tables of this result instead")
    options.add_argument("--size", default="1GiB")
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--seconds", type=float, default=3)
    options.add_argument("--requests", type=int, default=5000, help="writes of each trace")
    options.add_argument(
        "--parts", nargs="*", choices=PARTS, default=list(PARTS), help="only these"
    )
    options.add_argument("--profiles", nargs="*", default=PROFILES)
    given = options.parse_args()
    if given.markdown:
        print(tables(json.loads(given.markdown.read_text())))
        return
    given.dir.mkdir(parents=True, exist_ok=True)
    result = {}
    if given.json and given.json.exists() and set(given.parts) != set(PARTS):
        result = json.loads(given.json.read_text())
    for part in given.parts:
        result = merge(result, measure(part, given))
        if given.json:
            given.json.write_text(json.dumps(result, indent=1) + "\n")
    print(tables(result))


if __name__ == "__main__":
    main()
