"""Loads and batches over time, a lane for each channel and executor, as a picture."""

from pathlib import Path

from tools.simulate.engine import TaskOutcome

#: Fewer lanes and spans than this stay legible.
_MAX_SPANS = 20_000
_LABELLED_SPANS = 120


def draw_timeline(outcome: TaskOutcome, path: Path, *, until_s: float | None = None) -> None:
    """Write a PNG (or what else the suffix says). One colour for each expert, the same in every lane.

    Raises ValueError if nothing was recorded.
    """
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
