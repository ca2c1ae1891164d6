"""The lines that `stoker top` shows of a run: over its last steps."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

from ..report import figures
from ..report.advice import advice
from ..report.figures import Row
from ..train.settings import human_bytes

LAST = 20  # steps that the figures are means of
_BAR = 20


def lines(path: Path, rows: list[Row], steps: int | None, written_at: float | None) -> list[str]:
    """rows: all of the ledger. steps: how many the run will have. written_at: when its ledger
    changed, by time.time()."""
    if not rows:
        return [f"run          {path}", "             no step is decided yet"]
    recent = rows[-LAST:]
    seconds = sum(row["seconds"] for row in recent) or 1e-9
    waits = figures.total_waits(recent)
    last = rows[-1]
    shown = [
        f"run          {path}",
        f"step         {last['step']}"
        + (f" of {steps}" if steps else "")
        + f", {seconds / len(recent):.3g} s each"
        + (f", loss {last['loss']:.4g}" if "loss" in last else "")
        + _ago(written_at),
        _share("compute", seconds - sum(waits.values()), seconds),
    ]
    shown += [_share(f"  {cause}", each, seconds) for cause, each in waits.most_common(8)]
    used = figures.utilisation(rows)
    if used is not None:
        shown.append(f"utilisation  {used:.1%} of all time since the first step")
    shown.append(f"disk         {_disk(path, recent, seconds)}")
    if samples := figures.total_loaders(recent, "bytes"):
        moved = ", ".join(
            f"{human_bytes(each / seconds)}/s from {tier}" for tier, each in samples.most_common()
        )
        shown.append(f"samples      {moved}")
    if busy := figures.pipeline(recent):
        shown.append(
            f"loader       {busy.threads} of at most {busy.cpus} threads, {busy.share:.0%} busy"
        )
    shown += [
        f"cache        {_cache(name, cache, recent)}"
        for name, cache in figures.caches(last).items()
    ]
    saved: dict[str, Any] = {}
    for saved in figures.checkpoints(rows):
        pass
    if saved["saved"]:
        shown.append(
            f"checkpoints  {saved['saved']} saved, {human_bytes(saved['bytes'])}; training waited"
            f" {saved['seconds']:.3g} s for them"
        )
    if "process_bytes_peak" in last:
        shown.append(
            f"memory       {human_bytes(last['dram_bytes_peak'])} in pools,"
            f" {human_bytes(last['process_bytes_peak'])} in the process, at most"
        )
    return shown + [f"advice       {each}" for each in advice(recent)[:3]]


def _share(name: str, part: float, whole: float) -> str:
    share = min(1.0, max(0.0, part / whole))
    return f"{name:<24} {share:6.1%}  {'#' * round(share * _BAR):<{_BAR}}"


def _ago(written_at: float | None) -> str:
    if written_at is None:
        return ""
    ago = max(0.0, time.time() - written_at)
    return f", decided {ago:.0f} s ago"


def _disk(path: Path, rows: list[Row], seconds: float) -> str:
    read, written = (
        sum(figures.total_of(rows, f"{way}_bytes").values()) / seconds
        for way in ("read", "written")
    )
    free = shutil.disk_usage(path).free
    return (
        f"{human_bytes(read)}/s read, {human_bytes(written)}/s written; {human_bytes(free)} free"
        " where the run lies"
    )


def _cache(name: str, cache: dict[str, Any], rows: list[Row]) -> str:
    if cache["off"]:
        return f"off: {cache['off']} ({name})"
    share = figures.hit_share(rows)
    hits = "nothing asked" if share is None else f"{share:.0%} of the bytes hit"
    return (
        f"{hits}; {human_bytes(cache['held_bytes'])} of {human_bytes(cache['usable_bytes'])} held"
        f" ({name})"
    )
