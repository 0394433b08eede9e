"""A plot of benchmarks.cpu: one panel for each measure, one bar for each engine, the hardware's limit dashed."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

OURS, THEIRS = "#d9822b", "#8a8a8a"


def plot(result: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    panels = result["tokens_per_s"]
    columns = 3
    rows = math.ceil(len(panels) / columns)
    figure, axes = plt.subplots(rows, columns, figsize=(16, 2.9 * rows), squeeze=False)
    floors = result["floor_tokens_per_s"].get("twostroke, shipped file", {})
    for axis, (measure, speeds) in zip(axes.flat, panels.items(), strict=False):
        names = list(speeds)[::-1]
        bars = axis.barh(
            names, [speeds[n] for n in names], color=[OURS if n.startswith("twostroke") else THEIRS for n in names]
        )
        axis.bar_label(bars, fmt="%.0f", padding=3, fontsize=8)
        if measure in floors and floors[measure] < 4 * max(speeds.values()):
            axis.axvline(floors[measure], linestyle="--", color="black", linewidth=0.8)
        axis.set_title(f"{measure}, tokens/s", fontsize=10)
        axis.tick_params(labelsize=8)
        axis.margins(x=0.15)
        axis.spines[["top", "right"]].set_visible(False)
    for axis in axes.flat[len(panels) :]:
        axis.set_axis_off()
    figure.suptitle(
        f"{result['machine']['cpu']}, {result['threads']} threads, medians of {result['rounds']}", fontsize=11
    )
    figure.tight_layout()
    figure.savefig(path, dpi=110)
