"""A simulated run as a row for people and programs (docs/simulating.md), and as a picture over time."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tools.simulate.engine import TaskOutcome

#: Fewer lanes and spans than this stay legible.
_MAX_SPANS = 20_000
_LABELLED_SPANS = 120

#: The columns that fit a terminal, and how they show a row; programs get all figures.
_COLUMNS = {
    "policy": "{policy}",
    "images/s": "{images_per_s:.2f}",
    "loads": "{loads}",
    "disk": "{disk_loads}",
    "p50 s": "{p50_wait_s:.1f}",
    "p95 s": "{p95_wait_s:.1f}",
    "max s": "{max_wait_s:.1f}",
    "net GB": "{gigabytes:.2f}",
    "bound": "{share_of_bound:.0%}",
}
_WAITS = {"p50": 0.5, "p95": 0.95, "max": 1.0}
_LATENCIES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}

Row = dict[str, Any]


def row_of(outcome: TaskOutcome, bound_s: float) -> Row:
    """Return a run's figures. `bound_s`: seconds below which no policy can finish this task on this machine.

    Wait: from arrival to the start of the first expert's batch. `loads`: into pools that compute, after the fill.
    `wanted_evictions`: experts that left although images were queued for them. `unknown`: images given up because their
    deadline could not be met; `late`: answered after it. `network_…`: what crossed the network to other PCs after the
    initial fill, and the first loads of experts among it.
    """
    waits, latencies, makespan_s = outcome.waits_s, outcome.latencies_s, outcome.makespan_s
    return {
        "policy": outcome.policy,
        "images_per_s": round(outcome.images / makespan_s, 3) if makespan_s else 0.0,
        "makespan_s": round(makespan_s, 3),
        "loads": outcome.loads,
        "disk_loads": outcome.disk_loads,
        "wanted_evictions": outcome.wanted_evictions,
        **{f"{name}_wait_s": round(quantile(waits, share), 3) for name, share in _WAITS.items()},
        "share_of_bound": round(bound_s / makespan_s, 4) if makespan_s else 0.0,
        "bound_s": round(bound_s, 3),
        **{f"{name}_latency_s": round(quantile(latencies, share), 3) for name, share in _LATENCIES.items()},
        "unknown": outcome.expired,
        "late": outcome.late,
        "network_bytes": outcome.network_bytes,
        "network_loads": outcome.network_loads,
    }


def table(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Return columns and cells for a terminal; if anything crossed the network, its bytes replace the longest wait."""
    dropped = "max s" if any(row["network_bytes"] for row in rows) else "net GB"
    columns = {name: cell for name, cell in _COLUMNS.items() if name != dropped}
    return list(columns), [
        [cell.format(**row, gigabytes=row["network_bytes"] / 1e9) for cell in columns.values()] for row in rows
    ]


def quantile(values: Sequence[float], share: float) -> float:
    """Return the value that `share` of the values do not exceed; 0 without values."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def draw_timeline(outcome: TaskOutcome, path: Path, *, until_s: float | None = None) -> None:
    """Draw a lane per channel and executor, one colour per expert, in the suffix's format; ValueError without spans."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    last_s = min(outcome.makespan_s, until_s or outcome.makespan_s)
    spans = [span for span in outcome.spans if span.begin_s < last_s][:_MAX_SPANS]
    if not spans:
        raise ValueError("nothing happened in this time")
    channels = sorted({span.lane for span in spans if span.kind != "batch"})
    lanes = channels + sorted({span.lane for span in spans if span.kind == "batch"})
    colours = {expert: number for number, expert in enumerate(dict.fromkeys(span.expert for span in spans))}
    palette = plt.get_cmap("tab20")
    figure, axes = plt.subplots(figsize=(13, 1.2 + 0.55 * len(lanes)), layout="constrained")
    for span in spans:
        width_s = min(span.end_s, last_s) - span.begin_s
        axes.barh(
            lanes.index(span.lane), width_s, left=span.begin_s, height=0.8, color=palette(colours[span.expert] % 20)
        )
        if len(spans) <= _LABELLED_SPANS:
            text = f"{span.expert} ×{span.images}" if span.images else str(span.expert)
            axes.text(span.begin_s + width_s / 2, lanes.index(span.lane), text, ha="center", va="center", fontsize=6)
    axes.set_yticks(range(len(lanes)), labels=lanes)
    axes.invert_yaxis()
    axes.set_xlim(0.0, last_s)
    axes.set_xlabel("seconds")
    axes.set_title(f"{outcome.policy}: {outcome.images} images, {outcome.loads} loads, {outcome.makespan_s:.1f} s")
    figure.savefig(path, dpi=120)
    plt.close(figure)
