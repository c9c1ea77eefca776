"""Order of pruning: passed images first, the newest good examples late, evidence last; the oldest first within each."""

from collections.abc import Iterable
from dataclasses import dataclass

from routing_rules.routes import Verdict


@dataclass(frozen=True, slots=True)
class KeptImage:
    """An image that has its verdict and a durable copy; `inspection_id` sorts by acceptance."""

    inspection_id: int
    path: str
    size_bytes: int
    verdict: Verdict
    is_reviewed: bool
    is_example: bool = False


def rank(image: KeptImage) -> int:
    """Return 0 for passed images, which go first, 1 for never judged ones, 3 for failed, unsure and reviewed ones.

    The newest good examples of each component, 2, are few, and every review needs them; no evidence goes for them.
    """
    if image.is_reviewed or image.verdict in ("fail", "review"):
        return 3
    if image.is_example:
        return 2
    return 1 if image.verdict == "unknown" else 0


def excess_bytes(kept: int, max_kept: int | None, free: int | None, min_free: int | None) -> int:
    """Return the bytes to prune: `kept` beyond `max_kept`, or `min_free` beyond `free`; None sets no limit."""
    over = kept - max_kept if max_kept is not None else 0
    lacking = min_free - free if min_free is not None and free is not None else 0
    return max(0, over, lacking)


def images_to_prune(images: Iterable[KeptImage], excess: int) -> list[KeptImage]:
    """Return images until `excess` bytes are covered, in pruning order."""
    pruned: list[KeptImage] = []
    for image in sorted(images, key=lambda image: (rank(image), image.inspection_id)):
        if excess <= 0:
            break
        pruned.append(image)
        excess -= image.size_bytes
    return pruned
