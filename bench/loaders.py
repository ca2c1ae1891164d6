"""Samples a second of `stoker.data.Loader` beside other loaders, from the local disk and from S3.

Writes {system, data, store, cold, workers, samples_per_second, range, cpu_seconds_per_gb,
memory_bytes, first_batch_seconds} a line of `results`; of resnet50 and unet3d, which are shaped
as DLIO's and scaled, also `utilisation`. Each run is a process of its own; rounds are
interleaved; the figure is the median, `range` the least and the most. Cold: the page cache has
nothing of the files when a run begins, and the run ends after one epoch at the latest. Memory is
what the processes of a run have for themselves (anonymous and shared memory, no page cache).
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import resource
import signal
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "bench"))
sys.path.insert(0, str(ROOT / "tests/python"))
import loader_systems as systems  # noqa: E402

GIB = 1 << 30
S3_BYTES = GIB // 2  # of samples, in each form: the server keeps all in memory
PEERS = [name for name in systems.SYSTEMS if name != "stoker"]


# ---- one run, in its process


def one(
    system: str, folder: str, kind: str, workers: int, seconds: float, most: int, where: str
) -> dict:
    """most: samples after which it ends."""
    import torch

    torch.set_num_threads(1)
    _, _, module, run = systems.SYSTEMS[system]
    importlib.import_module(module)
    extra = (where,) if where else ()
    used, began = cpu_seconds(), time.perf_counter()
    batches = run(Path(folder), kind, workers, *extra)
    next(batches)
    first = time.perf_counter() - began
    # Speed counts from the second batch on: workers and connections are there then.
    count, started = 0, time.perf_counter()
    pause, given = systems.pause_of(kind), 0
    for batch in batches:
        count, given = count + len(batch), given + 1
        if pause:
            time.sleep(pause)
        took = time.perf_counter() - started
        if took >= seconds or count >= most:
            break
    batches.close()
    del batches
    gigabytes = (count + systems.batch_of(kind)) * systems.sample_bytes(kind) / 1e9
    answer = {
        "samples_per_second": count / took,
        "cpu_seconds_per_gb": (cpu_seconds() - used) / gigabytes,
        "first_batch_seconds": first,
    }
    # As MLPerf Storage has it: of the time behind the first step, what was computing.
    return answer | ({"utilisation": given * pause / took} if pause else {})


def cpu_seconds() -> float:
    """Of this process and of the children that ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


# ---- the machine


