"""Accepted images into rows: which attempt each belongs to, and the attempts that open with them."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from daemon.records import Accepted, Arrival, JournalKey
from daemon.storage.database import rows
from daemon.storage.database.attempts import Place, Plan
from daemon.storage.database.boards import Board, plan_text
from daemon.storage.database.schema import boards, inspections, pending, recipes, rules_versions
from daemon.storage.database.transaction import Transaction

if TYPE_CHECKING:
    from routing_rules.routes import Routes

Row = dict[str, Any]


def accept(tx: Transaction, group: Sequence[tuple[Arrival, JournalKey]], routes: "Routes") -> list[Accepted]:
    """Rows for images whose bytes are durable already; `routes` are the rules that new attempts open with."""
    opened: list[Row] = []
    images: list[Row] = []
    waiting: list[Row] = []
    accepted: list[Accepted] = []
    for arrival, key in group:
        board_row, late = _place(tx, arrival, routes, opened)
        image = rows.inspection_row(arrival, tx.next_inspection_id(), board_row, late=late, at=tx.at)
        images.append(image)
        waiting.append(rows.pending_row(image["inspection_id"], key, arrival.pixels))
        accepted.append(rows.accepted(image, waiting[-1], arrival.board.type))
        tx.segments[key.segment] += 1
    tx.add(boards, opened)
    tx.add(inspections, images)
    tx.add(pending, waiting)
    return accepted


def _place(tx: Transaction, arrival: Arrival, routes: "Routes", opened: list[Row]) -> tuple[Row, bool]:
    """The row of the attempt that takes `arrival`, and whether it comes late there."""
    board = tx.board(arrival.board.type, arrival.board.serial)
    choice = board.choose(arrival.board.attempt, arrival.component, arrival.designator)
    if choice.opens:
        opened.append(_open(tx, board, arrival, routes, choice.number))
    board.attempts[choice.number].take(arrival.component, arrival.designator)
    return board.rows[choice.number], choice.late


def _open(tx: Transaction, board: Board, arrival: Arrival, routes: "Routes", number: int) -> Row:
    plan = _plan(routes, arrival.board.type)
    _keep_recipe(tx, routes, arrival.board.type, plan)
    row: Row = {
        "board_id": tx.next_board_id(),
        "board_type": arrival.board.type,
        "serial": arrival.board.serial,
        "attempt": number,
        "lot": arrival.board.lot,
        "station": arrival.board.station,
        "first_seen_at": tx.at,
        "completed_at": None,
        "expected": plan.expected,
        "inspected": 0,
        "verdict": None,
        "reason": None,
        "rules_version": routes.version,
        "seq": None,
        "failed": None,
        "missing": None,
    }
    board.add(row, plan)
    if plan.time_limit_s is not None:
        tx.due_added.append((tx.now_s + plan.time_limit_s, arrival.board.type, arrival.board.serial, number))
    return row


def _plan(routes: "Routes", board_type: str) -> Plan:
    """What the recipe expects; nothing where a reload took the recipe while the image was on its way."""
    recipe = routes.recipes.get(board_type)
    if recipe is None:
        return Plan(())
    places = tuple(
        Place(component, position.quantity, tuple(position.designators) or None)
        for component, position in recipe.positions.items()
    )
    return Plan(places, recipe.time_limit_s)


def keep_rules(tx: Transaction, routes: "Routes") -> None:
    """The rules that are in force, once."""
    tx.add_once(
        rules_versions,
        {"rules_version": routes.version},
        lambda: {
            "rules_version": routes.version,
            "sha256": routes.sha256,
            "loaded_at": tx.at,
            "text": routes.text,
        },
    )


def _keep_recipe(tx: Transaction, routes: "Routes", board_type: str, plan: Plan) -> None:
    """Keep the rules and this board's part of them: an attempt keeps the rules it opened with."""
    keep_rules(tx, routes)
    key = {"rules_version": routes.version, "board_type": board_type}
    tx.add_once(recipes, key, lambda: {**key, "time_limit_s": plan.time_limit_s, "positions": plan_text(plan)})
