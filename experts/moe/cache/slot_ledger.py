"""Which expert is in which slot: the books of a slot cache, in bytes that never exceed its budget.

Plain steps without threads or loading; the cache calls all of them with its lock held.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from experts.ledger import Ledger
from experts.moe.cache.metrics import CacheMetrics, FetchReason
from experts.moe.cache.weight_transfer import WeightTransfer
from experts.moe.errors import ModelError
from experts.moe.gating import ExpertKey, ExpertWeights
from experts.moe.policy.eviction import EvictionPolicy, Key
from experts.moe.weights.expert_store import ExpertStore
from experts.spec import ExpertId
from experts.transfer import Place


@dataclass(eq=False, slots=True)
class ExpertSlot:
    """A place, and its views as weights: made once, whatever passes through."""

    place: Place
    weights: ExpertWeights


@dataclass(eq=False, slots=True)
class CachedExpert:
    """An expert that owns a slot. `used` is false until it has run for the first time."""

    key: ExpertKey
    name: ExpertId
    slot: ExpertSlot
    origin: FetchReason
    in_use: bool = False
    used: bool = False
    error: BaseException | None = None


class SlotLedger:
    """Slots, empty ones and those being filled included, and the experts in them.

    `residency` says whom to evict; never one that is in use, nor, but for a wave's own sake, one that is `awaited`, nor
    one of a layer that is `guarded`.
    """

    def __init__(
        self,
        store: ExpertStore,
        budget_bytes: int,
        residency: EvictionPolicy,
        carrier: WeightTransfer,
        metrics: CacheMetrics,
    ) -> None:
        self._store = store
        self._bytes = store.expert_bytes
        self._residency = residency
        self._carrier = carrier
        self._metrics = metrics
        #: Slots that may be, and that are.
        self.limit = self._slots_in(budget_bytes)
        self.count = 0
        self.budget_bytes = budget_bytes
        self._ledger = Ledger("moe", budget_bytes)
        self._free: list[ExpertSlot] = []
        self._retired: list[ExpertSlot] = []
        #: By layer, then by expert.
        self.ready: list[dict[int, CachedExpert]] = [{} for _ in range(store.arch.layers)]
        self.loading: dict[ExpertKey, CachedExpert] = {}
        self.in_use: list[CachedExpert] = []
        #: Experts of the layer that runs, still to be served; layers that keep what they have until they ran.
        self.awaited: dict[ExpertKey, None] = {}
        self.guarded: dict[int, None] = {}
        residency.resize(self.limit)
        while self.add():
            pass

    # Experts

    def get(self, key: ExpertKey) -> CachedExpert | None:
        """The expert, if it is ready."""
        return self.ready[key.layer].get(key.expert)

    def predicted(self, key: ExpertKey) -> None:
        """A resident expert will soon be wanted."""
        self._residency.predicted(key)

    def begin(self, key: ExpertKey, slot: ExpertSlot, origin: FetchReason) -> CachedExpert:
        """The slot is the expert's, who is loading from now on."""
        entry = CachedExpert(key, ExpertId(f"{key.layer}.{key.expert}"), slot, origin)
        self._ledger.begin_load(entry.name, self._bytes)
        self._residency.loaded(key)
        self.loading[key] = entry
        self._metrics.began(origin)
        self._require_budget()
        return entry

    def end(self, entry: CachedExpert) -> None:
        """The load has ended: the expert is ready, or, where it has an error, its slot is empty again."""
        del self.loading[entry.key]
        if entry.error is None:
            self._ledger.finish_load(entry.name)
            self.ready[entry.key.layer][entry.key.expert] = entry
            self._metrics.counts.bytes_moved += self._store.stored_bytes
        else:
            self._ledger.abandon_load(entry.name)
            self._residency.dropped(entry.key)
            self._free.append(entry.slot)
            self._metrics.counts.failed += 1

    def use(self, entry: CachedExpert, *, late: bool) -> None:
        """It runs from now on; `late` where computing had to wait for it."""
        entry.in_use = True
        self.in_use.append(entry)
        self._ledger.use(entry.name)
        self._residency.used(entry.key)
        if not entry.used:
            entry.used = True
            if entry.origin != "startup":
                self._metrics.first_use(late=late)

    def release(self) -> None:
        """What was in use is so no longer."""
        for entry in self.in_use:
            entry.in_use = False
            self._ledger.release(entry.name)
        self.in_use.clear()

    # Room

    def empty(self) -> ExpertSlot | None:
        """An empty slot; nobody is evicted."""
        return self._free.pop() if self._free else None

    def room_for(self, key: ExpertKey, *, urgent: bool) -> ExpertSlot | None:
        """An empty slot, or one made empty. `urgent`: computing stands still until there is one."""
        for victim in self._residency.victims(key, len(self._free), urgent=urgent):
            if self._may_go(victim):
                return self._evict(victim)
        if self._free:
            return self._free.pop()
        if urgent:
            for victim in self._last_resort(key):
                if victim != key and self._is_idle(victim):
                    return self._evict(victim)
        return None

    def room_by(self, victim: ExpertKey | None, key: ExpertKey) -> ExpertSlot | None:
        """The slot of the expert that is to make room for a prefetch; any where there is none such any more."""
        if victim is not None and self.get(victim) is not None:
            return self._evict(victim) if self._may_go(victim) else None
        return self.room_for(key, urgent=False)

    @property
    def moving(self) -> bool:
        """Whether somebody who cannot go now could go later."""
        return bool(self.in_use or self.awaited or self.guarded or self.loading)

    def _last_resort(self, key: ExpertKey) -> Iterator[Key]:
        """A layer needs more experts than there are slots: the one that runs last goes, and comes again."""
        yield from (one for one in sorted(self.awaited, reverse=True) if one > key)
        yield from self._residency.victims(key, 0, urgent=True)

    def _may_go(self, key: Key) -> bool:
        return key not in self.awaited and key[0] not in self.guarded and self._is_idle(key)

    def _is_idle(self, key: Key) -> bool:
        entry = self.ready[key[0]].get(key[1])
        return entry is not None and not entry.in_use

    def _evict(self, key: Key) -> ExpertSlot:
        entry = self.ready[key[0]].pop(key[1])
        self._ledger.evict(entry.name)
        self._residency.dropped(key)
        if not entry.used and entry.origin != "startup":
            self._metrics.counts.unused += 1
        return entry.slot

    # Slots

    @property
    def allocated_bytes(self) -> int:
        return self.count * self._bytes

    def aim(self, budget_bytes: int) -> None:
        """Another budget; `give_back` and `add` then bring the slots there. Raises ModelError."""
        self.limit = self._slots_in(budget_bytes)
        self.budget_bytes = budget_bytes
        self._residency.resize(self.limit)
        self._set_ledger()

    def vacate(self) -> None:
        """Give all memory back. Nothing may be in use."""
        _require(not self.in_use, "experts are in use")
        self.guarded.clear()
        self.limit = self.budget_bytes = 0
        self.shrink()

    def shrink(self) -> None:
        """Give back all slots above the limit that may go."""
        while self.give_back():
            pass

    def give_back(self) -> bool:
        """Give the memory of one slot back, if there are too many and one may go."""
        if self.count <= self.limit:
            return False
        if self._free:
            slot = self._free.pop()
        else:
            victim = next(filter(self._may_go, self._residency.victims(None, 0, urgent=True)), None)
            if victim is None:
                return False
            slot = self._evict(victim)
        self._carrier.retire(slot.place)
        self._retired.append(slot)
        self.count -= 1
        self._set_ledger()
        return True

    def add(self) -> bool:
        """One empty slot more, if there are too few. Raises ModelError; the limit is then what there is."""
        if self.count >= self.limit:
            return False
        try:
            if self._retired:
                self._carrier.restore(self._retired[-1].place)
                self._free.append(self._retired.pop())
            else:
                place = self._carrier.allocate()
                self._free.append(ExpertSlot(place, self._store.weights(place.buffer)))
        except (MemoryError, OSError, RuntimeError) as error:
            message = f"there is no memory for {self.limit} experts of {self._bytes} bytes, only for {self.count}"
            self.limit = self.count
            self._residency.resize(self.limit)
            raise ModelError(self._store.folder, f"{message}; lower its budget") from error
        self.count += 1
        self._require_budget()
        return True

    def _set_ledger(self) -> None:
        """Bytes that may be owned: the budget, and until it holds those of the slots that are still in use."""
        self._ledger.set_budget(max(self.budget_bytes, self.allocated_bytes))

    def _slots_in(self, budget_bytes: int) -> int:
        """Slots for a budget; no more than there are experts. Raises ModelError where there is not even one."""
        if budget_bytes < self._bytes:
            message = f"a budget of {budget_bytes} bytes holds no expert of {self._bytes}; give the model more memory"
            raise ModelError(self._store.folder, message)
        return min(budget_bytes // self._bytes, len(self._store.arch.keys()))

    def check(self) -> None:
        """Raise AssertionError or LedgerError where the books do not add up."""
        self._ledger.check()
        ready = [entry for entries in self.ready for entry in entries.values()]
        owners = [*ready, *self.loading.values()]
        _require(len(self._free) + len(owners) == self.count, "a slot is lost, or two experts share one")
        _require(len({id(entry.slot) for entry in owners}) == len(owners), "two experts share a slot")
        _require(all(entry.in_use == (entry in self.in_use) for entry in owners), "who is in use is wrong")
        _require({entry.name for entry in ready} == set(self._ledger.resident), "books and ledger disagree")
        self._require_budget()

    def _require_budget(self) -> None:
        allowed = self._ledger.budget_bytes
        _require(self.allocated_bytes <= allowed, f"{self.count} slots of {self._bytes} bytes, {allowed} allowed")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise AssertionError(message)
