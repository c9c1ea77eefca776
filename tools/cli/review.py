"""`coserve review`: decide about an image from the terminal, through the daemon or, where none runs, in its place."""

import getpass
import shlex
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from tools.cli.console import DEFAULT_CONFIG, AsJson, ConfigOption, console, fail, print_json

if TYPE_CHECKING:
    from daemon.config.settings import Config
    from daemon.storage.database.reviews import Review

_WAIT_S = 10.0


def register(app: typer.Typer) -> None:
    """Add this module's commands to `app`."""
    app.command()(review)


def review(
    image: Annotated[
        int | None, typer.Argument(metavar="ID", min=1, help="The image: its inspection_id.", show_default=False)
    ] = None,
    verdict: Annotated[
        str | None, typer.Argument(metavar="VERDICT", help="pass, fail, unknown or review.", show_default=False)
    ] = None,
    defect: Annotated[
        str | None, typer.Option(metavar="CODE", help="What is wrong, with fail; the line's own where none is named.")
    ] = None,
    note: Annotated[str | None, typer.Option(metavar="TEXT", help="What the next reader should know.")] = None,
    reviewer: Annotated[
        str | None, typer.Option(metavar="NAME", help="Who decides; without it, the user of this terminal.")
    ] = None,
    after: Annotated[
        int | None, typer.Option(metavar="REVIEW", min=1, help="Overrule this review, which you have seen.")
    ] = None,
    undo: Annotated[
        int | None, typer.Option("--undo", metavar="ID", min=1, help="Take back the newest decision about this image.")
    ] = None,
    show: Annotated[bool, typer.Option("--list", help="Print what waits for a decision, oldest board first.")] = False,
    limit: Annotated[int, typer.Option(min=1, max=10_000, help="Images of --list.")] = 50,
    config: ConfigOption = DEFAULT_CONFIG,
    as_json: AsJson = False,
) -> None:
    """Decide about an image: what a person says counts, the line's verdict stays beside it.

    Example: coserve review 1042 fail --defect D207 --note "pad 3" --reviewer Eva --config demo/coserve.yaml
    """
    asked = (show, undo is not None, image is not None)
    if sum(asked) != 1:
        fail("name an image and a verdict, or --undo ID, or --list: see coserve review --help", status=2)
    from tools.cli.open_line import settings_of

    settings = settings_of(config)
    if show:
        _list(settings, limit, as_json)
        return
    fields: dict[str, Any] = {"reviewer": reviewer or getpass.getuser(), "newest": after}
    if undo is not None:
        if verdict is not None or defect is not None or note is not None:
            fail("--undo takes no verdict, defect or note: it restores the decision before", status=2)
        fields |= {"inspection_id": undo, "undo": True, "newest": after or _newest(settings, undo)}
    elif verdict is None:
        fail("which verdict? pass, fail, unknown or review: coserve review ID VERDICT", status=2)
    else:
        assert image is not None
        fields |= {"inspection_id": image, "verdict": verdict, "defect": defect, "note": note}
        if verdict == "fail" and defect is None:
            fields["defect"] = _own_defect(settings, image)
    written = _write(settings, {name: value for name, value in fields.items() if value is not None}, config)
    if as_json:
        print_json(written)
    else:
        console.print(_sentence(written, is_undone=undo is not None), markup=False)


def _sentence(written: Mapping[str, Any], *, is_undone: bool) -> str:
    defect = f" {written['defect']}" if written["defect"] else ""
    what = f"image {written['inspection_id']} is {written['verdict']}{defect}"
    return f"{what}{' again' if is_undone else ''}, says {written['reviewer']} (review {written['review_id']})"


def _write(settings: "Config", fields: dict[str, Any], config: Path) -> Mapping[str, Any]:
    """By the daemon, or here where none runs; what was written. Leaves with 1 or 2 where nothing was."""
    from daemon.storage.review_requests import decision
    from daemon.wire.control import ControlError, ask

    try:
        decision(fields)
    except ControlError as error:
        fail(str(error), status=2)
    if "newest" not in fields and (waits_since := _newest_open(settings, fields["inspection_id"])) is not None:
        fields["newest"] = waits_since
    try:
        return ask(settings.endpoints.control, "review", timeout_s=_WAIT_S, **fields)
    except ControlError as error:
        if error.code == "no_daemon":
            return _write_here(settings, fields, config)
        _refuse(error.code, error.reason, fields, settings, config)


