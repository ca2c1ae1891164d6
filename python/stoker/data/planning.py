"""Which order reads a source well: the choice of `Loader(shuffle="auto")` and `stoker data plan`.

An exact order mixes best, and reads each sample by itself. An order of windows reads neighbours
together: ranges, or whole shards where they are compressed. What decides is what an epoch costs:
its bytes, and for each request as many bytes as would have come meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from . import windows
from .account import slow_of, tier_of
from .stored import UNPACKED_BYTES, Stored

# What one request costs, in bytes that come meanwhile: of a server far away, and of a disk.
FAR, NEAR = windows.RUN_BYTES, 16 << 10
_FAR_TIERS = ("s3", "served")
# An order of windows must cost so many times less: an exact one mixes better.
_WORTH = 2


@dataclass(frozen=True)
class Epoch:
    """What a store is asked for in one epoch, once its cache is full."""

    requests: float
    bytes: float

    def cost(self, request: int) -> float:
        return self.bytes + self.requests * request


@dataclass(frozen=True)
class Choice:
    """What to give `Loader(shuffle=)`, and why, in a sentence. exact, window: what each costs; None
    where there is no choice to make."""

    shuffle: bool | Literal["window"]
    why: str
    exact: Epoch | None = None
    window: Epoch | None = None


def choose(
    source: Any,
    batch: int,
    window_bytes: int = windows.WINDOW_BYTES,
    unpacked_bytes: int = UNPACKED_BYTES,
) -> Choice:
    """batch: samples of a global batch. Looks at the store's kind and the size of its cache."""
    if not isinstance(source, Stored):
        return Choice(True, "exact order: the source reads its samples by itself")
    if source.table.apart:
        return Choice(True, "exact order: each sample is an object of its own")
    info = source.store.info()
    tier, missed = _tier(info["composition"]), 1.0
    size, many = windows.sample_bytes(source) * len(source), len(source)
    if info["cache"] is not None:
        missed = max(0.0, 1 - info["cache"]["usable_bytes"] / size)
    count, run, *_ = windows.shape(
        many, windows.sample_bytes(source), batch, window_bytes, source.shard_samples
    )
    if source.shard_samples:
        return _of_packed(source, size, count / run, unpacked_bytes)
    exact = Epoch(many * missed, size * missed)
    window = Epoch(count / run * missed, size * missed)
    request = FAR if tier in _FAR_TIERS else NEAR
    cached = "" if missed == 1 else f", {missed:.0%} of them from {tier} past its cache"
    figures = (
        f"each sample by itself is {many:,} requests an epoch, runs of {run:,} neighbours are "
        f"{count / run:,.0f}{cached}; a request to {tier} costs about {windows.size(request)}"
    )
    if exact.cost(request) > _WORTH * window.cost(request):
        return Choice("window", f"windows of ranges: {figures}", exact, window)
    return Choice(
        True, f"exact order: {figures}, which is little beside the samples", exact, window
    )


def _of_packed(source: Stored, size: float, shards: float, unpacked_bytes: int) -> Choice:
    """Whole shards in any case: they are compressed."""
    exact = Epoch(len(source), size / shards * len(source))
    window = Epoch(shards, size)
    # A shard and its next one are there twice: as they are stored, and unpacked.
    if 2 * size <= unpacked_bytes:
        why = (
            f"exact order: all compressed shards, {windows.size(size)} unpacked, fit into "
            "unpacked_bytes, so each is fetched once"
        )
        return Choice(True, why, window, window)
    why = (
        f"windows of whole shards: an exact order would fetch one for each of {len(source):,} "
        f"samples, windows fetch {shards:,.0f} an epoch"
    )
    return Choice("window", why, exact, window)


def _tier(composition: str) -> str:
    if composition.startswith("cached("):
        return tier_of(slow_of(composition))
    return tier_of(composition)
