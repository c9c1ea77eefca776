"""The loader of one pool: evictions and budgets at once, transfers in turn on a channel."""

import time
from collections.abc import Callable, Mapping
from typing import Any

import structlog

from daemon.dispatch.channels import Channels
from daemon.dispatch.orders import LoadEnd, LoadOrder, Pool
from daemon.errors import is_device_error
from daemon.policy.actions import Load, Resize, Unload
from daemon.policy.request import PoolId
from experts.errors import ExpertError
from experts.spec import ExpertId, LoadReport, name_of


class PoolLoader:
    """Carries out loads into one pool. A load that fails is reported; the loader goes on.

    Evictions, unloads and smaller budgets take effect at once, in the order of the calls. The scheduler's decisions
    then fit the budget whichever waiting load goes first, so that on a channel a demand may overtake a prefetch of its
    pool. `channels` are shared with the machine's other pools; `pools` are those that weights can be copied from.
    """

    def __init__(
        self, pool_id: PoolId, pool: Pool, channels: Channels | None = None, pools: Mapping[PoolId, Pool] | None = None
    ) -> None:
        self.pool = pool_id
        self._pool = pool
        self._pools = pools or {}
        channels = channels or Channels()
        self._from_disk, self._from_memory = channels.disk, channels.copying_to(pool_id)
        self._report: Callable[[LoadEnd], None] = lambda _end: None
        self._log: Any = structlog.get_logger("loader").bind(device=pool_id)

    def start(self, report: Callable[[LoadEnd], None]) -> None:
        self._report = report
        self._from_disk.open()
        self._from_memory.open()

    def apply(self, change: LoadOrder | Unload | Resize) -> None:
        match change:
            case LoadOrder():
                self._unload(change.load.evict)
                channel = self._from_disk if change.load.source is None else self._from_memory
                channel.transfer(change.load, lambda: self._load(change), self._report)
            case Unload():
                self._unload(change.experts)
                self._log.info("experts_unloaded", experts=list(change.experts))
            case Resize():
                self._resize(change.budget_bytes)

    def under_way(self) -> list[tuple[Load, float]]:
        begun = (self._from_disk.under_way, self._from_memory.under_way)
        return [transfer for transfer in begun if transfer is not None and transfer[0].pool == self.pool]

    def give_up(self, load: Load) -> None:
        """Let other loads go on; the slot that is being filled stays taken until the transfer ends."""
        channel = self._from_disk if load.source is None else self._from_memory
        channel.give_up(load)

    def stop(self, timeout_s: float) -> bool:
        until_s = time.monotonic() + timeout_s
        closed = self._from_disk.close(timeout_s)
        return self._from_memory.close(max(0.0, until_s - time.monotonic())) and closed

    def _unload(self, experts: tuple[ExpertId, ...]) -> None:
        for expert in experts:
            try:
                self._pool.unload(expert)
            except Exception:  # noqa: BLE001  the ledger has moved on; the pool refuses what would not fit
                self._log.exception("expert_not_unloaded", expert=name_of(expert))

    def _resize(self, budget_bytes: int) -> None:
        try:
            self._pool.resize(budget_bytes)
        except Exception:  # noqa: BLE001  as above
            self._log.exception("budget_not_changed", budget_bytes=budget_bytes)
        else:
            self._log.info("budget_changed", budget_bytes=budget_bytes)

    def _load(self, order: LoadOrder) -> LoadEnd:
        load, spec, begin_s = order.load, order.spec, time.monotonic()
        try:
            done = self._transfer(order)
        except Exception as error:  # noqa: BLE001  a damaged file, or a defect, costs this expert only
            text = str(error) if isinstance(error, ExpertError) else f"{type(error).__name__}: {error}"
            self._log.error("expert_load_failed", expert=name_of(load.expert), error=text)
            spent_ms = (time.monotonic() - begin_s) * 1000.0
            return LoadEnd(load, spec, 0, spent_ms, "disk", text, is_device_error(error.__cause__ or error))
        self._log.info(
            "expert_loaded", expert=name_of(load.expert), bytes=done.bytes, load_ms=round(done.load_ms, 2),
            tier=done.tier, cause=load.cause, evicted=[*map(name_of, load.evict)],
        )  # fmt: skip
        return LoadEnd(load, spec, done.bytes, done.load_ms, done.tier)

    def _transfer(self, order: LoadOrder) -> LoadReport:
        source = order.load.source
        if source is None:
            return self._pool.load(order.spec)
        if source not in self._pools:
            raise ExpertError(order.spec.expert, f"cannot be copied from {source}: no such pool")
        return self._pool.load(order.spec, source=self._pools[source])
