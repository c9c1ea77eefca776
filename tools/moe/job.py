"""What one process of `coserve moe bench` is asked to measure, and what it found: JSON between the two."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

ACCELERATE = "accelerate"


@dataclass(frozen=True, slots=True)
class Job:
    """One side at one budget. `share`: of each layer's experts in memory; `links_ms`: one timing for each, 0 as is."""

    checkpoint: Path
    side: str
    share: float
    links_ms: tuple[float, ...]
    device: str
    prompts: int  # of each domain, timed
    prompt_tokens: int
    new_tokens: int
    judged: int  # of each domain, for perplexity; 0 for none
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Run:
    """Figures of one side over one link; rates are 0 to 1, None where the side has no such figure."""

    link_ms: float
    figures: dict[str, float | None]


@dataclass(frozen=True, slots=True)
class Report:
    """`error` says why a side could not be measured; the others go on."""

    runs: tuple[Run, ...] = ()
    error: str | None = None


JOB = TypeAdapter(Job)
REPORT = TypeAdapter(Report)
