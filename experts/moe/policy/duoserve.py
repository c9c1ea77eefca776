"""What DuoServe fetches, and when (DuoServe-MoE §5). Whom to evict for it is the cache's residency policy to say.

Probabilities come from the predictor, one row for each token of a decode step: how likely the token is to choose each
expert of the next layer.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Prefetch:
    """For one layer, likeliest first: predicted experts that are resident and must stay, and those to fetch."""

    keep: tuple[int, ...] = ()
    fetch: tuple[int, ...] = ()


def need(probabilities: Sequence[Sequence[float]]) -> tuple[float, ...]:
    """For each expert how likely it is that any of the tokens chooses it, taken as independent of one another."""
    spared = [1.0] * len(probabilities[0])
    for row in probabilities:
        for expert, probability in enumerate(row):
            spared[expert] *= 1.0 - probability
    return tuple(1.0 - one for one in spared)


def likeliest(probabilities: Sequence[Sequence[float]], width: int) -> tuple[int, ...]:
    """The `width` likeliest experts of each token, together, the one that is needed most likely first.

    One token with `width` = k is the paper's prediction. The union over the tokens of a batch is ours.
    """
    named: dict[int, None] = {}
    for row in probabilities:
        order = sorted(range(len(row)), key=lambda expert: (-row[expert], expert))
        named.update(dict.fromkeys(order[:width]))
    needed = need(probabilities)
    return tuple(sorted(named, key=lambda expert: (-needed[expert], expert)))


def plan_prefetch(
    probabilities: Sequence[Sequence[float]], resident: Collection[int], slots: int, width: int
) -> Prefetch:
    """The predicted experts of a layer that holds `slots` at most: more than these would push one another out."""
    wanted = likeliest(probabilities, width)[:slots]
    return Prefetch(
        keep=tuple(expert for expert in wanted if expert in resident),
        fetch=tuple(expert for expert in wanted if expert not in resident),
    )


def first_of_prefill(popularity: Sequence[float], resident: Collection[int], tokens: int, top_k: int) -> int | None:
    """The expert to fetch while a prefill is still computing what comes before a layer's gate (§5.2).

    Experts run in ascending order, so it is the first absent one that `tokens` tokens are expected to need at least
    once; None where everybody who is needed is there.
    """
    for expert, share in enumerate(popularity):
        if expert not in resident and share * top_k * tokens >= 1.0:
            return expert
    return None