def _write_here(settings: "Config", fields: dict[str, Any], config: Path) -> Mapping[str, Any]:
    """No daemon runs: the line's locks keep it so until this is done."""
    from sqlalchemy.exc import SQLAlchemyError

    from daemon.errors import StartError
    from daemon.host.lock import claim
    from daemon.storage.database.connections import StoreError, sqlite_path
    from daemon.storage.database.reviews import ReviewRefusedError
    from daemon.storage.database.store import open_store
    from daemon.storage.review_requests import decision, not_stored

    path = sqlite_path(settings.database)
    if path is not None and not path.is_file():
        fail(f"there is no database at {path}: has this line run?", status=1)
    try:
        locks = claim(path, settings.journal)
    except (StartError, OSError) as error:
        fail(f"{error}: and it does not answer at {settings.endpoints.control}", status=1)
    try:
        store = open_store(settings.database)
        try:
            return asdict(store.review(decision(fields)))
        finally:
            store.close()
    except StoreError as error:
        fail(str(error), status=1)
    except ReviewRefusedError as error:
        _refuse(error.code, error.reason, fields, settings, config)
    except (SQLAlchemyError, OSError) as error:
        fail(not_stored(error), status=1)
    finally:
        for lock in locks:
            lock.release()


def _refuse(code: str, reason: str, fields: dict[str, Any], settings: "Config", config: Path) -> NoReturn:
    """Say why nothing was written, and how to overrule what was seen."""
    if code == "conflict" and fields.get("verdict") is not None:
        newest = _newest(settings, fields["inspection_id"])
        if newest is not None:
            reason += f"; to overrule it: {_again(fields, newest, config)}"
    fail(reason, status=1)


def _again(fields: Mapping[str, Any], newest: int, config: Path) -> str:
    """The command once more, with all that was said, for a decision after `newest`."""
    words = ["coserve", "review", str(fields["inspection_id"]), str(fields["verdict"])]
    for name in ("defect", "note", "reviewer"):
        if fields.get(name) is not None:
            words += [f"--{name}", str(fields[name])]
    if config != DEFAULT_CONFIG:
        words += ["--config", str(config)]
    return shlex.join([*words, "--after", str(newest)])


def _list(settings: "Config", limit: int, as_json: bool) -> None:
    from daemon.storage.database.reviews import waiting
    from tools.cli.open_line import reading
    from tools.query.table import print_rows

    with reading(settings) as engine, engine.connect() as connection:
        rows = [dict(row) for row in connection.execute(waiting().limit(limit + 1)).mappings()]
    if as_json:
        print_json(rows[:limit])
        return
    if not rows:
        console.print("nothing waits for a decision")
        return
    columns = ("id", "serial", "designator", "line says", "defect", "since", "component", "board", "lot", "picture")
    cells = [
        (
            *(row["inspection_id"], f"{row['serial']} #{row['attempt']}", row["designator"], row["verdict"]),
            *(row["defect"] or row["reason"], _shortly(row["completed_at"]), row["component"], row["board_type"]),
            *(row["lot"], row["image_path"]),
        )
        for row in rows[:limit]
    ]
    print_rows("Waiting for a decision", columns, cells, all_columns=False, more="--json has them")
    if len(rows) > limit:
        console.print(f"and more: --limit {limit * 2}")


def _shortly(at: str | None) -> str | None:
    """`2026-11-21T09:28:11.123Z` without what nobody decides by: 11-21 09:28Z."""
    return None if at is None else f"{at[5:10]} {at[11:16]}Z"


def _own_defect(settings: "Config", inspection_id: int) -> str | None:
    """What the line itself found wrong, so that to agree needs no code."""
    from sqlalchemy import select

    from daemon.storage.database.schema import inspections
    from tools.cli.open_line import reading

    table = inspections.c
    of_fail = select(table.defect).where(table.inspection_id == inspection_id, table.verdict == "fail")
    with reading(settings) as engine, engine.connect() as connection:
        return connection.execute(of_fail).scalar()


def _newest(settings: "Config", inspection_id: int) -> int | None:
    past = _history(settings, inspection_id)
    return past[-1].review_id if past else None


def _newest_open(settings: "Config", inspection_id: int) -> int | None:
    """The newest row where it leaves the image waiting, as one does that undoes: there is no decision to overrule."""
    past = _history(settings, inspection_id)
    return past[-1].review_id if past and past[-1].is_open else None


def _history(settings: "Config", inspection_id: int) -> "list[Review]":
    from daemon.storage.database.reviews import history
    from tools.cli.open_line import reading

    with reading(settings) as engine, engine.connect() as connection:
        return history(connection, inspection_id)
