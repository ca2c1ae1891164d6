"""report.html: one file that shows a run; no scripts, no network, readable in light and dark."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from ..errors import naming
from ..offload.machine import CAUSES
from ..offload.planner import expected
from ..plan.text import event_text
from . import charts
from .charts import Series
from .settings import human_bytes

_STYLE = """
:root{color-scheme:light dark;--page:#f7f7f5;--card:#fff;--ink:#16181d;--soft:#5c626d;
--edge:#e2e3e6;--grid:#e9eaec;
--s0:#2a6fdb;--s1:#e07b1a;--s2:#16946a;--s3:#8b4fc8;--s4:#d33f57;--s5:#b99500;--s6:#0f93a8;
--s7:#7a7f8a;--s8:#a0522d;--ref:#b3261e}
@media (prefers-color-scheme:dark){:root{--page:#121418;--card:#1b1e24;--ink:#eceef2;--soft:#a2a9b5;
--edge:#2d3139;
--grid:#2a2e36;--s0:#6ea8ff;--s1:#ff9f45;--s2:#45c796;--s3:#b98cf0;--s4:#ff7186;--s5:#e0c04a;
--s6:#4cc6da;--s7:#9aa1ad;--s8:#d08a63;
--ref:#ff8a80}}
*{box-sizing:border-box}body{margin:0;background:var(--page);color:var(--ink);
font:15px/1.5 system-ui,-apple-system,
"Segoe UI","DejaVu Sans",sans-serif}main{max-width:1000px;margin:0 auto;padding:32px 20px 60px}
h1{font-size:26px;margin:0}
h2{font-size:17px;margin:0 0 2px}p{margin:0 0 8px}.sub,.note{color:var(--soft)}
.note{font-size:13.5px;max-width:75ch}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(200px,1fr));gap:12px;margin:22px 0}
.tile,section{
background:var(--card);border:1px solid var(--edge);border-radius:10px}.tile{padding:12px 14px}
.tile b{display:block;
font-size:22px;font-weight:600;font-variant-numeric:tabular-nums}.tile span{color:var(--soft);
font-size:13px}
section{padding:18px 20px;margin:0 0 16px}svg{display:block;width:100%;height:auto;
font:12px system-ui,"DejaVu Sans",sans-serif}
.grid{stroke:var(--grid)}.tick,.label{fill:var(--soft)}.name,.value{fill:var(--ink);font-size:13px}
.line{fill:none;
stroke-width:2;stroke-linejoin:round}.legend{display:flex;flex-wrap:wrap;gap:4px 18px;
font-size:13px;color:var(--soft);
margin:8px 0}.key{display:inline-block;width:12px;height:12px;border-radius:3px;margin-right:6px;
vertical-align:-1px}
.thin{stroke:var(--s0);opacity:.35;stroke-width:1}.ref{stroke:var(--ref);stroke-dasharray:6 4}
i.thin{background:var(--s0)}
i.ref{background:var(--ref);height:3px;vertical-align:3px}pre{white-space:pre-wrap;
overflow-wrap:anywhere;margin:0;
font:13px/1.5 ui-monospace,"DejaVu Sans Mono",monospace}pre em{font-style:normal;color:var(--soft)}
table{border-collapse:
collapse;width:100%;font-size:13.5px}td{padding:4px 0;border-top:1px solid var(--edge);
vertical-align:top}
td:last-child{text-align:right;font-variant-numeric:tabular-nums;overflow-wrap:anywhere}
.none{color:var(--soft)}
""" + "".join(
    f"rect.s{i},.dot.s{i}{{fill:var(--s{i})}}.line.s{i}{{stroke:var(--s{i})}}"
    f"i.s{i}{{background:var(--s{i})}}\n"
    for i in range(9)
)

_CLASS_STYLES = {"weights": "s0", "remainder": "s1", "m": "s2", "v": "s3", "gradients": "s4"}
_CAUSE_STYLES = dict(zip(CAUSES, ("s1", "s4", "s3", "s5", "s6", "s2", "s7", "s8"), strict=True))


def write_report(
    path: Path,
    rows: Sequence[dict[str, Any]],
    summary: dict[str, Any],
    plan: dict[str, Any],
    settings: dict[str, Any],
    prompt: str = "",
    sample: str = "",
    planned_behind: int = 0,
) -> None:
    """Write the report of a run: `rows` as in ledger.jsonl, `summary` as in summary.json, `plan` as
    opt.plan() gives: of the steps behind `planned_behind`."""
    own = [row for row in rows if row["step"] > planned_behind]
    state = "finished" if summary["finished"] else "stopped before its end"
    body = [
        (
            f"<h1>Training report</h1><p class='sub'>{summary['parameters'] / 1e6:.1f} M"
            f" parameters, step {summary['steps']} of {settings['steps']}, {state}. Weights,"
            " moments and masters lived on disk; memory was capped at"
            f" {human_bytes(summary['dram_cap_bytes'])}.</p>"
        ),
        _tiles(summary),
        _section(
            "Loss",
            _loss(rows, summary),
            "Cross-entropy in nats a token. The dashed line is the entropy of the held-out tokens'"
            " frequencies: a model below it has learned more than which tokens are common.",
        ),
        _section(
            "Time by cause",
            _time(rows),
            "Seconds of each step. What is not waiting is computing: forward, backward, "
            "the optimizer's kernels and checksums.",
        ),
        _section(
            "Seconds a step by cause",
            _causes(own, plan),
            "The plan's prediction from a measurement of the disk and of a layer just "
            "before, and the mean of the steps measured since.",
        ),
        _section(
            "Bytes a step by class",
            _bytes(own, plan),
            "Megabytes (10^6) moved between disk and memory: the plan's "
            "prediction, and the mean of the steps measured since.",
        ),
        _section("Memory against the cap", _memory(rows, summary), _memory_note(summary)),
    ]
    if told := [
        f"step {row['step']}: {line}" for row in rows for line in event_text(row.get("events", []))
    ]:
        body.append(
            _section(
                "What changed on the way",
                f"<pre>{escape(chr(10).join(told))}</pre>",
                "Policies, volumes and layers' activations, with the reason for each change.",
            )
        )
    if sample:
        body.append(
            _section(
                "A sampled continuation",
                f"<pre><em>{escape(prompt)}</em>{escape(sample)}</pre>",
                "Grey: the prompt, from the held-out part. Then the model's own words.",
            )
        )
    body.append(
        _section(
            "All figures",
            _table(
                {
                    **{k: v for k, v in summary.items() if k != "plan"},
                    **{f"setting {k}": v for k, v in settings.items()},
                }
            ),
            "",
        )
    )
    with naming(path):
        path.write_text(
            "<!doctype html><html lang='en'><head><meta charset='utf-8'>"
            "<meta name='viewport' content='width=device-width,initial-scale=1'><title>Stoker"
            " training report</title>"
            f"<style>{_STYLE}</style></head><body><main>{''.join(body)}</main></body></html>\n",
            encoding="utf-8",
        )


def _section(title: str, content: str, note: str) -> str:
    return f"<section><h2>{escape(title)}</h2><p class='note'>{escape(note)}</p>{content}</section>"


def _tiles(summary: dict[str, Any]) -> str:
    after = summary["heldout_loss_after"]
    tokens = summary["tokens_per_second"]
    entries = [
        ("held-out loss before", f"{summary['heldout_loss_before']:.3f}"),
        ("held-out loss after", "not reached" if after is None else f"{after:.3f}"),
        ("unigram entropy, held-out", f"{summary['unigram_entropy']:.3f}"),
        ("states / memory cap", f"{summary['state_bytes'] / summary['dram_cap_bytes']:.1f} x"),
        ("tokens a second", f"{tokens:.0f}"),
        ("time stalled on storage", f"{summary['stall_share']:.0%}"),
        ("bytes a parameter a step", f"{summary['bytes_per_parameter_step']:.1f}"),
        ("training time", f"{summary['seconds'] / 60:.1f} min"),
    ]
    return (
        "<div class='tiles'>"
        + "".join(
            f"<div class='tile'><b>{value}</b><span>{escape(name)}</span></div>"
            for name, value in entries
        )
        + "</div>"
    )


def _loss(rows: Sequence[dict[str, Any]], summary: dict[str, Any]) -> str:
    raw = [(row["step"], row["loss"]) for row in rows]
    smooth, mean = [], None
    for step, loss in raw:
        mean = loss if mean is None else 0.9 * mean + 0.1 * loss
        smooth.append((step, mean))
    last = raw[-1][0] if raw else 1
    series = [
        Series("each step", raw, "thin"),
        Series("smoothed", smooth, "s0"),
        Series(
            "unigram entropy of the held-out tokens",
            [(0, summary["unigram_entropy"]), (last, summary["unigram_entropy"])],
            "ref",
        ),
        Series("held-out before", [(0, summary["heldout_loss_before"])], "s1"),
    ]
    if summary["heldout_loss_after"] is not None:
        series.append(Series("held-out after", [(last, summary["heldout_loss_after"])], "s2"))
    return charts.lines(series, "Loss over steps", "step", "nats a token")


def _time(rows: Sequence[dict[str, Any]]) -> str:
    causes = [
        cause for cause in CAUSES if any(row["stall_seconds"].get(cause, 0.0) > 0 for row in rows)
    ]
    stalls = [
        Series(
            f"waiting: {cause.replace('_', ' ')}",
            [(row["step"], row["stall_seconds"].get(cause, 0.0)) for row in rows],
            _CAUSE_STYLES[cause],
        )
        for cause in causes
    ]
    computing = Series(
        "computing",
        [
            (row["step"], max(0.0, row["seconds"] - sum(row["stall_seconds"].values())))
            for row in rows
        ],
        "s0",
    )
    return charts.columns(
        [row["step"] for row in rows],
        [computing, *stalls],
        "Seconds of each step by cause",
        "step",
        "seconds",
    )


def _causes(rows: Sequence[dict[str, Any]], plan: dict[str, Any]) -> str:
    bars, planned = [], expected(plan, list(rows))
    if "seconds" in planned:
        bars.append(("planned", _parts(planned["compute_seconds"], planned["stall_seconds"])))
    if rows:
        stalls = {
            cause: sum(row["stall_seconds"].get(cause, 0.0) for row in rows) / len(rows)
            for cause in CAUSES
        }
        bars.append(
            (
                "measured",
                _parts(
                    sum(row["seconds"] for row in rows) / len(rows) - sum(stalls.values()), stalls
                ),
            )
        )
    return charts.bars(bars, "Seconds a step by cause", "s")


def _parts(computing: float, stalls: dict[str, float]) -> list[tuple[str, float, str]]:
    return [
        ("computing", max(0.0, computing), "s0"),
        *((f"waiting: {cause}", stalls[cause], _CAUSE_STYLES[cause]) for cause in CAUSES),
    ]


def _bytes(rows: Sequence[dict[str, Any]], plan: dict[str, Any]) -> str:
    bars, planned = [], expected(plan, list(rows))
    for way in ("read", "written"):
        bars.append((f"{way}, planned", _shares(planned[f"{way}_bytes"])))
        total: dict[str, float] = {}
        for row in rows:
            for name, count in row[f"{way}_bytes"].items():
                total[name] = total.get(name, 0) + count
        bars.append(
            (
                f"{way}, measured",
                _shares({name: count / max(1, len(rows)) for name, count in total.items()}),
            )
        )
    return charts.bars(bars, "Bytes a step by class", "MB")


def _shares(amounts: dict[str, float]) -> list[tuple[str, float, str]]:
    return [
        (name, count / 1e6, _CLASS_STYLES.get(name, "s7"))
        for name, count in amounts.items()
        if count > 0
    ]


def _memory(rows: Sequence[dict[str, Any]], summary: dict[str, Any]) -> str:
    cap = summary["dram_cap_bytes"] / 1e6
    first, last = (rows[0]["step"], rows[-1]["step"]) if rows else (0, 1)
    series = [
        Series(
            "peak of Stoker's pools",
            [(row["step"], row["dram_bytes_peak"] / 1e6) for row in rows],
            "s0",
        ),
        Series(
            "peak of the process",
            [
                (row["step"], row["process_bytes_peak"] / 1e6)
                for row in rows
                if "process_bytes_peak" in row
            ],
            "s1",
        ),
        Series("the cap", [(first, cap), (max(last, first + 1), cap)], "ref"),
    ]
    return charts.lines(series, "Memory over steps", "step", "MB", from_zero=True)


def _memory_note(summary: dict[str, Any]) -> str:
    return (
        "The pools (weights, gradients, state, staging) peaked at"
        f" {human_bytes(summary['dram_peak_bytes'])} of the cap of"
        f" {human_bytes(summary['dram_cap_bytes'])}; the whole process, with Python, torch and its"
        f" activations, at {human_bytes(summary['process_peak_bytes'])}. The model's states take"
        f" {human_bytes(summary['state_bytes'])}."
    )


def _table(figures: dict[str, Any]) -> str:
    return (
        "<table>"
        + "".join(
            f"<tr><td>{escape(name.replace('_', ' '))}</td><td>{escape(_figure(value))}</td></tr>"
            for name, value in figures.items()
        )
        + "</table>"
    )


def _figure(value: Any) -> str:
    return (
        f"{value:.6g}"
        if isinstance(value, float)
        else str(value)
        if value not in ((), "", None)
        else "–"
    )
