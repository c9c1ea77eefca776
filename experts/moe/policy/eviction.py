"""Who stays in a slot: whom to evict for an expert that is wanted, in which order.

A policy is told what was loaded, used, predicted and dropped; the cache asks it for victims and skips those that run.
Experts are (layer, expert), layers counting a model's MoE layers from 0.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

Key = tuple[int, int]


class EvictionPolicy(Protocol):
    """Whom to evict. Called under the cache's lock, so no method may wait or call back."""

    def resize(self, slots: int) -> None:
        """There are so many slots from now on; the cache then asks for victims until what is there fits."""
        ...

    def loaded(self, key: Key) -> None:
        """A slot is being filled with it."""
        ...

    def used(self, key: Key) -> None:
        """It runs now."""
        ...

    def predicted(self, key: Key) -> None:
        """It is resident and was predicted to run soon."""
        ...

    def dropped(self, key: Key) -> None:
        """It was evicted, or its load failed."""
        ...

    def victims(self, wanted: Key | None, free: int, *, urgent: bool) -> Iterable[Key]:
        """Residents that may go for `wanted`, best first; none where one of `free` empty slots is to be taken.

        `urgent`: computing stands still until `wanted` is there, so that no resident is refused. `wanted` is None
        where the slots shrink. Nothing is changed.
        """
        ...


def divide(slots: int, shares: Sequence[float]) -> tuple[int, ...]:
    """`slots` split in proportion to `shares`, largest remainders first; at least one each where they suffice."""
    if not shares:
        return ()
    least = 1 if slots >= len(shares) else 0
    total = sum(shares) or 1.0
    spare = slots - least * len(shares)
    # What a share would get beyond the one that everybody has.
    ideal = [max(0.0, share / total * slots - least) for share in shares]
    scale = spare / (sum(ideal) or 1.0)
    exact = [one * scale for one in ideal]
    counts = [int(one + 1e-9) for one in exact]
    by_remainder = sorted(range(len(shares)), key=lambda one: (counts[one] - exact[one], one))
    for one in range(spare - sum(counts)):
        counts[by_remainder[one % len(shares)]] += 1
    return tuple(count + least for count in counts)


class LayeredLru:
    """Each layer has its share of the slots, and evicts of its own what was used longest ago.

    One order over all layers would be worthless: layers run in turn, so the expert that ran longest ago is the one
    that runs next. `shares` are the layers' parts of the slots, even by default. A layer above its share, for want of
    another place, gives back first.
    """

    def __init__(self, layers: int, shares: Sequence[float] | None = None) -> None:
        self._shares = tuple(shares) if shares is not None else (1.0,) * layers
        self._quotas = (0,) * layers
        # A dict of each layer, the one used longest ago first; its values carry the order over all layers.
        self._order: list[dict[int, int]] = [{} for _ in range(layers)]
        self._clock = 0

    @property
    def quotas(self) -> tuple[int, ...]:
        """Slots of each layer."""
        return self._quotas

    def share(self, shares: Sequence[float]) -> None:
        """Other parts of the slots for the layers, from the next eviction on."""
        self._shares = tuple(shares)
        self._quotas = divide(sum(self._quotas), self._shares)

    def resize(self, slots: int) -> None:
        self._quotas = divide(slots, self._shares)

    def loaded(self, key: Key) -> None:
        self.used(key)

    def used(self, key: Key) -> None:
        layer, expert = key
        order = self._order[layer]
        order.pop(expert, None)
        self._clock += 1
        order[expert] = self._clock

    def predicted(self, key: Key) -> None:
        self.used(key)

    def dropped(self, key: Key) -> None:
        self._order[key[0]].pop(key[1], None)

    def victims(self, wanted: Key | None, free: int, *, urgent: bool) -> Iterator[Key]:
        own = None if wanted is None else wanted[0]
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


class MostPopular:
    """The most popular experts of each layer stay; the others pass through the slots that are left.

    `ranking[l]`: the experts of layer l, most popular first. `transit`: slots that the others pass through.
    """

    def __init__(self, ranking: Sequence[Sequence[int]], transit: int) -> None:
        self._ranking = tuple(tuple(experts) for experts in ranking)
        self._transit = transit
        self._kept: dict[Key, None] = {}
        self._passing: dict[Key, None] = {}
        self._staying: dict[Key, None] = {}

    @property
    def kept(self) -> tuple[Key, ...]:
        """Who stays, layer by layer."""
        return tuple(self._kept)

    def resize(self, slots: int) -> None:
        everyone = sum(len(experts) for experts in self._ranking)
        staying = slots if slots >= everyone else max(0, slots - self._transit)
        quotas = divide(staying, [1.0] * len(self._ranking))
        chosen = [
            (layer, expert)
            for layer, experts in enumerate(self._ranking)
            for expert in sorted(experts[: quotas[layer]])
        ]
        self._kept = dict.fromkeys(chosen)
        everybody = [*self._staying, *self._passing]
        self._staying = {key: None for key in everybody if key in self._kept}
        self._passing = {key: None for key in everybody if key not in self._kept}

    def loaded(self, key: Key) -> None:
        (self._staying if key in self._kept else self._passing)[key] = None

    def used(self, key: Key) -> None:
        if key in self._passing:
            del self._passing[key]
            self._passing[key] = None

    def predicted(self, key: Key) -> None:
        self.used(key)

    def dropped(self, key: Key) -> None:
        self._staying.pop(key, None)
        self._passing.pop(key, None)

    def victims(self, wanted: Key | None, free: int, *, urgent: bool) -> Iterator[Key]:
        # Free slots are for those who stay, unless all of them are there.
        missing = len(self._kept) - len(self._staying)
        if wanted is not None and free and (wanted in self._kept or free > missing):
            return
        yield from self._passing
        if (urgent and not free) or wanted is None:
            yield from self._staying
