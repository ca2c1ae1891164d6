"""`stoker report`: writes one HTML file that shows a run: its steps, what they waited for, the
bytes they moved, cache hits, checkpoints, and what would help. It needs no network. A run that goes
on is shown as it stands."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..command import Parser, fail, named, say
from ..errors import StokerError
from .advice import advice
from .folder import REPORT_FILE, RunFolder


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser("stoker report", __doc__)
    parser.add_argument(
        "run",
        type=lambda text: Path(named(text)),
        metavar="RUN",
        help="the folder of a run, with its ledger.jsonl (the --out of `stoker train`)",
    )
    parser.add_argument(
        "--out",
        type=lambda text: Path(named(text)),
        metavar="FILE",
        help=f"the file to write (default: RUN/{REPORT_FILE})",
    )
    args = parser.parse_args(argv)
    try:
        folder = RunFolder(args.run)
        file = args.out or args.run / REPORT_FILE
        folder.write_report(file)
    except (StokerError, OSError) as error:
        return fail("stoker report", error)
    for each in advice(folder.rows):
        say(each)
    say(f"written      {file}")
    return 0
