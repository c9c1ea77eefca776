"""Which experts the next prompts want: by expected tokens, sensitive tasks first (eMoE §3.4, Eq. 2)."""

from collections.abc import Iterator, Mapping, Sequence

from experts.moe.policy.eviction import Key
from experts.moe.policy.schedule import Generation, TaskProfiles

#: f: (L, E), how a task's tokens are expected to spread over the experts of each layer.
Frequencies = Sequence[Sequence[float]]


def expected_tokens(
    generations: Sequence[tuple[Generation, float]],
    frequencies: Mapping[str | None, Frequencies],
    weights: Mapping[str | None, Sequence[float]],
    profiles: TaskProfiles,
) -> list[list[float]]:
    """(L, E) tokens: Σ of (prompt + expected output) · s · f over generations, each with how many of it are expected.

    Every task of `generations` has its frequencies. `weights` are s of each task and layer; a task without them has 1
    everywhere, so that an empty mapping is task-agnostic loading.
    """
    shape = next(iter(frequencies.values()))
    total = [[0.0] * len(row) for row in shape]
    for generation, count in generations:
        tokens = count * (generation.prompt_tokens + generation.generated + profiles.remaining(generation))
        of_task = weights.get(generation.task)
        for layer, row in enumerate(frequencies[generation.task]):
            weight = 1.0 if of_task is None else of_task[layer]
            for expert, share in enumerate(row):
                total[layer][expert] += tokens * weight * share
    return total


def choose(
    tokens: Sequence[Sequence[float]], slots: int, least: int, resident: Sequence[Sequence[int]], bonus: float = 0.25
) -> tuple[tuple[int, ...], ...]:
    """The `slots` experts with the most tokens, `least` of each layer before all others; ascending for each layer.

    A resident expert counts `bonus` more: the others must be worth their load.
    """
    ranked: list[tuple[bool, float, int, int]] = []
    for layer, (row, here) in enumerate(zip(tokens, resident, strict=True)):
        worth = [one * (1.0 + bonus) if expert in here else one for expert, one in enumerate(row)]
        order = sorted(range(len(row)), key=lambda expert, worth=worth: (-worth[expert], expert))
        ranked += [(place >= least, -worth[expert], layer, expert) for place, expert in enumerate(order)]
    chosen: list[list[int]] = [[] for _ in tokens]
    for _, _, layer, expert in sorted(ranked)[:slots]:
        chosen[layer].append(expert)
    return tuple(tuple(sorted(experts)) for experts in chosen)


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
