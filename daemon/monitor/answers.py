"""The answers of `/metrics`, `/healthz` and `/readyz`, which the web process asks of the daemon.

Alive: an image could pass through the threads; if not, a restart helps. Ready: images are taken and judged. A line
that is degraded is ready as long as both go on. The daemon's control socket answers `health`, which asks no thread and
so is answered when one hangs; `http_answer` makes HTTP of it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

PATHS = ("/metrics", "/healthz", "/readyz")
_TEXT = "text/plain; charset=utf-8"
_EXPOSITION = "text/plain; version=0.0.4; charset=utf-8"
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


class NoAnswer(Exception):  # noqa: N818 - a fact about the daemon
    """The daemon did not answer; the text says why."""


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    status: int
    media_type: str
    text: str


def http_answer(path: str, ask: Callable[[str], Mapping[str, Any]]) -> HttpAnswer:
    """Answer one of PATHS by control's `metrics` and `health`; 503 if `ask` raises NoAnswer."""
    try:
        if path == "/metrics":
            return HttpAnswer(200, _EXPOSITION, str(ask("metrics")["text"]))
        part = ask("health")["alive" if path == "/healthz" else "ready"]
    except NoAnswer as error:
        return HttpAnswer(503, _TEXT, f"no answer from the daemon: {error}\n")
    return HttpAnswer(200 if part["ok"] else 503, _TEXT, f"{part['text']}\n")
