"""Operators' changes to the pools: pin, unpin, unload, new budgets. Refused if an expert would starve."""

from collections.abc import Callable, Iterable, Iterator
from functools import partial

from daemon.policy.actions import Resize, Unload
from daemon.policy.discipline import Discipline, Want
from daemon.policy.request import PoolId, device_of
from daemon.policy.residency import Residency
from experts.spec import ExpertId, name_of


class OperationRefusedError(Exception):
    """A refused request of an operator: a short code, and a reason that says what to do instead."""

    def __init__(self, code: str, reason: str) -> None:
        self.code = code
        self.reason = reason
        super().__init__(f"{code}: {reason}")


class Operator:
    """Checks each request at once; `next_change` and `wants` carry it out as memory allows.

    Pools are named by a pool, a device, or None for all: a request takes effect in all pools that it is about, or none.
    """

    def __init__(self, residency: Residency, discipline: Discipline) -> None:
        self._residency = residency
        self._discipline = discipline

    def pins(self) -> dict[ExpertId, tuple[PoolId, ...]]:
        pools: dict[ExpertId, tuple[PoolId, ...]] = {}
        for pool, ledger in self._residency.ledgers.items():
            for expert in ledger.pinned:
                pools[expert] = (*pools.get(expert, ()), pool)
        return pools

    def pin(self, expert: ExpertId, pool: PoolId | None) -> PoolId:
        """Keep `expert` in one of the named pools: where it is resident, else where most is free."""
        named = self._named(expert, pool)
        for place in [place for place in self._by_room(expert) if place in named] or named:
            ledger = self._residency.ledgers[place]
            if ledger.is_pinned(expert):
                return place
            pin, unpin = partial(ledger.pin, expert), partial(ledger.unpin, expert)
            if self._residency.fits(place, expert) and not self._starved_by(pin, unpin):
                return place
        raise OperationRefusedError(
            "does_not_fit", f"pinning {name_of(expert)} leaves no pool with room enough for the other experts"
        )

    def unpin(self, expert: ExpertId, pool: PoolId | None) -> None:
        named = self._named(expert, pool)
        pools = [place for place in self.pins().get(expert, ()) if place in named]
        if not pools:
            raise OperationRefusedError("not_pinned", f"{name_of(expert)} is not pinned{_where(pool)}")
        self.forget([expert], pools)

    def unload(self, expert: ExpertId, pool: PoolId | None) -> None:
        """Free `expert` when its running batch has ended; images that need it load it again."""
        pools = [place for place in self._named(expert, pool) if self._residency.can_run(place, expert)]
        if not pools:
            raise OperationRefusedError("not_resident", f"{name_of(expert)} is not resident{_where(pool)}")
        if any(self._residency.ledgers[place].is_pinned(expert) for place in pools):
            raise OperationRefusedError("pinned", f"{name_of(expert)} is pinned: unpin it first")
        if any(self._residency.ledgers[place].hung(expert) for place in pools):
            raise OperationRefusedError(
                "in_use", f"a batch of {name_of(expert)} hangs and keeps its weights: restart the daemon"
            )
        for place in pools:
            self._residency.leaving[place][expert] = None
        self._discipline.residency_changed(expert)

    def set_budget(self, pool: PoolId, budget_bytes: int) -> None:
        """Set the budget of `pool`; residents leave, the least wanted first, until the rest fits."""
        if pool not in self._residency.pools:
            raise OperationRefusedError("unknown_device", unknown_device(self._residency.pools, pool))
        pinned = sum(self._residency.bytes_of(expert) for expert in self._residency.ledgers[pool].pinned)
        if pinned > budget_bytes:
            raise OperationRefusedError(
                "does_not_fit", f"{pinned} bytes are pinned on {pool}, more than {budget_bytes}"
            )
        set_target = partial(self._residency.targets_bytes.__setitem__, pool)
        old_bytes = self._residency.targets_bytes[pool]
        starved = self._starved_by(partial(set_target, budget_bytes), partial(set_target, old_bytes))
        if starved:
            largest = max(starved, key=self._residency.bytes_of)
            need_bytes = self._residency.bytes_of(largest)
            raise OperationRefusedError(
                "does_not_fit",
                f"{name_of(largest)} would fit nowhere any more: {pool} needs {need_bytes} bytes beside what is pinned",
            )

    def next_change(self, pool: PoolId) -> Unload | Resize | None:
        """Return the next change before any load of `pool`: unload leaving experts that are idle, then resize."""
        ledger, leaving = self._residency.ledgers[pool], self._residency.leaving[pool]
        if leaving:
            for expert in tuple(leaving):
                if not ledger.holds(expert):
                    del leaving[expert]
            idle = tuple(expert for expert in leaving if ledger.is_ready(expert) and ledger.users(expert) == 0)
            if idle:
                return self._unload(pool, idle)
        target_bytes = self._residency.targets_bytes[pool]
        if ledger.budget_bytes == target_bytes:
            return None
        if ledger.used_bytes <= target_bytes:
            ledger.set_budget(target_bytes)
            return Resize(pool, target_bytes)
        # plan_room counts from the old budget: what must be free there so that the new one holds the rest.
        need_bytes = ledger.budget_bytes - target_bytes
        victims = tuple(self._discipline.victims(pool, "any"))
        shed = ledger.plan_room(need_bytes, victims)
        if shed:
            return self._unload(pool, shed)
        self._residency.draining[pool].update(
            dict.fromkeys(ledger.plan_room(need_bytes, victims, when_idle=True) or ())
        )
        return None

    def wants(self, pool: PoolId) -> Iterator[Want]:
        for expert in self._residency.ledgers[pool].pinned:
            if not self._residency.ledgers[pool].holds(expert):
                yield Want(expert, "pin", "any")

    def load_failed(self, pool: PoolId, expert: ExpertId) -> bool:
        """Return True if the failed load's weights are no longer wanted; otherwise give up their pin."""
        if expert in self._residency.leaving[pool]:
            del self._residency.leaving[pool][expert]
            return True
        if self._residency.ledgers[pool].is_pinned(expert):
            self._residency.ledgers[pool].unpin(expert)
            self._residency.room_changed()
        return False

    def forget(self, experts: Iterable[ExpertId], pools: Iterable[PoolId] | None = None) -> None:
        place = tuple(self._residency.pools if pools is None else pools)
        for expert in experts:
            for pool in place:
                self._residency.ledgers[pool].unpin(expert)
        self._residency.room_changed()

    def _unload(self, pool: PoolId, experts: tuple[ExpertId, ...]) -> Unload:
        ledger = self._residency.ledgers[pool]
        for expert in experts:
            # A pinned expert leaves only for its new weights: the pin stays, and loads it again.
            was_pinned = ledger.is_pinned(expert)
            ledger.unpin(expert)
            ledger.evict(expert)
            if was_pinned:
                ledger.pin(expert)
            self._residency.leaving[pool].pop(expert, None)
        return Unload(pool, experts)

    def _starved_by(self, change: Callable[[], None], undo: Callable[[], None]) -> list[ExpertId]:
        """Make a change; undo it and return the experts that it would leave no room for, if there are any."""
        before = self._starving()
        change()
        self._residency.room_changed()
        starved = [expert for expert in self._starving() if expert not in before]
        if starved:
            undo()
            self._residency.room_changed()
        return starved

    def _starving(self) -> dict[ExpertId, None]:
        fits, experts = self._residency.fits, self._residency.experts
        return {expert: None for expert in experts if not any(fits(pool, expert) for pool in self._serving())}

    def _by_room(self, expert: ExpertId) -> list[PoolId]:
        homes = self._residency.homes(expert)
        rest = [pool for pool in self._serving() if pool not in homes]
        return [*homes, *sorted(rest, key=lambda pool: -self._residency.room_bytes(pool, expert))]

    def _serving(self) -> Iterator[PoolId]:
        return (pool for pool, facts in self._residency.pools.items() if facts.processor != "ram")

    def _named(self, expert: ExpertId, pool: PoolId | None) -> list[PoolId]:
        if expert not in self._residency.experts:
            raise OperationRefusedError("unknown_expert", f"{name_of(expert)} is not in the catalog")
        named = [place for place in self._residency.pools if pool in (None, place, device_of(place))]
        if not named:
            raise OperationRefusedError("unknown_device", unknown_device(self._residency.pools, pool))
        return named


def unknown_device(pools: Iterable[PoolId], name: str | None) -> str:
    devices = ", ".join(dict.fromkeys(map(device_of, pools)))
    return f"{name} is not a device that the policy uses: expected one of {devices}"


def _where(pool: PoolId | None) -> str:
    return "" if pool is None else f" on {pool}"
