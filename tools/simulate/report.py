"""A simulated run as a row for people and programs (docs/simulating.md), and as a picture over time."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.simulate.engine import TaskOutcome


@dataclass(frozen=True, slots=True)
class Row:
    """`wait`: from arrival to the start of the first expert's batch. `loads`: into pools that compute, after the fill.

    `wanted_evictions`: experts that left although images were queued for them. `unknown`: images given up because their
    deadline could not be met; `late`: answered after it.
    """

    policy: str
    images_per_s: float
    makespan_s: float
    loads: int
    disk_loads: int
    wanted_evictions: int
    p50_wait_s: float
    p95_wait_s: float
    max_wait_s: float
    share_of_bound: float
    bound_s: float
    p50_latency_s: float
    p95_latency_s: float
    p99_latency_s: float
    unknown: int
    late: int
    #: What crossed the network to other PCs after the initial fill, and the first loads of experts among it.
    network_bytes: int
    network_loads: int


#: Fewer lanes and spans than this stay legible.
_MAX_SPANS = 20_000
_LABELLED_SPANS = 120

#: The columns that fit a terminal; programs get all figures.
COLUMNS = ("policy", "images/s", "loads", "disk", "p50 s", "p95 s", "max s", "bound")


def row_of(outcome: TaskOutcome, bound_s: float) -> Row:
    """`bound_s`: seconds below which no policy can finish this task on this machine."""
    waits, latencies = outcome.waits_s, outcome.latencies_s
    makespan_s = outcome.makespan_s
    return Row(
        policy=outcome.policy,
        images_per_s=round(outcome.images / makespan_s, 3) if makespan_s else 0.0,
        makespan_s=round(makespan_s, 3),
        loads=outcome.loads,
        disk_loads=outcome.disk_loads,
        wanted_evictions=outcome.wanted_evictions,
        p50_wait_s=round(quantile(waits, 0.5), 3),
        p95_wait_s=round(quantile(waits, 0.95), 3),
        max_wait_s=round(quantile(waits, 1.0), 3),
        share_of_bound=round(bound_s / makespan_s, 4) if makespan_s else 0.0,
        bound_s=round(bound_s, 3),
        p50_latency_s=round(quantile(latencies, 0.5), 3),
        p95_latency_s=round(quantile(latencies, 0.95), 3),
        p99_latency_s=round(quantile(latencies, 0.99), 3),
        unknown=outcome.expired,
        late=outcome.late,
        network_bytes=outcome.network_bytes,
        network_loads=outcome.network_loads,
    )


def columns(rows: Sequence[Row]) -> tuple[str, ...]:
    """Return a table's columns; if anything crossed the network, its bytes replace the longest wait."""
    crossed = any(row.network_bytes for row in rows)
    return tuple("net GB" if crossed and name == "max s" else name for name in COLUMNS)


def cells(row: Row, names: Sequence[str] = COLUMNS) -> tuple[str, ...]:
    texts = {
        "policy": row.policy,
        "images/s": f"{row.images_per_s:.2f}",
        "loads": str(row.loads),
        "disk": str(row.disk_loads),
        "p50 s": f"{row.p50_wait_s:.1f}",
        "p95 s": f"{row.p95_wait_s:.1f}",
        "max s": f"{row.max_wait_s:.1f}",
        "bound": f"{row.share_of_bound:.0%}",
        "net GB": f"{row.network_bytes / 1e9:.2f}",
    }
    return tuple(texts[name] for name in names)


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
