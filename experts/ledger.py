"""The bytes of one pool: which experts are resident, loading, or protected from eviction.

Pure accounting. `plan_room` changes nothing; the other methods carry out what a plan allowed, so each raises
`LedgerError` on a step that would break `used + free == budget`.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from experts.spec import ExpertId


class LedgerError(Exception):
    """A step that the plan would not have allowed: a defect in the caller, never the user's mistake."""


@dataclass(slots=True)
class _Entry:
    weights_bytes: int
    ready: bool = False
    users: int = 0
    #: Batches among the users that hang; nothing waits for their end.
    hung: int = 0


_ABSENT = _Entry(0)


class Ledger:
    """One pool's account. A loading expert already owns its bytes, so that loads in flight never overbook."""

    def __init__(self, pool: str, budget_bytes: int) -> None:
        if budget_bytes < 0:
            raise LedgerError(f"pool {pool}: a budget of {budget_bytes} bytes is negative")
        self.pool = pool
        self.budget_bytes = budget_bytes
        self._used_bytes = 0
        self._held_bytes = 0
        self.loading_count = 0
        self._entries: dict[ExpertId, _Entry] = {}
        #: Experts that may not be evicted, resident already or still to be loaded.
        self.pinned: dict[ExpertId, None] = {}

    @property
    def used_bytes(self) -> int:
        """Bytes of resident and loading experts, and those that a hung load still holds."""
        return self._used_bytes

    @property
    def free_bytes(self) -> int:
        return self.budget_bytes - self._used_bytes

    @property
    def resident(self) -> tuple[ExpertId, ...]:
        return tuple(expert for expert, entry in self._entries.items() if entry.ready)

    @property
    def loading(self) -> tuple[ExpertId, ...]:
        return tuple(expert for expert, entry in self._entries.items() if not entry.ready)

    def holds(self, expert: ExpertId) -> bool:
        return expert in self._entries

    def is_ready(self, expert: ExpertId) -> bool:
        return self._entries.get(expert, _ABSENT).ready

    def is_loading(self, expert: ExpertId) -> bool:
        entry = self._entries.get(expert)
        return entry is not None and not entry.ready

    def is_pinned(self, expert: ExpertId) -> bool:
        return expert in self.pinned

    def users(self, expert: ExpertId) -> int:
        return self._entries.get(expert, _ABSENT).users

    def bytes_of(self, expert: ExpertId) -> int:
        """Bytes that `expert` owns here, 0 if none."""
        return self._entries.get(expert, _ABSENT).weights_bytes

    def is_evictable(self, expert: ExpertId) -> bool:
        entry = self._entries.get(expert, _ABSENT)
        return entry.ready and entry.users == 0 and expert not in self.pinned

    def plan_room(
        self, need_bytes: int, candidates: Iterable[ExpertId], *, when_idle: bool = False
    ) -> tuple[ExpertId, ...] | None:
        """Return the experts to evict, in the order of `candidates`, so that `need_bytes` fit; None if they cannot.

        `when_idle` plans for later, when experts now in use may be evicted too.
        """
        missing_bytes = need_bytes - self.free_bytes
        if missing_bytes <= 0:
            return ()
        victims: dict[ExpertId, int] = {}
        freed_bytes = 0
        for expert in candidates:
            if expert in victims or not (self._could_go(expert) if when_idle else self.is_evictable(expert)):
                continue
            victims[expert] = self._entries[expert].weights_bytes
            freed_bytes += victims[expert]
            if freed_bytes >= missing_bytes:
                break
        if freed_bytes < missing_bytes:
            return None
        # A big victim found last can make the small ones found before it unnecessary.
        for expert, size_bytes in list(victims.items()):
            if freed_bytes - size_bytes >= missing_bytes:
                freed_bytes -= size_bytes
                del victims[expert]
        return tuple(victims)

    def begin_load(self, expert: ExpertId, weights_bytes: int, evict: tuple[ExpertId, ...] = ()) -> None:
        if expert in self._entries:
            raise LedgerError(f"pool {self.pool}: {expert} is already resident or loading")
        for victim in evict:
            self.evict(victim)
        if weights_bytes > self.free_bytes:
            raise LedgerError(f"pool {self.pool}: {expert} needs {weights_bytes} bytes, {self.free_bytes} are free")
        self._entries[expert] = _Entry(weights_bytes)
        self._used_bytes += weights_bytes
        self.loading_count += 1

    def finish_load(self, expert: ExpertId) -> None:
        self._loading(expert).ready = True
        self.loading_count -= 1

    def abandon_load(self, expert: ExpertId) -> None:
        self._used_bytes -= self._loading(expert).weights_bytes
        self.loading_count -= 1
        del self._entries[expert]

    def hold(self, expert: ExpertId) -> None:
        """Stop awaiting a load that hangs; its bytes may still be written, so they stay taken."""
        self._held_bytes += self._loading(expert).weights_bytes
        self.loading_count -= 1
        del self._entries[expert]

    def give_back(self, held_bytes: int) -> None:
        if held_bytes > self._held_bytes:
            raise LedgerError(f"pool {self.pool}: {held_bytes} bytes come back, {self._held_bytes} are held")
        self._held_bytes -= held_bytes
        self._used_bytes -= held_bytes

    def evict(self, expert: ExpertId) -> None:
        if not self.is_evictable(expert):
            raise LedgerError(f"pool {self.pool}: {expert} is absent, loading, in use or pinned and cannot be evicted")
        self._used_bytes -= self._entries.pop(expert).weights_bytes

    def use(self, expert: ExpertId) -> None:
        if not self.is_ready(expert):
            raise LedgerError(f"pool {self.pool}: {expert} is not resident and cannot run")
        self._entries[expert].users += 1

    def release(self, expert: ExpertId) -> None:
        entry = self._entries.get(expert)
        if entry is None or entry.users == 0:
            raise LedgerError(f"pool {self.pool}: {expert} is not in use")
        entry.users -= 1

    def hang(self, expert: ExpertId) -> None:
        """Mark a batch of `expert` as hung: the expert keeps its weights, and no load waits for the batch to end."""
        self._entries[expert].hung += 1

    def release_hung(self, expert: ExpertId) -> None:
        self._entries[expert].hung -= 1
        self.release(expert)

    def hung(self, expert: ExpertId) -> int:
        return self._entries.get(expert, _ABSENT).hung

    def pin(self, expert: ExpertId) -> None:
        """Keep `expert` from eviction; it may be pinned before it is loaded."""
        self.pinned[expert] = None

    def unpin(self, expert: ExpertId) -> None:
        self.pinned.pop(expert, None)

    def set_budget(self, budget_bytes: int) -> None:
        if budget_bytes < self._used_bytes:
            raise LedgerError(f"pool {self.pool}: {self._used_bytes} bytes are in use, more than {budget_bytes}")
        self.budget_bytes = budget_bytes

    def _could_go(self, expert: ExpertId) -> bool:
        return self.is_ready(expert) and expert not in self.pinned and not self._entries[expert].hung

    def _loading(self, expert: ExpertId) -> _Entry:
        entry = self._entries.get(expert)
        if entry is None or entry.ready:
            raise LedgerError(f"pool {self.pool}: {expert} is not loading")
        return entry
