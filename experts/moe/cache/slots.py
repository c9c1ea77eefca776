"""The slot cache: experts of a model pass through a fixed number of slots in memory, and run there.

One thread computes and calls `serve`, which loads missing experts itself unless they are being loaded already; a loader
thread loads those needed soon. Loads share one channel, one after the other; a load that computing waits for goes
before all that have not begun.
"""

import threading
import time
from collections.abc import Iterable, Iterator, Sequence

from experts.moe.cache.slot_ledger import CachedExpert, ExpertSlot, FetchCounts, LoadReason, SlotLedger
from experts.moe.cache.weight_transfer import WeightTransfer
from experts.moe.gating import ExpertKey, ExpertWeights, ForwardStep
from experts.moe.policy.eviction import EvictionPolicy
from experts.moe.weights.checkpoint import ExpertStore


class SlotCache:
    """Experts of one model in memory, never above `budget_bytes`, empty slots and those being filled included.

    Any thread may call `prefetch` and `cancel`; the computing one calls `serve`, and `resize` between two steps.
    Raises ModelError if the budget holds no expert, or its memory cannot be allocated.
    """

    def __init__(self, store: ExpertStore, budget_bytes: int, policy: EvictionPolicy, transfer: WeightTransfer) -> None:
        layers, experts = range(store.arch.layers), range(store.arch.experts)
        self.store = store
        self._transfer = transfer
        self._keys = [[ExpertKey(layer, expert) for expert in experts] for layer in layers]
        self._ledger = SlotLedger(store, budget_bytes, policy, transfer)
        self.counts = self._ledger.counts
        self._at_begin = FetchCounts()
        self._of_request: dict[str, FetchCounts] = {}
        # Two conditions of one lock: waking the loader when it has nothing to do costs a switch between threads.
        lock = threading.Lock()
        self._changed = threading.Condition(lock)
        self._work = threading.Condition(lock)
        self._loader: threading.Thread | None = None
        self._closed = False
        # The thread that fills a slot holds the channel; the computing thread goes first.
        self._channel_busy = False
        self._computing_waits = False
        #: Awaited experts of the running layer that the loader may load before they are requested.
        self._ahead: dict[ExpertKey, None] = {}
        self._prefetches: dict[ExpertKey, None] = {}
        #: The call of `serve` whose layer runs: an error keeps broken-off ones alive.
        self._serving: object | None = None

    @property
    def slots(self) -> int:
        return self._ledger.limit

    @property
    def allocated_bytes(self) -> int:
        return self._ledger.count * self.store.expert_bytes

    def resident(self, layer: int, *, guard: bool = False) -> tuple[int, ...]:
        """Return the ready experts of a layer, ascending. `guard`: they stay until the layer has been served."""
        with self._changed:
            if guard:
                self._ledger.guarded[layer] = None
            return tuple(sorted(self._ledger.ready[layer]))

    def begin_step(self) -> None:
        """Begin a step, and discard what a failed one left: a layer half served, guards."""
        with self._changed:
            self._end_serving()
            self._ledger.guarded.clear()
            self._wake()
        self._at_begin = self.counts.copy()

    def end_step(self, step: ForwardStep) -> None:
        """End a step, whose counts belong to each of its requests in full."""
        spent = self.counts - self._at_begin
        self.begin_step()
        for row in step.rows:
            if row.request:
                self._of_request[row.request] = self._of_request.get(row.request, FetchCounts()) + spent

    def pop_request(self, request: str) -> FetchCounts:
        """Return the counts of a request's steps, once."""
        return self._of_request.pop(request, FetchCounts())

    def serve(self, layer: int, experts: Sequence[int], *, ahead: bool) -> Iterator[tuple[int, ExpertWeights]]:
        """Yield the experts in ascending order, each when it is ready and valid until the next one is requested.

        More experts than slots come in waves. `ahead`: load the following ones while one is computed. Raises ModelError
        if one cannot be loaded; those loaded before stay usable.
        """
        names = self._keys[layer]
        keys = [names[expert] for expert in sorted(experts)]
        serving = self._begin_serving(layer, keys)
        try:
            for key in keys:
                cached = self._obtain(key, ahead=ahead)
                self._transfer.begin_use(cached.slot.place)
                try:
                    yield key.expert, cached.slot.weights
                finally:
                    self._transfer.end_use(cached.slot.place)
        finally:
            with self._changed:
                if self._serving is serving:
                    self._end_serving()
                    self._ledger.guarded.pop(layer, None)
                    self._wake()

    def prefetch(self, keys: Sequence[ExpertKey]) -> None:
        """Queue experts to be loaded when nothing more urgent is to do.

        An expert that runs, or is about to, is never evicted: the prefetch waits until it is idle. A prefetch is
        dropped if no expert can be evicted for it, and replaced by a demand for the same expert.
        """
        with self._changed:
            for key in keys:
                if self._ledger.get(key) is not None:
                    self._ledger.note_predicted(key)
                elif key not in self._ledger.loading:
                    self._prefetches[key] = None
            self._wake()

    def cancel(self, layer: int) -> None:
        with self._changed:
            for key in [key for key in self._prefetches if key.layer == layer]:
                self._drop_prefetch(key)

    def pending(self) -> tuple[ExpertKey, ...]:
        with self._changed:
            return (*self._ledger.loading, *self._prefetches)

    def quiesce(self) -> None:
        """Wait until no load runs or is queued; the calling thread must have no expert in use."""
        with self._changed:
            while self._ledger.loading or self._prefetches:
                self._changed.wait()

    def preload(self, keys: Iterable[ExpertKey]) -> None:
        """Load experts before anything runs, in this order, until no slot is empty. Raises ModelError."""
        for key in keys:
            with self._changed:
                while self._channel_busy:
                    self._changed.wait()
                if self._ledger.get(key) is not None:
                    continue
                slot = self._ledger.take_empty()
                if slot is None:
                    return
                load = self._begin_load(key, slot, "startup")
            self._carry_out(load)
            if load.error is not None:
                raise load.error

    def resize(self, budget_bytes: int) -> None:
        """Change the budget between two steps. Raises ModelError as the constructor; slots that were allocated stay."""
        with self._changed:
            self._ledger.set_budget(budget_bytes)
            while self._ledger.count > self._ledger.limit:
                if not self._ledger.remove_slot():
                    self._changed.wait()  # for a load
            while self._ledger.add_slot():
                pass
            self._wake()

    def check(self) -> None:
        with self._changed:
            self._ledger.check()
            if self._channel_busy != bool(self._ledger.loading):
                raise AssertionError("the channel is held without a load")

    def close(self) -> None:
        """Stop loading and give all memory back. No expert may be in use."""
        with self._work:
            self._closed = True
            self._work.notify()
        if self._loader is not None:
            self._loader.join()
        with self._changed:
            self._prefetches.clear()
            self._ledger.close()

    # Computing

    def _begin_serving(self, layer: int, keys: list[ExpertKey]) -> object:
        with self._changed:
            if self._serving is not None:
                raise AssertionError("a layer is served while another one is")
            self._serving = object()
            self._ledger.awaited.update(dict.fromkeys(keys))
            self.counts.served += len(keys)
            self.counts.hits += sum(key.expert in self._ledger.ready[layer] for key in keys)
            return self._serving

    def _obtain(self, key: ExpertKey, *, ahead: bool) -> CachedExpert:
        """Return an expert in use, once it is ready. Raises ModelError."""
        began_s = load = None
        with self._changed:
            self._ledger.release()
            self._wake()
            if self._ledger.get(key) is None:
                began_s = time.perf_counter()
                load = self._join_or_begin(key)
        if load is not None:
            self._carry_out(load)
            if load.error is not None:
                raise load.error
        with self._changed:
            cached = self._ledger.get(key)
            assert cached is not None, "an awaited expert is not evicted"
            if began_s is not None:
                self.counts.wait_s += time.perf_counter() - began_s
            self._ledger.use(cached, late=began_s is not None)
            del self._ledger.awaited[key]
            missing = [other for other in self._ledger.awaited if self._ledger.get(other) is None]
            if missing and ahead:
                self._ahead.update(dict.fromkeys(other for other in missing if other not in self._ledger.loading))
                self._wake()
            return cached

    # The methods below are called with the lock held, unless they say otherwise.

    def _join_or_begin(self, key: ExpertKey) -> CachedExpert | None:
        """Wait for a load in flight and return None, or begin one for the caller to carry out. Raises ModelError."""
        self._ahead.pop(key, None)
        self._computing_waits = True
        try:
            while self._ledger.get(key) is None:
                load = self._ledger.loading.get(key)
                if load is not None:
                    while key in self._ledger.loading:
                        self._changed.wait()
                    if load.error is not None:
                        raise load.error
                elif not self._channel_busy and (slot := self._ledger.take_slot(key, urgent=True)) is not None:
                    return self._begin_load(key, slot, "demand")
                else:
                    self._changed.wait()
            return None
        finally:
            self._computing_waits = False
            self._wake()

    def _end_serving(self) -> None:
        self._ledger.release()
        self._ledger.awaited.clear()
        self._ahead.clear()
        self._serving = None

    # Loading

    def _wake(self) -> None:
        """Wake the loader thread, started by the first call, if there may be something to load."""
        if not (self._prefetches or self._ahead):
            return
        if self._loader is None and not self._closed:
            self._loader = threading.Thread(target=self._run_loader, name="moe-loader", daemon=True)
            self._loader.start()
        self._work.notify()

    def _run_loader(self) -> None:
        """Carry out one load after the other, on the loader thread; takes the lock."""
        while True:
            with self._work:
                load = None
                while not self._closed and (load := self._next_load()) is None:
                    self._work.wait()
            if load is None:
                return
            self._carry_out(load)

    def _next_load(self) -> CachedExpert | None:
        """Begin the loader's next load: awaited experts first, then prefetches in order."""
        if self._channel_busy or self._computing_waits:
            return None
        if self._ahead:
            key = min(self._ahead)
            slot = self._ledger.take_slot(key, urgent=False)
            if slot is None:
                return None  # nor may a prefetch take the place that is freed next
            del self._ahead[key]
            return self._begin_load(key, slot, "demand")
        for key in list(self._prefetches):
            if self._ledger.get(key) is not None:
                self._drop_prefetch(key)  # a demand was faster
                continue
            slot = self._ledger.take_slot(key, urgent=False)
            if slot is not None:
                return self._begin_load(key, slot, "prefetch")
            if not self._ledger.may_free_slots:
                self._drop_prefetch(key)
        return None

    def _drop_prefetch(self, key: ExpertKey) -> None:
        del self._prefetches[key]
        self._changed.notify_all()

    def _begin_load(self, key: ExpertKey, slot: ExpertSlot, reason: LoadReason) -> CachedExpert:
        """Give the slot to the expert and the channel to the caller, who must `_carry_out` the load."""
        self._prefetches.pop(key, None)
        self._channel_busy = True
        return self._ledger.begin_load(key, slot, reason)

    def _carry_out(self, load: CachedExpert) -> None:
        """Fill the slot, without the lock. A failed load keeps its error; its slot is empty again."""
        began_s = time.perf_counter()
        try:
            self._transfer.fill(load.key, load.slot.place)
        except BaseException as error:  # noqa: BLE001  raised by the thread that waits for this expert
            load.error = error
        with self._changed:
            self._channel_busy = False
            self.counts.transfer_s += time.perf_counter() - began_s
            self._ledger.end_load(load)
            self._wake()
            self._changed.notify_all()
