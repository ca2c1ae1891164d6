"""Saving and loading a run: stoker.Checkpoints beside torch.save, safetensors and torch's
distributed checkpoint (DCP), the last also asynchronous, with a thread and with a process.

    .venv/bin/python bench/checkpoint.py               runs all; JSON to bench/results
    .venv/bin/python bench/checkpoint.py --systems stoker    one of them; the other rows stay
    .venv/bin/python bench/checkpoint.py --markdown    prints the section of docs/numbers.md

Each system and round is a process of its own; rounds are interleaved. The figure is the median,
`ranges` has the least and the most. A step of training is a small forward and backward and AdamW
over all parameters. `stoker offloaded` is the same model in a store of stoker.offload(). Each run
has saved twice before it is measured, and keeps the last save only. With 2 ranks it is sharded
(FSDP2), and the times are those of the slower rank.

stall_seconds      that the loop waits: in the save, and in the gate before the next step
slowdown_seconds   by which the steps until the state is durable take longer beyond that
durable_seconds    from the call of save until all bytes are flushed to the disk
paused_seconds     the same while training pauses
extra_memory_bytes anonymous and shared memory of all its processes beyond what training takes
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SYSTEMS = (
    *("stoker", "stoker offloaded", "torch.save", "safetensors"),
    *("dcp", "dcp async thread", "dcp async process"),
    *("stoker 2 ranks", "dcp 2 ranks"),
)
FIGURES = (
    *("stall_seconds", "slowdown_seconds", "durable_seconds", "paused_seconds"),
    "restore_cold_seconds",
)
COUNTS = ("extra_memory_bytes", "bytes_written")
BASE_STEPS = 10
SAVED_BEFORE = 2  # a run that goes on has saved before, and let old ones go
MIB = 1 << 20


def own_bytes() -> int:
    """Anonymous and shared memory of this process and those that it started. What they share
    counts once."""
    anonymous, shared = 0, 0
    for process in [os.getpid(), *children(os.getpid())]:
        try:
            lines = Path(f"/proc/{process}/status").read_text().splitlines()
        except OSError:
            continue  # it has ended
        sizes = {line.split(":")[0]: line.split()[1] for line in lines if line.startswith("Rss")}
        anonymous += int(sizes.get("RssAnon", 0)) * 1024
        shared = max(shared, int(sizes.get("RssShmem", 0)) * 1024)
    return anonymous + shared


def children(process: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{process}/task").glob("*/children"):
        try:
            found += [int(each) for each in task.read_text().split()]
        except OSError:
            continue
    return found + [each for child in found for each in children(child)]


class Peak:
    """The most own_bytes() while entered."""

    def __enter__(self) -> Peak:
        self.bytes, self._end = own_bytes(), threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._end.wait(0.005):
            self.bytes = max(self.bytes, own_bytes())

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()


def flush(folder: Path) -> None:
    for path in [*folder.rglob("*"), folder]:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def forget(folder: Path) -> None:
    """The files leave the page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def written(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def ranks_of(system: str) -> int:
    return 2 if system.endswith("2 ranks") else 1


def several() -> bool:
    """Whether this process is one of several ranks."""
    import torch.distributed as dist

    return dist.is_initialized() and dist.get_world_size() > 1


def any_rank(here: bool) -> bool:
    """Whether it is so on any rank. All ranks take the same steps."""
    if not several():
        return here
    import torch
    import torch.distributed as dist

    flag = torch.tensor(int(here))
    dist.all_reduce(flag, dist.ReduceOp.MAX)
    return bool(flag)


def made(state_bytes: int) -> tuple[Any, Any]:
    """Layers of 1024 x 1024 float32 and AdamW, whose state is twice as large."""
    import torch
    from torch import nn
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    layers = max(1, round(state_bytes / 12 / (1024 * 1024)))
    model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(layers)))
    if several():
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
    return model, torch.optim.AdamW(model.parameters())


def step(model: Any, opt: Any) -> float:
    import torch

    begin = time.monotonic()
    model(torch.ones(8, 1024)).square().mean().backward()
    opt.step()
    opt.zero_grad()
    return time.monotonic() - begin


def flat(model: Any, opt: Any) -> dict[str, Any]:
    """All tensors by name, for safetensors."""
    state = dict(model.state_dict())
    for number, entry in opt.state_dict()["state"].items():
        state |= {f"{number}.{name}": value for name, value in entry.items()}
    return state


