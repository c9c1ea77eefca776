"""The slot cache: experts of a model pass through a fixed number of places in memory, and run where they are.

One thread computes and calls `serve`. What it wants now it loads itself, unless that is already on its way; what it
will want soon a loader thread brings meanwhile. All loads share one channel, one after the other, and a load that
computing waits for goes before every other one that has not begun.
"""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

from experts.moe.cache.link import SlowLink
from experts.moe.cache.loader import PrefetchThread
from experts.moe.cache.metrics import CacheMetrics, FetchReason
from experts.moe.cache.slot_ledger import CachedExpert, ExpertSlot, SlotLedger
from experts.moe.cache.weight_transfer import WeightTransfer
from experts.moe.gating import ExpertKey, ExpertWeights, ForwardStep
from experts.moe.policy.eviction import EvictionPolicy
from experts.moe.weights.expert_store import ExpertStore


class SlotCache:
    """Experts of one model in memory, never above `budget_bytes`, empty slots and those being filled included.

    `residency` says whom to evict. `prefetch`, `cancel` and `resize` may be called by any thread, `serve` by the one
    that computes. Raises ModelError where the budget holds no expert, or memory for it cannot be had.
    """

    def __init__(
        self,
        store: ExpertStore,
        budget_bytes: int,
        residency: EvictionPolicy,
        carrier: WeightTransfer,
        *,
        link: SlowLink | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        layers, experts = range(store.arch.layers), range(store.arch.experts)
        self.store = store
        self.metrics = CacheMetrics(len(layers))
        self._carrier = carrier
        self._link = link
        self._clock = clock
        self._keys = [[ExpertKey(layer, expert) for expert in experts] for layer in layers]
        self._books = SlotLedger(store, budget_bytes, residency, carrier, self.metrics)
        # Two conditions of one lock: waking the loader where it has nothing to do costs a switch between threads.
        lock = threading.Lock()
        self._changed = threading.Condition(lock)
        self._loader = PrefetchThread(threading.Condition(lock), self._next_load)
        # Who fills a slot has the channel. Threads that computing depends on are counted, and go first.
        self._channel_busy = False
        self._hurried = 0
        self._ahead: dict[ExpertKey, None] = {}
        # Prefetches with whom they replace; those that are to come after a layer, by that layer.
        self._prefetches: dict[ExpertKey, ExpertKey | None] = {}
        self._deferred: dict[int, dict[ExpertKey, ExpertKey | None]] = {}
        # The layer that runs: which call of `serve`, in which thread.
        self._turn: object | None = None
        self._serving: int | None = None
        #: Threads that are in `resize`.
        self._resizing = 0

    @property
    def slots(self) -> int:
        """How many experts fit."""
        return self._books.limit

    @property
    def budget_bytes(self) -> int:
        return self._books.budget_bytes

    @property
    def allocated_bytes(self) -> int:
        """Bytes of all slots; above the budget only while a smaller one waits for experts that run."""
        return self._books.allocated_bytes

    def resident(self, layer: int, *, guard: bool = False) -> tuple[int, ...]:
        """Experts of a layer that are ready, ascending. `guard`: they stay until the layer has been served."""
        with self._changed:
            if guard:
                self._books.guarded[layer] = None
            return tuple(sorted(self._books.ready[layer]))

    def begin(self, step: ForwardStep) -> None:
        """A step begins; what one that failed had left behind is forgotten."""
        with self._changed:
            self._forget()
        self.metrics.begin(step)

    def end(self, step: ForwardStep) -> None:
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
                yield from self._one_by_one(keys, ahead, turn)
                return
            for entry in entries:
                yield from self._yield(entry, late=False)
        finally:
            with self._changed:
                if self._turn is turn:
                    self._end_turn()
                    self._books.guarded.pop(layer, None)
                    self._defer_no_longer(layer)
                    self._released()

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
                if self._books.get(key) is not None:
                    self._books.predicted(key)
                elif key not in self._books.loading and key not in self._prefetches:
                    queue[key] = replace[position] if position < len(replace) else None
            self._wake()

    def cancel(self, layer: int) -> None:
        """Withdraw the prefetches of a layer that have not begun."""
        with self._changed:
            for queue in (self._prefetches, *self._deferred.values()):
                for key in [key for key in queue if key.layer == layer]:
                    del queue[key]
                    self.metrics.counts.cancelled += 1
                    self._changed.notify_all()

    def pending(self) -> tuple[ExpertKey, ...]:
        """Experts that are being loaded, or are to be prefetched."""
        with self._changed:
            queues = (self._books.loading, self._prefetches, *self._deferred.values())
            return tuple(dict.fromkeys(key for queue in queues for key in queue))

    def quiesce(self) -> None:
        """Wait until nothing is being loaded or to be prefetched any more; never while an expert is in use here."""
        with self._changed:
            while self._books.loading or self._prefetches:
                self._changed.wait()

    def fill(self, keys: Iterable[ExpertKey]) -> None:
        """Load experts before anything runs, in this order, as far as there are empty slots. Raises ModelError."""
        for key in keys:
            with self._changed:
                while self._channel_busy:
                    self._changed.wait()
                if self._books.get(key) is not None:
                    continue
                slot = self._books.empty()
                if slot is None:
                    return
                entry = self._begin(key, slot, "startup")
            self._carry(entry)
            if entry.error is not None:
                raise entry.error

    def resize(self, budget_bytes: int) -> None:
        """Another budget, also while serving: more slots at once, fewer as soon as what is in them may go.

        Returns when it holds. Called by the thread that has experts in use just now, it returns at once and holds when
        they are released. Raises ModelError as the constructor; the slots that were to be had stay.
        """
        with self._changed:
            self._books.aim(budget_bytes)
            limit = self._books.limit
            self._resizing += 1
            self._changed.notify_all()
        try:
            while self._resize_by_one(limit):
                time.sleep(0)  # a thread that computes comes before the next slot
        finally:
            with self._changed:
                self._resizing -= 1
                self._released()

    def _resize_by_one(self, limit: int) -> bool:
        """Give one slot's memory back or take it, or wait for one that is in use; False where that is all."""
        books = self._books
        with self._changed:
            if books.limit != limit:
                return False  # somebody has changed it again
            moved = books.give_back() or books.add()
            if moved:
                self._changed.notify_all()
                self._wake()
            elif books.count > limit and self._serving != threading.get_ident():
                self._changed.wait()
                moved = True
            return moved

    def check(self) -> None:
        """Raise AssertionError or LedgerError where the books do not add up."""
        with self._changed:
            self._books.check()
            _require(self._channel_busy == bool(self._books.loading), "the channel is held by nobody")

    def close(self) -> None:
        """Stop loading and give all memory back. Nothing may be in use."""
        self._loader.close()
        with self._changed:
            self._prefetches.clear()
            self._deferred.clear()
            self._books.vacate()

    # Computing. Methods from here on are called with the lock held, but for those that say otherwise.

    def _use_all(self, layer: int, keys: list[ExpertKey], turn: object) -> list[CachedExpert] | None:
        """All experts at once where all are ready, else None; takes the lock. What the gate found is counted here."""
        books, counts = self._books, self.metrics.counts
        with self._changed:
            _require(self._turn is None, "a layer is served while another one is")
            self._turn = turn
            self._serving = threading.get_ident()
            ready = books.ready[layer]
            entries = [ready[key.expert] for key in keys if key.expert in ready]
            counts.served += len(keys)
            counts.hits += len(entries)
            if len(entries) < len(keys):
                joined = sum(key in books.loading for key in keys)
                counts.joined += joined
                counts.misses += len(keys) - len(entries) - joined
                books.awaited.update(dict.fromkeys(keys))
                return None
            for entry in entries:
                books.use(entry, late=False)
            self._defer_no_longer(layer)
            return entries

    def _one_by_one(self, keys: list[ExpertKey], ahead: bool, turn: object) -> Iterator[tuple[int, ExpertWeights]]:
        """Experts of which some are missing; takes the lock."""
        for key in keys:
            entry, late = self._obtain(key)
            with self._changed:
                if key is keys[-1]:
                    self._defer_no_longer(key.layer)
                elif ahead:
                    self._look_ahead()
            try:
                yield from self._yield(entry, late=late)
            finally:
                with self._changed:
                    if self._turn is turn:
                        self._books.release()
                        self._released()

    def _yield(self, entry: CachedExpert, *, late: bool) -> Iterator[tuple[int, ExpertWeights]]:
        """Without the lock: the expert, between what its device needs to know."""
        self._carrier.arrive(entry.slot.place, late=late)
        try:
            yield entry.key.expert, entry.slot.weights
        finally:
            self._carrier.leave(entry.slot.place)

    def _obtain(self, key: ExpertKey) -> tuple[CachedExpert, bool]:
        """An expert for computing, and whether computing had to wait; takes the lock. Raises ModelError."""
        began_s = None
        load = None
        with self._changed:
            if self._books.get(key) is None:
                began_s = self._clock()
                load = self._join_or_begin(key)
        if load is not None:
            self._carry(load)
            if load.error is not None:
                raise load.error
        with self._changed:
            entry = self._books.get(key)
            assert entry is not None, "nobody else evicts what is awaited"
            if began_s is not None:
                self.metrics.counts.wait_s += self._clock() - began_s
            self._books.use(entry, late=began_s is not None)
            del self._books.awaited[key]
            return entry, began_s is not None

    def _join_or_begin(self, key: ExpertKey) -> CachedExpert | None:
        """Wait for a load in flight (None), or the load that the caller must now carry out. Raises ModelError."""
        self._ahead.pop(key, None)
        self._hurried += 1
        try:
            while self._books.get(key) is None:
                load = self._books.loading.get(key)
                if load is not None:
                    while key in self._books.loading:
                        self._changed.wait()
                    if load.error is not None:
                        raise load.error
                elif not self._channel_busy and (slot := self._books.room_for(key, urgent=True)) is not None:
                    return self._begin(key, slot, "demand")
                else:
                    self._changed.wait()
            return None
        finally:
            self._hurried -= 1
            self._wake()

    def _look_ahead(self) -> None:
        """Have the loader bring what is awaited and not there."""
        for key in self._books.awaited:
            if self._books.get(key) is None and key not in self._books.loading:
                self._ahead[key] = None
        self._wake()

    def _end_turn(self) -> None:
        self._books.release()
        self._books.awaited.clear()
        self._ahead.clear()
        self._turn = self._serving = None

    def _forget(self) -> None:
        """What a step that failed may have left: a layer half served, guards, prefetches that were to come after it.

        An error keeps the frames alive that it passed through, and with them the iterator that it broke off.
        """
        self._end_turn()
        self._books.guarded.clear()
        self.metrics.counts.cancelled += sum(len(keys) for keys in self._deferred.values())
        self._deferred.clear()
        self._released()

    def _defer_no_longer(self, layer: int) -> None:
        """This layer's experts are there: prefetches that were to come after them may begin."""
        keys = self._deferred.pop(layer, None)
        if keys:
            self._prefetches.update({key: keys[key] for key in keys if self._books.get(key) is None})
            self._wake()

    # Loading

    def _next_load(self) -> Callable[[], None] | None:
        """For the loader thread: what awaited experts need first, then prefetches in the order of asking."""
        if self._channel_busy or self._hurried:
            return None
        if self._ahead:
            key = min(self._ahead)
            slot = self._books.room_for(key, urgent=False)
            if slot is None:
                return None  # nor may a prefetch take the place that is freed next
            del self._ahead[key]
            return partial(self._carry, self._begin(key, slot, "demand"))
        for key, victim in list(self._prefetches.items()):
            if self._books.get(key) is not None:
                self._drop(key)  # a demand was faster
                continue
            slot = self._books.room_by(victim, key)
            if slot is not None:
                return partial(self._carry, self._begin(key, slot, "prefetch"))
            if not self._books.moving:
                self.metrics.counts.refused += 1
                self._drop(key)
        return None

    def _drop(self, key: ExpertKey) -> None:
        del self._prefetches[key]
        self._changed.notify_all()

    def _begin(self, key: ExpertKey, slot: ExpertSlot, origin: FetchReason) -> CachedExpert:
        """The slot is the expert's and the channel the caller's, who must `_carry` the load out."""
        self._prefetches.pop(key, None)
        self._channel_busy = True
        return self._books.begin(key, slot, origin)

    def _carry(self, entry: CachedExpert) -> None:
        """Fill the slot, without the lock. An error is left in the entry, whose slot is then empty again."""
        began_s = self._clock()
        try:
            if self._link is None:
                self._carrier.bring(entry.key, entry.slot.place)
            else:
                self._link.carry(partial(self._carrier.bring, entry.key, entry.slot.place))
        except BaseException as error:  # noqa: BLE001 — told to whoever waits for this expert, on whichever thread
            entry.error = error
        with self._changed:
            self._channel_busy = False
            self.metrics.counts.transfer_s += self._clock() - began_s
            self._books.end(entry)
            self._released()
            self._changed.notify_all()

    def _released(self) -> None:
        """Somebody may go who could not before. A thread that resizes sees to the slots, else it is done here."""
        if self._books.count > self._books.limit:
            if not self._resizing:
                self._books.shrink()
            self._changed.notify_all()
        self._wake()

    def _wake(self) -> None:
        """The loader may have found no room, or had to let somebody go first."""
        if self._prefetches or self._ahead:
            self._loader.wake()


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise AssertionError(message)
