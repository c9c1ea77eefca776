"""Which experts are in memory under SwapMoE: how important each has been lately, and which swaps that calls for.

Importance itself is measured beside the model (experts/moe/modes/swapmoe.py); here its values come in as numbers.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from experts.moe.policy.residency import divide

Key = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Swap:
    """Load an expert; `evict` makes room for it, or an empty slot is there."""

    load: Key
    evict: Key | None


class Importance:
    """How important each expert of each layer was for the tokens of late, the last `window` of them above all.

    A token's weight halves with every `window` tokens that follow it. What is known before the first token, `prior`,
    (layers, experts) in any unit, counts as much as `prior_tokens` tokens, and does not fade: a window is a small
    sample, and the prior says how to doubt it.
    """

    def __init__(self, prior: Sequence[Sequence[float]], window: float, prior_tokens: float) -> None:
        if window <= 0:
            raise ValueError(f"a window of {window} tokens remembers nothing; give more than 0")
        self._shares = [_shares(row) for row in prior]
        self._recent = [[0.0] * len(row) for row in prior]
        self._window = window
        self._prior_tokens = prior_tokens
        # Sum of importance and number of tokens, both fading: what one token adds to a layer, on average.
        self._sum = [0.0] * len(prior)
        self._tokens = [0.0] * len(prior)

    def add(self, layer: int, values: Sequence[float], tokens: int) -> None:
        """What the tokens of one step said: (experts,) importance of each expert of a layer."""
        if not tokens:
            return
        keep = 0.5 ** (tokens / self._window)
        self._recent[layer] = [old * keep + new for old, new in zip(self._recent[layer], values, strict=True)]
        self._sum[layer] = self._sum[layer] * keep + sum(values)
        self._tokens[layer] = self._tokens[layer] * keep + tokens

    def of(self, layer: int) -> list[float]:
        """(experts,) what is known of each expert of a layer; only its order means something."""
        seen = self._tokens[layer]
        of_a_token = self._sum[layer] / seen if seen else 1.0
        prior = self._prior_tokens * of_a_token
        # Without a token yet, the prior alone has to order them, however little it counts later.
        weight = prior or (0.0 if seen else 1.0)
        return [recent + weight * share for recent, share in zip(self._recent[layer], self._shares[layer], strict=True)]


def _shares(row: Sequence[float]) -> list[float]:
    total = sum(row)
    return [value / total for value in row] if total > 0 else [1 / len(row)] * len(row)


class VirtualExperts:
    """The experts in memory: a number per layer, fixed by the plan; a residency policy for the cache.

    `shares`: parts of the memory for the layers beyond the `floor` of experts that each has at least. Of a layer that
    has too many the least important goes. Nothing here makes a layer smaller than its floor for a prefetch.
    """

    def __init__(self, importance: Importance, shares: Sequence[float], floor: int, experts: int) -> None:
        self.importance = importance
        self._shares = tuple(shares)
        self._floor = floor
        self._experts = experts
        self._present: list[dict[int, None]] = [{} for _ in shares]
        self._counts = (0,) * len(shares)

    @property
    def counts(self) -> tuple[int, ...]:
        """Experts that each layer is to have."""
        return self._counts

    def present(self, layer: int) -> tuple[int, ...]:
        """Experts of a layer that own a slot, those being loaded included, ascending."""
        return tuple(sorted(self._present[layer].copy()))

    def share(self, shares: Sequence[float]) -> None:
        """Another plan, for what memory there is."""
        self._shares = tuple(shares)
        self.resize(sum(self._counts))

    def resize(self, slots: int) -> None:
        self._counts = allot(slots, self._shares, self._floor, self._experts)

    def loaded(self, key: Key) -> None:
        self._present[key[0]][key[1]] = None

    def used(self, key: Key) -> None:
        """Importance comes from the gate, not from use."""

    def predicted(self, key: Key) -> None:
        """As `used`."""

    def dropped(self, key: Key) -> None:
        self._present[key[0]].pop(key[1], None)

    def victims(self, wanted: Key | None, free: int, *, urgent: bool) -> Iterator[Key]:
        if wanted is not None and free:
            return
        layers = range(len(self._present))
        yield from self._least([one for one in layers if len(self._present[one]) > self._counts[one]])
        if wanted is not None:
            own = wanted[0]
            others = [one for one in layers if len(self._present[one]) > self._floor]
            yield from self._least([own] if own in others else others)
        if urgent:
            yield from self._least(list(layers))

    def first(self) -> tuple[Key, ...]:
        """Whom to load before the first step: the layers in turn, each its most important."""
        ranked = [self._ranked(layer) for layer in range(len(self._counts))]
        most = max(self._counts, default=0)
        return tuple(
            (layer, ranked[layer][turn])
            for turn in range(most)
            for layer in range(len(self._counts))
            if turn < self._counts[layer]
        )

    def plan(self, layer: int, free: int, coming: Iterable[Key] = ()) -> tuple[Swap, ...]:
        """The swaps that bring a layer's most important experts in, the most important first; changes nothing.

        `free`: empty slots. `coming`: experts that are to be loaded already.
        """
        ranked = self._ranked(layer)
        target = ranked[: self._counts[layer]]
        present = self._present[layer].copy()
        awaited = dict.fromkeys(coming)
        loads = [expert for expert in target if expert not in present and (layer, expert) not in awaited]
        going = [expert for expert in reversed(ranked) if expert in present and expert not in target]
        swaps: list[Swap] = []
        size = len(present)
        for expert in loads:
            if size < self._counts[layer] and free > 0:
                free -= 1
                size += 1
                swaps.append(Swap((layer, expert), None))
            elif going and size > self._floor:
                swaps.append(Swap((layer, expert), (layer, going.pop(0))))
            elif (lent := self._lender(layer)) is not None and not swaps:
                # At its floor a layer gives nobody away before the other one is there: it borrows a slot.
                swaps.append(Swap((layer, expert), lent))
        return tuple(swaps)

    def _lender(self, layer: int) -> Key | None:
        """The least important expert of a layer that has more than its number, else of one above the floor."""
        over = [one for one in range(len(self._present)) if len(self._present[one]) > self._counts[one]]
        above = [one for one in range(len(self._present)) if len(self._present[one]) > self._floor and one != layer]
        return next(self._least(over or above), None)

    def _ranked(self, layer: int) -> list[int]:
        """Experts of a layer, most important first; equals by number, those present before others."""
        values = self.importance.of(layer)
        present = self._present[layer].copy()
        return sorted(range(len(values)), key=lambda expert: (-values[expert], expert not in present, expert))

    def _least(self, layers: Sequence[int]) -> Iterator[Key]:
        """Experts present in these layers, least important first: by their share of the layer's importance."""
        rows: list[tuple[float, int, int]] = []
        for layer in layers:
            values = self.importance.of(layer)
            total = sum(values) or 1.0
            rows += [(values[expert] / total, layer, expert) for expert in self._present[layer].copy()]
        for _, layer, expert in sorted(rows):
            yield layer, expert


