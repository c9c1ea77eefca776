"""Which experts the next prompts want: by expected tokens, those of sensitive tasks only (eMoE §3.4, Eq. 2)."""

from collections.abc import Iterator, Mapping, Sequence

from experts.moe.policy.residency import Key
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


class ChosenExperts:
    """Residency of fixed sets: who is not chosen goes first, of the wanted layer before others'.

    `choose` is called by the thread that computes, all else under the cache's lock.
    """

    def __init__(self) -> None:
        self._chosen: tuple[tuple[int, ...], ...] = ()
        self._here: dict[Key, None] = {}

    def choose(self, chosen: tuple[tuple[int, ...], ...]) -> None:
        """The experts of each layer that are to be in memory from now on."""
        self._chosen = chosen

    def resize(self, slots: int) -> None:
        """Sets are chosen to fit before the slots change."""

    def loaded(self, key: Key) -> None:
        self._here[key] = None

    def used(self, key: Key) -> None:
        """Sets do not follow single uses."""

    def predicted(self, key: Key) -> None:
        """Sets are the prediction."""

    def dropped(self, key: Key) -> None:
        self._here.pop(key, None)

    def victims(self, wanted: Key | None, free: int, *, urgent: bool) -> Iterator[Key]:
        if wanted is not None and free:
            return
        here = sorted(self._here, key=lambda key: (wanted is not None and key[0] != wanted[0], key))
        yield from (key for key in here if key[1] not in self._chosen[key[0]])
        if urgent:
            yield from (key for key in here if key[1] in self._chosen[key[0]])
