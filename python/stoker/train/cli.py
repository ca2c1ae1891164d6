"""`stoker train`: the command line of the trainer."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from ..checkpoint.commits import composition_of
from ..command import FAILED, WRONG, Parser, named, printable, sentence
from ..data.corpus import quick_corpus
from ..errors import StokerError
from ..report.metrics import Metrics, MetricsServer, parse_address
from .settings import QUICK, Settings, UsageError, read_run, resolve
from .stop import Stopped, StopSignals
from .trainer import forget_run, train

_DESCRIPTION = """\
Train a language model whose weights, masters and optimizer state live on disk, under a hard cap
on memory. Without options it trains a small model on the kernel documentation for about six minutes
on two cores, then measures the held-out loss, samples a continuation, exports the weights for
transformers and writes a report."""

_EPILOG = """\
In OUT afterwards: report.html, summary.json, ledger.jsonl (one object a step), export/ (for
transformers), store/. checkpoints/ are folders of safetensors (`stoker ckpt ls
OUT/checkpoints`); if the store is lost, --resume goes on from the newest.
Exit status: 0 done; 1 it failed, and a sentence says why; 2 the command line is wrong; 130 or 143
stopped by SIGINT or SIGTERM with the last step committed and, if 25 seconds are enough, saved
(--resume goes on; a second signal ends at once)."""

DEFAULT_OUT, QUICK_OUT = "out/train", "out/quick"

# Options that set a field of Settings: (field, help, keywords for argparse). The default is the
# field's own.
_RUN = (
    (
        "data",
        "text files or folders; default: Debian's linux-doc, the kernel documentation",
        {"nargs": "+", "metavar": "PATH"},
    ),
    (
        "tokenizer",
        "a tokenizer.json (or its folder) to use instead of learning one",
        {"metavar": "FILE"},
    ),
    ("vocabulary", "tokens of the vocabulary to learn", {"type": int}),
    (
        "steps",
        "steps of the whole run; 0: 230, or as many as are expected to end in six minutes",
        {"type": int},
    ),
    ("batch", "windows a step", {"type": int}),
    ("window", "tokens a window", {"type": int}),
    (
        "learning_rate",
        "peak of the learning rate; it warms up, then falls along a cosine",
        {"type": float},
    ),
    ("warmup", "steps of warm-up", {"type": int}),
    ("weight_decay", "AdamW's weight decay of the matrices", {"type": float}),
    ("clip", "limit of the gradient norm", {"type": float}),
    ("seed", "seed of weights, order of samples and continuation", {"type": int}),
)
_MODEL = (
    ("layers", "decoder layers", {"type": int}),
    ("hidden", "width of the model", {"type": int}),
    ("heads", "attention heads", {"type": int}),
    ("feed_forward", "width of the feed-forward part", {"type": int}),
    (
        "precision",
        (
            "type of the weights; bfloat16 has exact float32 masters; auto measures which of them"
            " this processor multiplies quicker, and takes bfloat16 on a GPU"
        ),
        {"choices": ("auto", "bfloat16", "float32")},
    ),
    (
        "moments",
        (
            "how AdamW's running means are kept; bf16 and 8bit are lossy and move 8 and 12 bytes a"
            " parameter less in a step"
        ),
        {"choices": ("exact", "bf16", "8bit")},
    ),
)
_WHERE = (
    (
        "dram",
        "cap on the memory for weights, gradients, state and staging, as 160MiB or 20GiB",
        {"metavar": "BYTES"},
    ),
    ("store", "where weights and state live; default: OUT/store", {"metavar": "DIR"}),
    (
        "policy",
        (
            "when updates run: in step() (sync), during backward (speculate), before a block's next"
            " use (lazy), or as pays (auto: speculates, and is lazy for 20 steps where that is in"
            " vain); all give the same bits"
        ),
        {"choices": ("auto", "sync", "speculate", "lazy")},
    ),
    (
        "activations",
        "where goes what backward needs of forward; all give the same bits",
        {"choices": ("keep", "disk", "dram", "recompute", "auto")},
    ),
    (
        "device",
        "where to compute: cpu, cuda, cuda:1; auto takes a GPU if torch sees one",
        {"metavar": "DEVICE"},
    ),
    ("cache", "where token files are kept and found again; default: OUT/data", {"metavar": "DIR"}),
    (
        "checkpoints",
        "where checkpoints go, a folder or s3://BUCKET/PREFIX; default: OUT/checkpoints",
        {"metavar": "STORE"},
    ),
    (
        "checkpoint_every",
        "when one is saved: auto (as often as pays), off, or a number of steps",
        {"metavar": "EVERY"},
    ),
    (
        "stall_seconds",
        "how long a disk may not answer before it is given up with an error",
        {"type": int, "metavar": "SECONDS"},
    ),
)
_AFTER = (
    ("eval_windows", "held-out windows to measure the loss on", {"type": int}),
    ("sample_tokens", "tokens of the sampled continuation; 0: none", {"type": int}),
)


def parser() -> Parser:
    """The parser. Options that are not given are absent from the namespace, so a resume can tell
    them apart."""
    top = Parser("stoker train", _DESCRIPTION, _EPILOG)
    run = top.add_argument_group("the run")
    run.add_argument(
        "--out",
        type=lambda text: Path(named(text)),
        metavar="DIR",
        help=(
            f"where results go (default: {DEFAULT_OUT}, or {DEFAULT_OUT}-2 and so on where that"
            " holds a finished run)"
        ),
    )
    start = run.add_mutually_exclusive_group()
    start.add_argument(
        "--resume",
        action="store_true",
        help=(
            "go on with the run in OUT at its last committed step; options left out are those of"
            " the run"
        ),
    )
    start.add_argument(
        "--overwrite",
        action="store_true",
        help="replace the run that OUT holds, without which that is an error",
    )
    run.add_argument(
        "--quick",
        action="store_true",
        help=(
            "a first look in about 30 seconds: a small float32 model on the sources of Python's own"
            f" library, to {QUICK_OUT}; other options still hold"
        ),
    )
    run.add_argument(
        "--rebuild-tokens",
        action="store_true",
        help="build the token file again even if it is there",
    )
    run.add_argument(
        "--metrics",
        metavar="PORT",
        help=(
            "serve metrics for Prometheus at http://127.0.0.1:PORT/metrics; HOST:PORT for others"
            " than this machine"
        ),
    )
    run.add_argument(
        "--json", action="store_true", help="print the summary as one JSON object on stdout"
    )
    for group, options in (
        (run, _RUN),
        (top.add_argument_group("the model"), _MODEL),
        (top.add_argument_group("where things live"), _WHERE),
        (top.add_argument_group("what is measured at the end"), _AFTER),
    ):
        for name, text, keywords in options:
            default = Settings.__dataclass_fields__[name].default
            shown = f"{text} (default: {default})" if default not in ("", ()) else text
            group.add_argument(
                f"--{name.replace('_', '-')}",
                dest=name,
                default=argparse.SUPPRESS,
                help=shown,
                **keywords,
            )
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status. Progress goes to stderr, --json to stdout."""
    args = vars(parser().parse_args(argv))
    try:
        return _run(args)
    except UsageError as error:
        return _fail(args["json"], f"{error}; see `stoker train --help`", WRONG)
    except (StokerError, OSError) as error:
        return _fail(args["json"], _sentence(error))