def allot(slots: int, shares: Sequence[float], floor: int, ceiling: int) -> tuple[int, ...]:
    """`slots` over layers: `floor` each, the rest in proportion to `shares`, at most `ceiling` each.

    With fewer slots than the floors need, what there is is split evenly. Where shares add up to the rest they come out
    as they are: a plan for this memory is carried out to the letter.
    """
    layers = len(shares)
    slots = min(slots, layers * ceiling)
    if slots <= layers * floor:
        return divide(slots, [1.0] * layers)
    counts = [floor] * layers
    while (rest := slots - sum(counts)) > 0:
        open_layers = [layer for layer in range(layers) if counts[layer] < ceiling]
        weights = [shares[layer] for layer in open_layers]
        if sum(weights) <= 0:
            weights = [1.0] * len(open_layers)
        more = _apportion(rest, weights)
        for layer, count in zip(open_layers, more, strict=True):
            counts[layer] = min(ceiling, counts[layer] + count)
    return tuple(counts)


def _apportion(slots: int, weights: Sequence[float]) -> list[int]:
    """Largest remainders, nobody guaranteed anything."""
    total = sum(weights)
    exact = [weight / total * slots for weight in weights]
    counts = [int(one + 1e-9) for one in exact]
    by_remainder = sorted(range(len(exact)), key=lambda one: (counts[one] - exact[one], one))
    for one in by_remainder[: slots - sum(counts)]:
        counts[one] += 1
    return counts


@dataclass(slots=True)
class Turns:
    """Amortised updates: within a cycle of `period` steps each layer has its turn once (SwapMoE §3.3).

    With fewer layers than steps, a turn spreads over several steps, in which `due` names the layer again and again.
    """

    layers: int
    period: int
    _step: int = 0

    def due(self) -> tuple[tuple[int, int], ...]:
        """For the step that ends now: (layer, steps left of its turn, this one included) of those to update."""
        here, self._step = self._step % self.period, self._step + 1
        if self.period <= self.layers:
            first, last = here * self.layers // self.period, (here + 1) * self.layers // self.period
            return tuple((layer, 1) for layer in range(first, last))
        layer = here * self.layers // self.period
        end = -(-(layer + 1) * self.period // self.layers)
        return ((layer, end - here),)
