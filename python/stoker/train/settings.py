"""What a run is made of: its settings, where they come from, and what must agree at a resume."""

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from ..errors import InvalidArgument, naming

_UNITS = {
    "": 1,
    "b": 1,
    "k": 1 << 10,
    "kb": 1000,
    "kib": 1 << 10,
    "m": 1 << 20,
    "mb": 10**6,
    "mib": 1 << 20,
    "g": 1 << 30,
    "gb": 10**9,
    "gib": 1 << 30,
    "t": 1 << 40,
    "tb": 10**12,
    "tib": 1 << 40,
}
RUN_FILE = "run.json"

STEPS, STEPS_SECONDS = 230, 330  # of a run that names none
# Settings that a run chooses by measuring, with what stands for that. A resume keeps what was
# chosen.
CHOSEN = {"steps": 0, "precision": "auto"}

# No run has more of these: a slip of the finger is told before it takes all memory.
MOST = {
    "layers": 10_000,
    "steps": 1 << 40,
    "warmup": 1 << 40,
    "eval_windows": 1 << 40,
    "sample_tokens": 1 << 40,
    "seed": (1 << 63) - 1,
    "stall_seconds": 1 << 30,
    **dict.fromkeys(("vocabulary", "hidden", "heads", "feed_forward", "window", "batch"), 1 << 24),
}

# What may be another at a resume: where things lie and how fast they go, nothing that the numbers
# depend on.
FREE_AT_RESUME = (
    "dram",
    "policy",
    "activations",
    "device",
    "store",
    "cache",
    "stall_seconds",
    "eval_windows",
    "sample_tokens",
    "checkpoints",
    "checkpoint_every",
)


class UsageError(InvalidArgument):
    """An option has a value that cannot be, whatever there is on the disk."""


@dataclass(frozen=True)
class Settings:
    """All settings of a run. The defaults are such that it ends in about six minutes on two
    cores."""

    data: tuple[str, ...] = ()  # files and folders of text; none: the kernel documentation
    tokenizer: str = ""  # a tokenizer.json to use instead of learning one
    vocabulary: int = 4096
    layers: int = 4
    hidden: int = 640
    heads: int = 10
    feed_forward: int = 1728
    window: int = 128  # tokens
    batch: int = 16  # windows a step
    steps: int = 0  # 0: STEPS, or as many as end within STEPS_SECONDS
    learning_rate: float = 2e-3
    warmup: int = 15  # steps
    weight_decay: float = 0.1
    clip: float = 1.0  # limit of the gradient norm
    seed: int = 0
    precision: str = "auto"  # until it was measured
    moments: str = "exact"
    dram: str = "95MiB"
    policy: str = "auto"
    activations: str = "keep"
    device: str = "auto"
    store: str = ""  # empty: OUT/store
    cache: str = ""  # where token files are kept; empty: OUT/data
    stall_seconds: int = 300
    checkpoints: str = ""  # a store; empty: OUT/checkpoints
    checkpoint_every: str = "auto"  # or "off", or a number of steps
    eval_windows: int = 256
    sample_tokens: int = 64

    @property
    def dram_bytes(self) -> int:
        return parse_bytes(self.dram)

    def check(self) -> None:
        """Raise UsageError with a sentence for values that cannot work together."""
        for name in ("learning_rate", "clip", "weight_decay"):
            if not math.isfinite(getattr(self, name)):
                raise UsageError(
                    f"--{name.replace('_', '-')} must be a number, not {getattr(self, name)}"
                )
        least_one = (
            "layers",
            "hidden",
            "heads",
            "feed_forward",
            "window",
            "batch",
            "eval_windows",
            "stall_seconds",
        )
        for name in least_one:
            if getattr(self, name) < 1:
                raise UsageError(
                    f"--{name.replace('_', '-')} must be at least 1, not {getattr(self, name)}"
                )
        for name, most in MOST.items():
            if getattr(self, name) > most:
                raise UsageError(
                    f"--{name.replace('_', '-')} must be at most {most}, not {getattr(self, name)}"
                )
        if self.seed < 0:
            raise UsageError(f"--seed must not be below 0, but is {self.seed}")
        if self.steps < 0:
            raise UsageError(
                "--steps must be at least 1, or 0 for as many as end in six minutes, not"
                f" {self.steps}"
            )
        if self.vocabulary < 257:
            raise UsageError(
                "--vocabulary must be at least 257 (256 bytes and the end of text), not"
                f" {self.vocabulary}"
            )
        if self.hidden % (2 * self.heads):
            raise UsageError(
                f"--hidden {self.hidden} must be a multiple of twice --heads {self.heads}: "
                f"try --hidden {-(-self.hidden // (2 * self.heads)) * 2 * self.heads}"
            )
        if self.learning_rate <= 0 or self.clip <= 0:
            raise UsageError(
                f"--learning-rate ({self.learning_rate:g}) and --clip ({self.clip:g}) must be"
                " above 0"
            )
        if self.warmup < 0 or self.sample_tokens < 0 or self.weight_decay < 0:
            raise UsageError(
                f"--warmup ({self.warmup}), --sample-tokens ({self.sample_tokens}) and"
                f" --weight-decay ({self.weight_decay:g}) must not be below 0"
            )
        parse_bytes(self.dram)
        if self.checkpoint_every not in ("auto", "off"):
            if not self.checkpoint_every.isdecimal() or int(self.checkpoint_every) < 1:
                raise UsageError(
                    "--checkpoint-every must be auto, off or a number of steps, "
                    f"not {self.checkpoint_every}"
                )


