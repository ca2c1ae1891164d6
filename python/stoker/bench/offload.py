"""`stoker bench offload`: seconds and bytes a step of a model that does not fit, for each policy,
beside the floor.

The floor of a step is the larger of two times. The disk's is bytes read / read rate + bytes written
/ write rate. The cores' is core-seconds of (plain forward and backward, the kernel alone, CRC
alone) / cores. The disk is probed just before and after each row; the bytes are those the process
moved.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import os
import platform
import shutil
import statistics
import sys
import tempfile
import time
from typing import Any

import torch
from torch import nn

import stoker
from stoker import _core
from stoker.bench.model import TOKENS, Model, step_loss
from stoker.bench.process import PeakMemory, process_io
from stoker.command import Parser, fail, named, whole, writable_folder
from stoker.errors import StokerError
from stoker.offload.observe.process import sleep_between_operators
from stoker.offload.observe.heap import keep_heap
from stoker.offload.planning.products import TYPES, quickest_type
from stoker.plan.measure import checksum_seconds, kernel_seconds
from stoker.offload.storage.probe import disk_rates
from stoker.offload.model.moments import MODES
from stoker.offload.division.layout import MIB
from stoker.offload.division.amounts import parse_bytes


def plain_compute_seconds(model: nn.Module, vocabulary: int, tokens: int, steps: int) -> float:
    """Core-seconds of forward and backward without any offload (weights in memory, gradients
    dropped)."""
    keep_heap()  # as offload() does: page faults are no part of the arithmetic, nor is spinning
    sleep_between_operators()
    times = []
    for step in range(steps + 1):
        model.zero_grad(set_to_none=True)
        started = time.process_time()
        step_loss(model, step, vocabulary, tokens).backward()
        times.append(time.process_time() - started)
    return statistics.median(times[1:])


def measure(policy: str, args: argparse.Namespace, directory: str) -> dict[str, Any]:
    """One row: builds the model in a fresh store, warms up, times `steps` steps."""
    store = os.path.join(directory, policy)
    model = stoker.build(
        lambda: Model(args.layers, args.width, args.vocabulary).to(args.dtype),
        seed=0,
        store=store,
        dram=args.dram,
    )
    opt = torch.optim.AdamW(model.parameters(), lr=1e-4)
    model, opt = stoker.offload(
        model, opt, store=store, dram=args.dram, policy=policy, moments=args.moments
    )
    parameters = opt.plan()["parameters"]
    before = disk_rates(directory)
    times, rows, losses = [], [], []
    memory, started_io = None, (0, 0)
    for step in range(args.warmup + args.steps):
        if step == args.warmup:
            memory, started_io = PeakMemory(), process_io()
        started = time.perf_counter()
        loss = step_loss(model, step, args.vocabulary)
        loss.backward()
        opt.step()
        opt.zero_grad()
        losses.append(loss.item())
        if step >= args.warmup:
            times.append(time.perf_counter() - started)
            rows.append(opt.ledger.last)
    started = time.perf_counter()
    opt.flush()
    times[-1] += time.perf_counter() - started
    ended_io = process_io()
    after = disk_rates(directory)
    per = lambda total: total / args.steps / parameters
    read = sum(sum(row["read_bytes"].values()) for row in rows)
    written = sum(sum(row["written_bytes"].values()) for row in rows)
    row = {
        "seconds_per_step": statistics.median(times),
        "seconds_range": [min(times), max(times)],
        "read_bytes_per_parameter": per(read),
        "written_bytes_per_parameter": per(written),
        "proc_read_bytes_per_parameter": per(ended_io[0] - started_io[0]),
        "proc_written_bytes_per_parameter": per(ended_io[1] - started_io[1]),
        "process_peak_bytes": memory.stop(),
        "disk_read_gbps": (before["read"] + after["read"]) / 2e9,
        "disk_write_gbps": (before["write"] + after["write"]) / 2e9,
        "disk_moved": max(abs(before[k] - after[k]) / before[k] for k in before),
        "stall_seconds": {
            k: statistics.median(r["stall_seconds"][k] for r in rows)
            for k in rows[0]["stall_seconds"]
        },
        "losses": losses,
        "plan": opt.plan(),
    }
    row["digest"] = digest(model, opt)
    opt.close()
    shutil.rmtree(store)
    io = row["proc_read_bytes_per_parameter"] * parameters / (row["disk_read_gbps"] * 1e9) + row[
        "proc_written_bytes_per_parameter"
    ] * parameters / (row["disk_write_gbps"] * 1e9)
    cpu = (
        args.compute
        + kernel_seconds(moments=args.moments) * parameters
        + checksum_seconds()
        * (row["read_bytes_per_parameter"] + row["written_bytes_per_parameter"])
        * parameters
    )
    row.update(
        floor_io_seconds=io,
        floor_cpu_seconds=cpu / os.cpu_count(),
        compute_core_seconds=args.compute,
        floor_seconds=max(io, cpu / os.cpu_count()),
    )
    row["ratio_to_floor"] = row["seconds_per_step"] / row["floor_seconds"]
    return row


def digest(model: nn.Module, opt: stoker.OffloadedOptimizer) -> str:
    """Of every weight, m and v."""
    total = hashlib.blake2b()
    for info in opt._session.planes.store.list(""):
        if not info["key"].startswith("meta/"):
            total.update(info["key"].encode())
            for start in range(0, info["bytes"], MIB):
                total.update(
                    opt._session.planes.store.read_bytes(
                        info["key"], start, min(MIB, info["bytes"] - start)
                    )
                )
    return total.hexdigest()


def model_width(text: str) -> int:
    """Heads are 64 wide."""
    value = whole(64, 1 << 16)(text)
    if value % 64:
        raise argparse.ArgumentTypeError(
            f"{value} is not a multiple of 64: try {value - value % 64}"
        )
    return value


def add_model_options(
    parser: argparse.ArgumentParser, dram: str = "1GiB", layers: int = 16, width: int = 1024
) -> None:
    """The model that is trained, and the memory it gets."""
    parser.add_argument("--dram", default=dram, help=f"memory budget (default: {dram})")
    parser.add_argument(
        "--layers",
        type=whole(1, 10_000),
        default=layers,
        help=f"blocks of the model (default: {layers})",
    )
    parser.add_argument(
        "--width", type=model_width, default=width, help=f"width of the model (default: {width})"
    )
    parser.add_argument(
        "--vocabulary",
        type=whole(2, 1 << 24),
        default=8192,
        help="tokens of the vocabulary (default: 8192)",
    )
    add_precision(parser)


def add_precision(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--precision",
        choices=("auto", *TYPES),
        default="auto",
        help="type of the weights (default: auto, the one that this processor multiplies quicker)",
    )


def weight_type(precision: str, tokens: int, width: int) -> torch.dtype:
    """The type that --precision names; what `auto` measured and chose is printed on stderr."""
    if precision == "auto":
        quickest = quickest_type(tokens, width)
        print(f"precision    {quickest}", file=sys.stderr, flush=True)
        precision = quickest.name
    return TYPES[precision]


def main(argv: list[str]) -> int:
    parser = Parser("stoker bench offload", __doc__)
    parser.add_argument(
        "--dir",
        type=named,
        default=".",
        help="where the stores are made and the disk is measured (default: here)",
    )
    add_model_options(parser)
    parser.add_argument(
        "--steps", type=whole(1, 1 << 20), default=6, help="timed steps a policy (default: 6)"
    )
    parser.add_argument(
        "--warmup", type=whole(0, 1 << 20), default=3, help="steps before them (default: 3)"
    )
    parser.add_argument(
        "--policy",
        action="append",
        choices=["sync", "speculate", "lazy"],
        help="only this policy (may be repeated)",
    )
    parser.add_argument(
        "--moments",
        default="exact",
        choices=list(MODES),
        help="how m and v are kept (default: exact)",
    )
    parser.add_argument(
        "--json", action="store_true", help="print the result as one JSON object on standard output"
    )
    args = parser.parse_args(argv)
    try:
        args.dram = parse_bytes("dram", args.dram)
    except StokerError as error:
        parser.error(str(error).replace("dram:", "--dram:"))
    try:
        return run(args)
    except (StokerError, OSError) as error:
        return fail("stoker bench offload", error)


def run(args: argparse.Namespace) -> int:
    """The measurement and its result; the exit status."""
    say = lambda text: print(text, file=sys.stderr, flush=True)
    writable_folder(args.dir)
    args.dtype = weight_type(args.precision, TOKENS, args.width)
    say("measuring forward and backward without offload ...")
    args.compute = plain_compute_seconds(
        Model(args.layers, args.width, args.vocabulary).to(args.dtype),
        args.vocabulary,
        TOKENS,
        args.steps,
    )
    policies = {}
    with tempfile.TemporaryDirectory(dir=args.dir, prefix="stoker-bench-") as directory:
        for policy in args.policy or ["sync", "speculate", "lazy"]:
            say(f"measuring policy {policy} ...")
            policies[policy] = row = measure(policy, args, directory)
            gc.collect()  # the arena of this row must not count in the next
            say(
                f"  {row['seconds_per_step']:.2f} s a step, floor {row['floor_seconds']:.2f} s"
                f" (disk {row['floor_io_seconds']:.2f}, cpu {row['floor_cpu_seconds']:.2f}), ratio"
                f" {row['ratio_to_floor']:.2f}"
            )
    plan = next(iter(policies.values()))["plan"]
    result = {
        "parameters": plan["parameters"],
        "dram_bytes": args.dram,
        "moments": args.moments,
        "precision": str(args.dtype).removeprefix("torch."),
        "machine": {
            "cpu": platform.processor() or platform.machine(),
            "target": _core.optim_target(),
            "cores": os.cpu_count(),
            "torch": torch.__version__,
            "stoker": stoker.__version__,
        },
        "policies": policies,
        "policies_bit_equal": (
            len({(row["digest"], tuple(row["losses"])) for row in policies.values()}) == 1
        ),
    }
    if args.json:
        print(json.dumps(result))
    else:
        for policy, row in policies.items():
            print(
                f"{policy:10} {row['seconds_per_step']:.2f} s/step  read"
                f" {row['read_bytes_per_parameter']:.1f}  written"
                f" {row['written_bytes_per_parameter']:.1f} B/parameter  floor"
                f" {row['floor_seconds']:.2f} s  ratio {row['ratio_to_floor']:.2f}  peak"
                f" {row['process_peak_bytes'] / MIB:.0f} MiB"
            )
        print(f"kernels: {_core.optim_target()}")
        print("policies are bit-equal" if result["policies_bit_equal"] else "POLICIES DIFFER")
    return 0 if result["policies_bit_equal"] else 1
