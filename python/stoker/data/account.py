"""Account: where the time went that a loop waited for its batches, and which tier gave the bytes.

A wait belongs to the stages that its batch went through meanwhile: a batch that was ready costs
nothing, however long it took to make. Reads of a cached store count for its slow store where
the cache fetched anything while the batch was under way, else for the cache.
"""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from stoker import _core
from stoker.errors import StokerError

from .threads import Scaling

# Between the loader's threads, and to the loop: nobody worked on the batch.
HAND_OVER = "hand over"
Stages = Sequence[tuple[str, int, int]]  # name, begin, end on the clock of perf_counter_ns()
_KEPT = 64  # objects that waits are kept of
_CACHE_HITS = ("hit_bytes", "memory_hit_bytes", "merged_bytes")
_CACHE_COUNTS = (
    *_CACHE_HITS,
    "fetched_bytes",
    "prefetched_bytes",
    "prefetched_in_vain_bytes",
    "stalls",
)


class Tiers:
    """What the bytes of a batch come from: the stores of its sources."""

    def __init__(self, stores: Sequence[_core.Store]) -> None:
        self._compositions = [store.info()["composition"] for store in stores]
        # one store may serve several sources: it counts its bytes once
        different = dict(zip(self._compositions, stores, strict=True))
        self._caches = {
            name: store for name, store in different.items() if name.startswith("cached(")
        }

    def caches(self) -> dict[str, dict[str, Any]]:
        """Counters of each cached store that is open, by its composition."""
        told = {}
        for name, store in self._caches.items():
            with contextlib.suppress(StokerError):  # closed: it counts no more
                told[name] = store.info()["cache"]
        return told

    def of(self, source: int, fetched: set[str]) -> str:
        """The tier that the reads of this source waited for. fetched: cached stores that read their
        slow store meanwhile."""
        name = self._compositions[source]
        if name not in self._caches:
            return tier_of(name)
        return tier_of(slow_of(name)) if name in fetched else "cache"

    def slow(self, cache: str) -> str:
        return tier_of(slow_of(cache))

    def plain(self, source: int) -> bool:
        return self._compositions[source] not in self._caches


def tier_of(composition: str) -> str:
    """The kind of store, as it stands before its first colon or bracket."""
    kind = composition.replace("(", ":").split(":", 1)[0]
    return "served" if kind == "unix" else kind


def slow_of(cached: str) -> str:
    """The slow store of "cached(FAST, SLOW, ...)": the second part that begins a store, with its
    kind or with parentheses; FAST may have volumes behind commas of its own (store/open.cc)."""
    parts, depth = [""], 0
    for sign in cached[cached.index("(") + 1 : -1]:
        depth += (sign == "(") - (sign == ")")
        if sign == "," and not depth:
            parts.append("")
        else:
            parts[-1] += sign
    begins = (each.strip() for each in parts[1:])
    return next((each for each in begins if re.match(r"[a-z0-9]+:|.*\)$", each)), "unknown:")


