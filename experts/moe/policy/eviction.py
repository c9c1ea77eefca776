"""Eviction from a slot cache: the base of its policies, and two shared ones. Experts are (MoE layer from 0, expert)."""

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


class MostPopular(EvictionPolicy):
    """Keeps the most popular experts of each layer; the others pass through the remaining slots.

    `ranking[l]`: the experts of layer l, most popular first. `transit`: slots for the unpopular experts.
    """

    def __init__(self, ranking: Sequence[Sequence[int]], transit: int) -> None:
        self._ranking = tuple(tuple(experts) for experts in ranking)
        self._transit = transit
        self._popular: dict[Key, None] = {}
        self._passing: dict[Key, None] = {}
        self._staying: dict[Key, None] = {}

    @property
    def popular(self) -> tuple[Key, ...]:
        return tuple(self._popular)

    def resize(self, slots: int) -> None:
        experts_in_all = sum(len(experts) for experts in self._ranking)
        staying = slots if slots >= experts_in_all else max(0, slots - self._transit)
        quotas = split_evenly(staying, len(self._ranking))
        self._popular = {
            (layer, expert): None
            for layer, experts in enumerate(self._ranking)
            for expert in sorted(experts[: quotas[layer]])
        }
        resident = [*self._staying, *self._passing]
        self._staying = {key: None for key in resident if key in self._popular}
        self._passing = {key: None for key in resident if key not in self._popular}

    def loaded(self, key: Key) -> None:
        (self._staying if key in self._popular else self._passing)[key] = None

    def used(self, key: Key) -> None:
        if key in self._passing:
            del self._passing[key]
            self._passing[key] = None

    def dropped(self, key: Key) -> None:
        self._staying.pop(key, None)
        self._passing.pop(key, None)

    def victims(self, incoming: Key | None, free: int, *, urgent: bool) -> Iterator[Key]:
        # Empty slots are for the popular experts until all of them are resident.
        missing = len(self._popular) - len(self._staying)
        if incoming is not None and free and (incoming in self._popular or free > missing):
            return
        yield from self._passing
        if (urgent and not free) or incoming is None:
            yield from self._staying
