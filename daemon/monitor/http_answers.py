"""What `/metrics`, `/healthz` and `/readyz` answer, whoever serves them: the daemon itself, or its web pages.

One function, so that a probe that was written against the one finds the same words at the other.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

PATHS = ("/metrics", "/healthz", "/readyz")
_TEXT = "text/plain; charset=utf-8"
_EXPOSITION = "text/plain; version=0.0.4; charset=utf-8"


class NoAnswer(Exception):  # noqa: N818 - a fact about the daemon
    """The daemon did not say; the text says why."""


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    media_type: str
    text: str


def answer(path: str, ask: Callable[[str], Mapping[str, Any]]) -> Answer:
    """`ask("metrics")` has the exposition as `text`, `ask("health")` what health_answer.py says, as control's answers.

    503 where the daemon does not say (`ask` raises NoAnswer). `path` is one of PATHS.
    """
    try:
        if path == "/metrics":
            return Answer(200, _EXPOSITION, str(ask("metrics")["text"]))
        said = ask("health")["alive" if path == "/healthz" else "ready"]
    except NoAnswer as error:
        return Answer(503, _TEXT, f"no answer from the daemon: {error}\n")
    return Answer(200 if said["ok"] else 503, _TEXT, f"{said['text']}\n")
