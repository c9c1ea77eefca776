"""The slot cache: experts of a model pass through a fixed number of places in memory, and run where they are.

One thread computes and calls `serve`. What it wants now it loads itself, unless that is already on its way; what it
will want soon a loader thread brings meanwhile. All loads share one channel, one after the other, and a load that
computing waits for goes before every other one that has not begun.
"""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from experts.ledger import Ledger
from experts.moe.carrier import Carrier
from experts.moe.errors import ModelError
from experts.moe.gating import ExpertKey, ExpertWeights, Step
from experts.moe.link import Link
from experts.moe.loader import Loader
from experts.moe.metrics import Metrics
from experts.moe.policy.residency import Residency
from experts.moe.store import ExpertStore
from experts.spec import ExpertId
from experts.transfer import Place

Origin = Literal["startup", "demand", "prefetch"]


@dataclass(eq=False, slots=True)
class _Slot:
    """A place, and its views as weights: made once, whatever passes through."""

    place: Place
    weights: ExpertWeights


@dataclass(eq=False, slots=True)
class _Entry:
    """An expert that owns a slot. `used` is false until it has run for the first time."""

    key: ExpertKey
    name: ExpertId
    slot: _Slot
    origin: Origin
    in_use: bool = False
    used: bool = False
    error: BaseException | None = None


