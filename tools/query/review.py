"""A person's decision about an image or a board, through the daemon or, if none runs, under the line's locks."""

import shlex
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, select
from sqlalchemy.exc import SQLAlchemyError

from daemon.config.settings import Config
from daemon.errors import ConfigError
from daemon.storage.claims import claim
from daemon.storage.database.boards import has_serial
from daemon.storage.database.connections import StoreError, sqlite_path
from daemon.storage.database.reader import read_defect_labels
from daemon.storage.database.reviews import Review, ReviewRefusedError, WaitingFilter, history, waiting
from daemon.storage.database.schema import boards
from daemon.storage.database.store import Store
from daemon.storage.decisions import Decision, not_stored
from daemon.wire.control import ControlError, ask
from routing_rules.defects import defect_code, defect_in_words
from tools.query.reading import is_defect_used, newest_attempt, read_defect
from tools.terminal.console import DEFAULT_CONFIG, CommandError
from tools.terminal.open_line import plant_time, reading

_WAIT_S = 10.0
#: Board ids have at most so many digits; a longer text is a serial.
_MAX_DIGITS = 18


def waiting_images(settings: Config, limit: int, which: WaitingFilter | None = None) -> list[dict[str, Any]]:
    query = waiting(which).limit(limit)
    return _in_database(settings, lambda connection: [dict(row) for row in connection.execute(query).mappings()])


def find_board(settings: Config, name: str, board_type: str | None) -> int:
    """Return `name` if it is a board_id, else that of the newest attempt at the board with this serial.

    Raises CommandError if it is the board_id of one board and the serial of another, or none.
    """
    number = int(name) if name.isdecimal() and board_type is None and len(name) <= _MAX_DIGITS else None

    def find(connection: Connection) -> int:
        if number is None:
            return newest_attempt(connection, name, board_type)
        same_serial = select(boards.c.board_type).where(has_serial(name), boards.c.board_id != number)
        if (other := connection.execute(same_serial).scalar()) is None:
            return number
        if connection.execute(select(boards.c.board_id).where(boards.c.board_id == number)).scalar() is None:
            return newest_attempt(connection, name)
        words = f"{name} is the board_id of one board and the serial of another"
        raise CommandError(f"{words}: for the serial, add --type {other}; for the other, name its serial", status=2)

    return _in_database(settings, find)


def decide(config: Path, settings: Config, fields: Mapping[str, Any], *, new_code: bool = False) -> Mapping[str, Any]:
    """Write a decision and return its row. `fields` are those of control's `review`. Raises CommandError.

    A fail without a defect gets the line's own, and a label becomes its code; a code that neither rules nor results
    have is refused without `new_code`. An undo without `newest` takes back the newest decision.
    """
    try:
        decision = Decision.from_fields(fields)
    except ControlError as error:
        raise CommandError(str(error), status=2) from None
    if decision.defect is not None:
        decision = replace(decision, defect=_known_code(settings, decision.defect, is_new=new_code))
    elif decision.verdict == "fail" and (image := decision.inspection_id) is not None:
        decision = replace(decision, defect=_in_database(settings, lambda connection: read_defect(connection, image)))
    if decision.newest is None:
        newest = _newest_review(settings, decision)
        # A decision that was undone leaves the image waiting: there is nothing to overrule.
        if newest is not None and (newest.is_open or decision.verdict is None):
            decision = replace(decision, newest=newest.review_id)
    try:
        return ask(settings.endpoints.control, "review", timeout_s=_WAIT_S, **decision.fields)
    except ControlError as error:
        code, reason = error.code, error.reason
    try:
        if code == "no_daemon":
            return _write_here(config, settings, decision)
    except ReviewRefusedError as error:
        code, reason = error.code, error.reason
    raise CommandError(_conflict(config, settings, decision, reason, new_code) if code == "conflict" else reason)


def _known_code(settings: Config, typed: str, *, is_new: bool) -> str:
    """Return the code of a typed defect. Raises CommandError if it is unknown and not said to be new."""
    labels = _in_database(settings, read_defect_labels)
    code = defect_code(typed, labels)
    if code is not None:
        return code
    if not is_new and not _in_database(settings, lambda connection: is_defect_used(connection, typed)):
        known = ", ".join(defect_in_words(each, labels) for each in labels)
        problem = f"--defect: the rules have no {typed!r}, and no result has it"
        problem += f": expected one of {known}" if known else ""
        raise CommandError(f"{problem}; a new code goes with --new-code", status=2)
    return typed


def _conflict(config: Path, settings: Config, decision: Decision, reason: str, is_new: bool) -> str:
    reason = plant_time(settings.plant.clock(), reason) or reason
    newest = _newest_review(settings, decision) if decision.verdict is not None else None
    return reason if newest is None else f"{reason}; to overrule it: {_command(config, decision, newest, is_new)}"


def _write_here(config: Path, settings: Config, decision: Decision) -> Mapping[str, Any]:
    """Write to the database. The line's locks keep a daemon from starting meanwhile."""
    path = sqlite_path(settings.database)
    if not path.is_file():
        raise CommandError(f"there is no database at {path}: has this line run?")
    try:
        locks = claim(config, settings)
    except (ConfigError, OSError) as error:
        raise CommandError(f"{error}: and it does not answer at {settings.endpoints.control}") from None
    try:
        with locks, closing(Store(settings.database)) as store:
            return asdict(store.review(decision))
    except StoreError as error:
        raise CommandError(str(error)) from None
    except (SQLAlchemyError, OSError) as error:
        raise CommandError(not_stored(error)) from None


def _command(config: Path, decision: Decision, newest: Review, is_new: bool) -> str:
    """Return the command that overrules the review `newest` with the same decision."""
    subject = [str(decision.inspection_id)] if decision.board_id is None else [str(decision.board_id), "--board"]
    words = ["coserve", "review", *subject, str(decision.verdict)]
    for name in ("defect", "note", "reviewer"):
        if (value := getattr(decision, name)) is not None:
            words += [f"--{name}", value]
    words += ["--new-code"] if is_new else []
    if config != DEFAULT_CONFIG:
        words += ["--config", str(config)]
    return shlex.join([*words, "--after", str(newest.review_id)])


def _newest_review(settings: Config, decision: Decision) -> Review | None:
    subject = decision.inspection_id, decision.board_id
    past = _in_database(settings, lambda connection: history(connection, *subject))
    return past[-1] if past else None


def _in_database(settings: Config, read: Callable[[Connection], Any]) -> Any:
    with reading(settings) as engine, engine.connect() as connection:
        return read(connection)
