"""What a cache fetches beside the least that is possible, simulated and read for real.

    .venv/bin/python bench/cache.py --dir out/bench --json bench/results/cache.json
    .venv/bin/python bench/cache.py --markdown bench/results/cache.json

`stoker bench cache` measures. The real run reads a bucket of an object gateway of its own (RGW, as
the tests start it), or a folder with --plain or where there is no RGW.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "bench"))
sys.path.insert(0, str(ROOT / "tests/python"))
import rgw  # noqa: E402
import tables  # noqa: E402

STOKER = Path(sys.executable).parent / "stoker"
WRITTEN_GOAL = 1.03


@contextlib.contextmanager
def slow_store(plain: bool) -> Iterator[tuple[list[str], dict[str, str]]]:
    """Options of the command that name it, and the environment that opens it."""
    if plain or rgw.missing():
        yield [], {}
        return
    with rgw.gateway() as served:
        yield ["--slow", served.store("cache")], served.environment()


def measure(given: argparse.Namespace) -> dict:
    with slow_store(given.plain) as (options, environment):
        line = [STOKER, "bench", "cache", given.dir, "--json", *options]
        line += ["--size", given.size, "--block", given.block, "--dram", given.dram]
        line += ["--blocks", str(given.blocks), "--epochs", str(given.epochs)]
        done = subprocess.run(
            line, check=True, stdout=subprocess.PIPE, env={**os.environ, **environment}
        )
    return json.loads(done.stdout)


def met(row: dict) -> bool:
    """Only what follows a plan has goals."""
    near = row["fetched_over_bound"] <= row["goal"]
    return near and row["written_over_admitted"] <= WRITTEN_GOAL


def both_tables(result: dict) -> str:
    """For docs/numbers.md."""
    rows = result["results"]
    cells: dict[tuple[str, float], dict[str, dict]] = {}
    for row in rows:
        if row["source"] == "simulated":
            cells.setdefault((row["regime"], row["cache_share"]), {})[row["policy"]] = row
    policies = ("plan", "S3-FIFO", "LRU")
    lines = tables.table(
        ["simulated, share", *policies, "goal", "met"],
        (
            [
                f"{regime}, {share}",
                *(f"{each[name]['fetched_over_bound']:.3f}" for name in policies),
                each["plan"]["goal"],
                met(each["plan"]),
            ]
            for (regime, share), each in cells.items()
        ),
    )
    real = [row for row in rows if row["source"] == "real"]
    if real:
        lines += [""]
        lines += tables.table(
            ["real, share", "fetched over bound", "goal", "written over admitted", "met"],
            (
                [
                    f"{row['regime']}, {row['cache_share']}",
                    f"{row['fetched_over_bound']:.3f}",
                    row["goal"],
                    f"{row['written_over_admitted']:.3f}",
                    met(row),
                ]
                for row in real
            ),
        )
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    raw = argparse.RawDescriptionHelpFormatter
    options = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    options.add_argument(
        "--dir", type=Path, default=Path("out/bench"), help="on the disk of the cache"
    )
    options.add_argument("--json", type=Path, help="where the result goes")
    options.add_argument("--markdown", type=Path, help="print the tables of this result instead")
    options.add_argument("--plain", action="store_true", help="a folder is the slow store")
    options.add_argument("--size", default="32MiB", help="of the set that is read for real")
    options.add_argument("--block", default="64KiB", help="of the real cache")
    options.add_argument("--dram", default="4MiB", help="memory of the real cache")
    options.add_argument("--blocks", type=int, default=4096, help="of the simulated set")
    options.add_argument("--epochs", type=int, default=3)
    given = options.parse_args(arguments)
    if given.markdown:
        print(both_tables(json.loads(given.markdown.read_text())))
        return
    given.dir.mkdir(parents=True, exist_ok=True)
    result = measure(given)
    if given.json:
        given.json.write_text(json.dumps(result, indent=1) + "\n")
    print(both_tables(result))


if __name__ == "__main__":
    main()
