"""A person's decision about an image or a board, through the daemon or, if none runs, under the line's locks."""

import shlex
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sqlalchemy import Connection
from sqlalchemy.exc import SQLAlchemyError

from daemon.config.settings import Config
from daemon.errors import ConfigError
from daemon.storage.claims import claim
from daemon.storage.database.connections import StoreError, sqlite_path
from daemon.storage.database.reviews import Review, ReviewRefusedError, history, waiting
from daemon.storage.database.store import open_store
from daemon.storage.review_requests import decision, not_stored
from daemon.wire.control import ControlError, ask
from tools.query.reading import read_defect
from tools.terminal.console import DEFAULT_CONFIG, CommandError
from tools.terminal.open_line import reading

_WAIT_S = 10.0


class DecisionError(CommandError):
    """Nothing was written; the text says why."""


def waiting_images(settings: Config, limit: int) -> list[dict[str, Any]]:
    """Return images that wait for a decision, oldest board first."""
    return _in_database(
        settings, lambda connection: [dict(row) for row in connection.execute(waiting().limit(limit)).mappings()]
    )


def decide(config: Path, settings: Config, fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """Write a decision, or undo one; return its row. `fields` are those of control's `review`. Raises DecisionError."""
    request = {name: value for name, value in fields.items() if value is not None}
    try:
        decision(request)
    except ControlError as error:
        raise DecisionError(str(error), status=2) from None
    if request.get("verdict") == "fail" and "defect" not in request and "inspection_id" in request:
        defect = _in_database(settings, lambda connection: read_defect(connection, request["inspection_id"]))
        request |= {"defect": defect} if defect is not None else {}
    if "newest" not in request:
        newest = _newest_review(settings, request)
        # A decision that was undone leaves the image waiting: there is nothing to overrule.
        if newest is not None and (newest.is_open or "undo" in request):
            request["newest"] = newest.review_id
    try:
        return ask(settings.endpoints.control, "review", timeout_s=_WAIT_S, **request)
    except ControlError as error:
        code, reason = error.code, error.reason
    try:
        if code == "no_daemon":
            return _write_here(config, settings, request)
    except ReviewRefusedError as error:
        code, reason = error.code, error.reason
    if code == "conflict" and "verdict" in request:
        newest = _newest_review(settings, request)
        reason += f"; to overrule it: {_command(config, request, newest)}" if newest is not None else ""
    raise DecisionError(reason)


def _write_here(config: Path, settings: Config, request: Mapping[str, Any]) -> Mapping[str, Any]:
    """Write to the database. The line's locks keep a daemon from starting meanwhile."""
    path = sqlite_path(settings.database)
    if path is not None and not path.is_file():
        raise DecisionError(f"there is no database at {path}: has this line run?")
    try:
        locks = claim(config, settings)
    except (ConfigError, OSError) as error:
        raise DecisionError(f"{error}: and it does not answer at {settings.endpoints.control}") from None
    try:
        with locks, closing(open_store(settings.database)) as store:
            return asdict(store.review(decision(request)))
    except StoreError as error:
        raise DecisionError(str(error)) from None
    except (SQLAlchemyError, OSError) as error:
        raise DecisionError(not_stored(error)) from None


def _command(config: Path, request: Mapping[str, Any], newest: Review) -> str:
    """Return the command that overrules the review `newest` with the same decision."""
    subject = [str(request["board_id"]), "--board"] if "board_id" in request else [str(request["inspection_id"])]
    words = ["coserve", "review", *subject, str(request["verdict"])]
    for name in ("defect", "note", "reviewer"):
        if name in request:
            words += [f"--{name}", str(request[name])]
    if config != DEFAULT_CONFIG:
        words += ["--config", str(config)]
    return shlex.join([*words, "--after", str(newest.review_id)])


def _newest_review(settings: Config, request: Mapping[str, Any]) -> Review | None:
    subject = request.get("inspection_id"), request.get("board_id")
    past = _in_database(settings, lambda connection: history(connection, *subject))
    return past[-1] if past else None


def _in_database(settings: Config, read: Callable[[Connection], Any]) -> Any:
    with reading(settings) as engine, engine.connect() as connection:
        return read(connection)
