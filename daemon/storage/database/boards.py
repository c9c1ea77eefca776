"""The boards that images arrive for: attempts rebuilt from rows when they are asked for, kept while they are in use."""

import json
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Connection, select

from daemon.storage.database.attempts import Attempt, Choice, Place, Plan, choose
from daemon.storage.database.schema import boards, inspections, recipes

Row = dict[str, Any]
BoardKey = tuple[str, str]

#: Boards whose attempts stay in memory; a line has a few at a time, and a forgotten one costs two queries.
_CACHED_BOARDS = 1024


@dataclass(slots=True)
class Board:
    """All attempts at one board (type, serial), with their rows in `boards` by attempt number."""

    attempts: dict[int, Attempt] = field(default_factory=dict[int, Attempt])
    rows: dict[int, Row] = field(default_factory=dict[int, Row])

    def choose(self, named: int | None, component: str, designator: str) -> Choice:
        return choose(self.attempts, named, component, designator)

    def add(self, row: Row, plan: Plan) -> Attempt:
        """An attempt as its row says: open, or closed where it has a verdict."""
        attempt = Attempt(row["board_id"], row["attempt"], plan, closed=row["verdict"] is not None)
        self.attempts[attempt.number] = attempt
        self.rows[attempt.number] = row
        return attempt


class Boards:
    """A cache of `Board`s. After a failed transaction `forget` what it touched: memory must not know more than disk."""

    def __init__(self) -> None:
        self._boards: OrderedDict[BoardKey, Board] = OrderedDict()

    def get(self, connection: Connection, board_type: str, serial: str) -> Board:
        key = (board_type, serial)
        board = self._boards.get(key)
        if board is None:
            board = self._boards[key] = _load(connection, board_type, serial)
        self._boards.move_to_end(key)
        return board

    def forget(self, keys: Iterable[BoardKey]) -> None:
        for key in keys:
            self._boards.pop(key, None)

    def trim(self) -> None:
        """Drop the least used beyond the bound; between transactions only, so that none is loaded twice in one."""
        while len(self._boards) > _CACHED_BOARDS:
            self._boards.popitem(last=False)


def plan_text(plan: Plan) -> str:
    """`recipes.positions`."""
    return json.dumps(
        [[place.component, place.quantity, place.designators] for place in plan.places], ensure_ascii=False
    )


def _plan(positions: str | None, time_limit_s: float | None) -> Plan:
    places = tuple(
        Place(component, quantity, None if designators is None else tuple(designators))
        for component, quantity, designators in json.loads(positions or "[]")
    )
    return Plan(places, time_limit_s)


def _load(connection: Connection, board_type: str, serial: str) -> Board:
    board = Board()
    found = connection.execute(
        select(boards, recipes.c.positions, recipes.c.time_limit_s)
        .join(
            recipes,
            (recipes.c.rules_version == boards.c.rules_version) & (recipes.c.board_type == boards.c.board_type),
            isouter=True,
        )
        .where(boards.c.board_type == board_type, boards.c.serial == serial)
        .order_by(boards.c.attempt)
    ).mappings()
    by_id: dict[int, Attempt] = {}
    for row in found:
        plan = _plan(row["positions"], row["time_limit_s"])
        attempt = board.add({name: row[name] for name in boards.c.keys()}, plan)  # noqa: SIM118  # a column collection
        by_id[attempt.board_id] = attempt
    if not by_id:
        return board
    images = connection.execute(
        select(
            *(inspections.c.inspection_id, inspections.c.board_id, inspections.c.component),
            *(inspections.c.designator, inspections.c.verdict, inspections.c.defect),
        )
        .where(inspections.c.board_id.in_(by_id))
        .order_by(inspections.c.inspection_id)
    )
    for inspection_id, board_id, component, designator, verdict, defect in images:
        by_id[board_id].take(component, designator)
        if verdict is not None:
            by_id[board_id].judge(inspection_id, component, designator, verdict, defect)
    return board
