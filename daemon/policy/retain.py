"""Which images go when room is needed: passed ones first, evidence last, oldest first within each."""

from collections.abc import Iterable
from dataclasses import dataclass

from routing_rules.routes import Verdict


@dataclass(frozen=True, slots=True)
class KeptImage:
    """An image that has its verdict and a durable copy; `completed_at` sorts by time."""

    inspection_id: int
    path: str
    size_bytes: int
    verdict: Verdict
    is_reviewed: bool
    completed_at: str


def rank(image: KeptImage) -> int:
    """0 goes first: passed; 1: never judged; 2: failed, unsure, and whatever an operator has decided about."""
    if image.is_reviewed or image.verdict in ("fail", "review"):
        return 2
    return 1 if image.verdict == "unknown" else 0


def excess_bytes(kept: int, most: int | None, free: int | None, floor: int | None) -> int:
    """Bytes that have to go: of what is `kept` beyond `most`, or that `free` lacks to `floor`; None sets no limit."""
    over = kept - most if most is not None else 0
    lacking = floor - free if floor is not None and free is not None else 0
    return max(0, over, lacking)


def images_to_prune(kept: Iterable[KeptImage], *, before: str | None, excess: int) -> list[KeptImage]:
    """Those completed before `before`, and others until `excess` bytes are covered, in the order in which they go."""
    chosen: list[KeptImage] = []
    ordered = sorted(kept, key=lambda image: (rank(image), image.completed_at, image.inspection_id))
    expired = [image for image in ordered if before is not None and image.completed_at < before]
    excess -= sum(image.size_bytes for image in expired)
    gone = {image.inspection_id for image in expired}
    for image in ordered:
        if image.inspection_id in gone:
            chosen.append(image)
        elif excess > 0:
            chosen.append(image)
            excess -= image.size_bytes
    return chosen
