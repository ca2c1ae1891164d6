"""Loss curves of lossy moments beside the exact ones: `stoker train` once a mode, same seed, data
and order of samples.

    .venv/bin/python bench/moments.py --out out/moments -- --steps 120        (everything behind --
    goes to `stoker train`)

Runs that OUT/MODE holds already are taken as they are. Writes bench/results/moments.json and
docs/moments.svg.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

import stoker
from stoker.offload.model.moments import MODES
from stoker.report.charts import Series, lines

ROOT = Path(__file__).resolve().parent.parent
WINDOW = 5  # steps that a drawn point is the mean of
COLOURS = {"exact": "#1b6ac9", "bf16": "#c2410c", "8bit": "#15803d"}
STYLE = """svg{background:#fff;font:12px sans-serif}.grid{stroke:#ddd}
.tick,.label{fill:#555}.line{fill:none;stroke-width:1.6}"""


def run(mode: str, out: Path, options: list[str]) -> dict[str, Any]:
    """The losses of one mode, from a run of its own unless there is one."""
    if not (out / "summary.json").exists():
        subprocess.run(
            [
                sys.executable,
                "-m",
                "stoker.train",
                "--out",
                str(out),
                "--cache",
                str(out.parent / "data"),
                "--moments",
                mode,
                "--sample-tokens",
                "0",
                *options,
            ],
            check=True,
        )
    summary = json.loads((out / "summary.json").read_text())
    settings = json.loads((out / "run.json").read_text())["settings"]
    if settings.pop("moments") != mode:
        raise SystemExit(f"{out} holds a run with other moments than {mode}")
    rows = [json.loads(line) for line in (out / "ledger.jsonl").read_text().splitlines()]
    per = lambda way: (
        statistics.mean(sum(row[way].values()) for row in rows[3:]) / summary["parameters"]
    )
    return {
        "moments": mode,
        "settings": {
            name: settings[name]
            for name in (
                "layers",
                "hidden",
                "heads",
                "feed_forward",
                "vocabulary",
                "window",
                "batch",
                "steps",
                "learning_rate",
                "clip",
                "seed",
                "precision",
            )
        },
        "parameters": summary["parameters"],
        "finished": summary["finished"],
        "heldout_loss_before": summary["heldout_loss_before"],
        "heldout_loss_after": summary["heldout_loss_after"],
        "state_bytes_per_parameter": summary["state_bytes"] / summary["parameters"],
        "read_b_per_p": per("read_bytes"),
        "written_b_per_p": per("written_bytes"),
        "losses": [row["loss"] for row in rows],
    }


def plot(rows: list[dict[str, Any]]) -> str:
    """The curves as one SVG file; each point is the mean of WINDOW steps."""
    series = []
    for row in rows:
        losses = row["losses"]
        means = [
            (i + WINDOW, statistics.mean(losses[i : i + WINDOW]))
            for i in range(0, len(losses) - WINDOW + 1, WINDOW)
        ]
        series.append(Series(row["moments"], means, row["moments"].replace("8bit", "eight")))
    drawn = lines(series, "Training loss by step", "step", "loss")
    svg = drawn[drawn.index("<svg") :].replace(
        "<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1
    )
    names = "".join(
        f'<text x="{600}" y="{40 + 18 * i}"'
        f' fill="{COLOURS[row["moments"]]}">{row["moments"]}</text>'
        for i, row in enumerate(rows)
    )
    colours = "".join(
        f".{each.style}{{stroke:{COLOURS[row['moments']]}}}"
        for each, row in zip(series, rows, strict=True)
    )
    return (
        svg.replace("</title>", f"</title><style>{STYLE}{colours}</style>", 1).replace(
            "</svg>", f"{names}</svg>"
        )
        + "\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="where the runs are, or go")
    parser.add_argument("options", nargs="*", help="of `stoker train`, behind --")
    args = parser.parse_args()
    rows = [run(mode, args.out / mode, args.options) for mode in MODES]
    if len({json.dumps(row["settings"]) for row in rows}) != 1:
        raise SystemExit(f"the runs in {args.out} differ in more than their moments")
    machine = {
        "cpu": platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "stoker": stoker.__version__,
    }
    (ROOT / "bench" / "results" / "moments.json").write_text(
        json.dumps({"machine": machine, "rows": rows}) + "\n"
    )
    (ROOT / "docs" / "moments.svg").write_text(plot(rows))
    for row in rows:
        after = row["heldout_loss_after"]
        print(
            (
                f"{row['moments']:6} held-out {row['heldout_loss_before']:.3f} -> {after:.3f}"
                if after
                else f"{row['moments']:6} not finished"
            ),
            f"last 20 steps {statistics.mean(row['losses'][-20:]):.4f}",
        )


if __name__ == "__main__":
    main()
