"""Bars of `coserve bench live`: one panel per trace and disk, one bar per side, the bound as a line."""

from pathlib import Path
from typing import Any

import matplotlib as mpl

from tests.bench.compare import Comparison
from tests.bench.job import OTHER_SIDES

_OURS, _OTHERS, _BOUND = "#2f6f9f", "#b0653a", "#444444"


def draw_live(comparison: Comparison, file: Path) -> None:
    """Write a PNG."""
    mpl.use("Agg")
    import matplotlib.pyplot as plt

    sides = [*reversed(comparison.settings.sides)]
    count = len(comparison.cells)
    wide = 2 if count > 1 else 1
    tall = -(-count // wide)
    size = (6.0 * wide, (1.2 + 0.32 * len(sides)) * tall)
    figure, axes = plt.subplots(tall, wide, figsize=size, squeeze=False, layout="constrained")
    for number, panel in enumerate(axes.flat):
        if number >= count:
            panel.set_axis_off()
            continue
        _draw_cell(panel, comparison, number, sides)
    figure.savefig(file, dpi=120)
    plt.close(figure)


def _draw_cell(panel: Any, comparison: Comparison, number: int, sides: list[str]) -> None:
    cell = comparison.cells[number]
    rates = [cell.images_per_s(side) or 0.0 for side in sides]
    colours = [_OTHERS if side in OTHER_SIDES else _OURS for side in sides]
    bars = panel.barh(sides, rates, color=colours)
    panel.bar_label(bars, labels=[f"{rate:.1f}" if rate else "–" for rate in rates], padding=3, fontsize=8)
    panel.axvline(cell.bound.images_per_s, color=_BOUND, linestyle="--", linewidth=1)
    panel.set_title(f"{cell.trace} trace, {cell.disk} disk (dashed: bound)", fontsize=10)
    panel.set_xlabel("images/s")
    panel.set_xlim(0, max([cell.bound.images_per_s, *rates]) * 1.12)
    panel.tick_params(axis="y", labelsize=8)
    panel.spines[["top", "right"]].set_visible(False)
