"""The curves of a soak: memory, handles and threads, files, and acceptance over time."""

from pathlib import Path
from typing import Any

import matplotlib as mpl

from tests.stress.soak import Soak

_LINE = "#2f6f9f"
_HOSTILE = "#b0653a"


def draw_soak(soak: Soak, file: Path) -> None:
    """Write a PNG; the shaded spans are those with a hostile process."""
    mpl.use("Agg")
    import matplotlib.pyplot as plt

    minutes = [look.held.at_s / 60 for look in soak.looks]
    held = [look.held for look in soak.looks]
    figure, panels = plt.subplots(4, 1, figsize=(10, 9), sharex=True, layout="constrained")
    found = soak.slopes()
    rss = found["rss_mb"]
    panels[0].plot(minutes, [one.rss_mb for one in held], color=_LINE, linewidth=1)
    panels[0].set_ylabel("resident MB")
    panels[0].set_ylim(bottom=0)
    panels[0].set_title(
        f"memory {rss.per_hour:+.1f} MB an hour (95 %: {rss.lowest:+.1f} to {rss.highest:+.1f})", fontsize=9, loc="left"
    )
    panels[1].plot(minutes, [one.handles for one in held], color=_LINE, linewidth=1, label="file handles")
    panels[1].plot(minutes, [one.threads for one in held], color=_HOSTILE, linewidth=1, label="threads")
    panels[1].set_ylim(bottom=0)
    for name, label in (
        ("database_mb", "database"),
        ("wal_mb", "WAL"),
        ("journal_mb", "journal"),
        ("images_mb", "images kept"),
        ("quarantine_mb", "quarantine"),
    ):
        panels[2].plot(minutes, [getattr(one, name) for one in held], linewidth=1, label=label)
    panels[2].set_ylabel("MB on disk")
    for share in ("p50_ms", "p99_ms"):
        panels[3].plot(
            minutes, [getattr(look, share) for look in soak.looks], linewidth=1, label=share.replace("_ms", "")
        )
    panels[3].set_ylabel("ms to acceptance")
    panels[3].set_yscale("log")
    panels[3].set_xlabel("minutes")
    for panel in panels[1:]:
        panel.legend(fontsize=8, loc="upper left")
    for panel in panels:
        _shade(panel, soak)
        panel.grid(alpha=0.2)
    figure.savefig(file, dpi=110)
    plt.close(figure)


def _shade(panel: Any, soak: Soak) -> None:
    before_s = 0.0
    for look in soak.looks:
        if look.attack:
            panel.axvspan(before_s / 60, look.held.at_s / 60, color=_HOSTILE, alpha=0.06, linewidth=0)
        before_s = look.held.at_s