class SlotCache:
    """Experts of one model in memory, never above `budget_bytes`, empty slots and those being filled included.

    `residency` says whom to evict. `prefetch`, `cancel` and `resize` may be called by any thread, `serve` by the one
    that computes. Raises ModelError where the budget holds no expert, or memory for it cannot be had.
    """

    def __init__(
        self,
        store: ExpertStore,
        budget_bytes: int,
        residency: Residency,
        carrier: Carrier,
        *,
        link: Link | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        layers = store.arch.layers
        self.store = store
        self.metrics = Metrics(layers)
        self._bytes = store.expert_bytes
        self._residency = residency
        self._carrier = carrier
        self._link = link
        self._clock = clock
        self._changed = threading.Condition(threading.Lock())
        self._loader = Loader(self._changed, self._next_load)
        self._limit = self._slots_in(budget_bytes)
        self._budget_bytes = budget_bytes
        self._ledger = Ledger("moe", budget_bytes)
        self._keys = [[ExpertKey(layer, expert) for expert in range(store.arch.experts)] for layer in range(layers)]
        self._slots = 0
        self._free: list[_Slot] = []
        self._retired: list[_Slot] = []
        self._ready: list[dict[int, _Entry]] = [{} for _ in range(layers)]
        self._loading: dict[ExpertKey, _Entry] = {}
        # Who fills a slot has the channel. Threads that computing depends on are counted, and go first.
        self._channel_busy = False
        self._hurried = 0
        self._ahead: dict[ExpertKey, None] = {}
        self._prefetches: dict[ExpertKey, ExpertKey | None] = {}
        self._deferred: dict[int, dict[ExpertKey, ExpertKey | None]] = {}
        # The layer that runs: in which thread, which call of `serve`, its experts still to be served and those in use.
        self._serving: int | None = None
        self._turn: object | None = None
        self._awaited: dict[ExpertKey, None] = {}
        self._in_use: list[_Entry] = []
        self._guarded: dict[int, None] = {}
        residency.resize(self._limit)
        with self._changed:
            self._grow()

    @property
    def slots(self) -> int:
        """How many experts fit."""
        return self._limit

    @property
    def budget_bytes(self) -> int:
        return self._budget_bytes

    @property
    def allocated_bytes(self) -> int:
        """Bytes of all slots; above the budget only while a smaller one waits for experts that run."""
        return self._slots * self._bytes

    def resident(self, layer: int, *, guard: bool = False) -> tuple[int, ...]:
        """Experts of a layer that are ready, ascending. `guard`: they stay until the layer has been served."""
        with self._changed:
            if guard:
                self._guarded[layer] = None
            return tuple(sorted(self._ready[layer]))

    def begin(self, step: Step) -> None:
        """A step begins; what one that failed had left behind is forgotten."""
        with self._changed:
            self._forget()
        self.metrics.begin(step)

    def end(self, step: Step) -> None:
        """The step has ended, well or not."""
        with self._changed:
            self._forget()
        for wait_s, late in self._carrier.waits():
            self.metrics.waited_on_device(wait_s, late=late)
        self.metrics.end(step)

    def serve(self, layer: int, experts: Sequence[int], *, ahead: bool) -> Iterator[tuple[int, ExpertWeights]]:
        """The experts in ascending order, each when it is ready and valid until the next one is asked for.

        More experts than slots come in waves. `ahead`: those still to come are loaded while one is computed.
        Raises ModelError where one cannot be loaded; what was loaded before stays usable.
        """
        names = self._keys[layer]
        keys = [names[expert] for expert in sorted(experts)]
        turn = object()
        entries = self._use_all(layer, keys, turn)
        try:
            if entries is None:
                yield from self._take_turns(keys, ahead, turn)
                return
            for entry in entries:
                self._carrier.arrive(entry.slot.place, late=False)
                try:
                    yield entry.key.expert, entry.slot.weights
                finally:
                    self._carrier.leave(entry.slot.place)
        finally:
            with self._changed:
                if self._turn is turn:
                    self._end_turn()
                    self._guarded.pop(layer, None)
                    self._defer_no_longer(layer)
                    self._shrink()
                    self._wake()

    def prefetch(
        self, keys: Sequence[ExpertKey], *, replace: Sequence[ExpertKey] = (), after: int | None = None
    ) -> None:
        """Load experts when nothing more urgent is to do; at once back. `replace[i]` makes room for `keys[i]`.

        `after`: not before all that this layer, which is about to be served, has to wait for is there. An expert that
        runs, or is about to, is never evicted: the prefetch waits until it is idle. One for which there is nobody to
        evict is refused; a demand for the same expert takes it over.
        """
        with self._changed:
            queue = self._prefetches if after is None else self._deferred.setdefault(after, {})
            for position, key in enumerate(keys):
                if key.expert in self._ready[key.layer]:
                    self._residency.predicted(key)
                elif key not in self._loading and key not in self._prefetches:
                    queue[key] = replace[position] if position < len(replace) else None
            if self._prefetches:
                self._loader.wake()

    def cancel(self, layer: int) -> None:
        """Withdraw the prefetches of a layer that have not begun."""
        with self._changed:
            for queue in (self._prefetches, *self._deferred.values()):
                for key in [key for key in queue if key.layer == layer]:
                    del queue[key]
                    self.metrics.counts.cancelled += 1
            self._wake()

    def pending(self) -> tuple[ExpertKey, ...]:
        """Experts that are being loaded, or are to be prefetched."""
        with self._changed:
            queues = (self._loading, self._prefetches, *self._deferred.values())
            return tuple(dict.fromkeys(key for queue in queues for key in queue))

    def quiesce(self) -> None:
        """Wait until nothing is being loaded or to be prefetched any more; never while an expert is in use here."""
        with self._changed:
            while self._loading or self._prefetches:
                self._changed.wait()

    def fill(self, keys: Iterable[ExpertKey]) -> None:
        """Load experts before anything runs, in this order, as far as there are free slots. Raises ModelError."""
        for key in keys:
            with self._changed:
                while self._channel_busy or key in self._loading:
                    self._changed.wait()
                if key.expert in self._ready[key.layer]:
                    continue
                if not self._free:
                    return
                entry = self._begin(key, self._free.pop(), "startup")
            self._carry(entry)
            if entry.error is not None:
                raise entry.error

    def resize(self, budget_bytes: int) -> None:
        """Another budget, also while serving: more slots at once, fewer as soon as what is in them may go.

        Returns when it holds. Called by the thread that has experts in use just now, it returns at once and holds when
        they are released. Raises ModelError as the constructor; the slots that were to be had stay.
        """
        limit = self._slots_in(budget_bytes)
        with self._changed:
            self._limit = limit
            self._budget_bytes = budget_bytes
            self._residency.resize(limit)
            self._shrink()
            self._grow()
            while self._slots > self._limit == limit and self._serving != threading.get_ident():
                self._changed.wait()

    def check(self) -> None:
        """Raise AssertionError or LedgerError where the books do not add up."""
        with self._changed:
            self._ledger.check()
            ready = [entry for entries in self._ready for entry in entries.values()]
            owners = [*ready, *self._loading.values()]
            _require(len(self._free) + len(owners) == self._slots, "a slot is lost, or two experts share one")
            _require(len({id(entry.slot) for entry in owners}) == len(owners), "two experts share a slot")
            _require(all(entry.in_use == (entry in self._in_use) for entry in owners), "who is in use is wrong")
            _require({entry.name for entry in ready} == set(self._ledger.resident), "cache and ledger disagree")
            _require(self._channel_busy == bool(self._loading), "the channel is held by nobody")
            self._require_budget()

    def close(self) -> None:
        """Stop loading and give all memory back. Nothing may be in use."""
        self._loader.close()
        with self._changed:
            _require(not self._in_use, "experts are in use")
            self._prefetches.clear()
            self._deferred.clear()
            self._limit = self._budget_bytes = 0
            self._shrink()

    # Computing. Methods from here on are called with the lock held, but for those that say otherwise.

    def _use_all(self, layer: int, keys: list[ExpertKey], turn: object) -> list[_Entry] | None:
        """All experts at once where all are ready, else None; takes the lock. What the gate found is counted here."""
        with self._changed:
            _require(self._turn is None, "a layer is served while another one is")
            self._turn = turn
            self._serving = threading.get_ident()
            ready = self._ready[layer]
            entries = [ready[key.expert] for key in keys if key.expert in ready]
            counts = self.metrics.counts
            counts.served += len(keys)
            counts.hits += len(entries)
            if len(entries) < len(keys):
                joined = sum(key in self._loading for key in keys)
                counts.joined += joined
                counts.misses += len(keys) - len(entries) - joined
                self._awaited = dict.fromkeys(keys)
                return None
            for entry in entries:
                self._use(entry, late=False)
            self._defer_no_longer(layer)
            return entries

    def _take_turns(self, keys: list[ExpertKey], ahead: bool, turn: object) -> Iterator[tuple[int, ExpertWeights]]:
        """One expert after the other; takes the lock."""
        for key in keys:
            entry, late = self._obtain(key)
            with self._changed:
                if key is keys[-1]:
                    self._defer_no_longer(key.layer)
                elif ahead:
                    self._look_ahead()
            self._carrier.arrive(entry.slot.place, late=late)
            try:
                yield key.expert, entry.slot.weights
            finally:
                self._carrier.leave(entry.slot.place)
                with self._changed:
                    if self._turn is turn:
                        self._release()
                        self._shrink()
                        self._wake()

    def _obtain(self, key: ExpertKey) -> tuple[_Entry, bool]:
        """An expert for computing, and whether computing had to wait; takes the lock. Raises ModelError."""
        began_s = None
        with self._changed:
            entry = self._ready[key.layer].get(key.expert)
            load = None
            if entry is None:
                began_s = self._clock()
                load = self._join_or_begin(key)
        if load is not None:
            self._carry(load)
            if load.error is not None:
                raise load.error
        with self._changed:
            entry = self._ready[key.layer][key.expert]  # nobody else evicts what is awaited
            if began_s is not None:
                self.metrics.counts.wait_s += self._clock() - began_s
            self._use(entry, late=began_s is not None)
            del self._awaited[key]
            return entry, began_s is not None

    def _join_or_begin(self, key: ExpertKey) -> _Entry | None:
        """Wait for a load in flight (None), or the load that the caller must now carry out."""
        self._ahead.pop(key, None)
        self._hurried += 1
        try:
            while key.expert not in self._ready[key.layer]:
                load = self._loading.get(key)
                if load is not None:
                    while key in self._loading:
                        self._changed.wait()
                    if load.error is not None:
                        raise load.error
                elif not self._channel_busy and (slot := self._room_for(key, urgent=True)) is not None:
                    return self._begin(key, slot, "demand")
                else:
                    self._changed.wait()
            return None
        finally:
            self._hurried -= 1
            self._wake()

    def _look_ahead(self) -> None:
        """Have the loader bring what is awaited and not there."""
        for key in self._awaited:
            if key.expert not in self._ready[key.layer] and key not in self._loading:
                self._ahead[key] = None
        if self._ahead:
            self._loader.wake()

    def _use(self, entry: _Entry, *, late: bool) -> None:
        entry.in_use = True
        self._in_use.append(entry)
        self._ledger.use(entry.name)
        self._residency.used(entry.key)
        if not entry.used:
            entry.used = True
            if entry.origin != "startup":
                self.metrics.first_use(late=late)

    def _release(self) -> None:
        for entry in self._in_use:
            entry.in_use = False
            self._ledger.release(entry.name)
        self._in_use.clear()

    def _end_turn(self) -> None:
        self._release()
        self._turn = self._serving = None
        self._awaited.clear()
        self._ahead.clear()

    def _defer_no_longer(self, layer: int) -> None:
        """This layer's experts are there: prefetches that were to come after them may begin."""
        keys = self._deferred.pop(layer, None)
        if keys:
            ready = self._ready
            self._prefetches.update({key: keys[key] for key in keys if key.expert not in ready[key.layer]})
            self._loader.wake()

    def _forget(self) -> None:
        """What a step that failed may have left: a layer half served, guards, prefetches that were to come after it.

        An error keeps the frames alive that it passed through, and with them the iterator that it broke off.
        """
        self._end_turn()
        self._guarded.clear()
        self.metrics.counts.cancelled += sum(len(keys) for keys in self._deferred.values())
        self._deferred.clear()
        self._shrink()
        self._wake()

    # Loading

    def _next_load(self) -> Callable[[], None] | None:
        """For the loader thread: what awaited experts need first, then prefetches in the order of asking."""
        if self._channel_busy or self._hurried:
            return None
        if self._ahead:
            key = min(self._ahead)
            slot = self._room_for(key, urgent=False)
            if slot is None:
                return None  # nor may a prefetch take the place that is freed next
            del self._ahead[key]
            return partial(self._carry, self._begin(key, slot, "demand"))
        for key, victim in list(self._prefetches.items()):
            if key.expert in self._ready[key.layer]:
                del self._prefetches[key]  # a demand was faster
                self._changed.notify_all()
                continue
            slot = self._room_by(victim, key)
            if slot is not None:
                return partial(self._carry, self._begin(key, slot, "prefetch"))
            if not (self._in_use or self._awaited or self._guarded or self._loading):
                del self._prefetches[key]
                self.metrics.counts.refused += 1
                self._changed.notify_all()
        return None

    def _begin(self, key: ExpertKey, slot: _Slot, origin: Origin) -> _Entry:
        """The slot is the expert's and the channel the caller's, who must `_carry` the load out."""
        entry = _Entry(key, ExpertId(f"{key.layer}.{key.expert}"), slot, origin)
        self._prefetches.pop(key, None)
        self._ledger.begin_load(entry.name, self._bytes)
        self._residency.loaded(key)
        self._loading[key] = entry
        self._channel_busy = True
        self.metrics.began(origin)
        self._require_budget()
        return entry

    def _carry(self, entry: _Entry) -> None:
        """Fill the slot, without the lock. An error is left in the entry, whose slot is then free again."""
        began_s = self._clock()
        try:
            if self._link is None:
                self._carrier.bring(entry.key, entry.slot.place)
            else:
                self._link.carry(partial(self._carrier.bring, entry.key, entry.slot.place))
        except BaseException as error:  # noqa: BLE001 — told to whoever waits for this expert, on whichever thread
            entry.error = error
        with self._changed:
            del self._loading[entry.key]
            self._channel_busy = False
            self.metrics.counts.transfer_s += self._clock() - began_s
            if entry.error is None:
                self._ledger.finish_load(entry.name)
                self._ready[entry.key.layer][entry.key.expert] = entry
                self.metrics.counts.bytes_moved += self.store.stored_bytes
            else:
                self._ledger.abandon_load(entry.name)
                self._residency.dropped(entry.key)
                self._free.append(entry.slot)
                self.metrics.counts.failed += 1
            self._shrink()
            self._changed.notify_all()

    # Room

    def _room_for(self, key: ExpertKey, *, urgent: bool) -> _Slot | None:
        """An empty slot, or one made empty. `urgent`: computing stands still until there is one."""
        for victim in self._residency.victims(key, len(self._free), urgent=urgent):
            if self._may_go(victim):
                return self._evict(victim)
        if self._free:
            return self._free.pop()
        if urgent:
            # The layer needs more experts than there are slots: the one that runs last goes, and comes again.
            awaited = (one for one in sorted(self._awaited, reverse=True) if one > key)
            for victim in (*awaited, *self._residency.victims(key, 0, urgent=True)):
                if victim != key and self._is_idle(victim):
                    return self._evict(victim)
        return None

    def _room_by(self, victim: ExpertKey | None, key: ExpertKey) -> _Slot | None:
        """The slot of the expert that is to make room for a prefetch; any where there is none such any more."""
        if victim is not None and victim.expert in self._ready[victim.layer]:
            return self._evict(victim) if self._may_go(victim) else None
        return self._room_for(key, urgent=False)

    def _may_go(self, key: tuple[int, int]) -> bool:
        return key not in self._awaited and key[0] not in self._guarded and self._is_idle(key)

    def _is_idle(self, key: tuple[int, int]) -> bool:
        entry = self._ready[key[0]].get(key[1])
        return entry is not None and not entry.in_use

    def _evict(self, key: tuple[int, int]) -> _Slot:
        entry = self._ready[key[0]].pop(key[1])
        self._ledger.evict(entry.name)
        self._residency.dropped(key)
        if not entry.used and entry.origin != "startup":
            self.metrics.counts.unused += 1
        return entry.slot

    # Slots

    def _slots_in(self, budget_bytes: int) -> int:
        """Slots for a budget; no more than there are experts. Raises ModelError where there is not even one."""
        if budget_bytes < self._bytes:
            message = f"a budget of {budget_bytes} bytes holds no expert of {self._bytes}; give the model more memory"
            raise ModelError(self.store.folder, message)
        return min(budget_bytes // self._bytes, len(self.store.arch.keys()))

    def _shrink(self) -> None:
        """Give back slots above the limit, as far as what is in them may go."""
        while self._slots > self._limit:
            if self._free:
                slot = self._free.pop()
            else:
                victim = next(filter(self._may_go, self._residency.victims(None, 0, urgent=True)), None)
                if victim is None:
                    break
                slot = self._evict(victim)
            self._carrier.retire(slot.place)
            self._retired.append(slot)
            self._slots -= 1
            self._changed.notify_all()
        if self._ledger.budget_bytes != self._budget_bytes:
            self._ledger.set_budget(max(self._budget_bytes, self._slots * self._bytes))

    def _grow(self) -> None:
        """Empty slots up to the limit. Raises ModelError; the limit is then what there is."""
        try:
            while self._slots < self._limit:
                if self._retired:
                    self._carrier.restore(self._retired[-1].place)
                    self._free.append(self._retired.pop())
                else:
                    place = self._carrier.allocate()
                    self._free.append(_Slot(place, self.store.weights(place.buffer)))
                self._slots += 1
        except (MemoryError, OSError, RuntimeError) as error:
            message = f"there is no memory for {self._limit} experts of {self._bytes} bytes, only for {self._slots}"
            self._limit = self._slots
            self._residency.resize(self._limit)
            raise ModelError(self.store.folder, f"{message}; lower its budget") from error
        finally:
            self._require_budget()
            self._wake()

    def _wake(self) -> None:
        """After something was released. Without anybody to wake, waking costs time at each layer."""
        if self._prefetches or self._ahead or self._hurried or self._slots != self._limit:
            self._changed.notify_all()

    def _require_budget(self) -> None:
        allowed = self._ledger.budget_bytes
        _require(self._slots * self._bytes <= allowed, f"{self._slots} slots of {self._bytes} bytes, {allowed} allowed")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise AssertionError(message)
