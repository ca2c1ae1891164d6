"""The picture of the README: seconds a step beside DeepSpeed, from bench/results/peers.json.

    .venv/bin/python bench/peers/picture.py   # writes docs/step_time.svg

A test holds that docs/step_time.svg is what these results give.
"""

from __future__ import annotations

import json
from html import escape
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SIZE, COMPUTE = "220M", "io"
BARS = {
    "deepspeed-tuned": "DeepSpeed ZeRO-Infinity, tuned",
    "deepspeed-cpu": "DeepSpeed, CPU offload",
    "stoker-speculate": "Stoker, exact",
    "stoker-bf16": "Stoker, bf16 moments",
    "stoker-equal": "Stoker, exact, more memory",
}
LEFT, SCALE_WIDTH, ROW, TOP = 230, 330, 34, 64
STYLE = "text{font:13px sans-serif;fill:#444}.head{font-weight:600}.small{font-size:11px;fill:#777}"


def picture(results: dict[str, Any]) -> str:
    rows = {
        row["system"]: row
        for row in results["rows"]
        if row["setting"]["size"] == SIZE and row["setting"]["compute"] == COMPUTE
    }
    longest = max(rows[system]["seconds_range"][1] for system in BARS)
    x = lambda seconds: LEFT + SCALE_WIDTH * seconds / longest
    parts = []
    for number, (system, name) in enumerate(BARS.items()):
        row, y = rows[system], TOP + ROW * number
        low, high = row["seconds_range"]
        colour = "#c8762b" if system.startswith("stoker") else "#9aa3ad"
        middle = y + 9
        told = f"{row['seconds']:.2f} s, {row['rss_bytes'] / 2**30:.1f} GiB"
        parts += [
            f'<text x="{LEFT - 10}" y="{y + 14}" text-anchor="end">{escape(name)}</text>',
            (
                f'<rect x="{LEFT}" y="{y}" width="{x(row["seconds"]) - LEFT:.1f}" height="18"'
                f' fill="{colour}"/>'
            ),
            f'<path d="M{x(low):.1f} {middle}H{x(high):.1f}" stroke="#222" stroke-width="1.5"/>',
            f'<text x="{x(high) + 8:.1f}" y="{y + 14}">{told}</text>',
        ]
    first = rows["stoker-speculate"]
    title = (
        f"Seconds a step, {first['parameters'] / 1e6:.0f} M parameters,"
        f" {first['setting']['tokens']} tokens"
    )
    machine = results["machine"]
    small = (
        "Shorter is better. Median, with the range of all steps as a line; GiB: peak memory of the"
        f" process. {machine['cpu']}, {machine['cores']} cores."
    )
    height = TOP + ROW * len(BARS) + 6
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 760 {height}" role="img">'
        f"<title>{escape(title)}</title><style>{STYLE}</style>"
        f'<rect width="760" height="{height}" fill="#fff"/>'
        f'<text class="head" x="10" y="22">{escape(title)}</text>'
        f'<text class="small" x="10" y="42">{escape(small)}</text>{"".join(parts)}</svg>\n'
    )


def main() -> None:
    results = json.loads((ROOT / "bench" / "results" / "peers.json").read_text())
    (ROOT / "docs" / "step_time.svg").write_text(picture(results))


if __name__ == "__main__":
    main()
