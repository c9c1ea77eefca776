"""Virtual experts of SwapMoE: their recent importance, the swaps that it calls for, the layers' update turns."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from experts.moe.policy.eviction import EvictionPolicy, Key, split_evenly


@dataclass(frozen=True, slots=True)
class ExpertSwap:
    """Load an expert into the slot of `evict`, or into an empty slot if that is None."""

    load: Key
    evict: Key | None


class Importance:
    """Importance of each expert of each layer for recent tokens, mixed with a prior.

    A token's weight halves with every `window` tokens that follow it. The prior (`set_prior`) counts as `prior_tokens`
    tokens and does not fade, since a window is a small sample.
    """

    def __init__(self, layers: int, experts: int, window: float, prior_tokens: float) -> None:
        if window <= 0:
            raise ValueError(f"a window of {window} tokens remembers nothing; give more than 0")
        self._window = window
        self._prior_tokens = prior_tokens
        self._shares = [[1 / experts] * experts for _ in range(layers)]
        self._recent = [[0.0] * experts for _ in range(layers)]
        # Weights of the tokens in `_recent`.
        self._tokens = [0.0] * layers

    def set_prior(self, prior: Sequence[Sequence[float]]) -> None:
        """Set the importance known before the first token: (layers, experts) in any unit."""
        self._shares = [_shares(row) for row in prior]

    def add(self, layer: int, values: Sequence[float], tokens: int) -> None:
        """Add the importance of a layer's experts for the tokens of one step: `values` is (experts,)."""
        keep = 0.5 ** (tokens / self._window)
        self._recent[layer] = [old * keep + new for old, new in zip(self._recent[layer], values, strict=True)]
        self._tokens[layer] = self._tokens[layer] * keep + tokens

    def of(self, layer: int) -> list[float]:
        """Return each expert's share of the layer's importance: (experts,)."""
        recent, tokens = self._recent[layer], self._tokens[layer]
        total = sum(recent)
        if total <= 0:
            return list(self._shares[layer])
        whole = tokens + self._prior_tokens
        weight, prior_weight = tokens / (whole * total), self._prior_tokens / whole
        shares = self._shares[layer]
        return [value * weight + share * prior_weight for value, share in zip(recent, shares, strict=True)]


def _shares(row: Sequence[float]) -> list[float]:
    total = sum(row)
    return [value / total for value in row] if total > 0 else [1 / len(row)] * len(row)


class VirtualExperts(EvictionPolicy):
    """Fixes the number of experts of each layer; no prefetch makes a layer smaller than `floor`."""

    def __init__(self, importance: Importance, layers: int, experts: int, floor: int) -> None:
        self.importance = importance
        self._experts = experts
        self._floor = floor
        self._shares = (1.0,) * layers
        self._present: list[dict[int, None]] = [{} for _ in range(layers)]
        self._counts = (0,) * layers

    @property
    def counts(self) -> tuple[int, ...]:
        return self._counts

    def present(self, layer: int) -> tuple[int, ...]:
        """Return the experts of a layer that own a slot or are being loaded, ascending."""
        return tuple(sorted(self._present[layer].copy()))

    def set_shares(self, shares: Sequence[float]) -> None:
        """Set each layer's part of the memory beyond its floor, from the next `resize` on."""
        self._shares = tuple(shares)

    def resize(self, slots: int) -> None:
        self._counts = allot(slots, self._shares, self._floor, self._experts)

    def loaded(self, key: Key) -> None:
        self._present[key[0]][key[1]] = None

    def dropped(self, key: Key) -> None:
        self._present[key[0]].pop(key[1], None)

    def victims(self, incoming: Key | None, free: int, *, urgent: bool) -> Iterator[Key]:
        if incoming is not None and free:
            return
        layers = range(len(self._present))
        yield from self._least_important([layer for layer in layers if len(self._present[layer]) > self._counts[layer]])
        if incoming is not None:
            own = incoming[0]
            above_floor = [layer for layer in layers if len(self._present[layer]) > self._floor]
            yield from self._least_important([own] if own in above_floor else above_floor)
        if urgent:
            yield from self._least_important(list(layers))

    def first(self) -> tuple[Key, ...]:
        """Return the experts to load before the first step: the layers in turn, each with its most important one."""
        ranked = [self._ranked(layer) for layer in range(len(self._counts))]
        return tuple(
            (layer, ranked[layer][turn])
            for turn in range(max(self._counts, default=0))
            for layer in range(len(self._counts))
            if turn < self._counts[layer]
        )

    def plan(self, layer: int, slots: int, pending: Iterable[Key] = ()) -> tuple[ExpertSwap, ...]:
        """Return the swaps that load a layer's most important experts; `pending` ones are queued or being loaded."""
        free = slots - sum(len(present) for present in self._present)
        ranked = self._ranked(layer)
        target = ranked[: self._counts[layer]]
        present = self._present[layer].copy()
        queued = dict.fromkeys(pending)
        loads = [expert for expert in target if expert not in present and (layer, expert) not in queued]
        leaving = (expert for expert in reversed(ranked) if expert in present and expert not in target)
        lent = self._lent(layer)
        size, swaps = len(present), list[ExpertSwap]()
        for expert in loads:
            victim: Key | None = None
            if size < self._counts[layer] and (free > 0 or (victim := next(lent, None)) is not None):
                free, size = free - (victim is None), size + 1
            elif size > self._floor and (expert_leaving := next(leaving, None)) is not None:
                victim = (layer, expert_leaving)
            elif not swaps and (victim := self._spare(layer)) is not None:
                # At its floor a layer evicts no expert before the new one is loaded: it borrows a slot.
                size += 1
            else:
                break
            swaps.append(ExpertSwap((layer, expert), victim))
        return tuple(swaps)

    def _lent(self, layer: int) -> Iterator[Key]:
        """Yield the experts that other layers have above their number."""
        for lender, present in enumerate(self._present):
            over = len(present) - self._counts[lender]
            if over > 0 and lender != layer:
                yield from islice(self._least_important([lender]), over)

    def _spare(self, layer: int) -> Key | None:
        """Return a victim for one more expert of `layer`: from above another layer's number, else above its floor."""
        sizes = map(len, self._present)
        above = [lender for lender, size in enumerate(sizes) if size > self._floor and lender != layer]
        return next(self._lent(layer), next(self._least_important(above), None))

    def _ranked(self, layer: int) -> list[int]:
        """Return the experts of a layer, most important first; equals by number, those present before others."""
        values = self.importance.of(layer)
        present = self._present[layer].copy()
        return sorted(range(len(values)), key=lambda expert: (-values[expert], expert not in present, expert))

    def _least_important(self, layers: Sequence[int]) -> Iterator[Key]:
        rows: list[tuple[float, int, int]] = []
        for layer in layers:
            values = self.importance.of(layer)
            rows += [(values[expert], layer, expert) for expert in self._present[layer].copy()]
        for _, layer, expert in sorted(rows):
            yield layer, expert