def forget_pages(folder: Path) -> None:
    """Takes the files out of the page cache."""
    os.sync()
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def touch_pages(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                while file.read(16 << 20):
                    pass


def own_bytes(pid: int) -> int:
    """Memory of a process and of its children that is no page cache."""
    total, left = 0, [pid]
    while left:
        each = left.pop()
        with contextlib.suppress(OSError):
            rollup = Path(f"/proc/{each}/smaps_rollup").read_text()
            for line in rollup.splitlines():
                if line.startswith(("Pss_Anon:", "Pss_Shmem:")):
                    total += int(line.split()[1]) << 10
            for task in Path(f"/proc/{each}/task").iterdir():
                left += [int(word) for word in (task / "children").read_text().split()]
    return total


def run_apart(python: str, words: list[str], environment: dict[str, str], most: float) -> dict:
    """The answer of one() in a process of its own, with its memory. Ended after `most` seconds."""
    process = subprocess.Popen(
        [python, __file__, "--one", *words],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        start_new_session=True,
    )
    memory, over = [0], threading.Event()

    def watch() -> None:
        while not over.wait(0.5):
            memory[0] = max(memory[0], own_bytes(process.pid))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        out, _ = process.communicate(timeout=most)
    except subprocess.TimeoutExpired:
        out = ""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # and the workers that it left behind
    process.wait()
    over.set()
    watcher.join()
    if not out:
        raise RuntimeError(f"{words[0]} gave no answer in {most:.0f} s, or failed")
    return {**json.loads(out.splitlines()[-1]), "memory_bytes": memory[0]}


def random_reads_a_second(path: Path) -> float:
    """Of 4 KiB past the page cache at depth 64, by fio: what the disk gives."""
    done = subprocess.run(
        ["fio", "--name=ceiling", f"--filename={path}", "--rw=randread", "--bs=4k", "--direct=1"]
        + ["--ioengine=io_uring", "--iodepth=64", "--runtime=10", "--time_based", "--readonly"]
        + ["--output-format=json"],
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout)["jobs"][0]["read"]["iops"]


def machine(peers: str) -> dict:
    info = Path("/proc/cpuinfo").read_text().splitlines()
    fields = {line.partition(":")[0].strip(): line.partition(":")[2].strip() for line in info}
    flags = set(fields.get("flags", "").split())
    ask = "import importlib.metadata as m, json; print(json.dumps({n: m.version(n) for n in "
    ask += '("torch", "webdataset", "mosaicml-streaming", "litdata", "spdl-io")}))'
    said = subprocess.run([peers, "-c", ask], capture_output=True, check=True).stdout
    return {
        "kernel": os.uname().release,
        "cpu": fields.get("model name"),
        "cores": os.cpu_count(),
        "cpu_features": sorted(flags & {"avx2", "avx512f", "sha_ni", "vaes"}),
        "versions": json.loads(said),
    }


# ---- the comparison


class Bench:
    def __init__(self, given: argparse.Namespace) -> None:
        self.given, self.root, self.results = given, Path(given.dir), []

    def count(self, kind: str) -> int:
        return int(self.given.gib * GIB) // systems.sample_bytes(kind)

    def make(self, kind: str, name: str, root: Path | None = None, count: int = 0) -> Path:
        form, root = systems.form_of(name, kind), root or self.root
        began = time.perf_counter()
        words = [str(root), form, kind, str(count or self.count(kind))]
        subprocess.run([self.given.peers, __file__, "--make", *words], check=True)
        folder = root / f"{kind}.{form}"
        if name == "stoker" and form == "tar":
            self.index(f"dir:{folder}", systems.index_of(folder))
        print(f"{kind} as {form}: {time.perf_counter() - began:.0f} s", file=sys.stderr)
        return folder

    def index(self, store: str, out: Path) -> None:
        words = [sys.executable, "-m", "stoker.dataset", "index", store, "--out", str(out)]
        subprocess.run(words, check=True)

    def compare(self, kind: str, names: list[str], cold: bool, store: str = "local") -> None:
        folders = {name: self.make(kind, name) for name in names}
        runs: dict[str, list[dict]] = {}
        for number in range(self.given.rounds):
            for name in names:
                (forget_pages if cold else touch_pages)(folders[name])
                most = self.count(kind) - 2 * systems.batch_of(kind) if cold else sys.maxsize
                run = self.run(name, folders[name], kind, most)
                if run is None:
                    continue
                print(f"round {number + 1}: {name} {kind} {run}", file=sys.stderr)
                runs.setdefault(name, []).append(run)
        for name, each in runs.items():
            self.add(name, kind, store, cold, each)

    def run(self, name: str, folder: Path, kind: str, most: int, where: str = "", env=None):
        words = [name, str(folder), kind, str(self.given.workers), str(self.given.seconds)]
        words += [str(most), where]
        python = sys.executable if name == "stoker" else self.given.peers
        try:
            return run_apart(python, words, env or {}, 2 * self.given.seconds + 60)
        except RuntimeError as error:
            print(error, file=sys.stderr)
            return None

    def add(self, name: str, kind: str, store: str, cold: bool, runs: list[dict]) -> None:
        speeds = [run["samples_per_second"] for run in runs]
        row = {
            "system": name,
            "data": kind,
            "store": store,
            "cold": cold,
            "workers": self.given.workers,
            "samples_per_second": round(statistics.median(speeds)),
            "range": [round(min(speeds)), round(max(speeds))],
        }
        for key, digits in (
            ("cpu_seconds_per_gb", 2),
            ("memory_bytes", None),
            ("first_batch_seconds", 3),
        ):
            row[key] = round(statistics.median(run[key] for run in runs), digits)
        if all("utilisation" in run for run in runs):
            row["utilisation"] = round(statistics.median(run["utilisation"] for run in runs), 3)
        self.results.append(row)
        print(json.dumps(row), flush=True)

    def from_s3(self, kind: str) -> None:
        """From a Ceph RGW, each in its own form and by its own client. The samples are as many as
        its memory takes. A run ends after one epoch: peers keep on the disk what they fetched."""
        import rgw

        names = [name for name in self.given.systems if name in systems.FROM_S3]
        count = min(self.count(kind), S3_BYTES // systems.sample_bytes(kind))
        root = self.root / "s3"
        folders = {name: self.make(kind, name, root, count) for name in names}
        runs: dict[str, list[dict]] = {}
        with rgw.gateway(8 << 30) as served:
            os.environ.update(served.environment())
            at = {
                name: f"s3://{served.bucket}/{folder.name}?endpoint={served.endpoint}"
                for name, folder in folders.items()
            }
            for folder in dict.fromkeys(folders.values()):
                upload(folder, next(at[name] for name in names if folders[name] == folder))
            if kind == "images" and "stoker" in names:
                self.index(at["stoker"], systems.index_of(folders["stoker"]))
            most = count - 2 * systems.batch_of(kind)
            for number in range(self.given.rounds):
                for name in names:
                    run = self.run(name, folders[name], kind, most, at[name], served.environment())
                    if run is None:
                        continue
                    print(f"round {number + 1}: {name} {kind} from S3 {run}", file=sys.stderr)
                    runs.setdefault(name, []).append(run)
        for name, each in runs.items():
            self.add(name, kind, "s3", True, each)


def upload(folder: Path, where: str) -> None:
    import stoker

    with stoker.open_store(where) as store:
        for path in sorted(folder.iterdir()):
            change = store.begin()
            data = path.read_bytes()
            change.resize(path.name, len(data))
            change.write_bytes(path.name, 0, data)
            change.commit().wait()


def table(result: dict) -> str:
    """For docs/numbers.md: a line a system, a column a case."""
    rows = result["results"]
    cases = list(dict.fromkeys((row["data"], row["store"], row["cold"]) for row in rows))
    head = [f"{data}, {store}, {'cold' if cold else 'warm'}" for data, store, cold in cases]
    text = ["| samples/s (CPU s/GB) | " + " | ".join(head) + " |"]
    text.append("|---" * (len(cases) + 1) + "|")
    cells = {(row["system"], row["data"], row["store"], row["cold"]): row for row in rows}
    for name in dict.fromkeys(row["system"] for row in rows):
        line = [name]
        for case in cases:
            row = cells.get((name, *case))
            line.append(
                f"{row['samples_per_second']:,} ({row['cpu_seconds_per_gb']:.1f})" if row else "-"
            )
        text.append("| " + " | ".join(line) + " |")
    text.append("")
    for case in cases:
        peers = [row for row in rows if row["system"] != "stoker"]
        peers = [row for row in peers if (row["data"], row["store"], row["cold"]) == case]
        ours = cells.get(("stoker", *case))
        if not peers or not ours:
            continue
        best = max(peers, key=lambda row: row["samples_per_second"])
        least = min(peers, key=lambda row: row["cpu_seconds_per_gb"])
        text.append(
            f"- {case[0]}, {case[1]}, {'cold' if case[2] else 'warm'}: "
            f"{ours['samples_per_second'] / best['samples_per_second']:.1f} times "
            f"{best['system']}, the quickest peer; CPU seconds a GB "
            f"{ours['cpu_seconds_per_gb'] / least['cpu_seconds_per_gb']:.2f} of "
            f"{least['system']}'s, the least. First batch {ours['first_batch_seconds']:.2f} s."
        )
    for kind in systems.DLIO:
        told = [
            f"{row['system']} {row['utilisation']:.1%}"
            for row in rows
            if row["data"] == kind and "utilisation" in row
        ]
        if told:
            text.append(f"- {kind}, accelerator utilisation: {', '.join(told)}.")
    if result["random_reads_per_second"]:
        ours = cells["stoker", "tokens", "local", True]["samples_per_second"]
        text.append(
            f"- tokens, cold: {ours / result['random_reads_per_second']:.2f} of fio's random reads "
            f"of 4 KiB ({result['random_reads_per_second']:,} a second)."
        )
    return "\n".join(text)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--peers", default=sys.executable, help="a Python with the peers")
    options.add_argument("--dir", default="out/bench/loaders", help="where the samples are made")
    options.add_argument("--json", default=str(ROOT / "bench/results/loaders.json"))
    options.add_argument("--gib", type=float, default=4, help="of samples, of each kind")
    options.add_argument("--seconds", type=float, default=20, help="of each run")
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--workers", type=int, default=2, help="processes or threads of the peers")
    options.add_argument("--systems", nargs="*", default=list(systems.SYSTEMS))
    kinds = [*systems.KINDS, systems.DECODED, *systems.DLIO]
    options.add_argument("--kinds", nargs="*", default=kinds, choices=kinds, help="of samples")
    options.add_argument("--states", nargs="*", default=["cold", "warm"], help="of the page cache")
    options.add_argument("--no-s3", action="store_true", help="leave out S3")
    options.add_argument("--markdown", type=Path, help="print the table of this result instead")
    options.add_argument("--one", nargs=7, help=argparse.SUPPRESS)
    options.add_argument("--make", nargs=4, help=argparse.SUPPRESS)
    given = options.parse_args()
    if given.markdown:
        print(table(json.loads(given.markdown.read_text())))
        return
    if given.one:
        name, folder, kind, workers, seconds, most, where = given.one
        run = one(name, folder, kind, int(workers), float(seconds), int(most), where)
        print(json.dumps(run))
        return
    if given.make:
        root, form, kind, count = given.make
        systems.made(Path(root), form, kind, int(count))
        return
    load = os.getloadavg()
    bench = Bench(given)
    for kind in given.kinds:
        if kind == systems.DECODED:  # the processor is what limits it
            bench.compare(kind, [n for n in given.systems if n in systems.DECODERS], cold=False)
            continue
        if kind in systems.DLIO:  # from the disk, as the original
            bench.compare(kind, given.systems, cold=True)
            continue
        for cold in [state == "cold" for state in given.states]:
            bench.compare(kind, given.systems, cold)
        if not given.no_s3:
            bench.from_s3(kind)
    flat = bench.root / "tokens.flat/flat.bin"
    text = {
        "machine": machine(given.peers),
        "load_average": [f"{load[0]:.2f}", f"{os.getloadavg()[0]:.2f}"],
        "rounds": given.rounds,
        "seconds": given.seconds,
        "gib": given.gib,
        "batch": systems.BATCH,
        "random_reads_per_second": round(random_reads_a_second(flat)) if flat.exists() else 0,
        "results": bench.results,
    }
    Path(given.json).write_text(json.dumps(text, indent=1) + "\n")


if __name__ == "__main__":
    main()
