"""Which experts the next prompts want: by expected tokens, those of sensitive tasks only (eMoE §3.4, Eq. 2)."""

from collections.abc import Mapping, Sequence

from experts.moe.policy.schedule import Generation, Profiles

#: f: (L, E), how a task's tokens are expected to spread over the experts of each layer.
Frequencies = Sequence[Sequence[float]]


def expected_tokens(
    generations: Sequence[Generation],
    frequencies: Mapping[str | None, Frequencies],
    sensitive: Mapping[str | None, Sequence[bool]],
    profiles: Profiles,
) -> list[list[float]]:
    """(L, E) tokens: Σ over those scheduled of (prompt + expected output) · s · f.

    Every task of `generations` has its frequencies. A task without an entry in `sensitive` is sensitive in every layer,
    so that an empty mapping is task-agnostic loading.
    """
    shape = next(iter(frequencies.values()))
    total = [[0.0] * len(row) for row in shape]
    for generation in generations:
        tokens = generation.prompt_tokens + generation.generated + profiles.remaining(generation)
        matters = sensitive.get(generation.task)
        for layer, row in enumerate(frequencies[generation.task]):
            if matters is None or matters[layer]:
                for expert, share in enumerate(row):
                    total[layer][expert] += tokens * share
    return total


def choose(
    tokens: Sequence[Sequence[float]], slots: Sequence[int], resident: Sequence[Sequence[int]]
) -> tuple[tuple[int, ...], ...]:
    """For each layer the `slots[layer]` experts with the most tokens, ascending.

    Among equals those stay that are resident, so that a layer which no task is sensitive to loads nothing.
    """
    chosen: list[tuple[int, ...]] = []
    for row, count, here in zip(tokens, slots, resident, strict=True):
        order = sorted(range(len(row)), key=lambda expert: (-row[expert], expert not in here, expert))
        chosen.append(tuple(sorted(order[:count])))
    return tuple(chosen)


def to_load(chosen: Sequence[Sequence[int]], resident: Sequence[Sequence[int]]) -> tuple[tuple[int, int], ...]:
    """(layer, expert) of what is chosen and not resident, ascending: what a change of experts costs."""
    return tuple(
        (layer, expert)
        for layer, (wanted, here) in enumerate(zip(chosen, resident, strict=True))
        for expert in wanted
        if expert not in here
    )