def _run(args: dict[str, Any]) -> int:
    base = QUICK_OUT if args["quick"] else DEFAULT_OUT
    out: Path = args["out"] or default_out(args["resume"] or args["overwrite"], base)
    given = {field.name: args[field.name] for field in fields(Settings) if field.name in args}
    if args["quick"] and not args["resume"]:  # a resume has them
        data = given.get("data") or tuple(map(str, quick_corpus()))
        given = {**QUICK, **given, "data": data}
    _make_absolute(given)
    Settings(**given).check()  # what is wrong is so whatever the folder holds
    stored = read_run(out)
    if args["resume"] and stored is None:
        return _fail(
            args["json"],
            f"there is no run to resume in {out}: leave --resume out to start one, or name its"
            " folder with --out",
        )
    if not args["resume"] and stored is not None:
        if not args["overwrite"]:
            return _fail(
                args["json"],
                f"{out} already holds a run: continue it with --resume, replace it with "
                f"--overwrite, or"
                " name another folder with --out",
            )
    settings = resolve(given, stored["settings"] if args["resume"] else None)
    summary = _finished(out) if args["resume"] else None
    if summary is not None:
        print(
            f"the run in {out} is finished: {summary['steps']} steps, held-out loss"
            f" {summary['heldout_loss_before']:.3f} -> {summary['heldout_loss_after']:.3f}",
            file=sys.stderr,
        )
    else:
        summary = _train(settings, out, stored if args["resume"] else None, args)
    if isinstance(summary, int):
        return summary
    if args["json"]:
        print(json.dumps(summary))
    return 0


