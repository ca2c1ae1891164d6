"""GET and PUT of an s3: store beside boto3, obstore and curl, on an RGW of its own on loopback.

Writes {system, operation, object_bytes, gb_per_second, range, cpu_seconds_per_gb} a line of
`results`. Rounds are interleaved; the figure is the median, `range` the least and the most. The
server runs on the same cores, so the figures compare clients and say nothing of a network.
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
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
AHEAD = 8  # objects under way at once
SYSTEMS = ("stoker", "boto3", "obstore", "curl")


def cpu_seconds() -> float:
    """Of this process and of the children that ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def clients(system: str, endpoint: str, bucket: str):
    """get(key, bytes), put(key, data), to be called by AHEAD threads."""
    access, secret = os.environ["AWS_ACCESS_KEY_ID"], os.environ["AWS_SECRET_ACCESS_KEY"]
    if system == "stoker":
        import stoker

        opened = stoker.open_store(f"s3://{bucket}?endpoint={endpoint}", dram="4GiB")
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

    sign = ["--aws-sigv4", "aws:amz:us-east-1:s3", "--user", f"{access}:{secret}", "-sf"]
    unsigned = ["-H", "x-amz-content-sha256: UNSIGNED-PAYLOAD"]

    def curl(key: str, bytes_: int) -> None:
        # As many parallel ranges as the store has, into nothing: the ceiling.
        ranges = range(0, bytes_, 8 * MIB)
        words = ["curl", "--no-progress-meter", "-Z", "--parallel-max", "16"]
        for start in ranges:
            end = min(start + 8 * MIB, bytes_) - 1
            url = f"{endpoint}/{bucket}/{key}"
            words += [*(["--next"] if start else []), *sign, *unsigned]
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

    work(0)  # connections and code are warm
    with concurrent.futures.ThreadPoolExecutor(min(AHEAD, count)) as threads:
        began, used = time.perf_counter(), cpu_seconds()
        list(threads.map(work, range(count)))
        seconds, cpu = time.perf_counter() - began, cpu_seconds() - used
    gigabytes = bytes_ * count / 1e9
    return {"gb_per_second": gigabytes / seconds, "cpu_seconds_per_gb": cpu / gigabytes}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--peers", default=sys.executable, help="a Python with boto3 and obstore")
    options.add_argument("--json", default=str(ROOT / "bench/results/s3.json"))
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--large", type=int, default=1024, help="MiB of the large object")
    options.add_argument("--one", nargs=6, help=argparse.SUPPRESS)
    given = options.parse_args()
    if given.one:
        system, operation, bytes_, count, endpoint, bucket = given.one
        print(json.dumps(one(system, operation, int(bytes_), int(count), endpoint, bucket)))
        return
    sys.path.insert(0, str(ROOT / "tests/python"))
    import rgw

    results = []
    with rgw.gateway(8 << 30) as served:
        words = {**served.environment(), "AWS_REQUEST_CHECKSUM_CALCULATION": "when_required"}
        words["AWS_RESPONSE_CHECKSUM_VALIDATION"] = "when_required"
        for bytes_, count in ((64 * KIB, 128), (8 * MIB, 16), (given.large * MIB, 1)):
            for operation in ("put", "get"):
                runs: dict[str, list[dict]] = {}
                for _ in range(given.rounds):
                    for system in SYSTEMS:
                        if system == "curl" and (operation == "put" or bytes_ < MIB):
                            continue  # a process an object measures processes
                        python = sys.executable if system in {"stoker", "curl"} else given.peers
                        case = (system, operation, bytes_, count, served.endpoint, served.bucket)
                        done = subprocess.run(
                            [python, __file__, "--one", *map(str, case)],
                            env={**os.environ, **words},
                            stdout=subprocess.PIPE,
                            check=True,
                            text=True,
                        )
                        runs.setdefault(system, []).append(json.loads(done.stdout))
                for system, each in runs.items():
                    speeds = [run["gb_per_second"] for run in each]
                    row = {
                        "system": system,
                        "operation": operation,
                        "object_bytes": bytes_,
                        "gb_per_second": round(statistics.median(speeds), 4),
                        "range": [round(min(speeds), 4), round(max(speeds), 4)],
                        "cpu_seconds_per_gb": round(
                            statistics.median(run["cpu_seconds_per_gb"] for run in each), 2
                        ),
                    }
                    results.append(row)
                    print(json.dumps(row), flush=True)
    text = json.dumps({"cores": os.cpu_count(), "rounds": given.rounds, "results": results})
    Path(given.json).write_text(text + "\n")


if __name__ == "__main__":
    main()
