"""How much wrong routing a task bears, layer by layer (eMoE §2.2.3, §3.4)."""

from collections.abc import Mapping, Sequence

from experts.moe.errors import ModelError
from experts.moe.weights.prepared import PreparedFiles

PART = "emoe/sensitivity"
#: A layer whose wrong routing leaves a task at least so much of its accuracy is insensitive for it (§3.4).
THRESHOLD = 0.85
#: No layer counts for nothing.
_LEAST = 0.01

#: For each task and layer: the share of its accuracy that is left with this layer, and all that bear more, wrong.
Shares = Mapping[str, tuple[float, ...]]


def load_shares(prepared: PreparedFiles) -> Shares:
    """What `measure` found. Raises ModelError where it did not come to its end."""
    found = prepared.load_json(PART)
    layers = found["layers"]
    try:
        return {task: shares_of(of_task, layers) for task, of_task in found["accuracy"].items()}
    except KeyError as error:
        raise ModelError(prepared.path(PART, ".json"), "is not complete; go on with `coserve moe fit`") from error


def sensitive(shares: Shares, threshold: float = THRESHOLD) -> dict[str, tuple[bool, ...]]:
    """Which layers of each task must be routed right."""
    return {task: tuple(share < threshold for share in row) for task, row in shares.items()}


def weights(shares: Shares) -> dict[str | None, tuple[float, ...]]:
    """The s of Eq. 2, graded: for each task and layer the accuracy that goes when this layer joins the wrong ones.

    The paper has 1 for sensitive layers and 0 for the others.
    """
    found: dict[str | None, tuple[float, ...]] = {}
    for task, row in shares.items():
        losses, before = [0.0] * len(row), 1.0
        for layer in sorted(range(len(row)), key=lambda layer, row=row: -row[layer]):
            losses[layer] = max(_LEAST, before - row[layer])
            before = row[layer]
        found[task] = tuple(losses)
    return found


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
