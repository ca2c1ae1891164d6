"""`stoker top`: a live view of a run: its step, what is computing and what waits, disk, cache and
checkpoints. It reads the run's ledger only, so it works from any shell that sees the folder. Ctrl-C
quits. Where the output is no terminal, it is printed once."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from ..command import Parser, fail, named, number, printable
from ..errors import StokerError
from ..report.folder import LEDGER_FILE, RunFolder
from .view import lines

_HOME, _CLEAR_LINE, _CLEAR_BELOW = "\x1b[H", "\x1b[K", "\x1b[J"


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser("stoker top", __doc__)
    parser.add_argument(
        "run",
        type=lambda text: Path(named(text)),
        metavar="RUN",
        help="the folder of a run, with its ledger.jsonl (the --out of `stoker train`)",
    )
    parser.add_argument(
        "--every",
        type=number(0.1, 3600),
        default=1.0,
        metavar="SECONDS",
        help="how often the view is drawn (default: 1)",
    )
    args = parser.parse_args(argv)
    try:
        if not sys.stdout.isatty():
            print("\n".join(map(printable, _look(args.run))))
            return 0
        _watch(args.run, args.every)
    except (StokerError, OSError) as error:
        return fail("stoker top", error)
    except KeyboardInterrupt:
        print()
    return 0


def _look(run: Path) -> list[str]:
    folder = RunFolder(run)
    ledger = run / LEDGER_FILE
    return lines(
        run,
        folder.rows,
        folder.run.get("settings", {}).get("steps"),
        ledger.stat().st_mtime if ledger.exists() else None,
    )


def _watch(run: Path, every: float) -> None:
    """Until Ctrl-C."""
    sys.stdout.write(_HOME + _CLEAR_BELOW)
    while True:
        width, height = os.get_terminal_size(sys.stdout.fileno())
        shown = [printable(each)[: width - 1] for each in _look(run)][: height - 1]
        sys.stdout.write(
            _HOME + "".join(each + _CLEAR_LINE + "\n" for each in shown) + _CLEAR_BELOW
        )
        sys.stdout.flush()
        time.sleep(every)
