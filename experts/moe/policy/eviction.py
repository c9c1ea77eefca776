"""Eviction from a slot cache: the base of its policies, and two shared ones. Experts are (MoE layer from 0, expert)."""

from collections import Counter
from collections.abc import Iterator, Sequence

Key = tuple[int, int]


class EvictionPolicy:
    """Order of eviction. Called under the cache's lock: no method may wait or call back."""

    def resize(self, slots: int) -> None:
        """Set the number of slots; the cache then asks for victims until the residents fit."""

    def loaded(self, key: Key) -> None:
        """A slot is being filled with the expert; by default a use."""
        self.used(key)

    def used(self, key: Key) -> None:
        """Record that the expert runs now."""

    def predicted(self, key: Key) -> None:
        """A resident expert is predicted to run soon; by default a use."""
        self.used(key)

    def dropped(self, key: Key) -> None:
        """The expert was evicted, or its load failed."""

    def victims(self, incoming: Key | None, free: int, *, urgent: bool) -> Iterator[Key]:
        """Yield residents that may be evicted for `incoming`, best first; none if an empty slot should be used.

        `free`: number of empty slots. `urgent`: computing stands still until `incoming` is loaded, so every resident is
        a candidate. `incoming` is None when the slots shrink. Changes nothing.
        """
        raise NotImplementedError


def split_evenly(total: int, parts: int) -> tuple[int, ...]:
    """Split `total` into parts that differ by one at most, the larger ones first."""
    each, remainder = divmod(total, parts)
    return tuple(each + (part < remainder) for part in range(parts))


class LayeredLru(EvictionPolicy):
    """Gives each layer an even share of the slots, and evicts the layer's own least recently used expert.

    Layers run in turn, so the least recently used expert of all is the one that runs next. A layer above its share,
    because another had left slots empty, gives back first.
    """

    def __init__(self, layers: int) -> None:
        self._quotas = (0,) * layers
        # For each layer a dict in order of use; its values give the order over all layers.
        self._order: list[dict[int, int]] = [{} for _ in range(layers)]
        self._clock = 0

    def resize(self, slots: int) -> None:
        self._quotas = split_evenly(slots, len(self._order))

    def used(self, key: Key) -> None:
        layer, expert = key
        order = self._order[layer]
        order.pop(expert, None)
        self._clock += 1
        order[expert] = self._clock

    def dropped(self, key: Key) -> None:
        self._order[key[0]].pop(key[1], None)

    def victims(self, incoming: Key | None, free: int, *, urgent: bool) -> Iterator[Key]:
        own = None if incoming is None else incoming[0]
        full = own is not None and len(self._order[own]) >= self._quotas[own]
        if own is not None and full:
            yield from ((own, expert) for expert in self._order[own])
        if own is not None and free:
            return
        others = [layer for layer in range(len(self._order)) if layer != own or not full]
        over = [layer for layer in others if len(self._order[layer]) > self._quotas[layer]]
        yield from self._oldest(over)
        if urgent:
            yield from self._oldest([layer for layer in others if layer not in over])

    def _oldest(self, layers: Sequence[int]) -> Iterator[Key]:
        aged = [(age, layer, expert) for layer in layers for expert, age in self._order[layer].items()]
        for _, layer, expert in sorted(aged):
            yield layer, expert


class KeepChosen(EvictionPolicy):
    """Keeps the `chosen` experts, set by the computing thread; the others pass through the remaining slots."""

    def __init__(self) -> None:
        self.chosen: frozenset[Key] = frozenset()
        #: In order of use.
        self._resident: dict[Key, None] = {}

    def loaded(self, key: Key) -> None:
        self._resident[key] = None

    def used(self, key: Key) -> None:
        if key in self._resident:
            del self._resident[key]
            self._resident[key] = None

    def dropped(self, key: Key) -> None:
        self._resident.pop(key, None)

    def victims(self, incoming: Key | None, free: int, *, urgent: bool) -> Iterator[Key]:
        chosen = self.chosen
        # Empty slots are for the chosen experts until all of them are resident.
        if incoming is not None and free and (incoming in chosen or free > len(chosen - self._resident.keys())):
            return
        # A layer above its number gives back first: others would have too few experts until the new ones are there.
        above = Counter(layer for layer, _ in self._resident)
        above.subtract(layer for layer, _ in chosen)
        yield from sorted((key for key in self._resident if key not in chosen), key=lambda key: -above[key[0]])
        if (urgent and not free) or incoming is None:
            yield from [key for key in self._resident if key in chosen]


def allot(slots: int, shares: Sequence[float], floor: int, ceiling: int) -> tuple[int, ...]:
    """Divide slots among layers: `floor` each, the rest in proportion to `shares`, at most `ceiling` each.

    Shares that add up to the rest come out unchanged: a plan for this memory is carried out exactly.
    """
    counts = [floor] * len(shares)
    for _ in range(min(slots, len(shares) * ceiling) - sum(counts)):
        below = [layer for layer, count in enumerate(counts) if count < ceiling]
        # D'Hondt's method.
        counts[min(below, key=lambda layer: (counts[layer] - floor + 1) / max(shares[layer], 1e-9))] += 1
    return tuple(counts)