class Saver:
    """One system. save() returns what waits until the state is durable; it may do so by itself."""

    def __init__(self, system: str, folder: Path, model: Any, opt: Any, ckpt: Any) -> None:
        self._system, self._folder = system.removesuffix(" 2 ranks"), folder
        self._model, self._opt, self._alone = model, opt, ranks_of(system) == 1
        self._ckpt, self._saved, self._handle = ckpt, 0, None

    def save(self) -> Callable[[], Any]:
        import torch
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

        self._saved += 1
        if self._ckpt is not None:
            both = {"model": self._model, "optimizer": self._opt}
            self._handle = self._ckpt.save(self._saved, **both)
            return self._handle.wait
        folder = self._folder / str(self._saved)
        folder.mkdir(exist_ok=True)
        if self._system == "safetensors":
            from safetensors.torch import save_file

            save_file(flat(self._model, self._opt), folder / "state.safetensors")
            return lambda: flush(folder)
        state = {"model": self._model.state_dict(), "optimizer": self._opt.state_dict()}
        if self._system == "torch.save":
            torch.save(state, folder / "state.pt")
            return lambda: flush(folder)
        if self._system == "dcp":
            dcp.save(state, checkpoint_id=folder, no_dist=self._alone)
            return lambda: flush(folder)
        kind = AsyncCheckpointerType(self._system.removeprefix("dcp async "))
        future = dcp.async_save(state, checkpoint_id=folder, async_checkpointer_type=kind)
        return lambda: (future.result(), flush(folder))

    def look(self) -> None:
        """Until it is durable, without a wait(): a copy rests until there is one."""
        while self._handle is not None and not self._handle.done():
            time.sleep(0.002)

    def keep_last(self) -> None:
        """What was saved before goes, as with keep=1."""
        if self._ckpt is not None:
            self._ckpt.wait()
            return
        for saved in range(1, self._saved):
            shutil.rmtree(self._folder / str(saved), ignore_errors=True)

    def waited(self) -> float:
        """In save(), and in the gate before step()."""
        return self._ckpt.costs.seconds if self._ckpt is not None else 0.0

    def load(self) -> None:
        import torch
        import torch.distributed.checkpoint as dcp

        if self._ckpt is not None:
            self._ckpt.restore(model=self._model, optimizer=self._opt)
            return
        folder = max(self._folder.iterdir())
        if self._system == "safetensors":
            from safetensors.torch import load_file

            loaded = load_file(folder / "state.safetensors")
            for name, tensor in flat(self._model, self._opt).items():
                tensor.copy_(loaded[name])
            return
        state = {"model": self._model.state_dict(), "optimizer": self._opt.state_dict()}
        if self._system == "torch.save":
            state = torch.load(folder / "state.pt", weights_only=True)
        else:
            dcp.load(state, checkpoint_id=folder, no_dist=self._alone)
        self._model.load_state_dict(state["model"])
        self._opt.load_state_dict(state["optimizer"])


def opened(system: str, folder: Path) -> Any:
    if not system.startswith("stoker"):
        return None
    import stoker

    return stoker.Checkpoints(f"dir:{folder}/saved", keep=1)


def started(system: str, state_bytes: int, folder: Path, ckpt: Any) -> tuple[Any, Any]:
    """The model, with moments, and its optimizer. A loaded run begins in memory of its own."""
    model, opt = made(state_bytes)
    if system == "stoker offloaded":
        return offloaded(model, opt, state_bytes, folder, ckpt)
    step(model, opt)
    return model, opt


def offloaded(model: Any, opt: Any, state_bytes: int, folder: Path, ckpt: Any) -> tuple[Any, Any]:
    import stoker

    dram = f"{max(state_bytes // 3, 96 * MIB) // MIB}MiB"
    options = {"store": f"{folder}/store", "dram": dram, "checkpoints": ckpt}
    return stoker.offload(model, opt, restore=ckpt, **options)