class Account:
    """Sums since take(). One thread: the loop's."""

    def __init__(self, ahead: int, scaling: Scaling | None = None) -> None:
        """scaling: of the C++ threads, where the sources lie in stores."""
        self.ahead, self._scaling = ahead, scaling
        self.tiers: Tiers | None = None  # where the sources lie in stores
        self._caches: dict[str, dict[str, Any]] = {}
        self._clear()

    def _clear(self) -> None:
        self.batches = self.samples = 0
        self.late = 0  # batches that were not ready when the loop asked
        self.seconds: Counter[str] = Counter()  # by stage; reads with their tier
        self.work: Counter[str] = Counter()  # seconds of stages, waited for or not
        self.bytes: Counter[str] = Counter()  # by tier
        self.objects: Counter[str] = Counter()  # seconds of reads, by tier and object

    def of_stores(self, stores: Sequence[_core.Store]) -> None:
        self.tiers = Tiers(stores)
        self._caches = self.tiers.caches()

    def began(self) -> dict[str, int]:
        """What each cache has fetched so far; kept with a batch until fetched_since()."""
        if self.tiers is None:
            return {}
        return {name: cache["fetched_bytes"] for name, cache in self.tiers.caches().items()}

    def fetched_since(self, began: dict[str, int]) -> set[str]:
        """The caches that read their slow store since then."""
        return {name for name, bytes_ in self.began().items() if bytes_ > began.get(name, 0)}

    def gave(self, samples: int, stages: Stages, objects: Iterable[tuple[int, str, int]]) -> None:
        """A batch went to the loop. objects: source, key and bytes of each that it was read from;
        cached stores count their bytes themselves."""
        self.batches += 1
        self.samples += samples
        for stage, first, last in stages:
            self.work[stage] += (last - first) / 1e9
        for source, _, count in objects:
            if self.tiers.plain(source):
                self.bytes[self.tiers.of(source, set())] += count

    def waited(
        self,
        began: int,
        ended: int,
        stages: Stages,
        objects: Sequence[tuple[int, str, int]] = (),
        fetched: set[str] = frozenset(),
    ) -> None:
        """The loop waited from `began` to `ended` for a batch that went through these stages, one
        behind another."""
        self.late += 1
        at, left = began, ended - began
        for stage, first, last in stages:
            inside = min(last, ended) - max(first, at)
            if inside <= 0:
                continue
            at, left = max(at, min(last, ended)), left - inside
            if stage == "read":
                self._read(inside / 1e9, objects, fetched)
            else:
                self.seconds[stage] += inside / 1e9
        self.seconds[HAND_OVER] += left / 1e9

    def _read(
        self, seconds: float, objects: Sequence[tuple[int, str, int]], fetched: set[str]
    ) -> None:
        """All objects of a batch are read at once: each has its part of the wait by its bytes.
        Where a network or a disk was asked, what came from memory or a cache has no part."""
        tiers = [self.tiers.of(source, fetched) for source, _, _ in objects]
        slow = [i for i, tier in enumerate(tiers) if tier not in ("cache", "memory")]
        counted = slow or range(len(objects))
        total = sum(objects[i][2] for i in counted)
        if not total:
            self.seconds["read"] += seconds
            return
        for i in counted:
            share = seconds * objects[i][2] / total
            self.seconds[f"read {tiers[i]}"] += share
            self.objects[f"{tiers[i]} {objects[i][1]}"] += share
        if len(self.objects) > 16 * _KEPT:
            self.objects = Counter(dict(self.objects.most_common(_KEPT)))

    def take(self) -> dict[str, Any]:
        """The figures since the last call, for the ledger: docs/ledger.md."""
        caches = self.tiers.caches() if self.tiers is not None else {}
        told = {}
        for name, now in caches.items():
            before = self._caches.get(name, {})
            since = {key: now[key] - before.get(key, 0) for key in _CACHE_COUNTS}
            hits = sum(since[key] for key in _CACHE_HITS)
            self.bytes["cache"] += hits
            self.bytes[self.tiers.slow(name)] += since["fetched_bytes"]
            told[name] = {
                "hit_bytes": hits,
                "fetched_bytes": since["fetched_bytes"],
                "prefetched_bytes": since["prefetched_bytes"],
                "prefetched_in_vain_bytes": since["prefetched_in_vain_bytes"],
                "stalls": since["stalls"],
                "ahead_depth_bytes": now["ahead_depth_bytes"],
                "epoch_fetched_bytes": now["epoch_fetched_bytes"],
                "held_bytes": now["held_bytes"],
                "usable_bytes": now["usable_bytes"],
                "off": now["off"],
            }
        self._caches = caches
        row = {
            "batches": self.batches,
            "samples": self.samples,
            "late": self.late,
            "ahead": self.ahead,
            "wait_seconds": {name: each for name, each in self.seconds.items() if each > 0},
            "work_seconds": {name: each for name, each in self.work.items() if each > 0},
            "bytes": {name: each for name, each in self.bytes.items() if each},
            "objects": dict(self.objects.most_common(3)),
        }
        if self._scaling is not None:
            row |= self._scaling.take()
        if told:
            row["caches"] = told
        self._clear()
        return row
