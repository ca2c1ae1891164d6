"""report.html: one file that shows a run; no scripts, no network, readable in light and dark."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from ..errors import naming
from ..offload.division.machine import CAUSES
from ..offload.planning.planner import expected
from ..plan.text import event_text
from ..train.settings import human_bytes
from . import charts, figures
from .advice import advice
from .charts import Series

_STYLE = """
:root{color-scheme:light dark;--page:#f7f7f5;--card:#fff;--ink:#16181d;--soft:#5c626d;
--edge:#e2e3e6;--grid:#e9eaec;
--s0:#2a6fdb;--s1:#e07b1a;--s2:#16946a;--s3:#8b4fc8;--s4:#d33f57;--s5:#b99500;--s6:#0f93a8;
--s7:#7a7f8a;--s8:#a0522d;--s9:#6b8e23;--s10:#c71585;--s11:#4682b4;--s12:#bdb76b;--ref:#b3261e}
@media (prefers-color-scheme:dark){:root{--page:#121418;--card:#1b1e24;--ink:#eceef2;--soft:#a2a9b5;
--edge:#2d3139;
--grid:#2a2e36;--s0:#6ea8ff;--s1:#ff9f45;--s2:#45c796;--s3:#b98cf0;--s4:#ff7186;--s5:#e0c04a;
--s6:#4cc6da;--s7:#9aa1ad;--s8:#d08a63;--s9:#a3c65c;--s10:#f07bc0;--s11:#8fbce6;--s12:#ddd69a;
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
    for i in range(13)
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
    body = [
        f"<h1>Training report</h1><p class='sub'>{escape(_headline(rows, summary, settings))}</p>",
        _tiles(rows, summary),
        _section("What to do", _told(advice(rows)), "Made from the figures below."),
    ]
    if any("loss" in row for row in rows) or "heldout_loss_before" in summary:
        body.append(
            _section(
                "Loss",
                _loss(rows, summary),
                "As the run wrote it: cross-entropy in nats a token. The dashed line, where there"
                " is one, is the entropy of the held-out tokens' frequencies: a model below it has"
                " learned more than which tokens are common.",
            )
        )
    body += [
        _section(
            "Time by cause",
            _time(rows),
            "Seconds of each step. What is not waiting is computing: forward, backward, "
            "the optimizer's kernels and checksums.",
        ),
        _section(
            "Seconds a step by cause",
            _causes(own, plan),
            "The mean of the steps"
            + (
                ", beside the plan's prediction from a measurement of the disk and of a layer just"
                " before."
                if plan
                else "."
            ),
        ),
        _section(
            "Bytes a step by class",
            _bytes(own, plan),
            "Megabytes (10^6) moved between disk and memory: the mean of the steps measured"
            + (", and the plan's prediction." if plan else "."),
        ),
        *_data(rows),
        *_checkpoints(rows),
    ]
    if "dram_cap_bytes" in summary:
        body.append(
            _section("Memory against the cap", _memory(rows, summary), _memory_note(summary))
        )
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
                    **{k: v for k, v in summary.items() if k not in ("plan", "continuation")},
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


def _headline(
    rows: Sequence[dict[str, Any]], summary: dict[str, Any], settings: dict[str, Any]
) -> str:
    step = summary.get("steps", rows[-1]["step"] if rows else 0)
    state = {True: "finished", False: "stopped before its end"}.get(
        summary.get("finished"), "as its ledger stands now"
    )
    if "parameters" not in summary:
        return f"Step {step}, {state}."
    return (
        f"{summary['parameters'] / 1e6:.1f} M parameters, step {step} of {settings['steps']},"
        f" {state}. Weights, moments and masters lived on disk; memory was capped at"
        f" {human_bytes(summary['dram_cap_bytes'])}."
    )


def _told(sentences: Sequence[str]) -> str:
    if not sentences:
        return '<p class="none">no step was recorded</p>'
    return "<ul>" + "".join(f"<li>{escape(each)}</li>" for each in sentences) + "</ul>"


def _tiles(rows: Sequence[dict[str, Any]], summary: dict[str, Any]) -> str:
    entries: list[tuple[str, str]] = []

    def add(name: str, key: str, text: Any) -> None:
        if key in summary:
            value = summary[key]
            entries.append((name, "not reached" if value is None else text(value)))

    add("held-out loss before", "heldout_loss_before", "{:.3f}".format)
    add("held-out loss after", "heldout_loss_after", "{:.3f}".format)
    add("unigram entropy, held-out", "unigram_entropy", "{:.3f}".format)
    if "state_bytes" in summary:
        ratio = summary["state_bytes"] / summary["dram_cap_bytes"]
        entries.append(("states / memory cap", f"{ratio:.1f} x"))
    add("tokens a second", "tokens_per_second", "{:.0f}".format)
    add("bytes a parameter a step", "bytes_per_parameter_step", "{:.1f}".format)
    if (share := figures.utilisation(rows)) is not None:
        entries.append(("accelerator utilisation (as MLPerf Storage)", f"{share:.1%}"))
        seconds = sum(row["seconds"] for row in rows)
        stalled = sum(figures.total_waits(rows).values())
        entries.append(("time stalled on storage", f"{stalled / seconds:.1%}"))
        if data := figures.batches(rows):
            entries.append(("time that batches were waited for", f"{data.share:.2%}"))
        entries.append(("training time", f"{seconds / 60:.1f} min"))
    if (share := figures.hit_share(rows)) is not None:
        entries.append(("of the samples' bytes came from the cache", f"{share:.1%}"))
    return (
        "<div class='tiles'>"
        + "".join(
            f"<div class='tile'><b>{value}</b><span>{escape(name)}</span></div>"
            for name, value in entries
        )
        + "</div>"
    )


def _loss(rows: Sequence[dict[str, Any]], summary: dict[str, Any]) -> str:
    raw = [(row["step"], row["loss"]) for row in rows if "loss" in row]
    smooth, mean = [], None
    for step, loss in raw:
        mean = loss if mean is None else 0.9 * mean + 0.1 * loss
        smooth.append((step, mean))
    last = raw[-1][0] if raw else 1
    series = [Series("each step", raw, "thin"), Series("smoothed", smooth, "s0")]
    if (entropy := summary.get("unigram_entropy")) is not None:
        series.append(
            Series("unigram entropy of the held-out tokens", [(0, entropy), (last, entropy)], "ref")
        )
    for name, at, style in (("before", 0, "s1"), ("after", last, "s2")):
        if (loss := summary.get(f"heldout_loss_{name}")) is not None:
            series.append(Series(f"held-out {name}", [(at, loss)], style))
    return charts.lines(series, "Loss over steps", "step", "nats a token")


def _style(cause: str) -> str:
    """The waits for data share out the styles that no other cause has."""
    if cause in _CAUSE_STYLES:
        return _CAUSE_STYLES[cause]
    stage = cause.removeprefix("data: ")
    if stage.startswith("read"):
        return "s7" if stage != "read cache" else "s9"
    return {"decode": "s10", "transform": "s11", "collate": "s11"}.get(stage, "s12")


def _in_order(waits: dict[str, float]) -> list[str]:
    known = [cause for cause in CAUSES if cause in waits]
    return known + sorted(set(waits) - set(known))


def _time(rows: Sequence[dict[str, Any]]) -> str:
    waits = [figures.waits(row) for row in rows]
    stalls = [
        Series(
            f"waiting: {cause}",
            [(row["step"], each.get(cause, 0.0)) for row, each in zip(rows, waits, strict=True)],
            _style(cause),
        )
        for cause in _in_order(figures.total_waits(rows))
    ]
    computing = Series(
        "computing",
        [
            (row["step"], max(0.0, row["seconds"] - sum(each.values())))
            for row, each in zip(rows, waits, strict=True)
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
    bars = []
    planned = expected(plan, list(rows)) if plan else {}
    if "seconds" in planned:
        bars.append(("planned", _parts(planned["compute_seconds"], planned["stall_seconds"])))
    if rows:
        stalls = {cause: each / len(rows) for cause, each in figures.total_waits(rows).items()}
        seconds = sum(row["seconds"] for row in rows) / len(rows)
        bars.append(("measured", _parts(seconds - sum(stalls.values()), stalls)))
    return charts.bars(bars, "Seconds a step by cause", "s")


def _parts(computing: float, stalls: dict[str, float]) -> list[tuple[str, float, str]]:
    return [
        ("computing", max(0.0, computing), "s0"),
        *((f"waiting: {cause}", stalls[cause], _style(cause)) for cause in _in_order(stalls)),
    ]


def _data(rows: Sequence[dict[str, Any]]) -> list[str]:
    """What loaders waited for and read; nothing where no loader told."""
    if not any("loaders" in row for row in rows):
        return []
    waits = figures.total_loaders(rows, "wait_seconds")
    bytes_ = figures.total_loaders(rows, "bytes")
    objects = figures.total_loaders(rows, "objects")
    bars = [
        (stage, [(stage, each, _style(f"data: {stage}"))]) for stage, each in waits.most_common()
    ]
    sections = [
        _section(
            "Waits for batches by stage and tier",
            charts.bars(bars, "Waits for batches by stage and tier", "s")
            if bars
            else '<p class="none">no batch was waited for</p>',
            "Seconds of the whole run. A batch that is ready when the loop asks costs nothing.",
        ),
        _section(
            "Bytes of samples by tier",
            charts.bars(
                [(tier, [(tier, each / 1e6, "s0")]) for tier, each in bytes_.most_common()],
                "Bytes of samples by tier",
                "MB",
            ),
            "What the sources' stores gave. Bytes that a cache fetched from its slow store count"
            " for the slow one, whole blocks with them.",
        ),
    ]
    threads = [(row["step"], busy.threads) for row in rows if (busy := figures.pipeline([row]))]
    if threads:
        told = figures.pipeline(rows)
        sections.append(
            _section(
                "Threads of the loader",
                charts.lines(
                    [Series("threads", threads, "s0")],
                    "Threads of the loader over steps",
                    "step",
                    "threads",
                    from_zero=True,
                ),
                f"At most {told.cpus} (cpus=). They were {told.share:.0%} busy.",
            )
        )
    if objects:
        slowest = {name: f"{each:.3g} s" for name, each in objects.most_common(8)}
        sections.append(
            _section("Objects that were waited for", _table(slowest), "The dearest of each step.")
        )
    shares = [
        (row["step"], 100 * share)
        for row in rows
        if (share := figures.hit_share([row])) is not None
    ]
    if shares:
        sections.append(
            _section(
                "Cache hits",
                charts.lines(
                    [Series("from the cache", shares, "s0")],
                    "Cache hits over steps",
                    "step",
                    "% of bytes",
                    from_zero=True,
                ),
                "Of the bytes that the cached store gave, the part that it did not fetch.",
            )
        )
    return sections


def _checkpoints(rows: Sequence[dict[str, Any]]) -> list[str]:
    so_far = list(figures.checkpoints(rows))
    if not so_far or not so_far[-1]["saved"]:
        return []
    saved = so_far[-1]
    counts = [(row["step"], each["saved"]) for row, each in zip(rows, so_far, strict=True)]
    return [
        _section(
            "Checkpoints",
            charts.lines(
                [Series("saved so far", counts, "s0")],
                "Checkpoints over steps",
                "step",
                "checkpoints",
                from_zero=True,
            ),
            f"{saved['saved']} were saved, {human_bytes(saved['bytes'])} in all; training waited"
            f" {saved['seconds']:.3g} s for them.",
        )
    ]


def _bytes(rows: Sequence[dict[str, Any]], plan: dict[str, Any]) -> str:
    bars, planned = [], expected(plan, list(rows)) if plan else {}
    for way in ("read", "written"):
        if plan:
            bars.append((f"{way}, planned", _shares(planned[f"{way}_bytes"])))
        total = figures.total_of(rows, f"{way}_bytes")
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
            f"<tr><td>{escape(str(name).replace('_', ' '))}</td>"
            f"<td>{escape(_figure(value))}</td></tr>"
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
