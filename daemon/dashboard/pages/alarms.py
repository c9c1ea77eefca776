"""What needs a person now, in their words: each alarm says what is wrong and what to do about it.

Made from control's `status` and, put beside it as `drifted`, the experts that drift. Whoever has something to raise an
alarm about writes a function from that to alarms, and adds it to SOURCES.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from daemon.wire.control import ControlError

Status = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Alarm:
    """`trouble` is one of the line: images wait, or are not judged. `notice` is one beside it."""

    level: Literal["trouble", "notice"]
    title: str
    remedy: str


def alarms(status: Status | ControlError) -> list[Alarm]:
    """Troubles first, in the order of SOURCES."""
    if isinstance(status, ControlError):
        return [Alarm("trouble", f"The daemon does not answer: {status.reason}", "systemctl status coserve")]
    found = [alarm for source in SOURCES for alarm in source(status)]
    return sorted(found, key=lambda alarm: alarm.level != "trouble")


def _line(status: Status) -> Iterable[Alarm]:
    state, last_error = status.get("state"), status.get("last_error")
    if state == "degraded":
        yield Alarm("trouble", str(last_error or "The line is degraded."), "coserve status says more")
    elif state == "draining":
        yield Alarm("notice", "The line is draining: it takes no new images.", "coserve drain --off takes them again")
    elif state == "starting":
        yield Alarm("notice", "The line is starting: its experts are being loaded.", "Images are judged meanwhile.")


def _children(status: Status) -> Iterable[Alarm]:
    """Processes beside the line that do not stay up: it goes on without them."""
    for child in status.get("children", ()):
        if child.get("state") in ("waiting", "hung"):
            end = f" ({child['last_end']})" if child.get("last_end") else ""
            yield Alarm("notice", f"{child.get('name')} is not running{end}; it is started again.", "The log says why.")


def _consumers(status: Status) -> Iterable[Alarm]:
    """Who gets results sent and does not keep up, or is refused. Never trouble of the line."""
    for consumer in status.get("consumers", ()):
        name, state, behind = consumer.get("name"), consumer.get("state"), consumer.get("behind") or 0
        error, missed = consumer.get("last_error"), consumer.get("missed")
        if missed:
            remedy = "Keep results longer (retention.results_for), or mend what holds it up sooner."
            yield Alarm("notice", f"Consumer {name} missed {missed:,} results: they were pruned before it.", remedy)
        if error or state in ("refused", "waiting"):
            why = f": {error}" if error else ""
            waits = f", {behind:,} results behind" if behind else ""
            yield Alarm("notice", f"Consumer {name} is {state}{waits}{why}", _CATCHES_UP)
        elif behind > _BEHIND:
            yield Alarm("notice", f"Consumer {name} is {behind:,} results behind.", _CATCHES_UP)


def _drifted(status: Status) -> Iterable[Alarm]:
    """Experts that see other images than they learnt from (drifted.py). Images are judged as before."""
    names = [one.expert for one in status.get("drifted", ())]
    if names:
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        answer = "answers" if len(names) == 1 else "answer"
        title = f"Drift: {', '.join(names[:_NAMED])}{more} {answer} with other confidence than in training."
        yield Alarm("notice", title, "Look at light, lens and parts; coserve experts show NAME; train again.")


#: Names that an alarm has room for.
_NAMED = 3
#: A consumer that is further behind than this is worth a look.
_BEHIND = 1000
_CATCHES_UP = "It catches up by itself, as far back as results are kept (retention.results_for)."
SOURCES: Sequence[Callable[[Status], Iterable[Alarm]]] = (_line, _children, _consumers, _drifted)
