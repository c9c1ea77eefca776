"""Order of pruning when disk space is needed: passed images first, evidence last, the oldest first within each."""

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
    """Return 0 for passed images, which go first, 1 for never judged ones, 2 for failed, unsure and reviewed ones."""
    if image.is_reviewed or image.verdict in ("fail", "review"):
        return 2
    return 1 if image.verdict == "unknown" else 0


def excess_bytes(kept: int, max_kept: int | None, free: int | None, min_free: int | None) -> int:
    """Return the bytes to prune: `kept` beyond `max_kept`, or `min_free` beyond `free`; None sets no limit."""
    over = kept - max_kept if max_kept is not None else 0
    lacking = min_free - free if min_free is not None and free is not None else 0
    return max(0, over, lacking)


def images_to_prune(images: Iterable[KeptImage], *, before: str | None, excess: int) -> list[KeptImage]:
    """Return the images completed before `before`, and others until `excess` bytes are covered, in pruning order."""
    pruned: list[KeptImage] = []
    ordered = sorted(images, key=lambda image: (rank(image), image.completed_at, image.inspection_id))
    expired = [image for image in ordered if before is not None and image.completed_at < before]
    excess -= sum(image.size_bytes for image in expired)
    gone = {image.inspection_id for image in expired}
    for image in ordered:
        if image.inspection_id in gone:
            pruned.append(image)
        elif excess > 0:
            pruned.append(image)
            excess -= image.size_bytes
    return pruned
