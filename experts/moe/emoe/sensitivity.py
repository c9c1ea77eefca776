"""How much wrong routing a task bears, layer by layer (eMoE §2.2.3, §3.4)."""

from collections.abc import Mapping, Sequence

from experts.moe.errors import ModelError
from experts.moe.prepared import Prepared

PART = "emoe/sensitivity"
#: A layer whose wrong routing leaves a task at least so much of its accuracy is insensitive for it (§3.4).
THRESHOLD = 0.85

#: For each task and layer: the share of its accuracy that is left with this layer, and all that bear more, wrong.
Shares = Mapping[str, tuple[float, ...]]


def load_shares(prepared: Prepared) -> Shares:
    """What `measure` found. Raises ModelError where it did not come to its end."""
    found = prepared.load_json(PART)
    layers = found["layers"]
    try:
        return {task: shares_of(of_task, layers) for task, of_task in found["accuracy"].items()}
    except KeyError as error:
        raise ModelError(prepared.path(PART, ".json"), "is not complete; go on with `coserve moe fit`") from error


def sensitive(shares: Shares, threshold: float = THRESHOLD) -> dict[str | None, tuple[bool, ...]]:
    """Which layers of each task must be routed right. A task that is not there is sensitive everywhere."""
    return {task: tuple(share < threshold for share in row) for task, row in shares.items()}


def name_of(wrong: Sequence[int]) -> str:
    return " ".join(map(str, sorted(wrong)))


def tolerant_first(accuracy: Mapping[str, float], layers: int) -> list[int]:
    return sorted(range(layers), key=lambda layer: (-accuracy[name_of([layer])], layer))


def shares_of(accuracy: Mapping[str, float], layers: int) -> tuple[float, ...]:
    """For each layer what is kept when it and all more tolerant ones are wrong."""
    order = tolerant_first(accuracy, layers)
    full, least, shares = max(accuracy[""], 1e-9), 1.0, [0.0] * layers
    for count, layer in enumerate(order, 1):
        least = min(least, accuracy[name_of(order[:count])] / full)
        shares[layer] = least
    return tuple(shares)
