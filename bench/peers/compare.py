"""Stoker beside DeepSpeed, DeepNVMe, fio and plain torch on this machine: `make bench-peers`, or
with options in ARGS="...".

The systems take turns, block by block (A B C A B C ...), each block in a process of its own; the
disk is probed before and after each round. Finished blocks are kept in DIR/blocks.jsonl: what is
stopped goes on with --resume, and so may parts be added to a result.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

import summary
from stoker.bench.model import Model
from stoker.bench.offload import plain_compute_seconds
from stoker.plan.measure import checksum_seconds, kernel_seconds
from stoker.offload.storage.probe import disk_rates
from systems import (
    COMPUTE,
    MANY,
    MANY_BYTES,
    MEMORY_BESIDE_DRAM,
    MIB,
    SIZES,
    SYSTEMS,
    TENSOR_BYTES,
    TENSOR_SYSTEMS,
)

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
BLOCK_LIMIT = 900.0  # seconds after which a block has failed
# Seconds a step and to set up, at 218 M parameters on two cores: only for the first estimate of
# what a run takes.
EXPECTED = {"stoker": (1.8, 14.0), "torch": (1.2, 8.0), "deepspeed": (4.2, 22.0)}
EXPECTED_TENSORS, EXPECTED_FIO, EXPECTED_PROBE = 30.0, 15.0, 3.0


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# -- what is kept ----------------------------------------------------------------------------------


class Kept:
    """Finished blocks, one JSON object a line: a run that is killed loses the round under way. Of
    one and the same task the last counts."""

    def __init__(self, path: Path, resume: bool) -> None:
        self.path = path
        self._blocks: dict[tuple, dict[str, Any]] = {}
        if path.exists() and not resume:
            path.replace(path.with_suffix(".previous.jsonl"))
        elif path.exists():
            whole = [line for line in path.read_text().splitlines() if line.endswith("}")]
            # without a line that a kill cut short
            path.write_text("".join(line + "\n" for line in whole))
            for line in whole:
                self._take(json.loads(line))

    @property
    def blocks(self) -> list[dict[str, Any]]:
        return list(self._blocks.values())

    def add(self, block: dict[str, Any]) -> None:
        self._take(block)
        with self.path.open("a") as file:
            file.write(json.dumps(block) + "\n")

    def _take(self, block: dict[str, Any]) -> None:
        self._blocks[
            tuple(block.get(name) for name in ("part", "system", "size", "compute", "repetition"))
        ] = block

    def find(self, **what: Any) -> dict[str, Any] | None:
        return next(
            (
                block
                for block in self.blocks
                if "error" not in block
                and all(block.get(name) == value for name, value in what.items())
            ),
            None,
        )


# -- processes -------------------------------------------------------------------------------------


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def environment(peers: Path) -> dict[str, str]:
    """The same for every system: threads, and glibc's heap thresholds, as page faults alone change
    a peer several times over."""
    return {
        **os.environ,
        "OMP_NUM_THREADS": str(os.cpu_count()),
        "MALLOC_MMAP_THRESHOLD_": str(32 * MIB),
        "MALLOC_TRIM_THRESHOLD_": str(512 * MIB),
        "DS_ACCELERATOR": "cpu",
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "MAX_JOBS": str(os.cpu_count()),
        "TORCH_EXTENSIONS_DIR": str(peers.parent.parent / "operators"),
        "PATH": f"{peers.parent}:{os.environ['PATH']}",
    }


def in_process(
    script: str, kind: str, spec: dict[str, Any], args: argparse.Namespace
) -> dict[str, Any]:
    """Runs bench/peers/`script` on `spec`: its result, or {"error": a sentence}."""
    python = args.peers if kind == "deepspeed" else Path(sys.executable)
    with tempfile.TemporaryDirectory(dir=args.dir, prefix="block-") as folder:
        files = [Path(folder) / name for name in ("spec.json", "result.json", "log.txt")]
        files[0].write_text(
            json.dumps({**spec, "kind": kind, "directory": folder, "threads": os.cpu_count()})
        )
        with files[2].open("w") as log:
            process = subprocess.Popen(
                [python, HERE / script, *files[:2]],
                env=environment(args.peers),
                stdout=log,
                stderr=log,
            )
            try:
                status = process.wait(BLOCK_LIMIT)
            except subprocess.TimeoutExpired:
                return {"error": f"it did not end within {BLOCK_LIMIT:.0f} s"}
            finally:
                process.kill()  # also where we are interrupted
                process.wait()
        if status != 0:
            return {
                "error": (
                    f"ended with status {status}:"
                    f" {' | '.join(files[2].read_text().strip().splitlines()[-2:])[-300:]}"
                )
            }
        return json.loads(files[1].read_text())


# -- the parts -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Task:
    """One block to be measured. `part`: "offload", "tensors" or "fio"; the last two have neither
    size nor compute."""

    part: str
    system: str
    repetition: int
    size: str = ""
    compute: str = ""


class Bench:
    """Runs rounds of tasks, in turn; each round is enclosed by probes of the disk."""

    def __init__(self, args: argparse.Namespace, kept: Kept) -> None:
        self.args, self.kept = args, kept
        self.began = time.monotonic()
        self.took: dict[Task, float] = {}  # seconds of the last one of its kind, under repetition 0

    def rounds(self) -> list[list[Task]]:
        """What is not finished yet."""
        args, found = self.args, []
        for number in range(args.repetitions):
            now = [name for name in args.systems if not (number and name in args.once)]
            if args.only != "tensors":
                found += [
                    [Task("offload", name, number, size, compute) for name in now]
                    for size in args.sizes
                    for compute in args.compute
                ]
            if args.only != "offload":
                movers = [name for name in TENSOR_SYSTEMS if name == "stoker" or peer_runs(args)]
                found.append(
                    [
                        *(Task("tensors", name, number) for name in movers),
                        Task("fio", "fio", number),
                    ]
                )
        left = [
            [task for task in tasks if not self.kept.find(**asdict(task), form=self.form(task))]
            for tasks in found
        ]
        return [tasks for tasks in left if tasks]

    def form(self, task: Task) -> list[float]:
        """What makes a finished block another one than this."""
        return {
            "offload": [self.args.warmup, self.args.steps],
            "tensors": [self.args.scale, self.args.passes],
            "fio": [self.args.fio_seconds],
        }[task.part]

    def expected(self, task: Task) -> float:
        if known := self.took.get(replace(task, repetition=0)):
            return known
        if task.part != "offload":
            return EXPECTED_FIO if task.part == "fio" else 8 + EXPECTED_TENSORS / self.args.scale
        step, setup = EXPECTED[SYSTEMS[task.system].kind]
        steps = (
            self.args.warmup + self.args.steps + (self.args.clipped if task.repetition == 0 else 0)
        )
        return 8 + SIZES[task.size].parameters / SIZES["220M"].parameters * (
            setup + steps * step * (1.5 if task.compute == "balanced" else 1.0)
        )

    def run(self) -> None:
        rounds = self.rounds()
        bound = (
            f"; rounds that would end after {self.args.minutes:g} minutes are left out"
            if self.args.minutes
            else ""
        )
        say(
            f"{sum(map(len, rounds))} blocks in {len(rounds)} rounds, about"
            f" {self._seconds(rounds) / 60:.0f} minutes{bound}"
        )
        self.calibrate()
        for number, tasks in enumerate(rounds):
            spent, needs = time.monotonic() - self.began, self._seconds([tasks])
            title = (
                f"round {tasks[0].repetition + 1}: {tasks[0].part} {tasks[0].size}"
                f" {tasks[0].compute}".rstrip()
            )
            if self.args.minutes and spent + needs > 60 * self.args.minutes:
                say(
                    f"{title} is left out: {spent / 60:.1f} minutes are over, and it takes about"
                    f" {needs / 60:.1f}; --resume adds it"
                )
                continue  # a shorter one may still fit
            say(
                f"{title}; {spent / 60:.1f} minutes so far, about"
                f" {self._seconds(rounds[number:]) / 60:.1f} left"
            )
            self._round(tasks)

    def _seconds(self, rounds: list[list[Task]]) -> float:
        return sum(EXPECTED_PROBE + sum(map(self.expected, tasks)) for tasks in rounds)

    def _round(self, tasks: list[Task]) -> None:
        before, done = self.disk(), []
        try:
            for task in tasks:
                began = time.monotonic()
                block = getattr(self, f"_{task.part}")(task, done)
                taken = time.monotonic() - began
                if block is not None:
                    done.append({**asdict(task), "form": self.form(task), **block})
                    say(f"  {task.system}: {told(done[-1])} ({taken:.0f} s)")
                    # which later rounds do not have
                    taken -= step_seconds(block) * len(block.get("clipped_losses", []))
                self.took[replace(task, repetition=0)] = taken
        finally:
            after = self.disk()
            for block in done:
                self.kept.add({**block, "disk": {"before": before, "after": after}})

    def _offload(self, task: Task, done: list[dict[str, Any]]) -> dict[str, Any] | None:
        system, size = SYSTEMS[task.system], SIZES[task.size]
        settings = dict(system.settings)
        if system.kind == "stoker":
            settings["dram"] = (
                self._budget(task, system.memory_of, done) if system.memory_of else size.dram
            )
            if settings["dram"] is None:
                return say(
                    f"  {task.system}: left out, as no block of {system.memory_of} says how much"
                    " memory it may have"
                )
        spec = {
            "settings": settings,
            "layers": size.layers,
            "width": size.width,
            "vocabulary": size.vocabulary,
            "tokens": COMPUTE[task.compute],
            "warmup": self.args.warmup,
            "steps": self.args.steps,
            "clipped": 0 if task.repetition else self.args.clipped,
        }
        return {"settings": settings, **in_process("block.py", system.kind, spec, self.args)}

    def _budget(self, task: Task, system: str, done: list[dict[str, Any]]) -> int | None:
        """Such that our whole process stays within what `system`'s held at most."""
        like = asdict(replace(task, system=system))
        del like["repetition"]
        peaks = [
            block["peak_bytes"]
            for block in self.kept.blocks + done
            if all(block.get(name) == value for name, value in like.items())
            and "error" not in block
        ]
        return (
            max(max(peaks) - MEMORY_BESIDE_DRAM, SIZES[task.size].dram) // MIB * MIB
            if peaks
            else None
        )

    def _tensors(self, task: Task, done: list[dict[str, Any]]) -> dict[str, Any]:
        settings, sizes = TENSOR_SYSTEMS[task.system], tensor_sizes(self.args.scale)
        kind = "stoker" if task.system == "stoker" else "deepspeed"
        return {
            "settings": settings,
            "sizes": sizes,
            **in_process(
                "tensors.py",
                kind,
                {"settings": settings, "cases": sizes, "passes": self.args.passes},
                self.args,
            ),
        }

    def _fio(self, task: Task, done: list[dict[str, Any]]) -> dict[str, Any]:
        """By `stoker bench io`, which gives fio 2 MiB pages: the best of its block sizes."""
        seconds = str(self.args.fio_seconds)
        command = [
            Path(sys.executable).parent / "stoker",
            "bench",
            "io",
            "--json",
            "--seconds",
            seconds,
            "--repetitions",
            "1",
            "--file-size",
            "1GiB",
            self.args.dir,
        ]
        ended = subprocess.run(command, capture_output=True, text=True)
        if ended.returncode != 0:
            return {"error": ended.stderr.strip()[-300:]}
        rows = json.loads(ended.stdout)["results"]
        return {
            kind: 1e9 * max(row["fio_gbps"] for row in rows if row["op"] == kind)
            for kind in ("read", "write")
        }

    # -- measuring the machine ---------------------------------------------------------------------

    def disk(self) -> dict[str, float]:
        rates = disk_rates(str(self.args.dir), self.args.probe_seconds)
        return {name: rates[name] for name in ("read", "write")}

    def calibrate(self) -> None:
        """What the floor needs: the kernels and checksums, and forward and backward without
        offload, in core-seconds."""
        if self.args.only == "tensors":
            return
        if not self.kept.find(part="kernels"):
            say("measuring the kernels and the checksums alone")
            modes = {mode: kernel_seconds(moments=mode) for mode in ("exact", "bf16")}
            self.kept.add(
                {
                    "part": "kernels",
                    "kernel_seconds": modes,
                    "checksum_seconds": checksum_seconds(),
                    "cores": os.cpu_count(),
                }
            )
        for name, compute in (
            (name, compute) for name in self.args.sizes for compute in self.args.compute
        ):
            if not self.kept.find(part="plain", size=name, compute=compute):
                say(f"measuring forward and backward alone: {name}, {COMPUTE[compute]} tokens")
                size = SIZES[name]
                seconds = plain_compute_seconds(
                    Model(size.layers, size.width, size.vocabulary).to(torch.bfloat16),
                    size.vocabulary,
                    COMPUTE[compute],
                    3,
                )
                self.kept.add(
                    {"part": "plain", "size": name, "compute": compute, "core_seconds": seconds}
                )