def _make_absolute(given: dict[str, Any]) -> None:
    """Paths become absolute, so that a resume from another folder finds the same files."""
    for name in ("data", "tokenizer", "cache", "store", "checkpoints"):
        if name in given and not all([given[name]] if name != "data" else given[name]):
            raise UsageError(f"--{name} is empty: give a path, or leave it out")
    if "data" in given:
        given["data"] = tuple(os.path.realpath(path) for path in given["data"])
    for name in ("tokenizer", "cache"):
        if given.get(name):
            given[name] = os.path.realpath(given[name])
    if given.get("checkpoints"):
        given["checkpoints"] = composition_of(given["checkpoints"])
    # else a composition, taken as it is
    if given.get("store") and not any(sign in given["store"] for sign in ":("):
        given["store"] = ",".join(map(os.path.realpath, given["store"].split(",")))


def default_out(existing: bool, base: str = DEFAULT_OUT) -> Path:
    """The folder of a run that names none: the newest of `base`, `base`-2 and so on, or the one
    behind it if that run is finished.

    existing: the newest one, finished or not. A finished run is never overwritten without being
    asked for.
    """
    number, out = 1, Path(base)
    while True:
        behind = Path(f"{base}-{number + 1}")
        if _finished(out) is None or existing and not behind.exists():
            return out
        number, out = number + 1, behind


def _finished(out: Path) -> dict[str, Any] | None:
    """The summary of a run that came to its end."""
    try:
        summary = json.loads((out / "summary.json").read_text(encoding="utf-8"))
    except (FileNotFoundError, json.JSONDecodeError):
        return None
    return summary if summary.get("finished") else None


def _train(
    settings: Settings, out: Path, stored: dict[str, Any] | None, args: dict[str, Any]
) -> dict[str, Any] | int:
    with StopSignals() as stop, _serving(args["metrics"]) as metrics:
        try:
            if args["overwrite"]:
                forget_run(out)
            summary = train(settings, out, stored, args["rebuild_tokens"], stop, metrics)
        except Stopped as stopped:
            if args["json"] and (out / "summary.json").exists():
                print((out / "summary.json").read_text(encoding="utf-8").replace("\n", ""))
            return stopped.exit_status
    for name in ("report.html", "summary.json", "ledger.jsonl", "export"):
        print(f"written      {out / name}", file=sys.stderr)
    return summary


@contextlib.contextmanager
def _serving(address: str | None) -> Iterator[Metrics | None]:
    """Metrics that are served while the run goes, where that is wanted."""
    if address is None:
        yield None
        return
    metrics = Metrics()
    server = MetricsServer(metrics, *parse_address(address))
    print(f"metrics      http://{server.host}:{server.port}/metrics", file=sys.stderr)
    try:
        yield metrics
    finally:
        server.close()


def _sentence(error: StokerError | OSError) -> str:
    if isinstance(error, StokerError):
        return re.sub(r'\bdram="?(\w+)"?', r"--dram \1", str(error))  # as it is said here
    if not error.filename:
        return f"{sentence(error)}: make room, then go on with --resume"
    return (
        f"{sentence(error)}: make room or make it accessible, or choose another folder with --out"
        " or --store"
    )


def _fail(as_json: bool, what: str, status: int = FAILED) -> int:
    print(f"stoker train: {printable(what)}", file=sys.stderr)
    if as_json:
        print(json.dumps({"error": what}))
    return status
