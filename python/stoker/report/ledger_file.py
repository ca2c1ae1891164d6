"""OUT/ledger.jsonl: one object a step, without gaps or duplicates across kills, resumes and full
disks."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

from ..errors import naming


class LedgerFile:
    """Joins what the trainer knows of a step (loss, tokens) with what the offload's ledger measured
    of it.

    A step's line is durable before opt.step() returns, hence before the step can be committed.
    Where the file cannot be written, the line is kept and belongs to the step's record, as this
    object is attached to the optimizer: it is committed with the step, and the resumed run writes
    it. So a committed step always has its line. A killed run may leave lines of steps that were not
    committed; open() cuts them, and the resumed run makes them again. One thread.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.last: dict[str, Any] | None = None  # the line of the newest decided step
        self._facts: dict[str, Any] = {}
        self._unwritten: list[dict[str, Any]] = []
        self._failure: OSError | None = None
        self._size = 0  # bytes of whole, durable lines
        self._out: int | None = None

    def open(self, committed_step: int) -> None:
        """Go on behind `committed_step` (0: begin anew), with the lines that the record of that
        step brought along."""
        lines = {
            line["step"]: line
            for line in [*self._unwritten, *read_ledger(self.path)]
            if line["step"] <= committed_step
        }
        partial = self.path.with_name(f".{self.path.name}.partial")
        with naming(self.path), open(partial, "wb") as out:
            out.writelines(_encoded(lines[step]) for step in sorted(lines))
            out.flush()
            os.fsync(out.fileno())
            self._size = out.tell()
        partial.rename(self.path)
        folder = os.open(self.path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            # else a power cut could bring back the file of before, without the lines to come
            os.fsync(folder)
        finally:
            os.close(folder)
        self._unwritten = []
        self._out = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)

    def about(self, **facts: Any) -> None:
        """The trainer's part of the step that is decided next."""
        self._facts = facts

    def decided(self, measured: dict[str, Any]) -> None:
        """The offload's part of that step: write its line. Never raises, as the step is decided
        already: see check()."""
        self.last = {**measured, **self._facts}
        self._unwritten.append(self.last)
        data = b"".join(map(_encoded, self._unwritten))
        try:
            with naming(self.path):
                written = os.write(self._out, data)
                while written < len(data):  # a disk that fills up takes a part first
                    written += os.write(self._out, data[written:])
                os.fdatasync(self._out)
        except OSError as error:
            self._failure = error
            with contextlib.suppress(OSError):  # read_ledger() leaves out a torn line as well
                os.ftruncate(self._out, self._size)
            return
        self._size += len(data)
        self._unwritten, self._failure = [], None

    def check(self) -> None:
        """Raise the error that kept the last line out of the file. Call it once all that belongs to
        the step has moved on."""
        if self._failure is not None:
            raise self._failure

    def state_dict(self) -> dict[str, Any]:
        """The lines that are not in the file yet."""
        return {"unwritten": list(self._unwritten)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._unwritten = list(state["unwritten"])

    def close(self) -> None:
        if self._out is not None:
            os.close(self._out)
            self._out = None


def _encoded(line: dict[str, Any]) -> bytes:
    return (json.dumps(line) + "\n").encode()


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