def peer_runs(args: argparse.Namespace) -> bool:
    """Whether DeepSpeed is among what was chosen, and DeepNVMe with it."""
    return any(SYSTEMS[name].kind == "deepspeed" for name in args.systems)


def step_seconds(block: dict[str, Any]) -> float:
    """Of a block of training; 0 for any other."""
    return (
        statistics.median(step["seconds"] for step in block["steps"]) if "steps" in block else 0.0
    )


def told(block: dict[str, Any]) -> str:
    if "error" in block:
        return f"FAILED: {block['error']}"
    if block["part"] == "fio":
        return f"read {block['read'] / 1e9:.2f}, written {block['write'] / 1e9:.2f} GB/s"
    if block["part"] == "tensors":
        return "done"
    return f"{step_seconds(block):.2f} s a step, {block['peak_bytes'] / (1 << 30):.2f} GiB"


def tensor_sizes(scale: int) -> dict[str, list[int]]:
    """The tensors of each case, a `scale`-th of the real ones. Many: from 64 KiB to 64 MiB, each
    size as likely as its double, drawn once and for all."""
    rng, many = random.Random(1), []
    while sum(many) < MANY_BYTES // scale:
        # the peer wants whole pages for each of its two threads
        many.append(max(64 << 10, int(2 ** rng.uniform(16, 26)) // scale) // 8192 * 8192)
    return {**{name: [size // scale] for name, size in TENSOR_BYTES.items()}, MANY: many}


def machine() -> dict[str, Any]:
    model = next(
        (
            line.split(":")[1].strip()
            for line in open("/proc/cpuinfo")
            if line.startswith("model name")
        ),
        platform.machine(),
    )
    memory = (
        int(next(line.split()[1] for line in open("/proc/meminfo") if line.startswith("MemTotal")))
        * 1024
    )
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "memory_bytes": memory,
        "kernel": platform.release(),
        "python": platform.python_version(),
    }


# -- the command -----------------------------------------------------------------------------------


def among(known: dict[str, Any]):
    """A type for argparse: names of `known`, separated by commas."""

    def names(text: str) -> list[str]:
        if unknown := [name for name in text.split(",") if name not in known]:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: not one of {', '.join(known)}")
        # systems that others take their memory from come first
        return sorted(text.split(","), key=list(known).index)

    return names


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bench/peers/compare.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--sizes",
        type=among(SIZES),
        default=["60M", "220M"],
        metavar="A,B",
        help="of the model: tiny, 60M, 220M (default: 60M,220M)",
    )
    parser.add_argument(
        "--compute",
        type=among(COMPUTE),
        default=list(COMPUTE),
        metavar="A,B",
        help="a step: io, balanced (default: both)",
    )
    parser.add_argument(
        "--systems",
        type=among(SYSTEMS),
        default=list(SYSTEMS),
        metavar="A,B",
        help=f"default: all of {', '.join(SYSTEMS)}",
    )
    parser.add_argument(
        "--once",
        type=among(SYSTEMS),
        default=["control"],
        metavar="A,B",
        help="systems in the first round only (default: control)",
    )
    parser.add_argument(
        "--only",
        choices=["offload", "tensors"],
        help="only training steps, or only loading and storing tensors",
    )
    parser.add_argument("--repetitions", type=int, default=5, help="rounds (default: 5)")
    parser.add_argument(
        "--warmup", type=int, default=2, help="steps of a block that do not count (default: 2)"
    )
    parser.add_argument(
        "--steps", type=int, default=4, help="steps of a block that do (default: 4)"
    )
    parser.add_argument(
        "--clipped",
        type=int,
        default=3,
        help="steps with clipping after them in the first round, for the losses (default: 3)",
    )
    parser.add_argument(
        "--passes",
        type=int,
        default=3,
        help="times each tensor is stored and loaded in a block (default: 3)",
    )
    parser.add_argument(
        "--scale", type=int, default=1, help="divides the sizes of the tensors (default: 1)"
    )
    parser.add_argument(
        "--probe-seconds",
        type=float,
        default=3.0,
        help="length of a probe of the disk (default: 3)",
    )
    parser.add_argument(
        "--fio-seconds", type=float, default=0.5, help="length of one run of fio (default: 0.5)"
    )
    parser.add_argument(
        "--minutes", type=float, default=0.0, help="start no round that would end later than this"
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="the tiny model, small tensors, one round: shows that all of it works",
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="keep the finished blocks in DIR/blocks.jsonl and add what is missing",
    )
    parser.add_argument(
        "--peers",
        type=Path,
        default=ROOT / "out/peers/bin/python",
        help="the Python that has the peers (tools/setup_peers.sh)",
    )
    parser.add_argument(
        "--dir",
        type=Path,
        default=ROOT / "out/bench/peers",
        help="a folder on the disk that is measured (default: out/bench/peers)",
    )
    parser.add_argument("--json", type=Path, help="where the result goes")
    parser.add_argument(
        "--markdown",
        type=Path,
        metavar="FILE",
        help="measure nothing: print the section of docs/numbers.md for the result in FILE",
    )
    return parser


def main(argv: list[str]) -> int:
    parser = options()
    args = parser.parse_args(argv)
    if args.markdown:
        result = json.loads(args.markdown.read_text())
        summary.check(result)
        print(summary.markdown(result, args.markdown.name), end="")
        return 0
    if args.quick:
        args.sizes, args.compute, args.repetitions, args.scale, args.passes = (
            ["tiny"],
            ["io"],
            1,
            64,
            1,
        )
        args.steps, args.probe_seconds, args.fio_seconds = 2, 1.0, 0.1
        # says nothing about speed: never in the place of a real result
        args.json = args.dir / "quick.json"
    args.peers, args.dir = args.peers.absolute(), args.dir.absolute()
    if peer_runs(args) and not args.peers.exists():
        parser.error(
            f"there is no {args.peers}: run `make bench-peers`, or tools/setup_peers.sh FOLDER and"
            " --peers FOLDER/bin/python, or leave the peers out with --systems"
        )
    args.dir.mkdir(parents=True, exist_ok=True)
    kept, interrupted = (
        Kept(args.dir / ("quick.jsonl" if args.quick else "blocks.jsonl"), args.resume),
        False,
    )
    try:
        Bench(args, kept).run()
    except KeyboardInterrupt:
        interrupted = True
        say("interrupted: what follows is of the finished rounds; --resume goes on")
    result = summary.document(kept.blocks, machine())
    summary.check(result)
    print(summary.terminal(result))
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(result, indent=1) + "\n")
        say(f"written {args.json}")
    return 130 if interrupted else 1 if result["failed"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
