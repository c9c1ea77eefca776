"""One thread per device that changes who is resident: loads, unloads, budgets, in the order they were decided."""

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import structlog

from daemon.orders import LoadEnd, LoadOrder, Pool
from daemon.policy.actions import Resize, Unload
from daemon.policy.request import PoolId
from daemon.worker import Worker
from experts.errors import ExpertError


class LoaderThread:
    """Carries out loads into one pool. A load that fails is reported; the thread goes on."""

    def __init__(self, pool_id: PoolId, pool: Pool, clock: Callable[[], float] = time.monotonic) -> None:
        self.pool = pool_id
        self._pool = pool
        self._clock = clock
        self._report: Callable[[LoadEnd], None] = _unheard
        self._worker: Worker[LoadOrder | Unload | Resize] = Worker(f"loader {pool_id}", self._carry_out)
        self._log: Any = structlog.get_logger("loader").bind(device=pool_id)

    def start(self, report: Callable[[LoadEnd], None]) -> None:
        self._report = report
        self._worker.start()

    def submit(self, order: LoadOrder | Unload | Resize) -> None:
        self._worker.submit(order)

    def stop(self, timeout_s: float) -> bool:
        return self._worker.stop(timeout_s)

    def _carry_out(self, order: LoadOrder | Unload | Resize) -> None:
        if isinstance(order, LoadOrder):
            self._report(self._load(order))
            return
        try:
            if isinstance(order, Unload):
                for expert in order.experts:
                    self._pool.unload(expert)
                    self._log.info("expert_unloaded", expert=expert)
            else:
                self._pool.resize(order.budget_bytes)
                self._log.info("budget_changed", budget_bytes=order.budget_bytes)
        except Exception:  # noqa: BLE001  the ledger has moved on; the pool's own books refuse what would not fit
            self._log.exception("pool_change_failed", order=str(order))

    def _load(self, order: LoadOrder) -> LoadEnd:
        load, spec, begin_s = order.load, order.spec, self._clock()
        try:
            done = self._pool.load(spec, load.evict)
        except Exception as error:  # noqa: BLE001  a damaged file, or a defect, costs this expert only
            # The ledger has given up the evicted whatever happened; so must the pool.
            for expert in load.evict:
                if expert in self._pool.resident():
                    with suppress(ExpertError):
                        self._pool.unload(expert)
            text = str(error) if isinstance(error, ExpertError) else f"{type(error).__name__}: {error}"
            self._log.error("expert_load_failed", expert=load.expert, error=text)
            return LoadEnd(load, spec, 0, (self._clock() - begin_s) * 1000.0, "disk", text)
        self._log.info(
            "expert_loaded", expert=load.expert, bytes=done.bytes, load_ms=round(done.load_ms, 2), tier=done.tier,
            cause=load.cause, evicted=list(load.evict),
        )  # fmt: skip
        return LoadEnd(load, spec, done.bytes, done.load_ms, done.tier)


def _unheard(_end: LoadEnd) -> None:
    """Nothing is loaded before `start`, which brings the one who listens."""
