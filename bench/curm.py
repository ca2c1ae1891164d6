"""Update schemes compared on traces, modelled on SSDs and on hard disks: the JSON, the plot, and
the tables of docs/numbers.md.

    .venv/bin/python bench/curm.py TRACE...                           (`make bench-curm
    TRACES="..."` does the same) .venv/bin/python bench/curm.py --markdown bench/results/curm.json

Runs `stoker curm replay` for each preset of disks, writes bench/results/curm.json ({"ssd": ...,
"hdd": ...}) and docs/curm_ssd.svg, and prints the tables. Tests hold that docs/numbers.md has these
tables and no others.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
COMMAND = Path(sys.executable).parent / "stoker"
DEVICES = {"ssd": "SSD", "hdd": "hard disk"}
CODES = ("6+3", "10+4")
SCHEMES = ("fo", "fl", "pl", "plr", "parix", "vdl", "curm", "curm-reserve")
RIVALS = ("fl", "pl", "plr", "parix")  # the goals are stated against these
MIB = 1 << 20

# What is known of published forms, 6+3, updates of 4 KiB on real traces: background and foreground
# bytes for each byte updated, reads an update.
KNOWN = {
    "fo": ("none", "8", "4"),
    "fl": ("9.0 to 10.1", "5", "1"),
    "pl": ("7.3 to 8.3", "5", "1"),
    "plr": ("30 to 33", "5", "1"),
    "parix": ("8.9 to 10.5", "7.0 to 7.5", "0.43 to 0.97"),
    "vdl": ("5.8 to 7.0", "4", "0"),
}

Row = dict[str, Any]
Table = list[list[str]]


class Results:
    """The rows of one device, by trace, scheme, form and code, each with what else was counted."""

    def __init__(self, answer: dict[str, Any]):
        self.log_bytes = answer["settings"]["log_bytes"]
        self.rows = {
            (row["trace"], row["scheme"], row["form"], row["code"]): {**row, **more}
            for row, more in zip(answer["results"], answer["more"], strict=True)
        }
        self.traces = list(dict.fromkeys(row["trace"] for row in answer["results"]))
        self.larger = {(row["trace"], row["code"]): row for row in answer.get("larger_logs", [])}

    def safe(self, trace: str, scheme: str, code: str) -> Row:
        return self.rows[trace, scheme, "safe", code]

    def folds(self, trace: str) -> bool:
        """Whether the trace fills the logs: else nobody folds before its end, and no rate has folds
        in it."""
        return self.rows[trace, "pl", "safe", CODES[0]]["update_bytes"] >= self.log_bytes

    def folding(self) -> list[str]:
        return [trace for trace in self.traces if self.folds(trace)]


def name(trace: str) -> str:
    return trace.removesuffix(".csv")


# -- the tables ------------------------------------------------------------------------------------


def trace_table(results: Results) -> Table:
    lines = [
        [
            "trace",
            "updates (6+3)",
            "MiB updated",
            "fills logs of 64 MiB",
            "modelled seconds, SSD: pl, curm",
        ]
    ]
    for trace in results.traces:
        row = results.safe(trace, "curm", "6+3")
        seconds = [results.safe(trace, scheme, "6+3") for scheme in ("pl", "curm")]
        told = ", ".join(f"{each['updates'] / each['updates_per_second']:.3g}" for each in seconds)
        lines.append(
            [
                name(trace),
                f"{row['updates']:,}",
                f"{row['update_bytes'] / MIB:.1f}",
                "yes" if results.folds(trace) else "**no**",
                told,
            ]
        )
    return lines


def known_table(results: Results) -> Table:
    traces = results.folding()
    lines = [
        [
            f"scheme (published, 6+3; {', '.join(map(name, traces))})",
            "background bytes per byte",
            "known",
            "foreground bytes per byte",
            "known",
            "reads an update",
            "known",
        ]
    ]
    for scheme, known in KNOWN.items():
        rows = [results.rows[trace, scheme, "published", "6+3"] for trace in traces]
        cells = []
        for key, expected in zip(
            (
                "background_bytes_per_byte",
                "foreground_bytes_per_byte",
                "foreground_reads_per_update",
            ),
            known,
            strict=True,
        ):
            cells += [", ".join(dict.fromkeys(f"{row[key]:.2f}" for row in rows)) or "-", expected]
        lines.append([scheme, *cells])
    return lines


def gain(results: Results, trace: str, code: str, key: str = "updates_per_second") -> float:
    """Of curm over the best of the rivals."""
    return (
        results.safe(trace, "curm", code)[key]
        / max(results.safe(trace, rival, code)[key] for rival in RIVALS)
        - 1
    )


def percent(value: float) -> str:
    return f"{100 * value:+.0f}%"


def comparison_table(results: Results) -> Table:
    lines = [
        [
            "SSD, 6+3, safe: thousands of updates a second (background bytes for each byte)",
            "updates",
            *SCHEMES,
            f"curm over the best of {', '.join(RIVALS)}",
        ]
    ]
    for trace in results.traces:
        rows = [results.safe(trace, scheme, "6+3") for scheme in SCHEMES]
        cells = [
            f"{row['updates_per_second'] / 1e3:.0f} ({row['background_bytes_per_byte']:.1f})"
            for row in rows
        ]
        short = "" if results.folds(trace) else ", too short to fold"
        lines.append(
            [
                name(trace),
                f"{rows[0]['updates']:,}{short}",
                *cells,
                percent(gain(results, trace, "6+3")),
            ]
        )
    return lines


def space_of(results: Results, trace: str, scheme: str, code: str, base: bool) -> float:
    row = results.safe(trace, scheme, code)
    return row["space_peak_bytes"] - (0 if base else row["space_base_bytes"])


def against(
    results: Results, trace: str, code: str, rivals: tuple[str, ...], value: Callable[[str], float]
) -> float:
    return value("curm") / max(value(rival) for rival in rivals) - 1


# What a line of the goals' table says, of which traces, and its value on one of them.
GOALS: list[tuple[str, bool, Callable[[Results, str, str], float]]] = [
    ("update throughput, at least +40 %, once +82.5 %", True, gain),
    ("the same, of the traces that fill the logs", False, gain),
    (
        "the same, everything folded at the end",
        True,
        lambda r, trace, code: gain(r, trace, code, "drained_updates_per_second"),
    ),
    (
        "rebuild of a node, at least -47 % against pl",
        True,
        lambda r, trace, code: against(
            r, trace, code, ("pl",), lambda s: r.safe(trace, s, code)["recovery_seconds"]
        ),
    ),
    (
        "space, at least -15 % against the largest",
        True,
        lambda r, trace, code: against(
            r, trace, code, RIVALS, lambda s: space_of(r, trace, s, code, base=True)
        ),
    ),
    (
        "of that, logs and reserves alone",
        True,
        lambda r, trace, code: against(
            r, trace, code, RIVALS, lambda s: space_of(r, trace, s, code, base=False)
        ),
    ),
]


def goal_table(devices: dict[str, Results]) -> Table:
    lines = [
        [
            "goal for curm, median over the traces (range)",
            *(f"{said} {code}" for said in DEVICES.values() for code in CODES),
        ]
    ]
    for what, every, value in GOALS:
        cells = []
        for device in DEVICES:
            results = devices[device]
            for code in CODES:
                values = [
                    value(results, trace, code)
                    for trace in (results.traces if every else results.folding())
                ]
                cells.append(
                    f"{percent(statistics.median(values))} ({percent(min(values))} to"
                    f" {percent(max(values))})"
                    if values
                    else "-"
                )
        lines.append([what, *cells])
    return lines


def change(key: str) -> Callable[[Row, Row], str]:
    return lambda plain, other: f"{100 * (other[key] / plain[key] - 1):+.1f}%"


def grown(key: str) -> Callable[[Row, Row], str]:
    return lambda plain, other: f"{(other[key] - plain[key]) / MIB:+.0f}"


# What a line of the reserves' table says, whether of curm-reserve or of curm with larger logs, and
# what it is beside curm. (Of the traces that fill the logs: on the others nothing is folded before
# the end.)
RESERVES: list[tuple[str, bool, Callable[[Row, Row], str]]] = [
    ("updates a second", False, change("updates_per_second")),
    ("the same, everything folded at the end", False, change("drained_updates_per_second")),
    ("background bytes", False, change("background_bytes_per_byte")),
    ("p99 of a write", False, change("p99_us")),
    ("rebuild of a node", False, change("recovery_seconds")),
    ("space at its peak, MiB", False, grown("space_peak_bytes")),
    ("reserved at its most, in all logs, MiB", False, grown("reserved_peak_bytes")),
    ("curm, as much more log for all: updates a second", True, change("updates_per_second")),
    ("the same, everything folded at the end", True, change("drained_updates_per_second")),
    ("background bytes", True, change("background_bytes_per_byte")),
    ("space at its peak, MiB", True, grown("space_peak_bytes")),
]


def reserve_table(devices: dict[str, Results]) -> Table:
    traces = devices["ssd"].folding()
    lines = [
        [
            f"curm-reserve beside curm, safe ({', '.join(map(name, traces))})",
            *(f"{said} {code}" for said in DEVICES.values() for code in CODES),
        ]
    ]
    for what, larger, value in RESERVES:
        cells = []
        for results in devices.values():
            for code in CODES:
                others = [
                    (
                        results.larger[trace, code]
                        if larger
                        else results.safe(trace, "curm-reserve", code)
                    )
                    for trace in traces
                ]
                cells.append(
                    ", ".join(
                        value(results.safe(trace, "curm", code), other)
                        for trace, other in zip(traces, others, strict=True)
                    )
                    or "-"
                )
        lines.append([what, *cells])
    return lines


def piped(lines: Table) -> str:
    head, *rest = ["| " + " | ".join(line) + " |" for line in lines]
    return "\n".join([head, "|" + "---|" * len(lines[0]), *rest])


def tables(result: dict[str, Any]) -> list[str]:
    """The tables of docs/numbers.md, in its order."""
    devices = {device: Results(result[device]) for device in DEVICES}
    ssd = devices["ssd"]
    return [
        piped(table)
        for table in (
            trace_table(ssd),
            known_table(ssd),
            comparison_table(ssd),
            goal_table(devices),
            reserve_table(devices),
        )
    ]


# -- the runs --------------------------------------------------------------------------------------


def replay(device: str, traces: list[Path], *words: str) -> dict[str, Any]:
    done = subprocess.run(
        [
            COMMAND,
            "curm",
            "replay",
            *map(str, traces),
            "--nodes",
            "25",
            "--device",
            device,
            "--json",
            *words,
        ],
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise SystemExit(
            f"the replay on {DEVICES[device]}s ended with status {done.returncode}; nothing was"
            " written"
        )
    return json.loads(done.stdout)


def compare(device: str, traces: list[Path], *words: str) -> dict[str, Any]:
    """All schemes; then curm once more, all of whose logs are larger by what curm-reserve sets
    aside at most: `larger_logs`."""
    answer = replay(device, traces, "--code", ",".join(CODES), *words)
    answer["larger_logs"] = []
    results = Results(answer)
    for trace in traces:
        for code in CODES:
            if not results.folds(trace.name):
                continue
            copies = 1 + int(code.split("+")[1])
            log_bytes = (
                results.log_bytes
                + results.safe(trace.name, "curm-reserve", code)["reserved_peak_bytes"] // copies
            )
            more = replay(
                device,
                [trace],
                "--scheme",
                "curm",
                "--form",
                "safe",
                "--code",
                code,
                "--log",
                str(log_bytes),
            )
            answer["larger_logs"].append(
                {**more["results"][0], **more["more"][0], "log_bytes": log_bytes}
            )
    return answer


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="bench/curm.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "traces",
        nargs="*",
        type=Path,
        metavar="TRACE",
        help="trace files, as `stoker curm replay` takes them",
    )
    parser.add_argument(
        "--json",
        type=Path,
        default=ROOT / "bench/results/curm.json",
        help="where the results go (default: bench/results/curm.json)",
    )
    parser.add_argument(
        "--plot",
        type=Path,
        default=ROOT / "docs/curm_ssd.svg",
        help="where the plot of the SSDs goes (default: docs/curm_ssd.svg)",
    )
    parser.add_argument(
        "--markdown",
        type=Path,
        metavar="FILE",
        help="run nothing: print the tables of the results in FILE",
    )
    args = parser.parse_args(argv)
    if bool(args.markdown) == bool(args.traces):
        parser.error("give trace files to run, or --markdown FILE, and not both")
    if args.markdown:
        result = json.loads(args.markdown.read_text())
    else:
        result = {
            device: compare(
                device, args.traces, *(["--plot", str(args.plot)] if device == "ssd" else [])
            )
            for device in DEVICES
        }
        args.json.write_text(json.dumps(result, indent=2) + "\n")
    print("\n\n".join(tables(result)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
