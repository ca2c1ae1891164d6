"""`stoker bench plan`: the planner's prediction beside the measured step, over settings from bound
by the disk to bound by computing.

For each row the disk, the kernels and forward and backward without offload are measured. The step
is planned from that, and then measured as the median of the steps after the warm-up. A row across
which the disk's rates moved by more than a tenth is repeated. One of which no repetition saw a
steady disk is shown and not counted.
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from typing import Any

import torch

import stoker
from stoker import _core
from stoker.bench.model import TOKENS, Model, step_loss
from stoker.bench.offload import add_precision, weight_type
from stoker.command import Parser, fail, named, number, whole, writable_folder
from stoker.errors import StokerError
from stoker.offload.observe.process import sleep_between_operators
from stoker.offload.observe.heap import keep_heap
from stoker.offload.storage.probe import disk_rates
from stoker.plan.measure import measure_machine
from stoker.offload.planning.planner import compare

VOCABULARY = 8192
WARM_UP = 4
GOAL = 0.15  # of the measured seconds
MOVED = 0.10  # of a disk's rate, from which on a row is repeated, and in the end not counted
TITLE = "## The plan beside the step (`stoker bench plan`, bench/results/plan.json)"
HEAD = [
    "model",
    "tokens",
    "dram",
    "policy",
    "planned, s",
    "measured, s",
    "miss",
    "MB read: planned, measured",
    "MB written",
    "disk moved",
]


@dataclass(frozen=True)
class Row:
    """One setting."""

    layers: int
    width: int
    tokens: int
    dram: str
    policy: str

    def make(self, dtype: torch.dtype) -> torch.nn.Module:
        return Model(self.layers, self.width, VOCABULARY).to(dtype)


SETTINGS = [
    Row(6, 512, 64, "84MiB", "sync"),
    Row(6, 512, 64, "84MiB", "speculate"),
    Row(6, 512, 1024, "84MiB", "speculate"),
    Row(6, 512, 64, "84MiB", "lazy"),
    Row(6, 512, 64, "300MiB", "speculate"),
    Row(6, 512, 1024, "300MiB", "sync"),
    Row(16, 512, 64, "190MiB", "speculate"),
    Row(16, 512, 512, "190MiB", "sync"),
    Row(16, 512, 512, "400MiB", "speculate"),
]


def compute_seconds(row: Row, dtype: torch.dtype, times: int = 7) -> float:
    """Forward and backward of the whole model in memory, nothing beside it."""
    keep_heap()  # as offload() does: page faults are no part of the arithmetic, nor is spinning
    sleep_between_operators()
    model, taken = row.make(dtype), []
    for step in range(times + 1):
        for param in model.parameters():
            param.grad = None
        started = time.perf_counter()
        step_loss(model, step, VOCABULARY, row.tokens).backward()
        taken.append(time.perf_counter() - started)
    return statistics.median(taken[1:])


def measure(
    row: Row, dtype: torch.dtype, steps: int, directory: str, probe_seconds: float
) -> dict[str, Any]:
    """The row with its plan, what was measured, and how far the disk moved meanwhile."""
    compute = compute_seconds(row, dtype)
    gc.collect()
    with tempfile.TemporaryDirectory(dir=directory, prefix="stoker-bench-") as store:
        model = stoker.build(lambda: row.make(dtype), seed=0, store=store, dram=row.dram)
        model, opt = stoker.offload(
            model,
            torch.optim.AdamW(model.parameters(), lr=1e-4),
            store=store,
            dram=row.dram,
            policy=row.policy,
        )
        try:
            machine = measure_machine([directory], probe_seconds)
            plan = opt.plan(machine, compute)
            rows = []
            for step in range(WARM_UP + steps):
                step_loss(model, step, VOCABULARY, row.tokens).backward()
                opt.step()
                opt.zero_grad()
                rows.append(opt.ledger.last)
        finally:
            opt.close()
        after = disk_rates(directory, probe_seconds)
    before = {"read": machine.read, "write": machine.write}
    seconds = [each["seconds"] for each in rows[WARM_UP:]]
    return {
        **asdict(row),
        "precision": str(dtype).removeprefix("torch."),
        "parameters": plan["parameters"],
        "steps": steps,
        "machine": asdict(machine),
        "compute_alone_seconds": compute,
        "compared": compare(plan, rows[WARM_UP:]),
        "seconds_range": [min(seconds), max(seconds)],
        "disk_moved": max(abs(after[kind] / before[kind] - 1) for kind in before),
    }


def steady(result: dict[str, Any]) -> bool:
    """Whether the disk that was planned with was the disk that was measured on."""
    return result["disk_moved"] <= MOVED


def judged(results: list[dict[str, Any]]) -> tuple[int, int]:
    """How many rows are within the goal, of how many that count."""
    counted = [result for result in results if steady(result)]
    return sum(abs(result["compared"]["seconds"]["miss"]) <= GOAL for result in counted), len(
        counted
    )


def verdict(results: list[dict[str, Any]]) -> str:
    within, counted = judged(results)
    moved = len(results) - counted
    return f"{within} of {counted} settings within {GOAL:.0%} of the measured seconds" + (
        f". Not counted: {moved} during which the disk moved by more than {MOVED:.0%}"
        if moved
        else ""
    )


def markdown(result: dict[str, Any]) -> str:
    """The section of docs/numbers.md; a test holds that it is this one."""
    rows = result["rows"]
    lines = []
    for row in rows:
        of, (low, high) = row["compared"], row["seconds_range"]
        pair = lambda item: f"{of[item]['planned'] / 1e6:.0f}, {of[item]['measured'] / 1e6:.0f}"
        lines.append(
            [
                f"{row['parameters'] / 1e6:.0f} M",
                str(row["tokens"]),
                row["dram"],
                row["policy"],
                f"{of['seconds']['planned']:.3f}",
                f"{of['seconds']['measured']:.3f} ({low:.2f} to {high:.2f})",
                f"{of['seconds']['miss']:+.0%}",
                pair("read_bytes"),
                pair("written_bytes"),
                f"{row['disk_moved']:.0%}" + ("" if steady(row) else ": not counted"),
            ]
        )
    head, *rest = ("| " + " | ".join(cells) + " |" for cells in (HEAD, *lines))
    table = "\n".join([head, "|" + "---|" * len(HEAD), *rest])
    return f"""\
{TITLE}

