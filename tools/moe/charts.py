"""Pictures of `coserve moe bench`: one of the sides, one of each curve."""

from pathlib import Path
from typing import Any

import matplotlib as mpl

_COLOURS = ("#2f6f9f", "#b0653a", "#5a8f4c", "#7a5a9c", "#444444", "#a3294a")
_OURS, _OTHERS = "#2f6f9f", "#b0653a"
_CAPACITY = "load, of what first come, first served can do"
#: Of each curve what is varied, and its panels: which value, what it is called, whether its axis is logarithmic.
_CURVES: dict[str, tuple[str, list[tuple[str, str, bool]]]] = {
    "budget": ("share of experts in memory", [("perplexity", "perplexity, held-out files", True)]),
    "period": (
        "prompts from choice to choice",
        [("perplexity", "perplexity, held-out files", False), ("loads_per_prompt", "loads a prompt", True)],
    ),
    "threshold": (
        "threshold",
        [("perplexity", "perplexity, held-out files", True), ("accesses", "experts run, of those asked for", False)],
    ),
    "load": (_CAPACITY, [("violations", "share of requests over their SLO", False)]),
    "brownout_load": ("load, of what threshold 1 can take", [("violations", "share of tokens over their SLO", False)]),
}
_MODES = {"duoserve", "swapmoe", "emoe", "brownout"}


def draw(account: dict[str, Any], folder: Path) -> list[Path]:
    """Write a PNG for each thing that was measured; returns the files."""
    mpl.use("Agg")
    folder.mkdir(parents=True, exist_ok=True)
    drawn = [_draw_sides(account, folder / "moe-sides.png"), _draw_hits(account, folder / "moe-predictors.png")]
    for name, (across, panels) in _CURVES.items():
        points = account.get("curves", {}).get(name)
        if points:
            drawn.append(_draw_curve(points, panels, across, folder / f"moe-{name.replace('_', '-')}.png"))
    return [file for file in drawn if file is not None]


def _draw_sides(account: dict[str, Any], file: Path) -> Path | None:
    """Milliseconds between tokens of every side, p50 and p95, for each link and budget."""
    import matplotlib.pyplot as plt

    cells = [cell for cell in account["cells"] if cell["error"] is None]
    places = list(dict.fromkeys((cell["link_ms"], cell["share"]) for cell in cells if cell["side"] != "resident"))
    if not places:
        return None
    tall = -(-len(places) // 2)
    figure, axes = plt.subplots(tall, 2, figsize=(9.0, 3.6 * tall), squeeze=False, layout="constrained")
    for panel in axes.flat[len(places) :]:
        panel.set_axis_off()
    for panel, (link_ms, share) in zip(axes.flat, places, strict=False):
        there = [cell for cell in cells if cell["link_ms"] == link_ms and cell["share"] in {share, 1.0}][::-1]
        names = [cell["side"] for cell in there]
        p50 = [cell["figures"]["tpot_p50_ms"] for cell in there]
        p95 = [cell["figures"]["tpot_p95_ms"] for cell in there]
        panel.barh(names, p95, color="#d5d5d5", label="p95")
        bars = panel.barh(names, p50, color=[_OURS if name in _MODES else _OTHERS for name in names], label="p50")
        panel.bar_label(bars, labels=[f"{value:.1f}" for value in p50], padding=3, fontsize=8)
        panel.set_title(f"{share:.0%} of the experts, {f'{link_ms:g} ms link' if link_ms else 'as is'}", fontsize=10)
        panel.set_xlabel("ms a token (grey: p95)")
        panel.spines[["top", "right"]].set_visible(False)
    return _save(figure, file)


def _draw_hits(account: dict[str, Any], file: Path) -> Path | None:
    """How often predictors named all experts of a token, and at least one."""
    import matplotlib.pyplot as plt

    cells = [
        cell
        for cell in account["cells"]
        if not cell["error"] and cell["figures"].get("all_predicted") is not None and cell["share"] == 0.5
    ]
    first = {cell["side"]: cell["figures"] for cell in reversed(cells)}
    if not first:
        return None
    figure, panel = plt.subplots(figsize=(5.0, 3.2), layout="constrained")
    names = list(first)[::-1]
    panel.barh([f"{name} " for name in names], [first[name]["any_predicted"] for name in names], color="#d5d5d5")
    bars = panel.barh([f"{name} " for name in names], [first[name]["all_predicted"] for name in names], color=_OURS)
    panel.bar_label(bars, fmt="%.2f", padding=3, fontsize=8)
    panel.set_xlabel("tokens whose experts were all predicted (grey: at least one)")
    panel.set_xlim(0, 1)
    panel.spines[["top", "right"]].set_visible(False)
    return _save(figure, file)


def _draw_curve(points: list[dict[str, Any]], panels: list[tuple[str, str, bool]], across: str, file: Path) -> Path:
    """A line for each series in every panel."""
    import matplotlib.pyplot as plt
    from matplotlib.ticker import LogLocator, NullLocator

    figure, axes = plt.subplots(1, len(panels), figsize=(4.8 * len(panels), 3.6), squeeze=False, layout="constrained")
    for panel, (value, label, logarithmic) in zip(axes.flat, panels, strict=True):
        for colour, series in zip(_COLOURS, dict.fromkeys(point["series"] for point in points), strict=False):
            line = [point for point in points if point["series"] == series]
            xs, ys = [point["x"] for point in line], [point[value] for point in line]
            panel.plot(xs, ys, marker="o", markersize=4, color=colour, label=series)
        panel.set_xlabel(across)
        panel.set_ylabel(label)
        if logarithmic:
            panel.set_yscale("log")
            panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            panel.yaxis.set_major_formatter("{x:g}")
            panel.yaxis.set_minor_locator(NullLocator())
        panel.legend(fontsize=8, frameon=False)
        panel.spines[["top", "right"]].set_visible(False)
    return _save(figure, file)


def _save(figure: Any, file: Path) -> Path:
    import matplotlib.pyplot as plt

    figure.savefig(file, dpi=120)
    plt.close(figure)
    return file
