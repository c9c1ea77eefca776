"""The ledger of a slot cache: which expert is in which slot, within the budget. The cache calls it under its lock."""

from collections.abc import Iterator
from dataclasses import dataclass

from experts.moe.cache.metrics import CacheMetrics, FetchReason
from experts.moe.cache.weight_transfer import WeightTransfer
from experts.moe.errors import ModelError
from experts.moe.gating import ExpertKey, ExpertWeights
from experts.moe.policy.eviction import EvictionPolicy, Key
from experts.moe.weights.expert_store import ExpertStore
from experts.transfer import SlotMemory


@dataclass(eq=False, slots=True)
class ExpertSlot:
    """Memory of one expert, and its views as weights, made once."""

    place: SlotMemory
    weights: ExpertWeights


@dataclass(eq=False, slots=True)
class CachedExpert:
    """An expert that owns a slot. `used` is false until it first runs."""

    key: ExpertKey
    slot: ExpertSlot
    reason: FetchReason
    in_use: bool = False
    used: bool = False
    error: BaseException | None = None


class SlotLedger:
    """Slots, including empty ones and those being filled, and the experts in them.

    The `policy` chooses victims. Never evicted are experts in use, `awaited` ones (unless a layer has more experts than
    there are slots), and those of a `guarded` layer.
    """

    def __init__(
        self,
        store: ExpertStore,
        budget_bytes: int,
        policy: EvictionPolicy,
        transfer: WeightTransfer,
        metrics: CacheMetrics,
    ) -> None:
        self._store = store
        self._bytes = store.expert_bytes
        self._policy = policy
        self._transfer = transfer
        self._metrics = metrics
        #: Slots allowed, and slots allocated.
        self.limit = self._slots_in(budget_bytes)
        self.count = 0
        self.budget_bytes = budget_bytes
        self._free: list[ExpertSlot] = []
        self._retired: list[ExpertSlot] = []
        #: By layer, then by expert.
        self.ready: list[dict[int, CachedExpert]] = [{} for _ in range(store.arch.layers)]
        self.loading: dict[ExpertKey, CachedExpert] = {}
        self.in_use: list[CachedExpert] = []
        #: Experts of the running layer that are still to be served; layers whose experts stay until they ran.
        self.awaited: dict[ExpertKey, None] = {}
        self.guarded: dict[int, None] = {}
        policy.resize(self.limit)
        while self.add_slot():
            pass

    # Experts

    def get(self, key: ExpertKey) -> CachedExpert | None:
        return self.ready[key.layer].get(key.expert)

    def note_predicted(self, key: ExpertKey) -> None:
        self._policy.predicted(key)

    def begin_load(self, key: ExpertKey, slot: ExpertSlot, reason: FetchReason) -> CachedExpert:
        cached = self.loading[key] = CachedExpert(key, slot, reason)
        self._policy.loaded(key)
        self._metrics.load_begun(reason)
        return cached

    def end_load(self, cached: CachedExpert) -> None:
        """Mark the expert as ready, or empty its slot again if its load failed."""
        del self.loading[cached.key]
        if cached.error is None:
            self.ready[cached.key.layer][cached.key.expert] = cached
            self._metrics.counts.bytes_moved += self._store.stored_bytes
        else:
            self._policy.dropped(cached.key)
            self._free.append(cached.slot)

    def use(self, cached: CachedExpert, *, late: bool) -> None:
        """Mark the expert as running; `late` if computing had to wait for it."""
        cached.in_use = True
        self.in_use.append(cached)
        self._policy.used(cached.key)
        if not cached.used:
            cached.used = True
            if cached.reason != "startup":
                self._metrics.first_use(late=late)

    def release(self) -> None:
        for cached in self.in_use:
            cached.in_use = False
        self.in_use.clear()

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
        cached = self.ready[key[0]].pop(key[1])
        self._policy.dropped(key)
        if not cached.used and cached.reason != "startup":
            self._metrics.counts.unused += 1
        return cached.slot

    # Slots

    @property
    def allocated_bytes(self) -> int:
        return self.count * self._bytes

    def set_budget(self, budget_bytes: int) -> None:
        """Set the budget; `remove_slot` and `add_slot` then change the slots. Raises ModelError."""
        self.limit = self._slots_in(budget_bytes)
        self.budget_bytes = budget_bytes
        self._policy.resize(self.limit)

    def close(self) -> None:
        """Give all memory back. No expert may be in use."""
        assert not self.in_use, "experts are in use"
        self.guarded.clear()
        self.limit = self.budget_bytes = 0
        self.shrink()

    def shrink(self) -> None:
        while self.remove_slot():
            pass

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
        self._retired.append(slot)
        self.count -= 1
        return True

    def add_slot(self) -> bool:
        """Add an empty slot if there are too few. Raises ModelError; then the limit is the number of slots."""
        if self.count >= self.limit:
            return False
        try:
            if self._retired:
                self._transfer.restore(self._retired[-1].place)
                self._free.append(self._retired.pop())
            else:
                place = self._transfer.allocate()
                self._free.append(ExpertSlot(place, self._store.arch.weights(place.buffer)))
        except (MemoryError, OSError, RuntimeError) as error:
            message = f"there is no memory for {self.limit} experts of {self._bytes} bytes, only for {self.count}"
            self.limit = self.count
            self._policy.resize(self.limit)
            raise ModelError(self._store.folder, f"{message}; lower its budget") from error
        self.count += 1
        return True

    def _slots_in(self, budget_bytes: int) -> int:
        """Return the slots in a budget, at most one per expert. Raises ModelError for none."""
        if budget_bytes < self._bytes:
            message = f"a budget of {budget_bytes} bytes holds no expert of {self._bytes}; give the model more memory"
            raise ModelError(self._store.folder, message)
        return min(budget_bytes // self._bytes, len(self._store.arch.expert_keys))

    def check(self) -> None:
        ready = [cached for experts in self.ready for cached in experts.values()]
        owners = [*ready, *self.loading.values()]
        assert len(self._free) + len(owners) == self.count, "a slot is lost, or two experts share one"
        assert len({id(cached.slot) for cached in owners}) == len(owners), "two experts share a slot"
        assert all(cached.in_use == (cached in self.in_use) for cached in owners), "the experts in use are wrong"
        assert self.limit * self._bytes <= self.budget_bytes, "the slots are more than the budget"
