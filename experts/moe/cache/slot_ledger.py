"""The ledger of a slot cache: which expert is in which slot, within the budget. The cache calls it under its lock."""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Literal

from experts.moe.cache.weight_transfer import WeightTransfer
from experts.moe.errors import ModelError
from experts.moe.gating import ExpertKey, ExpertWeights
from experts.moe.policy.eviction import EvictionPolicy, Key
from experts.moe.weights.checkpoint import ExpertStore
from experts.transfer import SlotMemory

#: Before anything runs, because an expert is to run, or because it is predicted.
LoadReason = Literal["startup", "demand", "prefetch"]


@dataclass(slots=True)
class FetchCounts:
    """Counters of a cache, since the start or over an interval.

    A fetch is *blocking* if computing had to wait for it at its first use, even for an instant, else *overlapped*. A
    prefetch that is waited for at once is therefore blocking. (On a GPU the wait is for the read, not for the copy.)
    """

    #: Experts that ran, once for each layer and step, and those of them that were ready when the gate chose.
    served: int = 0
    hits: int = 0
    #: Loads begun because an expert was to run, and because it was predicted.
    fetches_demand: int = 0
    fetches_prefetch: int = 0
    #: First uses of both.
    blocking: int = 0
    overlapped: int = 0
    #: Stored bytes that loads have read.
    bytes_moved: int = 0
    #: Seconds that computing stood still for experts, and seconds of all transfers.
    wait_s: float = 0.0
    transfer_s: float = 0.0

    @property
    def fetches(self) -> int:
        return self.fetches_demand + self.fetches_prefetch

    @property
    def hit_rate(self) -> float:
        return self.hits / self.served if self.served else 0.0

    def copy(self) -> "FetchCounts":
        return self - FetchCounts()

    def __add__(self, other: "FetchCounts") -> "FetchCounts":
        return FetchCounts(*(getattr(self, name) + getattr(other, name) for name in _COUNTS))

    def __sub__(self, other: "FetchCounts") -> "FetchCounts":
        return FetchCounts(*(getattr(self, name) - getattr(other, name) for name in _COUNTS))


_COUNTS = [field.name for field in fields(FetchCounts)]


@dataclass(eq=False, slots=True)
class ExpertSlot:
    """Memory of one expert, and its views as weights, made once."""

    place: SlotMemory
    weights: ExpertWeights


@dataclass(eq=False, slots=True)
class CachedExpert:
    """An expert that owns a slot. `fetched` is true from a demand or prefetch to its first use."""

    key: ExpertKey
    slot: ExpertSlot
    fetched: bool
    in_use: bool = False
    error: BaseException | None = None


