"""A simulated run as a row for people and programs (docs/architecture.md), and as a picture over time."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tools.simulate.engine import TaskOutcome

#: Fewer lanes and spans than this stay legible.
_MAX_SPANS = 20_000
_LABELLED_SPANS = 120


def figures(outcome: TaskOutcome, bound_s: float) -> dict[str, Any]:
    """Return a run's figures for programs; `bound_s`: seconds below which no policy can finish this task here.

    `wait`: from arrival to the start of the first expert's batch. `loads`: into pools that compute, after the fill.
    `wanted_evictions`: experts that left although images were queued for them. `unknown`: images given up because their
    deadline could not be met; `late`: answered after it. `network_bytes`: what crossed the network to other PCs after
    the initial fill, `network_loads` the first loads of experts among it.
    """
    waits, latencies, makespan_s = outcome.waits_s, outcome.latencies_s, outcome.makespan_s
    return {
        "policy": outcome.policy,
        "images_per_s": round(outcome.images / makespan_s, 3) if makespan_s else 0.0,
        "makespan_s": round(makespan_s, 3),
        "loads": outcome.loads,
        "disk_loads": outcome.disk_loads,
        "wanted_evictions": outcome.wanted_evictions,
        "p50_wait_s": round(quantile(waits, 0.5), 3),
        "p95_wait_s": round(quantile(waits, 0.95), 3),
        "max_wait_s": round(quantile(waits, 1.0), 3),
        "share_of_bound": round(bound_s / makespan_s, 4) if makespan_s else 0.0,
        "bound_s": round(bound_s, 3),
        "p50_latency_s": round(quantile(latencies, 0.5), 3),
        "p95_latency_s": round(quantile(latencies, 0.95), 3),
        "p99_latency_s": round(quantile(latencies, 0.99), 3),
        "unknown": outcome.expired,
        "late": outcome.late,
        "network_bytes": outcome.network_bytes,
        "network_loads": outcome.network_loads,
    }


def cells(rows: Sequence[Mapping[str, Any]]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return columns and cells of a table that fits a terminal; bytes over a network replace the longest wait."""
    crossed = any(row["network_bytes"] for row in rows)
    columns = ("policy", "images/s", "loads", "disk", "p50 s", "p95 s", "net GB" if crossed else "max s", "bound")
    texts = [
        (
            row["policy"],
            f"{row['images_per_s']:.2f}",
            str(row["loads"]),
            str(row["disk_loads"]),
            f"{row['p50_wait_s']:.1f}",
            f"{row['p95_wait_s']:.1f}",
            f"{row['network_bytes'] / 1e9:.2f}" if crossed else f"{row['max_wait_s']:.1f}",
            f"{row['share_of_bound']:.0%}",
        )
        for row in rows
    ]
    return columns, texts


def quantile(values: Sequence[float], share: float) -> float:
    """Nearest-rank quantile; 0 without values."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def draw_timeline(outcome: TaskOutcome, path: Path, *, until_s: float | None = None) -> None:
    """Draw a lane per channel and executor, one colour per expert, in the suffix's format; ValueError without spans."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    last_s = min(outcome.makespan_s, until_s or outcome.makespan_s)
    spans = [span for span in outcome.spans if span.begin_s < last_s][:_MAX_SPANS]
    if not spans:
        raise ValueError("nothing happened in this time")
    channels = sorted({span.lane for span in spans if span.kind != "batch"})
    lanes = channels + sorted({span.lane for span in spans if span.kind == "batch"})
    colours = {expert: number for number, expert in enumerate(dict.fromkeys(span.expert for span in spans))}
    palette, figure = colormaps["tab20"], Figure(figsize=(13, 1.2 + 0.55 * len(lanes)), layout="constrained")
    axes = figure.subplots()
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
