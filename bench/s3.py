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
import io
import json
import os
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
SYSTEMS = ("stoker", "boto3", "obstore", "s3torchconnector", "curl")
OURS = {"stoker", "curl"}  # run by this Python


def cpu_seconds() -> float:
    """Of this process and of the children that ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def clients(system: str, endpoint: str, bucket: str):
    """get(key, bytes), put(key, data), to be called by AHEAD threads."""
    access = os.environ.get("AWS_ACCESS_KEY_ID", "")  # empty: nginx, which wants no signature
    secret = os.environ.get("AWS_SECRET_ACCESS_KEY", "")
    if system == "stoker":
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

        return lambda key, bytes_: store.read_bytes(key, 0, bytes_), put
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

        def get(key: str, bytes_: int) -> bytes:
            if bytes_ <= 8 * MIB:
                return client.get_object(Bucket=bucket, Key=key)["Body"].read()
            into = io.BytesIO()
            client.download_fileobj(bucket, key, into, Config=config)
            return into.getvalue()

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

        def get(key: str, bytes_: int) -> bytes:
            if bytes_ <= 8 * MIB:
                return bytes(obstore.get(store, key).bytes())
            starts = list(range(0, bytes_, 8 * MIB))
            ends = [min(start + 8 * MIB, bytes_) for start in starts]
            parts = obstore.get_ranges(store, key, starts=starts, ends=ends, coalesce=0)
            return b"".join(bytes(part) for part in parts)

        return get, lambda key, data: obstore.put(store, key, data, chunk_size=16 * MIB)

    if system == "s3torchconnector":
        from s3torchconnector._s3client import S3Client
        from s3torchconnector._s3client.s3client_config import S3ClientConfig

        config = S3ClientConfig(part_size=16 * MIB, force_path_style=True)
        client = S3Client("us-east-1", endpoint, s3client_config=config)

        def put(key: str, data: bytes) -> None:
            writer = client.put_object(bucket, key)
            writer.write(data)
            writer.close()

        return lambda key, _bytes: client.get_object(bucket, key).read(), put

    sign = ["-sf"]
    if access:
        sign += ["--aws-sigv4", "aws:amz:us-east-1:s3", "--user", f"{access}:{secret}"]
        sign += ["-H", "x-amz-content-sha256: UNSIGNED-PAYLOAD"]

    def curl(key: str, bytes_: int) -> None:
        # As many parallel ranges as the store has, into nothing: the ceiling.
        ranges = range(0, bytes_, 8 * MIB)
        words = ["curl", "--no-progress-meter", "-Z", "--parallel-max", "16"]
        for start in ranges:
            end = min(start + 8 * MIB, bytes_) - 1
            url = f"{endpoint}/{bucket}/{key}"
            words += [*(["--next"] if start else []), *sign]
            words += ["-r", f"{start}-{end}", "-o", "/dev/null", url]
        subprocess.run(words, check=True)

    return curl, None


def one(system: str, operation: str, bytes_: int, count: int, endpoint: str, bucket: str) -> dict:
    get, put = clients(system, endpoint, bucket)
    key = f"{bytes_}-{{}}".format
    data = os.urandom(min(bytes_, 16 * MIB)) * (bytes_ // min(bytes_, 16 * MIB))

    def work(index: int) -> None:
        if operation == "put":
            put(key(index), data)
        else:
            got = get(key(index), bytes_)
            assert got is None or len(got) == bytes_

    work(0)  # connections and code are warm; the count of requests holds it, too
    with concurrent.futures.ThreadPoolExecutor(min(AHEAD, count)) as threads:
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
                    [sys.executable if system in OURS else self.peers, __file__, "--one"]
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
    versions = json.loads(subprocess.run([peers, "-c", ask], capture_output=True, check=True).stdout)
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


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--peers", default=sys.executable, help="a Python with the peers")
    options.add_argument("--json", default=str(ROOT / "bench/results/s3.json"))
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--large", type=int, default=1024, help="MiB of the large object")
    options.add_argument("--one", nargs=6, help=argparse.SUPPRESS)
    given = options.parse_args()
    if given.one:
        system, operation, size, count, endpoint, bucket = given.one
        print(json.dumps(one(system, operation, int(size), int(count), endpoint, bucket)))
        return
    load = os.getloadavg()
    bench = Bench(given.rounds, given.peers)
    peers = [system for system in SYSTEMS if system != "curl"]  # a process an object there
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
            bench.measure(server, peers, "put", size, count)
            bench.measure(server, [*peers, "curl"][: 5 if size > MIB else 4], "get", size, count)
    with tempfile.TemporaryDirectory(prefix="stoker_nginx_") as folder:
        data = Path(folder) / "data"
        data.mkdir()
        piece = os.urandom(16 * MIB)
        with (data / f"{large}-0").open("wb") as file:
            for at in range(0, large, len(piece)):
                file.write(piece[: large - at])
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
