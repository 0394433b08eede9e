"""Plots as inline SVG, without a plotting library."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from math import ceil, floor, log2, log10

import numpy as np

WIDTH, HEIGHT = 520, 260
LEFT, RIGHT, TOP, BOTTOM = 58, 14, 30, 40
Point = tuple[float, float]


class Axes:
    """Maps data to the picture; draws the frame, ticks and labels."""

    def __init__(self, title: str, x: str, y: str, xs: Sequence[float], ys: Sequence[float], height: int = HEIGHT):
        self.title, self.x, self.y, self.height = title, x, y, height
        self.x_low, self.x_high = 0.0, max([*xs, 1e-9])
        self.y_low, self.y_high = 0.0, max([*ys, 1e-9])
        self.body: list[str] = []

    def at(self, x: float, y: float) -> Point:
        across = (x - self.x_low) / (self.x_high - self.x_low)
        up = (y - self.y_low) / (self.y_high - self.y_low)
        return LEFT + across * (WIDTH - LEFT - RIGHT), self.height - BOTTOM - up * (self.height - TOP - BOTTOM)

    def line(self, points: Sequence[Point], kind: str, dots: bool = False) -> None:
        places = [self.at(*point) for point in points]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        self.body.append(f'<polyline class="line {kind}" points="{path}"/>')
        if dots:
            self.body += [f'<circle class="dot {kind}" cx="{x:.1f}" cy="{y:.1f}" r="3.5"/>' for x, y in places]

    def bar(self, x: float, width: float, row: float, thick: float, kind: str, tip: str = "") -> None:
        left, top = self.at(x, row + thick)
        right, bottom = self.at(x + width, row)
        tag = f"<title>{escape(tip)}</title>" if tip else ""
        size = f'width="{max(0.4, right - left):.2f}" height="{max(0.5, bottom - top):.2f}"'
        self.body.append(f'<rect class="{kind}" x="{left:.2f}" y="{top:.2f}" {size}>{tag}</rect>')

    def render(self, legend: Sequence[tuple[str, str]] = ()) -> str:
        parts = [f'<svg viewBox="0 0 {WIDTH} {self.height}" role="img" aria-label="{escape(self.title)}">']
        parts.append(f'<text class="title" x="{LEFT}" y="16">{escape(self.title)}</text>')
        parts += self._ticks()
        parts += self.body
        for index, (name, kind) in enumerate(legend):
            x = WIDTH - RIGHT - 70 * (len(legend) - index)
            parts.append(f'<rect class="{kind}" x="{x}" y="8" width="10" height="10"/>')
            parts.append(f'<text class="label" x="{x + 14}" y="17">{escape(name)}</text>')
        return "".join(parts) + "</svg>"

    def _ticks(self) -> list[str]:
        parts = []
        floor_y = self.height - BOTTOM
        for value in ticks(self.x_high):
            x, _ = self.at(value, 0)
            parts.append(f'<line class="grid" x1="{x:.1f}" y1="{TOP}" x2="{x:.1f}" y2="{floor_y}"/>')
            parts.append(f'<text class="label" x="{x:.1f}" y="{floor_y + 15}" text-anchor="middle">{value:g}</text>')
        for value in ticks(self.y_high):
            _, y = self.at(0, value)
            parts.append(f'<line class="grid" x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}"/>')
            parts.append(f'<text class="label" x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{value:g}</text>')
        middle = (LEFT + WIDTH - RIGHT) / 2
        parts.append(
            f'<text class="label" x="{middle}" y="{self.height - 6}" text-anchor="middle">{escape(self.x)}</text>'
        )
        parts.append(
            f'<text class="label" transform="translate(12 {(TOP + floor_y) / 2}) rotate(-90)" '
            f'text-anchor="middle">{escape(self.y)}</text>'
        )
        return parts


def ticks(high: float, count: int = 5) -> list[float]:
    """Round values from 0 to `high`."""
    raw = high / count
    unit = 10.0 ** floor(log10(raw))
    step = unit * next(factor for factor in (1, 2, 5, 10) if factor * unit >= raw)
    return [round(index * step, 12) for index in range(ceil(high / step) + 1) if index * step <= high * 1.0001]


def cumulative(title: str, unit: str, values: Sequence[float] | np.ndarray, kind: str) -> str:
    """Share of values at or below x, up to the 99.5th percentile so that one outlier does not hide the rest."""
    ordered = np.sort(np.asarray(values, dtype=np.float64))
    if not len(ordered):
        return ""
    shown = ordered[: max(2, ceil(0.995 * len(ordered)))]
    places = np.unique(np.linspace(0, len(shown) - 1, min(200, len(shown))).astype(int))
    axes = Axes(title, unit, "share", [float(shown[-1])], [1.0])
    axes.line([(float(shown[i]), (i + 1) / len(ordered)) for i in places], kind)
    return axes.render()


def lanes(rows: Sequence[tuple[float, float, float, float]], most: int = 120) -> str:
    """Requests as bars: (arrival, scheduled, first token, end), one row each, in order of arrival."""
    shown = rows[:most]
    if not shown:
        return ""
    count = len(shown)
    axes = Axes(f"requests over time{'' if count == len(rows) else f' (first {most})'}", "seconds", "request",
                [max(row[3] for row in shown)], [count], height=max(180, 90 + 5 * count))  # fmt: skip
    for index, (arrival, scheduled, first, end) in enumerate(shown):
        row = count - 1 - index
        axes.bar(arrival, scheduled - arrival, row + 0.1, 0.8, "queue", f"queue {scheduled - arrival:.3f} s")
        axes.bar(scheduled, first - scheduled, row + 0.1, 0.8, "prefill", f"prefill {first - scheduled:.3f} s")
        axes.bar(first, end - first, row + 0.1, 0.8, "decode", f"decode {end - first:.3f} s")
    return axes.render([("queue", "queue"), ("prefill", "prefill"), ("decode", "decode")])


def curve(title: str, x: str, y: str, lines: Sequence[tuple[str, Sequence[Point]]]) -> str:
    """One or more named curves: [(kind, points)]."""
    xs = [point[0] for _, points in lines for point in points]
    ys = [point[1] for _, points in lines for point in points]
    axes = Axes(title, x, y, xs, ys)
    for kind, points in lines:
        axes.line(points, kind, dots=True)
    return axes.render([(kind, kind) for kind, _ in lines] if len(lines) > 1 else ())


EFFECTS = (
    ("ttft", "TTFT", 0), ("tpot", "TPOT", 1), ("throughput", "tokens/s", 2), ("kv_bytes_per_token", "KV memory", 3),
    ("weight_bytes", "weights' memory", 3),
)  # fmt: skip
SHOWN = 5.0  # doublings; longer bars are cut, their number is printed


def effects(title: str, rows: Sequence[tuple[str, Mapping[str, float]]]) -> str:
    """Bars for each lever, from 1× in the middle; better is to the right. A complete SVG file."""
    left, each, top = 215, 58, 56
    height, middle = top + each * len(rows) + 30, left + (760 - left) / 2
    unit = (760 - left) / 2 / SHOWN
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 850 {height}" font-family="system-ui,sans-serif" '
        f'font-size="11" role="img" aria-label="{escape(title)}"><rect width="850" height="{height}" fill="#fff"/>',
        f'<text x="12" y="20" font-size="13" font-weight="600" fill="#1c2430">{escape(title)}</text>',
        '<text x="12" y="36" fill="#66707d">on over off; to the right is better: a shorter time, a higher rate</text>',
    ]
    for doubling in range(-int(SHOWN), int(SHOWN) + 1):
        x = middle + doubling * unit
        label = f"{2**doubling}×" if doubling >= 0 else f"1/{2**-doubling}"
        parts.append(f'<line x1="{x:.0f}" x2="{x:.0f}" y1="{top - 6}" y2="{height - 24}" stroke="#e3e7ec"/>')
        parts.append(f'<text x="{x:.0f}" y="{height - 8}" text-anchor="middle" fill="#66707d">{label}</text>')
    for index, (name, effect) in enumerate(rows):
        y = top + each * index
        parts.append(f'<text x="{left - 10}" y="{y + 24}" text-anchor="end" fill="#1c2430">{escape(name)}</text>')
        for key, label, place in EFFECTS:
            if effect.get(key, 1.0) != 1.0:
                gain = effect[key] if key == "throughput" else 1 / effect[key]
                parts.append(
                    effect_bar(middle, y + 13 * place, max(-SHOWN, min(SHOWN, log2(gain))) * unit, label, gain)
                )
    return "".join(parts) + "</svg>\n"


def effect_bar(middle: float, y: float, reach: float, label: str, gain: float) -> str:
    colour = {"TTFT": "#3a6ea5", "TPOT": "#d9822b", "tokens/s": "#6b7785"}.get(label, "#6650a8")
    begin, end = min(middle, middle + reach), max(middle, middle + reach)
    where = f'x="{end + 4:.0f}"' if reach >= 0 else f'x="{begin - 4:.0f}" text-anchor="end"'
    text = f"{label} {gain:.2f}×" if gain < 10 else f"{label} {gain:.0f}×"
    return (
        f'<rect x="{begin:.1f}" y="{y:.0f}" width="{max(1.0, end - begin):.1f}" height="10" fill="{colour}"/>'
        f'<text {where} y="{y + 9:.0f}" font-size="10" fill="#1c2430">{text}</text>'
    )
