"""GET and PUT of an s3: store beside boto3, obstore, s3torchconnector and curl, on loopback.

The server is an RGW of its own; then nginx serves the large object, as the ceiling of GET. Writes
{system, operation, server, object_bytes, gb_per_second, range, cpu_seconds_per_gb, requests} a line
of `results`. Rounds are interleaved; the figure is the median, `range` the least and the most;
`requests` are those that the server saw for one run, the warm-up included. The server runs on the
same cores, so the figures compare clients and say nothing of a network.
"""

from __future__ import annotations

import argparse
import atexit
import concurrent.futures
import ctypes
import io
import json
import os
import queue
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests/python"))
import nginx  # noqa: E402
import rgw  # noqa: E402

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
AHEAD = 8  # objects under way at once
OURS = ["stoker", "stoker.read_bytes"]
PEERS = ["boto3", "obstore", "s3torchconnector"]  # run by their Python


def cpu_seconds() -> float:
    """Of this process and of the children that ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def clients(system: str, endpoint: str, bucket: str):
    """get(key, memory), put(key, data), to be called by AHEAD threads. Who can reads into the
    memory, which was touched before; the others return what they have made."""
    access = os.environ.get("AWS_ACCESS_KEY_ID", "")  # empty: nginx, which wants no signature
    secret = os.environ.get("AWS_SECRET_ACCESS_KEY", "")
    if system in OURS:
        import stoker

        sign = "" if access else "&anon=1"
        opened = stoker.open_store(f"s3://{bucket}?endpoint={endpoint}{sign}", dram="4GiB")
        store = opened.__enter__()
        atexit.register(opened.__exit__, None, None, None)

        def put(key: str, data: bytes) -> None:
            change = store.begin()
            change.resize(key, len(data))
            change.write_bytes(key, 0, data)
            change.commit().wait()

        if system == "stoker.read_bytes":
            return lambda key, memory: [store.read_bytes(key, 0, len(memory))], put

        def get(key: str, memory: bytearray) -> None:
            address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
            store.read(key, 0, address, len(memory)).wait()

        return get, put
    if system == "boto3":
        import boto3
        from boto3.s3.transfer import TransferConfig
        from botocore.config import Config

        client = boto3.client(
            "s3",
            endpoint_url=endpoint,
            region_name="us-east-1",
            config=Config(max_pool_connections=64, s3={"addressing_style": "path"}),
        )
        config = TransferConfig(max_concurrency=16, multipart_chunksize=16 * MIB)

        def get(key: str, memory: bytearray) -> None:
            if len(memory) <= 8 * MIB:
                body, got = client.get_object(Bucket=bucket, Key=key)["Body"], 0
                while some := body.readinto(memoryview(memory)[got:]):
                    got += some
                assert got == len(memory)
            else:
                client.download_fileobj(bucket, key, Into(memory), Config=config)

        def put(key: str, data: bytes) -> None:
            if len(data) <= 8 * MIB:
                client.put_object(Bucket=bucket, Key=key, Body=data)
            else:
                client.upload_fileobj(io.BytesIO(data), bucket, key, Config=config)

        return get, put
    if system == "obstore":
        import obstore
        from obstore.store import S3Store

        store = S3Store(
            bucket,
            endpoint=endpoint,
            region="us-east-1",
            access_key_id=access,
            secret_access_key=secret,
            client_options={"allow_http": True},
        )

        def get(key: str, memory: bytearray) -> list:
            if len(memory) <= 8 * MIB:
                return [obstore.get(store, key).bytes()]
            starts = list(range(0, len(memory), 8 * MIB))
            ends = [min(start + 8 * MIB, len(memory)) for start in starts]
            return obstore.get_ranges(store, key, starts=starts, ends=ends, coalesce=0)

        return get, lambda key, data: obstore.put(store, key, data, chunk_size=16 * MIB)

    if system == "s3torchconnector":
        from s3torchconnector._s3client import S3Client
        from s3torchconnector._s3client.s3client_config import S3ClientConfig

        config = S3ClientConfig(part_size=16 * MIB, force_path_style=True)
        client = S3Client("us-east-1", endpoint=endpoint, s3client_config=config)

        def get(key: str, memory: bytearray) -> None:
            reader, got = client.get_object(bucket, key), 0
            while some := reader.readinto(memoryview(memory)[got:]):
                got += some
            assert got == len(memory)

        return get, None

    sign = ["-sf"]
    if access:
        sign += ["--aws-sigv4", "aws:amz:us-east-1:s3", "--user", f"{access}:{secret}"]
        sign += ["-H", "x-amz-content-sha256: UNSIGNED-PAYLOAD"]

    def curl(key: str, memory: bytearray) -> None:
        # As many parallel ranges as the store has, into nothing: the ceiling.
        bytes_ = len(memory)
        ranges = range(0, bytes_, 8 * MIB)
        words = ["curl", "--no-progress-meter", "-Z", "--parallel-max", "16"]
        for start in ranges:
            end = min(start + 8 * MIB, bytes_) - 1
            url = f"{endpoint}/{bucket}/{key}"
            words += [*(["--next"] if start else []), *sign]
            words += ["-r", f"{start}-{end}", "-o", "/dev/null", url]
        subprocess.run(words, check=True)

    return curl, None


class Into(io.RawIOBase):
    """A file that is this memory."""

    def __init__(self, memory: bytearray) -> None:
        self.memory, self.at = memoryview(memory), 0

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.at

    def seek(self, to: int, whence: int = 0) -> int:
        self.at = to + (0, self.at, len(self.memory))[whence]
        return self.at

    def write(self, data: bytes) -> int:
        self.memory[self.at : self.at + len(data)] = data
        self.at += len(data)
        return len(data)


def one(system: str, operation: str, bytes_: int, count: int, endpoint: str, bucket: str) -> dict:
    get, put = clients(system, endpoint, bucket)
    data = os.urandom(min(bytes_, 16 * MIB)) * (bytes_ // min(bytes_, 16 * MIB))
    ahead = min(AHEAD, count)
    memories = queue.SimpleQueue()
    for _ in range(ahead if operation == "get" else 0):
        memories.put(bytearray(data))

    def work(index: int) -> None:
        if operation == "put":
            put(f"{bytes_}-{index}", data)
            return
        memory = memories.get()
        made = get(f"{bytes_}-{index}", memory)
        assert made is None or sum(len(each) for each in made) == bytes_
        memories.put(memory)

    # Connections and code are warm; the count of requests holds it, too.
    small = min(bytes_, 8 * MIB)
    if operation == "put":
        put(f"{small}-0", data[:small])
    else:
        get(f"{small}-0", bytearray(small))
    with concurrent.futures.ThreadPoolExecutor(ahead) as threads:
        began, used = time.perf_counter(), cpu_seconds()
        list(threads.map(work, range(count)))
        seconds, cpu = time.perf_counter() - began, cpu_seconds() - used
    gigabytes = bytes_ * count / 1e9
    return {"gb_per_second": gigabytes / seconds, "cpu_seconds_per_gb": cpu / gigabytes}


class Bench:
    """Runs systems in turn against one server, and collects the rows."""

    def __init__(self, rounds: int, peers: str) -> None:
        self.rounds, self.peers, self.results = rounds, peers, []

    def measure(self, server: dict, systems: list[str], operation: str, size: int, count: int):
        """server: name, endpoint, bucket, environment, and log(): the requests it noted."""
        runs: dict[str, list[dict]] = {}
        for _ in range(self.rounds):
            for system in systems:
                case = (system, operation, size, count, server["endpoint"], server["bucket"])
                before = server["log"]()
                done = subprocess.run(
                    [self.peers if system in PEERS else sys.executable, __file__, "--one"]
                    + [str(word) for word in case],
                    env={**os.environ, **server["environment"]},
                    stdout=subprocess.PIPE,
                    text=True,
                )
                if done.returncode != 0:
                    print(f"{system} failed: {operation} of {size} bytes", file=sys.stderr)
                    continue
                run = {**json.loads(done.stdout), "requests": server["log"]() - before}
                runs.setdefault(system, []).append(run)
        for system, each in runs.items():
            speeds = [run["gb_per_second"] for run in each]
            cpu = statistics.median(run["cpu_seconds_per_gb"] for run in each)
            row = {
                "system": system,
                "operation": operation,
                "server": server["name"],
                "object_bytes": size,
                "objects": count,
                "gb_per_second": round(statistics.median(speeds), 4),
                "range": [round(min(speeds), 4), round(max(speeds), 4)],
                "cpu_seconds_per_gb": round(cpu, 3),
                "requests": int(statistics.median(run["requests"] for run in each)),
            }
            self.results.append(row)
            print(json.dumps(row), flush=True)


def lines(path: Path, mark: bytes) -> int:
    time.sleep(0.2)  # what the server writes behind its answers
    return path.read_bytes().count(mark)


def machine(peers: str) -> dict:
    info = Path("/proc/cpuinfo").read_text().splitlines()
    fields = {line.partition(":")[0].strip(): line.partition(":")[2].strip() for line in info}
    flags = set(fields.get("flags", "").split())
    ask = "import importlib.metadata as m, json; print(json.dumps({n: m.version(n) for n in "
    ask += '("boto3", "obstore", "s3torchconnector")}))'
    versions = json.loads(
        subprocess.run([peers, "-c", ask], capture_output=True, check=True).stdout
    )
    for name, words in {
        "curl": ["curl", "--version"],
        "radosgw": ["radosgw", "--version"],
        "nginx": [nginx.program(), "-v"],
    }.items():
        said = subprocess.run(words, capture_output=True, text=True)
        versions[name] = (said.stdout or said.stderr).splitlines()[0]
    return {
        "kernel": os.uname().release,
        "cpu": fields.get("model name"),
        "cores": os.cpu_count(),
        "cpu_features": sorted(flags & {"avx2", "avx512f", "sha_ni", "vaes", "vpclmulqdq"}),
        "versions": versions,
    }


def table(result: dict) -> str:
    """For docs/numbers.md: a line for each case, GB/s and in parentheses CPU seconds a GB."""
    systems = list(dict.fromkeys(row["system"] for row in result["results"]))
    systems.sort(key=[*OURS, *PEERS, "curl"].index)
    cases: dict[tuple, dict[str, str]] = {}
    for row in result["results"]:
        case = (row["server"], row["operation"], row["object_bytes"], row["objects"])
        speed, cpu = row["gb_per_second"], row["cpu_seconds_per_gb"]
        cases.setdefault(case, {})[row["system"]] = f"{speed:.3f} ({cpu:.2f})"
    text = ["| case | " + " | ".join(systems) + " |", "|---" * (len(systems) + 1) + "|"]
    for (server, operation, size, count), cells in cases.items():
        unit = f"{size // MIB} MiB" if size >= MIB else f"{size // KIB} KiB"
        words = [f"{server}: {operation} {count} x {unit}"]
        text.append("| " + " | ".join(words + [cells.get(each, "-") for each in systems]) + " |")
    text.append("")
    for server, operation, size, _ in cases:
        best, ours = behind(result, server, operation, size)
        if best and ours < 1:
            text.append(f"`{operation}` of {size} bytes: {ours:.2f} of {best}, the best.")
    ours, cpu = result["nginx_share_of_curl"], result["nginx_cpu_of_curl"]
    text.append(f"From nginx: {ours:.2f} of curl's speed, {cpu:.2f} of its CPU seconds.")
    return "\n".join(text)


def behind(result: dict, server: str, operation: str, size: int) -> tuple[str, float]:
    """The best peer of a case, and our part of its speed."""
    of_case = [
        (row["gb_per_second"], row["system"])
        for row in result["results"]
        if (row["server"], row["operation"], row["object_bytes"]) == (server, operation, size)
    ]
    peers = max((each for each in of_case if each[1] in PEERS), default=None)
    ours = dict((system, speed) for speed, system in of_case)["stoker"]
    return (peers[1], ours / peers[0]) if peers else ("", 1)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--peers", default=sys.executable, help="a Python with the peers")
    options.add_argument("--json", default=str(ROOT / "bench/results/s3.json"))
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--large", type=int, default=1024, help="MiB of the large object")
    options.add_argument("--markdown", type=Path, help="print the table of this result instead")
    options.add_argument("--one", nargs=6, help=argparse.SUPPRESS)
    given = options.parse_args()
    if given.markdown:
        print(table(json.loads(given.markdown.read_text())))
        return
    if given.one:
        system, operation, size, count, endpoint, bucket = given.one
        print(json.dumps(one(system, operation, int(size), int(count), endpoint, bucket)))
        return
    load = os.getloadavg()
    bench = Bench(given.rounds, given.peers)
    large = given.large * MIB
    with rgw.gateway(8 << 30) as served:
        words = {**served.environment(), "AWS_REQUEST_CHECKSUM_CALCULATION": "when_required"}
        words["AWS_RESPONSE_CHECKSUM_VALIDATION"] = "when_required"
        log = served.folder / "client.rgw.log"
        server = {
            "name": "radosgw",
            "endpoint": served.endpoint,
            "bucket": served.bucket,
            "environment": words,
            "log": lambda: lines(log, b" beast: "),
        }
        for size, count in ((64 * KIB, 128), (8 * MIB, 16), (large, 1)):
            # RGW 16 names no ETag where it ends an upload, and s3torchconnector takes that for a
            # failure: it cannot write there.
            bench.measure(server, ["stoker", "boto3", "obstore"], "put", size, count)
            systems = ["stoker", "stoker.read_bytes", *PEERS]
            # curl is a process an object: of small ones that would be what is measured.
            systems += ["curl"] if size == large else []
            bench.measure(server, systems, "get", size, count)
    with tempfile.TemporaryDirectory(prefix="stoker_nginx_") as folder:
        data = Path(folder) / "data"
        data.mkdir()
        piece = os.urandom(16 * MIB)
        for size in (8 * MIB, large):
            with (data / f"{size}-0").open("wb") as file:
                for at in range(0, size, len(piece)):
                    file.write(piece[: size - at])
        with nginx.serve(data, Path(folder)) as endpoint:
            server = {
                "name": "nginx",
                "endpoint": endpoint,
                "bucket": "bucket",
                "environment": {"AWS_ACCESS_KEY_ID": ""},
                "log": lambda: lines(Path(folder) / "access.log", b"\n"),
            }
            bench.measure(server, ["stoker", "curl"], "get", large, 1)
    best = {row["system"]: row for row in bench.results if row["server"] == "nginx"}
    ours, ceiling = best["stoker"], best["curl"]
    text = {
        "machine": machine(given.peers),
        "load_average": [f"{load[0]:.2f}", f"{os.getloadavg()[0]:.2f}"],
        "rounds": given.rounds,
        "ahead": AHEAD,
        "nginx_share_of_curl": round(ours["gb_per_second"] / ceiling["gb_per_second"], 3),
        "nginx_cpu_of_curl": round(ours["cpu_seconds_per_gb"] / ceiling["cpu_seconds_per_gb"], 2),
        "results": bench.results,
    }
    Path(given.json).write_text(json.dumps(text, indent=1) + "\n")


if __name__ == "__main__":
    main()
