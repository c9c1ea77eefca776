"""Whether a line is alive and ready: control's `health`, of which the web process makes `/healthz` and `/readyz`.

Alive: an image could pass through the threads; if not, a restart helps. Ready: images are taken and judged. A line
that is degraded is ready as long as both go on. No thread is asked, so that it is answered when one hangs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

#: A thread that has held the probe for this long hangs (pipeline_probe.py).
STUCK_AFTER_S = 10.0


@dataclass(frozen=True, slots=True)
class Vitals:
    """Facts from which the answer is made.

    `held_by` is the thread that has the probe, and for how many seconds. `refuses` says why no image is taken,
    `unjudged` why none gets a verdict, `troubles` what else is wrong with a line that goes on.
    """

    state: str
    held_by: tuple[str, float] | None = None
    refuses: Sequence[str] = ()
    unjudged: Sequence[str] = ()
    troubles: Sequence[str] = ()


def health(vitals: Vitals) -> dict[str, Any]:
    """Return `alive` and `ready`, each with `ok` and `text`, for control's `health`."""
    stuck = vitals.held_by if vitals.held_by is not None and vitals.held_by[1] >= STUCK_AFTER_S else None
    if stuck is not None:
        text = f"stuck: the {stuck[0]} thread has not answered for {stuck[1]:.0f} s; the log says more"
        return {"alive": _part(False, text), "ready": _part(False, text)}
    return {"alive": _part(True, "alive"), "ready": _ready(vitals)}


def _ready(vitals: Vitals) -> dict[str, Any]:
    if vitals.state == "starting":
        return _part(False, "starting: the first experts are being loaded")
    if vitals.refuses:
        return _part(False, f"{vitals.state}: takes no images: {'; '.join(vitals.refuses)}")
    if vitals.state not in ("ready", "degraded"):
        return _part(False, vitals.state)
    if vitals.unjudged:
        return _part(False, f"{vitals.state}: images get no verdict: {'; '.join(vitals.unjudged)}")
    return _part(True, ": ".join([vitals.state, "; ".join(vitals.troubles)]) if vitals.troubles else vitals.state)


def _part(ok: bool, text: str) -> dict[str, Any]:
    return {"ok": ok, "text": text}
