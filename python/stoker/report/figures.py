"""Figures of a run, made from the rows of its ledger: docs/ledger.md."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

Row = dict[str, Any]
OTHER = "other"  # waits for data that no loader told about


def waits(row: Row) -> dict[str, float]:
    """Seconds of one step by cause; the waits for data as "data: STAGE TIER"."""
    seconds = {cause: each for cause, each in row["stall_seconds"].items() if cause != "data"}
    data = row["stall_seconds"].get("data", 0.0)
    stages = loaders(row, "wait_seconds")
    told = sum(stages.values())
    # A loader also works while nobody waits in the ledger's sense (an evaluation, say).
    scale = min(1.0, data / told) if told else 0.0
    for stage, each in stages.items():
        seconds[f"data: {stage}"] = each * scale
    if (rest := data - told * scale) > 0:
        seconds[f"data: {OTHER}"] = rest
    return {cause: each for cause, each in seconds.items() if each > 0}


def loaders(row: Row, item: str) -> Counter[str]:
    """An item of all loaders' accounts in this row, added up."""
    total: Counter[str] = Counter()
    for account in row.get("loaders", {}).values():
        total.update(account[item])
    return total


class Pipeline(NamedTuple):
    """The C++ threads of loaders."""

    threads: int  # now
    cpus: int  # the most that there may be
    share: float  # of their time that they worked


def pipeline(rows: Sequence[Row]) -> Pipeline | None:
    """Of all loaders together; None where none has such threads."""
    seconds = busy = 0.0
    told: Pipeline | None = None
    for row in rows:
        accounts = [each for each in row.get("loaders", {}).values() if "threads" in each]
        if not accounts:
            continue
        threads, cpus = (sum(each[item] for each in accounts) for item in ("threads", "cpus"))
        seconds += row["seconds"] * threads
        busy += sum(each["busy_seconds"] for each in accounts)
        told = Pipeline(threads, cpus, min(1.0, busy / seconds) if seconds else 0.0)
    return told


def caches(row: Row) -> dict[str, dict[str, Any]]:
    """Of each cached store that a loader reads, by its composition."""
    found: dict[str, dict[str, Any]] = {}
    for account in row.get("loaders", {}).values():
        found.update(account.get("caches", {}))
    return found


def hit_share(rows: Iterable[Row]) -> float | None:
    """Of the bytes that caches gave, the part that they had; None where there is no cache."""
    hit = fetched = 0
    for row in rows:
        for cache in caches(row).values():
            hit, fetched = hit + cache["hit_bytes"], fetched + cache["fetched_bytes"]
    return hit / (hit + fetched) if hit + fetched else None


def total_waits(rows: Iterable[Row]) -> Counter[str]:
    total: Counter[str] = Counter()
    for row in rows:
        total.update(waits(row))
    return total


def total_of(rows: Iterable[Row], item: str) -> Counter[str]:
    """The sum of "read_bytes" or the like, by its keys."""
    total: Counter[str] = Counter()
    for row in rows:
        total.update(row.get(item, {}))
    return total


def total_loaders(rows: Iterable[Row], item: str) -> Counter[str]:
    total: Counter[str] = Counter()
    for row in rows:
        total.update(loaders(row, item))
    return total


def settled(rows: Sequence[Row]) -> Sequence[Row]:
    """Without the first step, which warms up: as MLPerf Storage counts."""
    return rows[1:] if len(rows) > 1 else rows


def utilisation(rows: Sequence[Row]) -> float | None:
    """Accelerator utilisation as MLPerf Storage defines it: the time of computing, as a part of
    all time, without the first step."""
    counted = settled(rows)
    seconds = sum(row["seconds"] for row in counted)
    if not seconds:
        return None
    return sum(max(0.0, row["seconds"] - sum(waits(row).values())) for row in counted) / seconds


class Batches(NamedTuple):
    share: float  # of the time that the loop waited for data, without the first step
    late: int  # batches that were not ready when the loop asked
    batches: int


def batches(rows: Sequence[Row]) -> Batches | None:
    """What batches cost the loop; None where no time is told."""
    counted = settled(rows)
    seconds = sum(row["seconds"] for row in counted)
    if not seconds:
        return None
    waited = sum(row["stall_seconds"].get("data", 0.0) for row in counted)
    accounts = [each for row in counted for each in row.get("loaders", {}).values()]
    return Batches(
        waited / seconds,
        sum(each.get("late", 0) for each in accounts),
        sum(each["batches"] for each in accounts),
    )


def checkpoints(rows: Iterable[Row]) -> Iterator[dict[str, float]]:
    """For each row: how many were saved so far, their bytes, and the seconds that training waited
    for them. The counts in the rows begin anew with each process of a run."""
    total = {"saved": 0, "bytes": 0, "seconds": 0.0}
    last: dict[str, float] = {}
    for row in rows:
        if now := row.get("checkpoints"):
            again = any(now[key] < last.get(key, 0) for key in total)
            for key in total:
                total[key] += now[key] - (0 if again else last.get(key, 0))
            last = now
        yield dict(total)
