"""A model that computes on a GPU: copies, steps, batches and checkpoints, each beside what torch
alone does.

    .venv/bin/python bench/gpu.py --dir out/bench/gpu --json bench/results/gpu.json
    .venv/bin/python bench/gpu.py --markdown bench/results/gpu.json

Two systems take turns, and medians count. The first turn of each is dropped.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Callable

import numpy as np
import torch

import stoker
from overhead import machine as cpu
from stoker.data import Loader, Rows
from stoker.offload.paging.link import CudaLink
from stoker.train.model import Model, ModelConfig, initialise, next_token_loss

GIB = 1 << 30
COPY_BYTES = (1 << 20, 16 << 20, 128 << 20)
COPIED = 2 * GIB  # in one turn
TURNS = 6
CONFIG = ModelConfig(32000, layers=24, hidden=1024, heads=16, feed_forward=2816, window=1024)
ROWS, ROW = 1 << 16, 4096  # float32: a GiB
PARTS = ("disk", "copies", "steps", "batches", "checkpoints")


def machine() -> dict[str, Any]:
    return {
        **cpu(),
        "gpu": torch.cuda.get_device_name(),
        "gpu_bytes": torch.cuda.get_device_properties(0).total_memory,
        "cuda": torch.version.cuda,
    }


def seconds(run: Callable[[], None]) -> float:
    torch.cuda.synchronize()
    started = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return time.perf_counter() - started


def in_turns(systems: dict[str, Callable[[], float]], turns: int) -> dict[str, list[float]]:
    """What each returned, without its first turn."""
    seen: dict[str, list[float]] = {name: [] for name in systems}
    for turn in range(turns):
        for name in list(systems) if turn % 2 else reversed(list(systems)):
            seen[name].append(systems[name]())
    return {name: each[1:] for name, each in seen.items()}


def spread(values: list[float], scale: float = 1.0) -> dict[str, float]:
    scaled = [scale * value for value in values]
    return {"median": statistics.median(scaled), "least": min(scaled), "most": max(scaled)}


# -- the disk --------------------------------------------------------------------------------------


def disk(folder: Path) -> dict[str, Any]:
    """Between the folder and the GPU, by `stoker probe`."""
    command = [
        str(Path(sys.executable).parent / "stoker"),
        "probe",
        str(folder),
        "--gpu",
        "0",
        "--json",
    ]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)


# -- copies ----------------------------------------------------------------------------------------


def copies(folder: Path) -> list[dict[str, Any]]:
    """Our link, from memory of a store, beside torch's copies from memory that torch pinned."""
    found = []
    with stoker.open_store(f"dir:{folder}/copies", create=True, dram="1GiB") as store:
        arena = store.arena(512 << 20)
        link = CudaLink(torch.device("cuda"))
        link.pin(arena)
        for size in COPY_BYTES:
            count = COPIED // size
            buffer = arena.take(size)
            ours = torch.from_dlpack(buffer)
            theirs = torch.empty(size, dtype=torch.uint8, pin_memory=True)
            device = torch.empty(size, dtype=torch.uint8, device="cuda")

            def up() -> None:
                for _ in range(count):
                    event = link.upload(ours, device)
                link.wait(event)

            def down() -> None:
                for _ in range(count):
                    event = link.download(device, ours)
                link.wait(event)

            def torch_up() -> None:
                for _ in range(count):
                    device.copy_(theirs, non_blocking=True)

            def torch_down() -> None:
                for _ in range(count):
                    theirs.copy_(device, non_blocking=True)

            for way, mine, torchs in (("to", up, torch_up), ("from", down, torch_down)):
                seen = in_turns(
                    {"stoker": lambda: seconds(mine), "torch": lambda: seconds(torchs)}, TURNS
                )
                for system, taken in seen.items():
                    rates = spread([count * size / each for each in taken])
                    found.append({"system": system, "way": way, "bytes": size, "rate": rates})
            ours = buffer = None  # the arena takes them back
        pages = arena.pages
        link.unpin()
        del arena
    return [{**row, "pages": pages["kind"]} for row in found]


# -- steps -----------------------------------------------------------------------------------------