def while_training(saver: Saver, model: Any, opt: Any) -> dict[str, float]:
    alone = [step(model, opt) for _ in range(BASE_STEPS)]
    before, durable, waited = own_bytes(), [], saver.waited()
    with Peak() as peak:
        begin = time.monotonic()
        wait = saver.save()
        stall = time.monotonic() - begin

        def until_durable() -> None:
            saver.look()
            wait()
            durable.append(time.monotonic() - begin)

        thread = threading.Thread(target=until_durable)
        thread.start()
        taken = []
        while any_rank(thread.is_alive()):
            taken.append(step(model, opt))
        thread.join()
    alone += [step(model, opt) for _ in range(BASE_STEPS)]  # disks change their pace
    base = statistics.mean(alone)
    slower = sum(taken) - len(taken) * base
    waited = saver.waited() - waited
    if waited:  # the gate holds a step back, too
        slower, stall = slower - (waited - stall), max(stall, waited)
    return {
        "stall_seconds": stall,
        "slowdown_seconds": max(0.0, slower),
        "durable_seconds": durable[0],
        "extra_memory_bytes": max(0, peak.bytes - before),
        "step_seconds": base,
    }


def one(system: str, state_bytes: int, folder: Path, rank: int) -> dict[str, float]:
    import torch.distributed as dist

    if system.startswith("dcp async") or ranks_of(system) > 1:
        group = (folder / "group").absolute().as_uri()
        dist.init_process_group("gloo", init_method=group, rank=rank, world_size=ranks_of(system))
    saved = folder / "saved"
    saved.mkdir(exist_ok=True)
    ckpt = opened(system, folder)
    model, opt = started(system, state_bytes, folder, ckpt)
    saver = Saver(system, saved, model, opt, ckpt)
    for _ in range(SAVED_BEFORE):
        saver.save()()
        saver.keep_last()
    if system == "stoker offloaded":  # one that saves rarely, as its next save tells nothing yet
        ckpt.close()
        ckpt = opened(system, folder)
        saver = Saver(system, saved, model, opt, ckpt)
    row = while_training(saver, model, opt)
    saver.keep_last()
    begin = time.monotonic()
    saver.save()()
    row["paused_seconds"] = time.monotonic() - begin
    saver.keep_last()
    if ckpt is not None:
        ckpt.close()
    any_rank(True)  # all of them have
    row["bytes_written"] = written(saved) // len(list(saved.iterdir()))
    row["restore_cold_seconds"] = restored(system, state_bytes, folder, model, opt)
    if not several():
        return row
    rows: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(rows, row)
    memory = sum(each["extra_memory_bytes"] for each in rows)
    return {name: max(each[name] for each in rows) for name in row} | {"extra_memory_bytes": memory}


def restored(system: str, state_bytes: int, folder: Path, model: Any, opt: Any) -> float:
    """Into a model that is there already; an offloaded one, into a new store."""
    if system == "stoker offloaded":
        opt.close()
        shutil.rmtree(folder / "store")
        model, opt = made(state_bytes)
    forget(folder / "saved")
    ckpt = opened(system, folder)
    begin = time.monotonic()
    if system == "stoker offloaded":
        _, opt = offloaded(model, opt, state_bytes, folder, ckpt)
        opt.close()
    else:
        Saver(system, folder / "saved", model, opt, ckpt).load()
    taken = time.monotonic() - begin
    if ckpt is not None:
        ckpt.close()
    return taken


def ceilings(folder: Path) -> dict[str, float]:
    """Bytes a second that fio writes and reads with 2 MiB pages, as `stoker bench io` runs it."""
    command = [str(Path(sys.executable).parent / "stoker"), "bench", "io", "--json", str(folder)]
    command += ["--seconds", "0.5", "--repetitions", "1", "--file-size", "1GiB"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    rows = json.loads(done.stdout)["results"]
    found = {}
    for way in ("read", "write"):
        best = max(row["fio_gbps"] for row in rows if row["op"] == way)
        found[f"{way}_bytes_per_second"] = 1e9 * best
    return found | {"write_new_bytes_per_second": rate_of_new_files(folder)}


def rate_of_new_files(folder: Path) -> float:
    """Bytes a second of direct writes to a new file, from 2 MiB pages, reserved before and flushed
    behind: fio above writes to blocks that a file has, and a checkpoint is new files."""
    size, chunk, threads, path = 1 << 30, 4 * MIB, 4, folder / "new"
    rates = []
    with mmap.mmap(-1, 64 * MIB) as memory:
        memory.madvise(mmap.MADV_HUGEPAGE)
        memory.write(os.urandom(MIB) * 64)
        for _ in range(3):
            begin = time.monotonic()
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT)
            os.posix_fallocate(file, 0, size)
            with memoryview(memory) as view, ThreadPoolExecutor(threads) as pool:
                write = lambda at: os.pwrite(file, view[at % len(view) :][:chunk], at)
                assert sum(pool.map(write, range(0, size, chunk))) == size
            os.fdatasync(file)
            os.close(file)
            rates.append(size / (time.monotonic() - begin))
            path.unlink()
    return statistics.median(rates)


def cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(": ")[1] for line in lines if line.startswith("model name")), "unknown")


def cpu_features() -> list[str]:
    flags = next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if "flags" in line)
    known = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "vaes", "vpclmulqdq")
    return sorted(set(flags.split()) & set(known))


def measure(system: str, state_bytes: int, where: Path) -> dict[str, float]:
    with tempfile.TemporaryDirectory(dir=where) as folder:
        command = [sys.executable, __file__, "--state-bytes", str(state_bytes), "--one"]
        given = [[*command, system, folder, str(rank)] for rank in range(ranks_of(system))]
        others = [subprocess.Popen(each, stdout=subprocess.DEVNULL) for each in given[1:]]
        try:
            done = subprocess.run(given[0], check=True, capture_output=True, text=True)
        finally:
            for other in others:
                other.wait(60)
        return json.loads(done.stdout.splitlines()[-1])


def section(result: dict[str, Any]) -> str:
    """For docs/numbers.md."""
    rows = {row["system"]: row for row in result["results"]}
    ours, away = rows["stoker"], rows["stoker offloaded"]
    peers = [row for name, row in rows.items() if name.startswith("dcp async")]
    size = ours["state_bytes"]
    lines = [
        "| system | stall s | slow-down s | durable s | paused s | restore s | more memory MiB |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, row in rows.items():
        cells = [f"{row[figure]:.2f}" for figure in FIGURES]
        cells.append(f"{row['extra_memory_bytes'] / MIB:.0f}")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    disk, machine = result["disk"], result["machine"]
    reads, writes = disk["read_bytes_per_second"], disk["write_bytes_per_second"]
    rate = ours["bytes_written"] / ours["durable_seconds"]
    bound = max(0.0, (size - 256 * MIB) / rate - ours["step_seconds"]) + 0.02
    cost = {row["system"]: row["stall_seconds"] + row["slowdown_seconds"] for row in rows.values()}
    least = min(cost[row["system"]] for row in peers)
    slower = (away["stall_seconds"] + away["slowdown_seconds"]) / away["durable_seconds"]
    rate_paused = size / ours["paused_seconds"]
    fresh = disk.get("write_new_bytes_per_second")  # older results have it not
    loads = size / ours["restore_cold_seconds"] / reads
    more = ours["extra_memory_bytes"] / MIB
    goals = [
        (
            "in memory, stall",
            f"{ours['stall_seconds']:.3f} s",
            f"at most {bound:.3f} s",
            ours["stall_seconds"] <= bound,
        ),
        (
            "stall and slow-down beside DCP async",
            f"{cost['stoker'] / least:.2f} times",
            "at most 0.5 times the better one",
            cost["stoker"] <= 0.5 * least,
        ),
        ("memory beyond the state", f"{more:.0f} MiB", "at most 256 MiB", more <= 256),
        (
            "durable while training pauses, of fio",
            f"{rate_paused / writes:.2f}",
            "at least 0.9",
            rate_paused >= 0.9 * writes,
        ),
        ("restore, of fio", f"{loads:.2f}", "at least 0.9", loads >= 0.9),
        ("offloaded: the copy slows steps by", f"{slower:.1%}", "at most 3 %", slower <= 0.03),
    ]
    if fresh is not None:
        goals.append(
            (
                "durable while training pauses, of direct writes to new files",
                f"{rate_paused / fresh:.2f}",
                "at least 0.9",
                rate_paused >= 0.9 * fresh,
            )
        )
    lines += ["", "| goal | figure | wanted | |", "|---|---|---|---|"]
    for goal, figure, wanted, met in goals:
        lines.append(f"| {goal} | {figure} | {wanted} | {'met' if met else 'not met'} |")
    lines += [
        "",
        f"State: {size / 1e9:.1f} GB; a step in memory takes {ours['step_seconds']:.2f} s.",
        f"fio with 2 MiB pages writes {writes / 1e9:.2f} GB/s and reads {reads / 1e9:.2f} GB/s.",
        *([] if fresh is None else [f"Direct writes to new files reach {fresh / 1e9:.2f} GB/s."]),
        f"Medians of {result['settings']['rounds']} rounds, {machine['cores']} cores",
        f"({', '.join(machine['features'])}), torch {result['versions']['torch']};",
        f"average load of its last minute {machine['load'][0]:.1f}.",
        "Beside training the copy of an offloaded run takes"
        f" {away['durable_seconds']:.0f} s. Saves at least",
        f"{(away['stall_seconds'] + away['slowdown_seconds']) / 0.03:.0f} s apart slow steps by 3 %"
        " at most, copies among them.",
        *earlier_rows(result),
    ]
    return "\n".join(lines)


def earlier_rows(result: dict[str, Any]) -> list[str]:
    """A sentence where the last run did not measure all."""
    last = result["settings"].get("systems", SYSTEMS)
    earlier = [row["system"] for row in result["results"] if row["system"] not in last]
    if not earlier:
        return []
    return [
        f"The last run measured {', '.join(last)} and the disk; other rows are of earlier runs."
    ]


def main(given: list[str] | None = None) -> None:
    import safetensors
    import torch

    import stoker

    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--state-bytes", type=int, default=1_000_000_000)
    arguments.add_argument("--rounds", type=int, default=2)
    arguments.add_argument("--systems", nargs="+", choices=SYSTEMS, default=SYSTEMS)
    arguments.add_argument("--out", type=Path, default=ROOT / "bench/results/checkpoint.json")
    arguments.add_argument("--where", type=Path, default=ROOT / "out", help="a folder of the disk")
    arguments.add_argument("--markdown", action="store_true", help="print the section of --out")
    arguments.add_argument("--one", nargs=3, help=argparse.SUPPRESS)  # system, folder, rank
    args = arguments.parse_args(given)
    if args.one:
        system, folder, rank = args.one
        print(json.dumps(one(system, args.state_bytes, Path(folder), int(rank))))
        return
    if args.markdown:
        print(section(json.loads(args.out.read_text())))
        return
    args.where.mkdir(parents=True, exist_ok=True)
    if shutil.disk_usage(args.where).free < 3 * args.state_bytes:
        raise SystemExit(f"{args.where} has too little room for states of {args.state_bytes} bytes")
    rows: dict[str, list[dict[str, float]]] = {system: [] for system in args.systems}
    limits = []
    for number in range(args.rounds):
        limits.append(ceilings(args.where))
        for system in args.systems:
            rows[system].append(measure(system, args.state_bytes, args.where))
            print(f"round {number + 1} {system}: {rows[system][-1]}", file=sys.stderr, flush=True)
    results = []
    for system, measured in rows.items():
        values = {name: [row[name] for row in measured] for name in (*FIGURES, *COUNTS)}
        results.append(
            {
                "system": system,
                "state_bytes": args.state_bytes,
                "ranks": ranks_of(system),
                **{name: statistics.median(each) for name, each in values.items()},
                "ranges": {name: [min(each), max(each)] for name, each in values.items()},
                "step_seconds": statistics.median(row["step_seconds"] for row in measured),
            }
        )
    machine = {"cpu": cpu_name(), "features": cpu_features(), "cores": os.cpu_count()}
    versions = {"stoker": stoker.__version__, "torch": torch.__version__}
    if args.out.exists():  # rows of systems that this run has left out
        results += [
            row
            for row in json.loads(args.out.read_text())["results"]
            if row["system"] not in rows and row["state_bytes"] == args.state_bytes
        ]
        results.sort(key=lambda row: SYSTEMS.index(row["system"]))
    made_with = {"rounds": args.rounds, "state_bytes": args.state_bytes, "staging": "256MiB"}
    made_with["systems"] = list(args.systems)
    disk = {name: statistics.median(each[name] for each in limits) for name in limits[0]}
    document = {
        "results": results,
        "disk": disk,
        "machine": machine | {"load": os.getloadavg()},
        "versions": versions | {"safetensors": safetensors.__version__},
        "settings": made_with,
    }
    args.out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