def allot(slots: int, shares: Sequence[float], floor: int, ceiling: int) -> tuple[int, ...]:
    """Divide `slots` among layers: `floor` each, the rest in proportion to `shares`, at most `ceiling` each.

    With fewer slots than the floors need, the slots are split evenly. Shares that add up to the rest come out
    unchanged: a plan for this memory is carried out exactly.
    """
    layers = len(shares)
    slots = min(slots, layers * ceiling)
    if slots <= layers * floor:
        return split_evenly(slots, layers)
    counts = [floor] * layers
    while (rest := slots - sum(counts)) > 0:
        open_layers = [layer for layer in range(layers) if counts[layer] < ceiling]
        weights = [shares[layer] for layer in open_layers]
        if sum(weights) <= 0:
            weights = [1.0] * len(open_layers)
        for layer, count in zip(open_layers, _apportion(rest, weights), strict=True):
            counts[layer] = min(ceiling, counts[layer] + count)
    return tuple(counts)


def _apportion(slots: int, weights: Sequence[float]) -> list[int]:
    """Divide slots in proportion to weights, largest remainders first."""
    total = sum(weights)
    exact = [weight / total * slots for weight in weights]
    counts = [int(value + 1e-9) for value in exact]
    by_remainder = sorted(range(len(exact)), key=lambda place: (counts[place] - exact[place], place))
    for place in by_remainder[: slots - sum(counts)]:
        counts[place] += 1
    return counts


@dataclass(slots=True)
class UpdateTurns:
    """Amortised updates: within a cycle of `period` steps each layer has one turn (SwapMoE §3.3).

    With fewer layers than steps, a turn spreads over several steps, and `due` names the layer in each of them.
    """

    layers: int
    period: int
    _step: int = 0

    def due(self) -> tuple[tuple[int, int], ...]:
        """Return the layers to update in the step that ends now: (layer, steps left of its turn, including this one).

        Each cycle begins with another layer: if loads cannot keep up, the last ones of a step are not begun.
        """
        cycle, place = divmod(self._step, self.period)
        self._step += 1
        if self.period <= self.layers:
            first, last = place * self.layers // self.period, (place + 1) * self.layers // self.period
            return tuple(((turn + cycle) % self.layers, 1) for turn in range(first, last))
        turn = place * self.layers // self.period
        end = -(-(turn + 1) * self.period // self.layers)
        return (((turn + cycle) % self.layers, end - place),)