class SlotLedger:
    """Slots, including empty ones and those being filled, and the experts in them.

    The `policy` chooses victims. Never evicted are experts in use, `awaited` ones (unless a layer has more experts than
    there are slots), and those of a `guarded` layer.
    """

    def __init__(self, store: ExpertStore, budget_bytes: int, policy: EvictionPolicy, transfer: WeightTransfer) -> None:
        self._store = store
        self._bytes = store.expert_bytes
        self._policy = policy
        self._transfer = transfer
        self.counts = FetchCounts()
        #: Slots allocated, and those of them that are empty.
        self.count = 0
        self._free: list[ExpertSlot] = []
        #: By layer, then by expert.
        self.ready: list[dict[int, CachedExpert]] = [{} for _ in range(store.arch.layers)]
        self.loading: dict[ExpertKey, CachedExpert] = {}
        self.in_use: CachedExpert | None = None
        #: Experts of the running layer that are still to be served; layers whose experts stay until they ran.
        self.awaited: dict[ExpertKey, None] = {}
        self.guarded: dict[int, None] = {}
        self.set_budget(budget_bytes)
        while self.add_slot():
            pass

    # Experts

    def get(self, key: ExpertKey) -> CachedExpert | None:
        return self.ready[key.layer].get(key.expert)

    def note_predicted(self, key: ExpertKey) -> None:
        self._policy.predicted(key)

    def begin_load(self, key: ExpertKey, slot: ExpertSlot, reason: LoadReason) -> CachedExpert:
        cached = self.loading[key] = CachedExpert(key, slot, reason != "startup")
        self._policy.loaded(key)
        self.counts.fetches_demand += reason == "demand"
        self.counts.fetches_prefetch += reason == "prefetch"
        return cached

    def end_load(self, cached: CachedExpert) -> None:
        """Mark the expert as ready, or empty its slot again if its load failed."""
        del self.loading[cached.key]
        if cached.error is None:
            self.ready[cached.key.layer][cached.key.expert] = cached
            self.counts.bytes_moved += self._store.stored_bytes
        else:
            self._policy.dropped(cached.key)
            self._free.append(cached.slot)

    def use(self, cached: CachedExpert, *, late: bool) -> None:
        """Mark the expert as the one that runs; `late` if computing had to wait for it."""
        self.release()
        cached.in_use, self.in_use = True, cached
        self._policy.used(cached.key)
        if cached.fetched:
            cached.fetched = False
            self.counts.blocking += late
            self.counts.overlapped += not late

    def release(self) -> None:
        if self.in_use is not None:
            self.in_use.in_use, self.in_use = False, None

    # Eviction

    def take_empty(self) -> ExpertSlot | None:
        return self._free.pop() if self._free else None

    def take_slot(self, key: ExpertKey, *, urgent: bool) -> ExpertSlot | None:
        """Take an empty slot, or evict an expert for it. `urgent`: computing stands still until there is one."""
        for victim in self._policy.victims(key, len(self._free), urgent=urgent):
            if self._may_evict(victim):
                return self._evict(victim)
        if self._free:
            return self._free.pop()
        if urgent:
            for victim in self._last_resort(key):
                if victim != key and self._is_idle(victim):
                    return self._evict(victim)
        return None

    @property
    def may_free_slots(self) -> bool:
        """True if an expert that cannot be evicted now may be evicted later."""
        return bool(self.in_use or self.awaited or self.guarded or self.loading)

    def _last_resort(self, key: ExpertKey) -> Iterator[Key]:
        """Where a layer needs more experts than slots, evict the one that runs last and load it again later."""
        yield from (awaited for awaited in sorted(self.awaited, reverse=True) if awaited > key)
        yield from self._policy.victims(key, 0, urgent=True)

    def _may_evict(self, key: Key) -> bool:
        return key not in self.awaited and key[0] not in self.guarded and self._is_idle(key)

    def _is_idle(self, key: Key) -> bool:
        cached = self.ready[key[0]].get(key[1])
        return cached is not None and not cached.in_use

    def _evict(self, key: Key) -> ExpertSlot:
        self._policy.dropped(key)
        return self.ready[key[0]].pop(key[1]).slot

    # Slots

    def set_budget(self, budget_bytes: int) -> None:
        """Set the budget; `remove_slot` and `add_slot` then change the slots. Raises ModelError if it holds none."""
        if budget_bytes < self._bytes:
            message = f"a budget of {budget_bytes} bytes holds no expert of {self._bytes}; give the model more memory"
            raise ModelError(self._store.folder, message)
        self.budget_bytes = budget_bytes
        self._set_limit(min(budget_bytes // self._bytes, len(self._store.arch.expert_keys)))

    def _set_limit(self, slots: int) -> None:
        self.limit = slots
        self._policy.resize(slots)

    def remove_slot(self) -> bool:
        """Give back the memory of one slot if there are too many and one can be emptied; else return False."""
        if self.count <= self.limit:
            return False
        slot = self.take_empty()
        if slot is None:
            victim = next(filter(self._may_evict, self._policy.victims(None, 0, urgent=True)), None)
            if victim is None:
                return False
            slot = self._evict(victim)
        self._transfer.retire(slot.place)
        self.count -= 1
        return True

    def add_slot(self) -> bool:
        """Add an empty slot if there are too few. Raises ModelError; then the limit is the number of slots."""
        if self.count >= self.limit:
            return False
        try:
            place = self._transfer.allocate()
        except (MemoryError, OSError, RuntimeError) as error:
            message = f"there is no memory for {self.limit} experts of {self._bytes} bytes, only for {self.count}"
            self._set_limit(self.count)
            raise ModelError(self._store.folder, f"{message}; lower its budget") from error
        self._free.append(ExpertSlot(place, self._store.arch.weights(place.buffer)))
        self.count += 1
        return True

    def close(self) -> None:
        """Give all memory back. No expert may be in use."""
        assert self.in_use is None, "an expert is in use"
        self.guarded.clear()
        self.limit = self.budget_bytes = 0
        while self.remove_slot():
            pass

    def check(self) -> None:
        ready = [cached for experts in self.ready for cached in experts.values()]
        owners = [*ready, *self.loading.values()]
        assert len(self._free) + len(owners) == self.count, "a slot is lost, or two experts share one"
        assert len({id(cached.slot) for cached in owners}) == len(owners), "two experts share a slot"
        assert all(cached.in_use == (cached is self.in_use) for cached in owners), "the experts in use are wrong"
        assert self.limit * self._bytes <= self.budget_bytes, "the slots are more than the budget"
