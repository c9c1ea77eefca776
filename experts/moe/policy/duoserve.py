"""DuoServe's choice of experts to fetch (§5), from one row of probabilities for each token of a decode step."""

from collections.abc import Collection, Sequence


def need(probabilities: Sequence[Sequence[float]]) -> tuple[float, ...]:
    """Return for each expert the probability that any of the tokens chooses it; tokens count as independent."""
    spared = [1.0] * len(probabilities[0])
    for row in probabilities:
        for expert, probability in enumerate(row):
            spared[expert] *= 1.0 - probability
    return tuple(1.0 - chance for chance in spared)


def likeliest(probabilities: Sequence[Sequence[float]], width: int) -> tuple[int, ...]:
    """Return the `width` likeliest experts of each token together, the one most likely to be needed first.

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
) -> tuple[int, ...]:
    """Return a layer's predicted experts, at most `slots`: residents that must stay, then those to fetch."""
    predicted = likeliest(probabilities, width)[:slots]
    return tuple(sorted(predicted, key=lambda expert: expert not in resident))


def first_of_prefill(popularity: Sequence[float], resident: Collection[int], tokens: int, top_k: int) -> int | None:
    """Return the expert to fetch while a prefill still computes up to a layer's gate (§5.2).

    Experts run in ascending order, so it is the first absent one that `tokens` tokens are expected to need; None if
    every expected one is resident.
    """
    for expert, share in enumerate(popularity):
        if expert not in resident and share * top_k * tokens >= 1.0:
            return expert
    return None
