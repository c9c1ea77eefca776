"""`coserve changes`: who changed what about the line, and when."""

from typing import Annotated, Any

import typer

from tools.terminal.console import DEFAULT_CONFIG, AsJson, ConfigOption, console, print_json, print_table
from tools.terminal.option_values import shift_option, since_option, time_window, until_option

#: The newest of a table.
_SHOWN = 50


def changes(
    config: ConfigOption = DEFAULT_CONFIG,
    since: Annotated[str | None, since_option("Changes of then or later: 2026-11-21, today, 2h (ago).")] = None,
    until: Annotated[str | None, until_option("Changes before; a day counts whole.")] = None,
    shift: Annotated[str | None, shift_option()] = None,
    subject: Annotated[
        str | None,
        typer.Option(metavar="SUBJECT", help="Of this alone: rules, CoServe, an expert, or a key of coserve.yaml."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """What people and the daemon changed, newest first: starts, rules, experts, limits, pins, keys, settings, restores.

    Example: coserve changes --subject rules --config demo/coserve.yaml
    """
    from sqlalchemy import select

    from daemon.storage.database import schema
    from tools.terminal.open_line import opened, times_note, with_plant_times

    since, until = time_window(config, since, until, shift)
    table = schema.changes.c
    query = select(schema.changes).order_by(table.at.desc(), table.change_id.desc())
    query = query if since is None else query.where(table.at >= since)
    query = query if until is None else query.where(table.at < until)
    query = query if subject is None else query.where(table.subject == subject)
    with opened(config) as (settings, engine), engine.connect() as connection:
        query = query if as_json else query.limit(_SHOWN + 1)
        rows = [dict(row) for row in connection.execute(query).mappings()]
    if as_json:
        print_json(rows)
        return
    plant = settings.plant.clock()
    shown = [with_plant_times(plant, row, "short") for row in rows[:_SHOWN]]
    cells = [(row["at"], row["who"], row["what"], row["subject"], _old_and_new(row)) for row in shown]
    columns = ("at", "who", "what", "subject", "old → new: note")
    print_table(f"Changes; {times_note(plant)}", columns, cells, unbroken=("at", "what"))
    if len(rows) > _SHOWN:
        console.print(f"The newest {_SHOWN}; --until shows earlier ones, --json all")


def _old_and_new(row: dict[str, Any]) -> str | None:
    """Return `old → new: note` with the parts that there are."""
    old, new, note = (row[name] for name in ("old", "new", "note"))
    change = f"{old or '–'} → {new or '–'}" if old else new
    return ": ".join(filter(None, (change, note))) or None
