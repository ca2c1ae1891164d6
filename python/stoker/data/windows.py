"""How much of a source is mixed at a time, and what is read at once: the planner of `Loader`."""

from __future__ import annotations

import math
from typing import Any

from .stored import Stored

# Samples that follow one another and come by one read. To ask an object store takes about as long
# as these bytes take on their way, so longer reads win little; shorter windows have fewer of them.
RUN_BYTES = 256 << 10
# What one window mixes, of all ranks: 256 runs. Twice as much is in memory, this window and the
# next.
WINDOW_BYTES = 64 << 20
# Parts of a batch with windows of their own, so that a rank reads what it needs and no more. A lane
# mixes at least so many runs.
LANES, LANE_RUNS = 64, 4
# A compressed shard is one run, for it comes whole. A window mixes at least so many.
WINDOW_SHARDS = 2


def shape(
    count: int, sample_bytes: float, batch: int, window_bytes: int, shard_samples: int = 0
) -> tuple[int, int, int, int, int]:
    """For `Sequence.windowed`: samples, of a run, of a lane's window; lanes; samples of a batch.
    shard_samples: of a compressed shard; 0 where samples can be read by themselves."""
    run = shard_samples or max(1, int(RUN_BYTES // sample_bytes))
    runs = WINDOW_SHARDS if shard_samples else LANE_RUNS
    window = max(runs * run, int(window_bytes // sample_bytes))
    lanes = math.gcd(batch, LANES)
    while lanes > 1 and window < lanes * runs * run:
        lanes = lanes // 2 if lanes % 2 == 0 else 1
    return count, run, window // lanes, lanes, batch


def sample_bytes(source: Any) -> float:
    """Of a sample, on average. ValueError for a source whose samples lie in no store."""
    if not isinstance(source, Stored):
        raise ValueError(
            f"{type(source).__name__} does not say where its samples lie, so it cannot be read "
            f"by windows: leave out shuffle='window'"
        )
    return max(1.0, source.sample_bytes)


def size(many: float) -> str:
    """2,050 bytes, 64 KiB, 3.5 MiB"""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if many < 1024 or unit == "GiB":
            break
        many /= 1024
    return f"{many:,.0f} {unit}" if many >= 10 or unit == "bytes" else f"{many:.1f} {unit}"


def explain(source: Any, shuffle: bool | str, window: tuple[int, int, int, int, int] | None) -> str:
    """How samples of this source are read, and why."""
    if not isinstance(source, Stored):
        return f"{type(source).__name__} reads its samples by itself, batch by batch"
    each = size(sample_bytes(source))
    if source.shard_samples:
        return _explain_packed(source.shard_samples, each, shuffle, window)
    if source.table.apart:
        return f"each sample is an object of about {each}: it comes by a read of its own"
    if window is not None:
        _, run, samples, lanes, _ = window
        return (
            f"windows: {run:,} samples of about {each} follow one another and come by one read; "
            f"{samples * lanes:,} samples are mixed at a time, in {lanes} "
            f"{'lane' if lanes == 1 else 'lanes'}"
        )
    if not shuffle:
        return f"in order: samples of about {each}, those of a batch come by one read"
    told = f"exact order: each sample of about {each} comes by a read of its own"
    if sample_bytes(source) * LANE_RUNS < RUN_BYTES:
        told += (
            "; where a request costs more than its bytes (s3:), shuffle='window' reads "
            f"{size(RUN_BYTES)} at once"
        )
    return told


def _explain_packed(
    samples: int, each: str, shuffle: bool | str, window: tuple[int, int, int, int, int] | None
) -> str:
    what = f"compressed shards, of up to {samples:,} samples of about {each}, come whole"
    if window is not None:
        _, run, mixed, lanes, _ = window
        return (
            f"windows: {what}, each by one read; {mixed * lanes:,} samples, those of about "
            f"{max(1, mixed * lanes // run):,} shards, are mixed at a time"
        )
    if not shuffle:
        return f"in order: {what}, one after another"
    return (
        f"exact order: {what}, and each sample needs its own: where they do not all fit into "
        "unpacked_bytes, a shard is fetched and unpacked for nearly every sample; "
        "shuffle='window' does that once an epoch and window"
    )
