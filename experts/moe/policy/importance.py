"""Which experts are in memory under SwapMoE: how important each has been lately, and which swaps that calls for.

Importance itself is measured beside the model (experts/moe/modes/swapmoe/mode.py); here its values come in as numbers.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from experts.moe.policy.eviction import divide

Key = tuple[int, int]


@dataclass(frozen=True, slots=True)
class ExpertSwap:
    """Load an expert; `evict` makes room for it, or an empty slot is there."""

    load: Key
    evict: Key | None


class Importance:
    """How important each expert of each layer was for the tokens of late, the last `window` of them above all.

    A token's weight halves with every `window` tokens that follow it. What is known before the first token (`believe`)
    counts as much as `prior_tokens` tokens and does not fade: a window is a small sample, and the prior doubts it.
    """

    def __init__(self, layers: int, experts: int, window: float, prior_tokens: float) -> None:
        if window <= 0:
            raise ValueError(f"a window of {window} tokens remembers nothing; give more than 0")
        self._window = window
        self._prior_tokens = prior_tokens
        self._shares = [[1 / experts] * experts for _ in range(layers)]
        self._recent = [[0.0] * experts for _ in range(layers)]
        # Tokens that `_recent` is of, fading as it does.
        self._tokens = [0.0] * layers

    def believe(self, prior: Sequence[Sequence[float]]) -> None:
        """(layers, experts) in any unit: what is known without a token of this service."""
        self._shares = [_shares(row) for row in prior]

    def add(self, layer: int, values: Sequence[float], tokens: int) -> None:
        """What the tokens of one step said: (experts,) importance of each expert of a layer."""
        keep = 0.5 ** (tokens / self._window)
        self._recent[layer] = [old * keep + new for old, new in zip(self._recent[layer], values, strict=True)]
        self._tokens[layer] = self._tokens[layer] * keep + tokens

    def of(self, layer: int) -> list[float]:
        """(experts,) what is known of each expert of a layer, as shares of the layer's importance."""
        recent, tokens = self._recent[layer], self._tokens[layer]
        total = sum(recent)
        if total <= 0:
            return list(self._shares[layer])
        whole = tokens + self._prior_tokens
        seen, prior = tokens / (whole * total), self._prior_tokens / whole
        return [value * seen + share * prior for value, share in zip(recent, self._shares[layer], strict=True)]


def _shares(row: Sequence[float]) -> list[float]:
    total = sum(row)
    return [value / total for value in row] if total > 0 else [1 / len(row)] * len(row)


class VirtualExperts:
    """The experts in memory: a number per layer, fixed by the plan; a residency policy for the cache.

    Of a layer that has too many the least important goes. No prefetch makes a layer smaller than `floor`.
    """

    def __init__(self, importance: Importance, layers: int, experts: int, floor: int) -> None:
        self.importance = importance
        self._experts = experts
        self._floor = floor
        self._shares = (1.0,) * layers
        self._present: list[dict[int, None]] = [{} for _ in range(layers)]
        self._counts = (0,) * layers

    @property
    def counts(self) -> tuple[int, ...]:
        """Experts that each layer is to have."""
        return self._counts

    def present(self, layer: int) -> tuple[int, ...]:
        """Experts of a layer that own a slot, those being loaded included, ascending."""
        return tuple(sorted(self._present[layer].copy()))

    def share(self, shares: Sequence[float]) -> None:
        """Parts of the memory for the layers, beyond the floor that each has; from the next `resize` on."""
        self._shares = tuple(shares)

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

    def plan(self, layer: int, slots: int, coming: Iterable[Key] = ()) -> tuple[ExpertSwap, ...]:
        """The swaps that bring a layer's most important experts in, the most important first; changes nothing.

        `slots` are there in all. `coming`: experts that are to be loaded already.
        """
        free = slots - sum(len(present) for present in self._present)
        ranked = self._ranked(layer)
        target = ranked[: self._counts[layer]]
        present = self._present[layer].copy()
        awaited = dict.fromkeys(coming)
        loads = [expert for expert in target if expert not in present and (layer, expert) not in awaited]
        going = (expert for expert in reversed(ranked) if expert in present and expert not in target)
        lent = self._lent(layer)
        size, swaps = len(present), list[ExpertSwap]()
        for expert in loads:
            victim: Key | None = None
            if size < self._counts[layer] and (free > 0 or (victim := next(lent, None)) is not None):
                free, size = free - (victim is None), size + 1
            elif size > self._floor and (other := next(going, None)) is not None:
                victim = (layer, other)
            elif not swaps and (victim := self._spare(layer)) is not None:
                # At its floor a layer gives nobody away before the other one is there: it borrows a slot.
                size += 1
            else:
                break
            swaps.append(ExpertSwap((layer, expert), victim))
        return tuple(swaps)

    def _lent(self, layer: int) -> Iterator[Key]:
        """Experts above the number of their layer, other than this one."""
        for one, present in enumerate(self._present):
            over = len(present) - self._counts[one]
            if over > 0 and one != layer:
                yield from islice(self._least([one]), over)

    def _spare(self, layer: int) -> Key | None:
        """Whom to give away for one more of `layer`: above a layer's number, else above its floor."""
        above = [one for one, present in enumerate(self._present) if len(present) > self._floor and one != layer]
        return next(self._lent(layer), next(self._least(above), None))

    def _ranked(self, layer: int) -> list[int]:
        """Experts of a layer, most important first; equals by number, those present before others."""
        values = self.importance.of(layer)
        present = self._present[layer].copy()
        return sorted(range(len(values)), key=lambda expert: (-values[expert], expert not in present, expert))

    def _least(self, layers: Sequence[int]) -> Iterator[Key]:
        """Experts present in these layers, least important first."""
        rows: list[tuple[float, int, int]] = []
        for layer in layers:
            values = self.importance.of(layer)
            rows += [(values[expert], layer, expert) for expert in self._present[layer].copy()]
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
class UpdateTurns:
    """Amortised updates: within a cycle of `period` steps each layer has its turn once (SwapMoE §3.3).

    With fewer layers than steps, a turn spreads over several steps, in which `due` names the layer again and again.
    """

    layers: int
    period: int
    _step: int = 0

    def due(self) -> tuple[tuple[int, int], ...]:
        """For the step that ends now: (layer, steps left of its turn, this one included) of those to update.

        Each cycle begins with another layer: where loads cannot keep up, what comes last in a step is not begun.
        """
        cycle, here = divmod(self._step, self.period)
        self._step += 1
        if self.period <= self.layers:
            first, last = here * self.layers // self.period, (here + 1) * self.layers // self.period
            return tuple(((turn + cycle) % self.layers, 1) for turn in range(first, last))
        turn = here * self.layers // self.period
        end = -(-(turn + 1) * self.period // self.layers)
        return (((turn + cycle) % self.layers, end - here),)
