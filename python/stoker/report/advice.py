"""Advice: sentences that are made from the figures of a run, the dearest wait first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..train.settings import human_bytes
from . import figures
from .figures import Row

WORTH_SAYING = 0.02  # of the time
GIB = 1 << 30
_REMOTE = {"s3", "served"}
_DISK = {
    "weights": "give more memory (dram=) so that more of them stay there, or a faster disk",
    "state": (
        'keep the moments as moments="bf16" or "8bit", which move less, or give more memory (dram=)'
    ),
    "gradients": "give more memory (dram=), so that gradients need not wait for their place",
    "writing": "write less a step by larger batches, or give a disk that writes faster",
    "commit": "put the store on a disk with a faster flush, or make steps longer by larger batches",
    "checkpoint": "save less often (--checkpoint-every), or to a faster store",
    "activations": 'try activations="recompute", or give more memory (dram=)',
}


def advice(rows: Sequence[Row]) -> list[str]:
    """What the run waited for and what would help, for each wait that is worth it."""
    counted = figures.settled(rows)
    seconds = sum(row["seconds"] for row in counted)
    if not seconds:
        return []
    total = figures.total_waits(counted)
    told = [
        _sentence(cause, waited / seconds, counted)
        for cause, waited in total.most_common()
        if waited / seconds >= WORTH_SAYING
    ]
    for name, cache in (figures.caches(counted[-1]) if counted else {}).items():
        if cache["off"]:
            told.append(f"The cache of {name} is off: {cache['off']}.")
    if told:
        return told
    share = 1 - sum(total.values()) / seconds
    return [f"Nothing to mend: {share:.1%} of the time went into computing."]


def _sentence(cause: str, share: float, rows: Sequence[Row]) -> str:
    if not cause.startswith("data: "):
        moved = sum(row.get("read_bytes", {}).get(cause, 0) for row in rows) / len(rows)
        amount = f" ({human_bytes(moved)} a step)" if moved else ""
        return f"{share:.0%} of the step waited for {_NAMES.get(cause, cause)}{amount}: " + (
            f"{_DISK.get(cause, 'see what else used the disk meanwhile')}."
        )
    stage = cause.removeprefix("data: ")
    said, remedy = _of_data(stage, rows)
    return f"{share:.0%} of the step waited for {said}: {remedy}."


_NAMES = {
    "weights": "weights from disk",
    "state": "optimizer state from disk",
    "writing": "writes of the step before",
    "commit": "commits to reach the disk",
    "checkpoint": "checkpoints",
    "gradients": "gradients to come or go",
    "activations": "activations to come or go",
}


def _of_data(stage: str, rows: Sequence[Row]) -> tuple[str, str]:
    """What was waited for, and what would help."""
    if stage.startswith("read "):
        return _of_reads(stage.removeprefix("read "), rows)
    if stage == "decode":
        return "images to be decoded", f"{_threads(rows)}, or store images of fewer pixels"
    if stage == "unpack":
        return (
            "compressed shards to be unpacked",
            "unpack them once (`stoker data build STORE OUT --unpack`), "
            f"{_threads(rows)}, or give it more unpacked_bytes= where shards are unpacked "
            "again and again",
        )
    if stage in ("verify", "assemble", "queue", "hand over"):
        what = {
            "verify": "the checksums of samples",
            "assemble": "batches to be put together",
            "queue": "a thread of the loader",
            "hand over": "batches to pass between threads",
        }[stage]
        return what, f"{_threads(rows)}, or make batches smaller"
    if stage == "source":
        return (
            "samples of a source in Python",
            "put them into a store (Tokens, Rows, Tar or Files), which C++ reads without Python",
        )
    if stage in ("collate", "transform"):
        remedy = (
            "give it more workers (workers=)" if stage == "transform" else "move it to transform="
        )
        return f"the {stage} in Python", f"{remedy}, or make it do less for each sample"
    return (
        "data outside of any stage of a loader",
        "see what the loop does between `ledger.waiting('data')` and the next batch",
    )


def _threads(rows: Sequence[Row]) -> str:
    """More of them, where the loader had all that it may have, and they were busy."""
    busy = figures.pipeline(rows)
    if busy is None or busy.threads < busy.cpus or busy.share < 0.5:
        return "leave the loader a core that training does not use"
    return (
        f"let the loader use more cores (cpus={2 * busy.cpus}; it has {busy.cpus}, "
        f"{busy.share:.0%} busy)"
    )


def _of_reads(tier: str, rows: Sequence[Row]) -> tuple[str, str]:
    objects = figures.total_loaders(rows, "objects")
    here = {
        name.removeprefix(f"{tier} "): seconds
        for name, seconds in objects.items()
        if name.startswith(f"{tier} ")
    }
    slowest = max(here, key=here.__getitem__, default="")
    alone = slowest and here[slowest] >= 0.5 * sum(here.values())
    what = f"reads {'of ' + slowest + ' ' if alone else ''}from {tier}"
    remedies = []
    if tier in _REMOTE | {"dir"}:
        remedies += _more_cache(tier, rows)
    ahead = max((each["ahead"] for row in rows for each in _accounts(row)), default=0)
    if ahead:
        remedies.append(f"allow {2 * ahead} batches in flight (ahead={2 * ahead})")
    if tier in ("local", "coded", "cache"):
        remedies.append("give a disk that reads faster")
    return what, ", or ".join(remedies)


def _more_cache(tier: str, rows: Sequence[Row]) -> list[str]:
    """How much larger a cache would have to be; that there could be one."""
    cached = [cache for cache in figures.caches(rows[-1]).values() if not cache["off"]]
    if not cached:
        return ["put a cache before it (cached(local:/FAST, SLOW))"] if tier in _REMOTE else []
    if all(each["held_bytes"] < 0.9 * each["usable_bytes"] for each in cached):
        return []  # it still fills: the first epoch has to fetch
    # what an epoch fetches does not fit; before one is over, what was fetched so far
    fetched = sum(each["epoch_fetched_bytes"] for each in cached) or sum(
        each["fetched_bytes"] for row in rows for each in figures.caches(row).values()
    )
    return [f"give the cache {max(1, round(fetched / GIB))} GiB more"]


def _accounts(row: Row) -> list[dict[str, Any]]:
    return list(row.get("loaders", {}).values())
