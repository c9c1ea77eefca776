"""`coserve db …`: the results database of a line, also while it runs."""

from dataclasses import asdict, fields
from datetime import timedelta
from pathlib import Path
from time import monotonic, sleep, time
from typing import Annotated, Any

import typer

from daemon.config.plant_time import Span
from daemon.units import count_text, size_text, utc_text, wall_seconds
from daemon.wire.control import ControlError, ask
from experts.people import current_user
from tools.terminal.console import DEFAULT_CONFIG, AsJson, ConfigOption, end_with, fail, need_folder, print_step, say
from tools.terminal.open_line import reading, settings_of
from tools.terminal.option_values import Commands, Note, since_option, time_window, until_option

db_app = typer.Typer(
    cls=Commands, no_args_is_help=True, help="Copy, check and prune the results database, also while the line runs."
)

_POLL_S = 0.2


@db_app.command()
def backup(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The copy; it must not exist yet.", show_default=False)],
    config: ConfigOption = DEFAULT_CONFIG,
    as_json: AsJson = False,
) -> None:
    """Copy the database as it is now to one file, while the line runs (`coserve backup` copies the whole line).

    Example: coserve db backup /mnt/backup/inspection.db --config demo/coserve.yaml
    """
    settings = settings_of(config)
    from daemon.storage.database.connections import sqlite_path
    from daemon.storage.database.upkeep import copy_database

    database = sqlite_path(settings.database)
    if not database.is_file():
        fail(f"there is no database at {database}: has this line run? coserve run {config}", status=1)
    if file.exists():
        fail(f"{file} exists already: name another file, or delete it", status=2)
    need_folder(file.parent)
    copy_database(database, file)
    size_bytes = file.stat().st_size
    say({"file": str(file), "bytes": size_bytes}, f"{file}: {size_text(size_bytes)}", as_json=as_json)


@db_app.command()
def shifts(
    config: ConfigOption = DEFAULT_CONFIG,
    since: Annotated[str | None, since_option("Days and shifts then or later")] = "31d",
    until: Annotated[str | None, until_option("Days and shifts before")] = None,
) -> None:
    """Print the plant's days and shifts as SQL, a temporary table `plant_times`, to join results in UTC with.

    Example: coserve db shifts --since 31d --config demo/coserve.yaml
    """
    plant = settings_of(config).plant.clock()
    since, until = time_window(config, since, until)
    span = Span(str(since), until or utc_text(time()))
    first, last = (plant.today(wall_seconds(edge)) for edge in (span.since, span.until))
    days = [first + timedelta(days=number) for number in range((last - first).days + 1)]
    named = [("day", day, plant.days(day)) for day in days]
    named += [(shift.name, shift.day, shift) for shift in plant.shifts(span)]
    print("CREATE TEMP TABLE plant_times (name TEXT, day TEXT, since TEXT, until TEXT);")
    for name, day, times in named:  # names of shifts have no quotes
        print(f"INSERT INTO plant_times VALUES ('{name}', '{day}', '{times.since}', '{times.until}');")  # noqa: S608


@db_app.command()
def check(
    config: ConfigOption = DEFAULT_CONFIG,
    since: Annotated[str | None, since_option("Judge only boards again that closed then or later")] = None,
    images: Annotated[bool, typer.Option("--images", help="Also compare kept pictures with their sha256.")] = False,
    as_json: AsJson = False,
) -> None:
    """Look for damage and for changed rows, while the line runs. Status 1 if there is any.

    Pages, references, numbers, files; texts with their sha256, verdicts with answers and rules, boards with images,
    reviews. A problem names table, key, and what was expected. With --since only boards that closed then or later are
    judged again.

    Example: coserve db check --since today --config demo/coserve.yaml
    """
    settings = settings_of(config)
    from daemon.storage.database.schema import boards
    from daemon.storage.database.upkeep import check_database
    from tools.backup.gentle import step_back
    from tools.query.evidence import check_evidence

    since, _ = time_window(config, since, None)
    step_back()
    began_s = monotonic()
    problems = check_database(settings.database, settings.images, settings.journal, print_step)
    with reading(settings) as engine:
        is_chosen = None if since is None else boards.c.completed_at >= since
        evidence = check_evidence(engine.connect, settings.images, is_chosen, with_pictures=images, on_step=print_step)
    problems += evidence.problems
    checked = (
        f"{count_text(evidence.boards, 'board')}, {count_text(evidence.images, 'image')},"
        f" {count_text(evidence.pictures, 'picture')} checked in {monotonic() - began_s:.1f} s"
    )
    more = "\n".join([*evidence.gaps, checked])
    end_with(settings.database, problems, evidence.counts, more=more, as_json=as_json)


@db_app.command()
def prune(config: ConfigOption = DEFAULT_CONFIG, note: Note = None, as_json: AsJson = False) -> None:
    """Delete now what the configuration's `retention` no longer keeps, by the running daemon or, without one, here.

    Example: coserve db prune --config demo/coserve.yaml
    """
    settings = settings_of(config)
    try:
        pruned = _prune_by_daemon(settings.endpoints.control, note)
    except ControlError as error:
        if error.code != "no_daemon":
            fail(str(error), status=1)
        from daemon.storage.claims import claim
        from daemon.storage.retention import prune_alone

        with claim(config, settings):  # the line's locks keep a daemon from starting
            pruned = asdict(prune_alone(settings.database, settings.images, settings.retention, note))
    sentence = (
        f"pruned {count_text(pruned['images'], 'image')} ({size_text(pruned['image_bytes'])}),"
        f" {count_text(pruned['boards'], 'board')} with {count_text(pruned['inspections'], 'inspection')},"
        f" {count_text(pruned['stray_files'], 'stray file')}"
    )
    say(pruned, sentence, as_json=as_json)


def _prune_by_daemon(control: str, note: str | None) -> dict[str, Any]:
    from daemon.storage.retention import PruneCounts

    before = ask(control, "prune", begin=False)
    now = ask(control, "prune", begin=True, who=current_user(), note=note)
    while now["pruning"]:
        sleep(_POLL_S)
        now = ask(control, "prune", begin=False)
    return {count.name: now[count.name] - before[count.name] for count in fields(PruneCounts)}
