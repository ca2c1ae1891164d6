"""OUT/ledger.jsonl: one object a step, without gaps or duplicates across kills and resumes."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


class LedgerFile:
    """Joins what the trainer knows of a step (loss, tokens) with what the offload's ledger measured of it.

    A step's line is durable before opt.step() returns, hence before the step can be committed: so a committed step
    always has its line. A killed run may leave lines of steps that were not committed; opening cuts them, and the
    resumed run makes them again. One thread.
    """

    def __init__(self, path: Path, committed_step: int) -> None:
        """Go on behind `committed_step` (0: begin anew)."""
        self.path = path
        kept = [line for line in read_ledger(path) if line["step"] <= committed_step]
        partial = path.with_name(f".{path.name}.partial")
        with open(partial, "w", encoding="utf-8") as out:
            out.writelines(json.dumps(line) + "\n" for line in kept)
            out.flush()
            os.fsync(out.fileno())
        partial.rename(path)
        self._facts: dict[str, Any] = {}
        self._out = open(path, "a", encoding="utf-8")

    def about(self, **facts: Any) -> None:
        """The trainer's part of the step that is decided next."""
        self._facts = facts

    def decided(self, measured: dict[str, Any]) -> None:
        """The offload's part of that step: write its line."""
        try:
            self._out.write(json.dumps({**measured, **self._facts}) + "\n")
            self._out.flush()
            os.fdatasync(self._out.fileno())
        except OSError as error:  # which file it was, is known only here
            raise OSError(error.errno, error.strerror, str(self.path)) from error

    def close(self) -> None:
        self._out.close()


def read_ledger(path: Path) -> list[dict[str, Any]]:
    """The lines of a ledger; a torn last line, as a power loss leaves it, is left out."""
    lines = []
    if path.exists():
        for raw in path.read_text(encoding="utf-8").splitlines():
            try:
                lines.append(json.loads(raw))
            except json.JSONDecodeError:
                break
    return lines
