"""RunFolder: what a run left in its folder, or has there so far while it goes on."""

from __future__ import annotations

import contextlib
import json
from functools import cached_property
from pathlib import Path
from typing import Any

from ..errors import NotFound, naming
from ..train.settings import RUN_FILE, Settings
from .ledger_file import read_ledger
from .page import write_report

LEDGER_FILE, SUMMARY_FILE, REPORT_FILE = "ledger.jsonl", "summary.json", "report.html"
PLAN_FILE = "plan.json"


class RunFolder:
    """The folder as it was when it was opened. NotFound where no run has written a ledger."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if not (path / LEDGER_FILE).exists() and not (path / RUN_FILE).exists():
            raise NotFound(
                f"there is no run in {path}: name the folder that holds its {LEDGER_FILE} (the"
                " --out of `stoker train`)"
            )
        with naming(path / LEDGER_FILE):
            self.rows = read_ledger(path / LEDGER_FILE)

    @cached_property
    def run(self) -> dict[str, Any]:
        """run.json; empty where the ledger is of another program than `stoker train`."""
        return self._read(RUN_FILE)

    @cached_property
    def planned(self) -> dict[str, Any]:
        return self._read(PLAN_FILE)

    @cached_property
    def summary(self) -> dict[str, Any]:
        """summary.json, unless steps followed it; then, and while there is none, what is known."""
        written = self._read(SUMMARY_FILE)
        if written and written["steps"] >= (self.rows[-1]["step"] if self.rows else 0):
            return written
        summary: dict[str, Any] = {"steps": self.rows[-1]["step"] if self.rows else 0}
        if "settings" not in self.run or not self.planned:
            return summary
        plan = self.planned["plan"]
        return summary | {
            "heldout_loss_before": self.run.get("heldout_loss_before"),
            "unigram_entropy": self.planned["unigram_entropy"],
            "parameters": plan["parameters"],
            "state_bytes": plan["state_bytes"],
            "dram_cap_bytes": Settings(**self.run["settings"]).dram_bytes,
            "dram_peak_bytes": max((row["dram_bytes_peak"] for row in self.rows), default=0),
            "process_peak_bytes": max(
                (row.get("process_bytes_peak", 0) for row in self.rows), default=0
            ),
        }

    def write_report(self, file: Path) -> None:
        continuation = self.summary.get("continuation", {})
        write_report(
            file,
            self.rows,
            self.summary,
            self.planned.get("plan", {}),
            self.run.get("settings", {}),
            continuation.get("prompt", ""),
            continuation.get("text", ""),
            planned_behind=self.planned.get("behind", 0),
        )

    def _read(self, name: str) -> dict[str, Any]:
        with contextlib.suppress(FileNotFoundError, json.JSONDecodeError), naming(self.path / name):
            return json.loads((self.path / name).read_text(encoding="utf-8"))
        return {}
