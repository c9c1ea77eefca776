"""eMoE's choice of resident experts: by expected tokens, sensitive tasks first (§3.4, Eq. 2)."""

from collections.abc import Iterator, Mapping, Sequence

from experts.moe.policy.eviction import EvictionPolicy, Key
from experts.moe.policy.schedule import Generation, TaskProfiles

#: f: (L, E), expected shares of a task's tokens at the experts of each layer.
Frequencies = Sequence[Sequence[float]]


def expected_tokens(
    generations: Sequence[tuple[Generation, float]],
    frequencies: Mapping[str | None, Frequencies],
    weights: Mapping[str | None, Sequence[float]],
    profiles: TaskProfiles,
) -> list[list[float]]:
    """Return (L, E) tokens: the sum of (prompt + expected output) · s · f over `generations`, each with its count.

    Every task of `generations` has its frequencies. `weights` are s of each task and layer; a task without them has 1
    everywhere, so that an empty mapping means task-agnostic loading.
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
    tokens: Sequence[Sequence[float]], slots: int, floor: int, resident: Sequence[Sequence[int]], bonus: float = 0.25
) -> tuple[tuple[int, ...], ...]:
    """Return the `slots` experts with the most tokens, `floor` of each layer before all others; ascending by layer.

    A resident expert counts `bonus` more, so that others must be worth their load.
    """
    ranked: list[tuple[bool, float, int, int]] = []
    for layer, (row, present) in enumerate(zip(tokens, resident, strict=True)):
        worth = [count * (1.0 + bonus) if expert in present else count for expert, count in enumerate(row)]
        order = sorted(range(len(row)), key=lambda expert, worth=worth: (-worth[expert], expert))
        ranked += [(place >= floor, -worth[expert], layer, expert) for place, expert in enumerate(order)]
    sets: list[list[int]] = [[] for _ in tokens]
    for _, _, layer, expert in sorted(ranked)[:slots]:
        sets[layer].append(expert)
    return tuple(tuple(sorted(experts)) for experts in sets)


def to_load(sets: Sequence[Sequence[int]], resident: Sequence[Sequence[int]]) -> tuple[tuple[int, int], ...]:
    """Return (layer, expert) of the experts of these sets that are not resident, ascending."""
    return tuple(
        (layer, expert)
        for layer, (experts, present) in enumerate(zip(sets, resident, strict=True))
        for expert in experts
        if expert not in present
    )


class ChosenExperts(EvictionPolicy):
    """Eviction by fixed sets: experts outside the set go first, those of the incoming expert's layer before others.

    `choose` is called by the computing thread, everything else under the cache's lock.
    """

    def __init__(self) -> None:
        self._sets: tuple[tuple[int, ...], ...] = ()
        self._resident: dict[Key, None] = {}

    def choose(self, sets: tuple[tuple[int, ...], ...]) -> None:
        """Set the experts of each layer that should be in memory from now on."""
        self._sets = sets

    def loaded(self, key: Key) -> None:
        self._resident[key] = None

    def dropped(self, key: Key) -> None:
        self._resident.pop(key, None)

    def victims(self, incoming: Key | None, free: int, *, urgent: bool) -> Iterator[Key]:
        if incoming is not None and free:
            return
        resident = sorted(self._resident, key=lambda key: (incoming is not None and key[0] != incoming[0], key))
        yield from (key for key in resident if key[1] not in self._sets[key[0]])
        if urgent:
            yield from (key for key in resident if key[1] in self._sets[key[0]])
