"""What Stoker computes beside the model: processor seconds of a step by number of blocks.

    .venv/bin/python bench/overhead.py --json bench/results/overhead.json
    .venv/bin/python bench/overhead.py --markdown bench/results/overhead.json

Small blocks (Linear(32, 32), float32) show the cost of a block: there is next to nothing to compute
in one. What torch takes for a block of real size stands beside them. Seconds are those of all
threads of the process, medians of the steps; memory holds the weights.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, Callable, Iterator

import torch
from torch import nn

import stoker
from stoker import _core
from stoker.offload.paging import pager, shown

SMALL = (125, 250, 500, 1000)  # blocks of Linear(32, 32)
REAL = 24, 1024, 512  # blocks of Linear(1024, 1024), and samples of a batch
POLICIES = ("speculate", "sync", "lazy")
FEATURES = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")
WARM = 3  # steps that learn the order


def machine() -> dict[str, Any]:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    known = dict(map(str.strip, line.split(":", 1)) for line in lines if ":" in line)
    flags = known.get("flags", "").split()
    return {
        "cpu": known.get("model name", "unknown"),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "features": [feature for feature in FEATURES if feature in flags],
        "kernels": _core.optim_target(),
        "torch": torch.__version__,
        "stoker": stoker.__version__,
        "load_before": round(os.getloadavg()[0], 2),
    }


def seconds(step: Callable[[], None], steps: int) -> float:
    """Processor seconds of a step, of all threads: the median."""
    taken = []
    for _ in range(steps):
        before = time.process_time()
        step()
        taken.append(time.process_time() - before)
    return statistics.median(taken)


def measure(
    blocks: int, policy: str | None, steps: int, folder: str, width: int = 32, batch: int = 8
) -> float:
    """One model; policy None: torch alone."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(blocks)))
    opt = torch.optim.AdamW(model.parameters())
    if policy is not None:
        store = f"{folder}/{blocks}-{policy}"
        model, opt = stoker.offload(model, opt, store=store, dram="256MiB", policy=policy)
    x = torch.randn(batch, width)

    def step() -> None:
        model(x).square().mean().backward()
        opt.step()
        opt.zero_grad()

    for _ in range(WARM):
        step()
    taken = seconds(step, steps)
    if policy is not None:
        opt.close()
    return taken


@contextlib.contextmanager
def watched() -> Iterator[list[float]]:
    """Sums up the seconds that finding edits of weights takes, in the list's one element."""
    spent, depth = [0.0], [0]

    def timed(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def wrapper(*args: Any, **options: Any) -> Any:
            depth[0] += 1
            started = time.perf_counter()
            try:
                return function(*args, **options)
            finally:
                depth[0] -= 1
                spent[0] += 0 if depth[0] else time.perf_counter() - started

        return wrapper

    kept = []
    for owner in (shown.Shown, pager):
        for name, function in list(vars(owner).items()):
            its_own = (
                owner is shown.Shown and callable(function) and name not in ("__init__", "call")
            )
            if its_own or name in ("become", "uses"):
                kept.append((owner, name, function))
                setattr(owner, name, timed(function))
    try:
        yield spent
    finally:
        for owner, name, function in kept:
            setattr(owner, name, function)


def edits(blocks: int, width: int, batch: int, steps: int, folder: str) -> dict[str, float]:
    """Seconds of a step, and those of them that finding edits of weights takes: medians."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(blocks)))
    opt = torch.optim.AdamW(model.parameters())
    model, opt = stoker.offload(model, opt, store=f"{folder}/edits", dram="256MiB")
    x, rows = torch.randn(batch, width), []
    with watched() as spent:
        for _ in range(WARM + steps):
            spent[0], started = 0.0, time.perf_counter()
            model(x).square().mean().backward()
            opt.step()
            opt.zero_grad()
            rows.append((time.perf_counter() - started, spent[0]))
    opt.close()
    step, finding = (statistics.median(each) for each in zip(*rows[WARM:]))
    return {"step": step, "finding": finding}


def run(counts: tuple[int, ...], steps: int) -> dict[str, Any]:
    where, rows = machine(), []
    with tempfile.TemporaryDirectory() as folder:
        for blocks in counts:
            row: dict[str, Any] = {"blocks": blocks, "torch": measure(blocks, None, steps, folder)}
            for policy in POLICIES:
                row[policy] = measure(blocks, policy, steps, folder)
            rows.append(row)
        blocks, width, batch = REAL
        real = {"blocks": blocks, "width": width, "batch": batch}
        real["torch"] = measure(blocks, None, steps, folder, width, batch)
        real["edits"] = edits(blocks, width, batch, steps, folder)
    return {"machine": where, "steps": steps, "rows": rows, "real": real}


def table(result: dict[str, Any]) -> str:
    """For docs/numbers.md."""
    head = "".join(f" {policy} | beyond torch a block |" for policy in POLICIES)
    lines = [f"| blocks | torch |{head}", "|---|---|" + "---|---|" * len(POLICIES)]
    for row in result["rows"]:
        cells = [str(row["blocks"]), f"{row['torch']:.3f} s"]
        for policy in POLICIES:
            each = (row[policy] - row["torch"]) / row["blocks"]
            cells += [f"{row[policy]:.3f} s", f"{1e3 * each:.2f} ms"]
        lines.append("| " + " | ".join(cells) + " |")
    real = result["real"]
    each = 1e3 * real["torch"] / real["blocks"]
    layer = f"Linear({real['width']}, {real['width']})"
    share = real["edits"]["finding"] / real["edits"]["step"]
    lines += ["", f"Torch alone takes {each:.1f} ms for one {layer} and batch {real['batch']}."]
    lines += [
        f"Finding edits of the weights of {real['blocks']} of them takes {share:.2%} of a step."
    ]
    return "\n".join(lines)


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--json", type=Path, help="where the result goes")
    parser.add_argument("--markdown", type=Path, help="print the table of this result instead")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--blocks", type=int, nargs="+", default=list(SMALL))
    args = parser.parse_args()
    if args.markdown:
        print(table(json.loads(args.markdown.read_text())))
        return
    result = run(tuple(args.blocks), args.steps)
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    print(table(result))


if __name__ == "__main__":
    main()