For each row the disk, the kernels, and forward and backward alone are measured. The step is planned
from that, then measured as the median (range) of {rows[0]["steps"]} steps.
{verdict(rows)}.
A row across which a probe of the disk moved by more than a tenth is repeated, twice at most. The
last column tells what it moved by in the end.

{table}
"""


def line(result: dict[str, Any]) -> str:
    of = result["compared"]
    show = lambda item: f"{of[item]['planned'] / 1e6:7.1f} / {of[item]['measured'] / 1e6:7.1f}"
    moved = f"  (the disk moved by {result['disk_moved']:.0%})" if not steady(result) else ""
    return (
        f"{result['parameters'] / 1e6:4.0f} M  {result['tokens']:5} tokens  {result['dram']:>7} "
        f" {result['policy']:9}  planned {of['seconds']['planned']:.3f} s  measured"
        f" {of['seconds']['measured']:.3f} s  {of['seconds']['miss']:+.0%}  MB read"
        f" {show('read_bytes')}  written {show('written_bytes')}{moved}"
    )


def main(argv: list[str]) -> int:
    parser = Parser("stoker bench plan", __doc__)
    parser.add_argument(
        "--dir",
        type=named,
        default=".",
        help="where the stores are made and the disk is measured (default: here)",
    )
    parser.add_argument(
        "--steps", type=whole(1, 1 << 20), default=20, help="measured steps a setting (default: 20)"
    )
    parser.add_argument(
        "--seconds",
        type=number(1, 600),
        default=3.0,
        help="about how long the disk is measured each time (default: 3)",
    )
    parser.add_argument(
        "--rows",
        type=whole(1, len(SETTINGS)),
        default=len(SETTINGS),
        help=f"only the first so many settings (default: all {len(SETTINGS)})",
    )
    parser.add_argument(
        "--repeat",
        type=whole(0, 100),
        default=2,
        help="how often a row is repeated while the disk's rates move (default: 2)",
    )
    add_precision(parser)
    parser.add_argument(
        "--json", action="store_true", help="print the result as one JSON object on standard output"
    )
    parser.add_argument(
        "--markdown",
        metavar="FILE",
        help=(
            "measure nothing: print the section of docs/numbers.md of a result that --json printed"
        ),
    )
    args = parser.parse_args(argv)
    say = lambda text: print(text, file=sys.stderr, flush=True)
    results = []
    try:
        if args.markdown:
            with open(args.markdown, encoding="utf-8") as kept:
                print(markdown(json.load(kept)), end="")
            return 0
        writable_folder(args.dir)
        dtype = weight_type(args.precision, TOKENS, SETTINGS[0].width)
        for row in SETTINGS[: args.rows]:
            for _ in range(1 + args.repeat):
                result = measure(row, dtype, args.steps, args.dir, args.seconds)
                say(line(result))
                if steady(result):
                    break
            results.append(result)
    except (StokerError, OSError) as error:
        return fail("stoker bench plan", error)
    say(verdict(results))
    if args.json:
        within, counted = judged(results)
        machine = {
            "target": _core.optim_target(),
            "cores": os.cpu_count(),
            "torch": torch.__version__,
            "stoker": stoker.__version__,
            "load_before": os.getloadavg()[0],
        }
        print(
            json.dumps(
                {
                    **machine,
                    "goal": GOAL,
                    "within_goal": within,
                    "counted": counted,
                    "rows": results,
                }
            )
        )
    return 0
