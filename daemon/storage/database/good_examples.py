"""The newest passes of each component, whose pictures are kept to compare with.

To copy every pass would cost the line more than they are worth: a component's examples are renewed once a minute at
most. Only what was kept as an example goes for a newer one: passes that an earlier `retention.keep` kept stay as long
as the other settings say.
"""

from collections import defaultdict

from sqlalchemy import Connection, exists, select, update

from daemon.storage.database.schema import inspections, pending, reviews
from daemon.storage.database.transaction import Transaction

_RENEW_S = 60.0
#: Kept passes among which the newest of each component are looked for.
_MAX_PASSES = 10_000


def newest_passes(connection: Connection, count: int) -> dict[str, list[int]]:
    """Return the newest `count` kept passes of each component, the oldest first."""
    table = inspections.c
    query = select(table.component, table.inspection_id).where(table.verdict == "pass", table.image_path.is_not(None))
    newest: defaultdict[str, list[int]] = defaultdict(list)
    for component, inspection_id in connection.execute(query.order_by(table.inspection_id.desc()).limit(_MAX_PASSES)):
        if len(newest[component]) < count:
            newest[component].insert(0, inspection_id)
    return dict(newest)


class GoodExamples:
    """Chooses passes at their verdict, in the writer's thread; `count` of each component, none if that is 0."""

    def __init__(self, connection: Connection, count: int) -> None:
        self._count = count
        self._ids: dict[str, list[int]] = newest_passes(connection, count) if count else {}
        self._renewed_s: dict[str, float] = {}

    def choose(self, component: str, inspection_id: int, now_s: float) -> bool:
        """Return True if the picture of this pass is to be kept: some are missing, or the newest is a minute old."""
        ids = self._ids.get(component, [])
        is_due = len(ids) < self._count or now_s - self._renewed_s.get(component, -_RENEW_S) >= _RENEW_S
        if not self._count or not is_due:
            return False
        self._ids[component] = [*ids, inspection_id]
        self._renewed_s[component] = now_s
        return True

    @property
    def are_too_many(self) -> bool:
        return any(len(ids) > self._count for ids in self._ids.values())

    def drop(self, tx: Transaction) -> list[str]:
        """Forget the pictures beyond `count`, and return their paths. One that a person reviewed stays, as evidence."""
        extra = [(one, ids) for ids in self._ids.values() for one in ids[: -self._count]]
        table = inspections.c
        is_waiting = exists().where(pending.c.inspection_id == table.inspection_id)
        is_reviewed = exists().where(reviews.c.inspection_id == table.inspection_id)
        query = select(table.inspection_id, table.image_path, is_waiting, is_reviewed)
        query = query.where(table.inspection_id.in_([one for one, _ in extra]))
        rows = {row[0]: row for row in tx.connection.execute(query)}
        paths: dict[int, str] = {}
        for one, ids in extra:
            _, path, waits, reviewed = rows.get(one, (one, None, False, False))
            if waits:
                continue  # its copy is under way: next time
            ids.remove(one)
            if path is not None and not reviewed:
                paths[one] = path
        tx.connection.execute(update(inspections).where(table.inspection_id.in_(paths)).values(image_path=None))
        return list(paths.values())