def made() -> tuple[Model, torch.optim.Optimizer]:
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = Model(CONFIG)
        initialise(model)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def run_steps(
    folder: Path, dram: str | None, policy: str, micro_batches: int, steps: int
) -> dict[str, Any]:
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    model, opt = made()
    parameters = sum(param.numel() for param in model.parameters())
    store = f"{folder}/steps"
    if dram is not None:
        model, opt = stoker.offload(
            model, opt, store=store, dram=dram, policy=policy, accumulate=micro_batches
        )
    tokens = torch.randint(0, CONFIG.vocabulary, (8, CONFIG.window + 1), device="cuda")

    def step() -> None:
        for _ in range(micro_batches):
            (next_token_loss(model, tokens) / micro_batches).backward()
        opt.step()
        opt.zero_grad()

    for _ in range(2):
        step()
    if dram is not None:
        opt.flush()
    before = copy.deepcopy(opt.ledger.summary()) if dram is not None else None
    taken = [seconds(step) for _ in range(steps)]
    row: dict[str, Any] = {
        "system": "torch" if dram is None else "stoker",
        "dram": dram,
        "policy": policy if dram is not None else None,
        "parameters": parameters,
        "micro_batches": micro_batches,
        "tokens": micro_batches * 8 * CONFIG.window,
        "step_seconds": spread(taken),
        "gpu_bytes_peak": torch.cuda.max_memory_allocated(),
    }
    if before is not None:
        after = opt.ledger.summary()
        for what in ("read_bytes", "written_bytes"):
            moved = sum(after[what].values()) - sum(before[what].values())
            row[what] = moved / steps
        row["dram_bytes_peak"] = after["dram_bytes_peak"]
        opt.close()
        for file in Path(store).rglob("*"):
            if file.is_file():
                file.unlink()
    return row


