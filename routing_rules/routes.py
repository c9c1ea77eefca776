"""What the daemon reads of the rules: immutable recipes, chains of experts, and how an answer is judged.

Everything here is a value or a pure function of values: the live daemon, the simulator and `coserve explain`
use the same objects.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

Verdict = Literal["pass", "fail", "review", "unknown"]

#: Worst first: a board, or a chain of stages, takes the worst verdict among its parts (PROTOCOL.md, Boards).
SEVERITY: tuple[Verdict, ...] = ("fail", "unknown", "review", "pass")


def worst(verdicts: Sequence[Verdict]) -> Verdict:
    """The verdict that wins among `verdicts` (not empty): fail, then unknown, then review, then pass."""
    return min(verdicts, key=SEVERITY.index)


class Seen(Protocol):
    """One detection, as the rules look at it; box is (x1, y1, x2, y2) in pixels of the stored image."""

    @property
    def label(self) -> str: ...
    @property
    def confidence(self) -> float: ...
    @property
    def box(self) -> tuple[float, float, float, float]: ...
