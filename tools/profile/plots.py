"""The profile in two pictures for each device: latency over batch, and throughput over the split of memory."""

from collections.abc import Sequence
from pathlib import Path

from tools.profile.measure import LayoutCost
from tools.profile.window import Split


def plot_latencies(path: Path, device: str, costs: Sequence[LayoutCost]) -> None:
    """Measured points, fitted lines, and the largest useful batch of each layout."""
    figure, axes = _figure()
    for cost in costs:
        sizes = sorted(cost.latencies_s)
        label = f"{cost.layout}: {cost.line.k_s * 1e3:.1f}·n + {cost.line.b_s * 1e3:.1f} ms"
        (points,) = axes.plot(sizes, [cost.latencies_s[size] * 1e3 for size in sizes], "o", markersize=5)
        ends = [1, sizes[-1]]
        axes.plot(ends, [cost.line.latency_s(size) * 1e3 for size in ends], color=points.get_color(), label=label)
        axes.axvline(cost.max_batch, color=points.get_color(), linestyle=":", linewidth=1)
    axes.set(
        xlabel="images in a batch (dotted: largest useful batch)", ylabel="milliseconds", title=f"Batches on {device}"
    )
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=7)
    figure.savefig(path, dpi=120)


def plot_split(path: Path, device: str, split: Split, expert_count: int) -> None:
    """Simulated throughput over the number of experts in memory, the windows of the search, and the number in use."""
    figure, axes = _figure()
    for number, trial in enumerate(split.trials):
        lower = split.trials[number - 1].experts if number else 0
        axes.axvspan(lower, trial.experts, alpha=0.12 if number % 2 else 0.25, color="tab:blue", linewidth=0)
        if trial.expected is not None:
            axes.plot(trial.experts, trial.expected, "_", color="tab:red", markersize=16)
    measured = split.measured()
    axes.plot(list(measured), list(measured.values()), "o-", color="tab:blue", markersize=5)
    axes.axvline(expert_count, color="tab:green", linestyle="--", label=f"kept: {expert_count} experts")
    axes.set(
        xlabel="experts in memory (shaded: windows; red: what the trend let expect)",
        ylabel="images per second, simulated",
        title=f"Memory of {device} between experts and batches",
    )
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=120)


def _figure():  # matplotlib has no types
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5), layout="constrained")
    return figure, figure.subplots()
