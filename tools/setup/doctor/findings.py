"""Findings of the doctor: one sentence for the state, one for the remedy."""

from dataclasses import dataclass
from typing import Literal

Grade = Literal["ok", "warn", "wrong"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at. `do` is None where nothing is to be done."""

    check: str
    grade: Grade
    so: str
    do: str | None = None


def ok(check: str, so: str) -> Finding:
    """All is as it should be."""
    return Finding(check, "ok", so)


def warn(check: str, so: str, do: str) -> Finding:
    """The line runs, worse or less safely than it could."""
    return Finding(check, "warn", so, do)


def wrong(check: str, so: str, do: str) -> Finding:
    """The line does not run, or loses what it should keep."""
    return Finding(check, "wrong", so, do)
