"""Small inline SVG charts: lines, stacked columns, stacked bars. Colours are CSS classes, so a page
themes them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 760, 260  # view box in px; the page scales it
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 16, 14, 40


@dataclass(frozen=True)
class Series:
    """One line or one layer. `style` is a class: s0..s8 (colours), thin, or ref (a dashed reference
    line)."""

    name: str
    points: Sequence[tuple[float, float]]  # (x, y)
    style: str


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers that cover [low, high]."""
    span = high - low or 1.0
    raw = span / about
    magnitude = 10 ** math.floor(math.log10(raw))
    step = next(m * magnitude for m in (1, 2, 2.5, 5, 10) if m * magnitude >= raw * 0.999)
    first = math.floor(low / step + 1e-9)
    last = math.ceil(high / step - 1e-9)
    return [round(i * step, 10) for i in range(first, last + 1)]


def number(value: float) -> str:
    """Short and plain: 1200 -> 1200, 0.25 -> 0.25."""
    return f"{value:.10g}"


class _Frame:
    """The plot area with its two scales; y runs over ticks, x over [x_low, x_high]."""

    def __init__(self, x_low: float, x_high: float, y_low: float, y_high: float) -> None:
        self.y_ticks = ticks(y_low, y_high)
        self.x_low, self.x_high = x_low, x_high if x_high > x_low else x_low + 1
        self.y_low, self.y_high = self.y_ticks[0], self.y_ticks[-1]

    def x(self, value: float) -> float:
        return _LEFT + (value - self.x_low) / (self.x_high - self.x_low) * (WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        return (
            HEIGHT
            - _BOTTOM
            - (value - self.y_low) / (self.y_high - self.y_low) * (HEIGHT - _TOP - _BOTTOM)
        )

    def axes(self, x_label: str, y_label: str) -> list[str]:
        parts = []
        for tick in self.y_ticks:
            at = self.y(tick)
            parts.append(
                f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{at:.1f}"'
                f' y2="{at:.1f}"/>'
            )
            parts.append(
                f'<text class="tick" x="{_LEFT - 8}" y="{at + 4:.1f}"'
                f' text-anchor="end">{number(tick)}</text>'
            )
        for tick in ticks(self.x_low, self.x_high, 8):
            if self.x_low <= tick <= self.x_high:
                parts.append(
                    f'<text class="tick" x="{self.x(tick):.1f}" y="{HEIGHT - _BOTTOM + 18}" '
                    f'text-anchor="middle">{number(tick)}</text>'
                )
        parts.append(
            f'<text class="label" x="{WIDTH - _RIGHT}" y="{HEIGHT - 4}"'
            f' text-anchor="end">{escape(x_label)}</text>'
        )
        parts.append(
            f'<text class="label" x="14" y="{_TOP + 70}" transform="rotate(-90 14 {_TOP + 70})" '
            f'text-anchor="middle">{escape(y_label)}</text>'
        )
        return parts


def _svg(parts: list[str], title: str, height: int = HEIGHT) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(title, quote=True)}">'
        f"<title>{escape(title)}</title>{''.join(parts)}</svg>"
    )


def legend(entries: Sequence[tuple[str, str]]) -> str:
    """(name, style) pairs as a line of HTML."""
    return (
        '<p class="legend">'
        + "".join(
            f'<span><i class="key {style}"></i>{escape(name)}</span>' for name, style in entries
        )
        + "</p>"
    )


def lines(
    series: Sequence[Series], title: str, x_label: str, y_label: str, from_zero: bool = False
) -> str:
    """A line chart with a legend."""
    series = [each for each in series if each.points]
    xs = [x for each in series for x, _ in each.points]
    ys = [y for each in series for _, y in each.points]
    if not xs:
        return '<p class="none">no step was recorded</p>'
    frame = _Frame(min(xs), max(xs), 0.0 if from_zero else min(ys), max(ys))
    parts = frame.axes(x_label, y_label)
    for each in series:
        if len(each.points) == 1:
            x, y = each.points[0]
            parts.append(
                f'<circle class="dot {each.style}" cx="{frame.x(x):.1f}" cy="{frame.y(y):.1f}"'
                ' r="4"/>'
            )
        else:
            path = " ".join(f"{frame.x(x):.1f},{frame.y(y):.1f}" for x, y in each.points)
            parts.append(f'<polyline class="line {each.style}" points="{path}"/>')
    return legend([(each.name, each.style) for each in series]) + _svg(parts, title)


def columns(
    steps: Sequence[float], layers: Sequence[Series], title: str, x_label: str, y_label: str
) -> str:
    """Stacked columns over steps; each layer has one y for each step, the first lies at the bottom.

    More steps than fit are joined: a column then is the mean of its steps.
    """
    if not steps:
        return '<p class="none">no step was recorded</p>'
    group = -(-len(steps) // 180)
    starts = range(0, len(steps), group)
    heights = [
        [_mean([y for _, y in layer.points[i : i + group]]) for layer in layers] for i in starts
    ]
    frame = _Frame(steps[0] - 0.5, steps[-1] + 0.5, 0.0, max(map(sum, heights)) or 1.0)
    parts = frame.axes(x_label, y_label)
    for i, stack in zip(starts, heights, strict=True):
        left = frame.x(steps[i] - 0.5)
        width = frame.x(steps[min(i + group, len(steps)) - 1] + 0.5) - left
        base = 0.0
        for layer, value in zip(layers, stack, strict=True):
            if value > 0:
                top = frame.y(base + value)
                parts.append(
                    f'<rect class="{layer.style}" x="{left:.2f}" y="{top:.2f}"'
                    f' width="{max(0.5, width * 0.86):.2f}" height="{frame.y(base) - top:.2f}"/>'
                )
            base += value
    return legend([(layer.name, layer.style) for layer in layers]) + _svg(parts, title)


def bars(
    rows: Sequence[tuple[str, Sequence[tuple[str, float, str]]]], title: str, unit: str
) -> str:
    """Horizontal stacked bars: rows of (label, [(name, value, style)]), each with its total at the
    end."""
    entries = {name: style for _, parts in rows for name, value, style in parts if value > 0}
    largest = max((sum(value for _, value, _ in parts) for _, parts in rows), default=0.0)
    if not largest:
        return '<p class="none">nothing was moved</p>'
    left, right, pitch = 150, 90, 34
    out = []
    for index, (label, parts) in enumerate(rows):
        y, x = 8 + index * pitch, float(left)
        out.append(
            f'<text class="name" x="{left - 10}" y="{y + 16}"'
            f' text-anchor="end">{escape(label)}</text>'
        )
        for name, value, style in parts:
            width = value / largest * (WIDTH - left - right)
            if width > 0:
                out.append(
                    f'<rect class="{style}" x="{x:.1f}" y="{y}" width="{max(0.5, width - 1):.1f}"'
                    f' height="22" rx="2"><title>{escape(name)}: {number(round(value, 2))}'
                    f" {escape(unit)}</title></rect>"
                )
            x += width
        total = sum(value for _, value, _ in parts)
        out.append(
            f'<text class="value" x="{x + 8:.1f}" y="{y + 16}">{total:.1f} {escape(unit)}</text>'
        )
    return legend(list(entries.items())) + _svg(out, title, 16 + len(rows) * pitch)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