# `--quick`: a first look. The model is small, its text is what every Python has, and nothing is
# measured before it begins.
QUICK = {
    "vocabulary": 1024,
    "layers": 4,
    "hidden": 192,
    "heads": 6,
    "feed_forward": 512,
    "window": 64,
    "batch": 8,
    "steps": 60,
    "precision": "float32",
    "dram": "24MiB",
    "eval_windows": 32,
    "sample_tokens": 40,
}


def parse_bytes(text: str) -> int:
    """ "160MiB" -> 167772160; a plain number is bytes. Raises UsageError."""
    head = text.strip()
    digits = head.rstrip("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ ")
    unit = head[len(digits) :].strip().lower()
    try:
        value = float(digits) * _UNITS[unit]
    except (ValueError, KeyError) as error:
        raise UsageError(
            f"{text!r} is not an amount of memory: write it as 160MiB or 20GiB"
        ) from error
    if not 0 < value < 1 << 60:
        raise UsageError(f"an amount of memory must be above 0 and below 1 EiB, not {text}")
    return int(value)


def human_bytes(count: float) -> str:
    """1234567 -> "1.2 MB" (powers of 1000)."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.2f} TB"


def resolve(given: dict[str, Any], stored: dict[str, Any] | None) -> Settings:
    """Settings from what the user gave, over what the stored run has (at a resume), over the
    defaults.

    Raises InvalidArgument naming each setting that differs from the stored run and that the numbers
    depend on.
    """
    if stored is None:
        settings = Settings(**given)
    else:
        known = {field.name for field in fields(Settings)}
        kept = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in stored.items()
            if name in known
        }
        kept.setdefault("checkpoint_every", "off")  # its store was made without room for a copy
        before = Settings(**kept)
        given = {
            name: value
            for name, value in given.items()
            if name not in CHOSEN or value != CHOSEN[name]
        }
        settings = Settings(**{**kept, **given})
        differ = [
            f"--{name.replace('_', '-')} {_shown(getattr(settings, name))} (stored:"
            f" {_shown(getattr(before, name))})"
            for name in known
            if name not in FREE_AT_RESUME
            and getattr(settings, name) != getattr(before, name)
            and kept.get(name) != CHOSEN.get(name, name)
        ]
        if differ:
            raise InvalidArgument(
                "the stored run has other settings: "
                + ", ".join(sorted(differ))
                + "; leave them out to resume, or give another --out to start a new run"
            )
    settings.check()
    return settings


def _shown(value: Any) -> str:
    return " ".join(value) if isinstance(value, tuple) else str(value)


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write atomically and durably: after a crash the file is the old one or the new one, whole."""
    partial = path.with_name(f".{path.name}.partial")
    with naming(partial), open(partial, "w", encoding="utf-8") as out:
        json.dump(content, out, indent=2)
        out.write("\n")
        out.flush()
        os.fsync(out.fileno())
    partial.rename(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def read_run(out: Path) -> dict[str, Any] | None:
    """The stored run of a folder: {"settings", "heldout_loss_before", "unigram_entropy"}; None if
    there is none."""
    try:
        return json.loads((out / RUN_FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as error:  # not JSON, or not UTF-8
        raise InvalidArgument(
            f"{out / RUN_FILE} is damaged ({error}); give another --out to start a new run"
        ) from error


def write_run(out: Path, settings: Settings, **facts: Any) -> None:
    write_json(out / RUN_FILE, {"settings": asdict(settings), **facts})
