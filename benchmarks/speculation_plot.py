"""Plots of benchmarks.speculation: decode speed with drafts over speed without, by streams, context and right guesses.

python -m benchmarks.speculation_plot benchmarks/results/speculation-h200.json     # writes a .png beside it
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

CELL = re.compile(r"(\d+) x (\d+), (\d+)% right")


def speedups(result: dict[str, Any]) -> dict[int, dict[int, list[tuple[int, float]]]]:
    """By context, by streams: (percent of right guesses, speed-up)."""
    found: dict[int, dict[int, list[tuple[int, float]]]] = {}
    for name, cell in result["grid"].items():
        match = CELL.fullmatch(name)
        assert match is not None, name
        streams, context, right = map(int, match.groups())
        found.setdefault(context, {}).setdefault(streams, []).append((right, cell["ratio"]))
    return found


def plot(result: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    panels = speedups(result)
    figure, axes = plt.subplots(1, len(panels), figsize=(4.6 * len(panels), 3.8), squeeze=False, sharey=True)
    for axis, (context, curves) in zip(axes.flat, sorted(panels.items()), strict=True):
        for streams, points in sorted(curves.items()):
            right, ratio = zip(*sorted(points), strict=True)
            axis.plot(right, ratio, marker="o", markersize=3, label=f"{streams} stream{'s' * (streams > 1)}")
        axis.axhline(1.0, linestyle="--", color="black", linewidth=0.8)
        axis.set_yscale("log", base=2)
        axis.set_title(f"context of {context:,} tokens", fontsize=10)
        axis.set_xlabel("right guesses, %")
        axis.spines[["top", "right"]].set_visible(False)
    axes[0, 0].set_ylabel("decode speed, drafts on / off")
    axes[0, 0].legend(fontsize=8, frameon=False)
    figure.suptitle(result["model"], fontsize=11)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    source = Path(sys.argv[1])
    plot(json.loads(source.read_text()), source.with_suffix(".png"))