def steps(folder: Path, drams: list[str], policy: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for micro_batches in (1, 16):
        for dram in (None, *drams):
            found.append(run_steps(folder, dram, policy, micro_batches, 5))
            print(json.dumps(found[-1]), flush=True)
    return found


# -- batches ---------------------------------------------------------------------------------------


def batches(folder: Path) -> list[dict[str, Any]]:
    """A GiB of rows in random order, read from a folder and copied to the GPU."""
    found = []
    values = np.random.default_rng(0).random((ROWS, ROW), dtype=np.float32)
    np.save(folder / "rows.npy", values)
    (folder / "data").mkdir(exist_ok=True)
    os.replace(folder / "rows.npy", folder / "data" / "rows.npy")
    with stoker.open_store(f"dir:{folder}/data", dram="512MiB", read_only=True) as store:

        def epoch(pin: bool) -> float:
            loader = Loader(Rows(store, "rows.npy"), batch=256, seed=1, pin=pin)

            def run() -> None:
                for rows in loader:
                    rows.to("cuda", non_blocking=pin)
                    del rows

            taken = seconds(run)
            loader.close()
            return taken

        seen = in_turns({"pinned": lambda: epoch(True), "pageable": lambda: epoch(False)}, 4)
    for system, taken in seen.items():
        rates = spread([values.nbytes / each for each in taken])
        found.append({"system": f"stoker.data, {system}", "bytes": values.nbytes, "rate": rates})
    return found


# -- checkpoints -----------------------------------------------------------------------------------


def checkpoints(folder: Path) -> list[dict[str, Any]]:
    """Of a run in the GPU's memory: how long the loop stands still, and until it is durable."""
    model, opt = made()
    tokens = torch.randint(0, CONFIG.vocabulary, (8, CONFIG.window + 1), device="cuda")

    def step() -> None:
        next_token_loss(model, tokens).backward()
        opt.step()
        opt.zero_grad()

    for _ in range(3):
        step()
    plain = statistics.median(seconds(step) for _ in range(5))
    state = sum(param.nbytes for param in model.parameters()) + sum(
        value.nbytes for entry in opt.state.values() for value in entry.values()
    )
    rows = []
    file = folder / "torch.pt"
    ckpt = stoker.Checkpoints(f"dir:{folder}/checkpoints", keep=1)
    number = iter(range(1, 1000))

    def ours() -> tuple[float, float]:
        handle = None
        started = time.perf_counter()

        def save_and_step() -> None:
            nonlocal handle
            handle = ckpt.save(next(number), model=model, optimizer=opt, force=True)
            step()

        stall = seconds(save_and_step) - plain
        handle.wait()
        return stall, time.perf_counter() - started

    def theirs() -> tuple[float, float]:
        started = time.perf_counter()

        def save() -> None:
            torch.save({"model": model.state_dict(), "optimizer": opt.state_dict()}, file)

        stall = seconds(save)
        with open(file, "r+b") as opened:
            os.fsync(opened.fileno())
        return stall, time.perf_counter() - started

    for system, seen in in_turns({"stoker": ours, "torch.save": theirs}, 4).items():
        rows.append(
            {
                "system": system,
                "state_bytes": state,
                "step_seconds": plain,
                "stall_seconds": spread([stall for stall, _ in seen]),
                "durable_seconds": spread([durable for _, durable in seen]),
            }
        )
    ckpt.close()
    file.unlink()
    return rows


# -- what is printed -------------------------------------------------------------------------------


def markdown(found: dict[str, Any]) -> str:
    def of(value: dict[str, float], scale: float, digits: int) -> str:
        least, most = value["least"] / scale, value["most"] / scale
        return f"{value['median'] / scale:.{digits}f} ({least:.{digits}f} to {most:.{digits}f})"

    lines: list[str] = []
    if "disk" in found:
        lines += ["| disk to GPU | op | block | depth | GB/s |", "|---|---|---|---|---|"]
        for point in found["disk"]["points"]:
            if point["way"] == "cufile" and found["disk"]["bounced_bytes"]:
                continue  # they went through host memory after all
            lines.append(
                f"| {point['way']} | {point['op']} | {point['block_bytes'] >> 10} KiB |"
                f" {point['depth']} | {point['bytes_per_second'] / 1e9:.2f} |"
            )
        lines.append("")
    lines += ["| copies of | way | Stoker GB/s | torch GB/s |", "|---|---|---|---|"]
    rates = {(row["bytes"], row["way"], row["system"]): row for row in found["copies"]}
    for size, way in dict.fromkeys((size, way) for size, way, _ in rates):
        each = [of(rates[size, way, name]["rate"], 1e9, 1) for name in ("stoker", "torch")]
        lines.append(f"| {size >> 20} MiB | {way} the GPU | {each[0]} | {each[1]} |")
    lines += [
        "",
        "| system | dram | policy | tokens a step | step s | read GB | written GB | GPU GB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in found["steps"]:
        moved = [f"{row.get(what, 0) / 1e9:.1f}" for what in ("read_bytes", "written_bytes")]
        lines.append(
            f"| {row['system']} | {row['dram'] or '-'} | {row['policy'] or '-'} | {row['tokens']} |"
            f" {of(row['step_seconds'], 1, 2)} | {moved[0]} | {moved[1]} |"
            f" {row['gpu_bytes_peak'] / 1e9:.1f} |"
        )
    lines += ["", "| batches | GB/s |", "|---|---|"]
    lines += [f"| {row['system']} | {of(row['rate'], 1e9, 2)} |" for row in found["batches"]]
    lines += ["", "| checkpoint | stall s | durable s |", "|---|---|---|"]
    for row in found["checkpoints"]:
        both = [of(row[what], 1, 2) for what in ("stall_seconds", "durable_seconds")]
        lines.append(f"| {row['system']} | {both[0]} | {both[1]} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--dir", type=Path, default=Path("out/bench/gpu"), help="scratch folder")
    parser.add_argument("--json", type=Path, help="writes the figures here")
    parser.add_argument("--markdown", type=Path, help="prints the tables of such a file, and ends")
    parser.add_argument("--parts", default=",".join(PARTS), help="of " + ", ".join(PARTS))
    parser.add_argument("--dram", default="2GiB,8GiB", help="caps of the steps")
    parser.add_argument("--policy", default="speculate", help="of the steps")
    args = parser.parse_args()
    if args.markdown:
        print(markdown(json.loads(args.markdown.read_text())))
        return
    if not torch.cuda.is_available():
        parser.error("torch finds no GPU here")
    args.dir.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {"machine": machine()}
    if args.json and args.json.exists():  # parts that are not measured again stay
        found = {**json.loads(args.json.read_text()), **found}
    for part in args.parts.split(","):
        started = time.perf_counter()
        if part == "steps":
            found[part] = steps(args.dir, args.dram.split(","), args.policy)
        else:
            run: dict[str, Callable[[Path], Any]] = {
                "disk": disk,
                "copies": copies,
                "batches": batches,
                "checkpoints": checkpoints,
            }
            found[part] = run[part](args.dir)
        print(f"{part} took {time.perf_counter() - started:.0f} s", flush=True)
        if args.json:
            args.json.write_text(json.dumps(found, indent=1) + "\n")
    if all(part in found for part in PARTS):
        print(markdown(found))


if __name__ == "__main__":
    main()
