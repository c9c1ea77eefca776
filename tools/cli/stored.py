"""Copy out and check what a line has stored: `coserve export`, `backup`, `restore`, `db …`."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, fields
from datetime import timedelta
from pathlib import Path
from time import monotonic, sleep, time
from typing import Annotated, Any

import typer

from daemon.config.plant_time import Span
from daemon.host.folders import make_folder
from daemon.units import count_text, size_text, utc_text, wall_seconds
from daemon.wire.control import ControlError, ask
from experts.people import current_user
from tools.cli.results import Texts
from tools.terminal.console import (
    DEFAULT_CONFIG,
    AsJson,
    Bars,
    ConfigOption,
    ConfigPath,
    as_typed,
    console,
    end_with,
    errors,
    fail,
    need_file,
    need_folder,
    os_errors_end,
    print_json,
    print_step,
    say,
)
from tools.terminal.open_line import opened, reading, settings_of
from tools.terminal.option_values import Commands, Note, shift_option, since_option, time_window, until_option


def export(
    config: ConfigOption = DEFAULT_CONFIG,
    lot: Annotated[Texts, typer.Option(metavar="LOT", help="Boards of this lot; repeat for several.")] = None,
    serial: Annotated[Texts, typer.Option(metavar="SERIAL", help="Boards of this serial.")] = None,
    board_type: Annotated[Texts, typer.Option("--type", metavar="TYPE", help="Boards of this type.")] = None,
    since: Annotated[str | None, since_option("Boards that closed then or later")] = None,
    until: Annotated[str | None, until_option("Boards that closed before")] = None,
    shift: Annotated[str | None, shift_option("Boards that closed")] = None,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="A new or empty folder.")] = None,
    with_weights: Annotated[bool, typer.Option("--with-weights", help="Also the experts' weights.")] = False,
    sign: Annotated[
        Path | None, typer.Option(metavar="KEY", help="Sign it: a .sign_secret file of `coserve keys new NAME --sign`.")
    ] = None,
    verify: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Check a package instead: its files and its signature.")
    ] = None,
    key: Annotated[
        Path | None, typer.Option(metavar="KEY", help="With --verify: the signer's public key, a .sign file.")
    ] = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="With --verify: also compare its rows with the line's database of today.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Write an audit package of boards: rows, pictures, rules, versions of experts, with checksums of everything.

    --since, --until and --shift choose boards by the time they closed. The rows are one state of the database, also
    while the line runs. DIR is complete, or it is not there.

    Example: coserve export --lot L42 --out /mnt/audit/L42 --config demo/coserve.yaml
    """
    if verify is not None:
        raise SystemExit(_verify(verify, key, config if compare else None, as_json=as_json))
    if key is not None or compare:
        fail("--key and --compare check a package: name it with --verify DIR", status=2)
    since, until = time_window(config, since, until, shift)
    from tools.query.reading import BoardSelection

    selection = BoardSelection(tuple(lot or ()), tuple(serial or ()), tuple(board_type or ()), since, until)
    if out is None or selection == BoardSelection():
        fail(
            "name --out DIR and which boards: --lot, --serial, --type, --since, --until or --shift (or --verify DIR)",
            status=2,
        )
    from tools.backup.gentle import step_back
    from tools.query.formats import clean_up_on_signals
    from tools.query.package.write import write_package

    step_back()
    clean_up_on_signals()
    with opened(config) as (settings, engine), os_errors_end(out):
        make_folder(out.absolute().parent)
        report = write_package(
            *(config, settings, engine, selection, out),
            with_weights=with_weights,
            sign_with=sign,
            progress=print_step,
        )
    if as_json:
        print_json({"package": str(out), **asdict(report)})
        return
    for warning in report.warnings:
        console.print(f"warning: {warning}", style="yellow")
    console.print(
        f"{out}: {count_text(report.boards, 'board')}, {count_text(report.images, 'image')},"
        f" {count_text(report.pictures, 'picture')}; {count_text(report.files, 'file')}, {size_text(report.bytes)}"
    )
    for reason, count in report.missing.items():
        console.print(f"  {count_text(count, 'image')} without a picture: {reason}")
    console.print(f"fingerprint {report.fingerprint}\nCheck it:  {as_typed(f'export --verify {out}')}")


def _verify(package: Path, key: Path | None, config: Path | None, *, as_json: bool) -> int:
    """Print a package's differences, from the database of `config` too; return 1 if there are any."""
    from tools.query.package.verify import verify_package

    need_folder(package, "name the folder of a package of coserve export")
    with ExitStack() as stack:
        engine = None if config is None else stack.enter_context(opened(config))[1]
        stack.enter_context(os_errors_end(package))
        check = verify_package(package, key, None if engine is None else engine.connect)
    if as_json:
        print_json({"package": str(package), "is_whole": check.is_whole, **asdict(check)})
        return 0 if check.is_whole else 1
    for problem, names in (("changed", check.changed), ("missing", check.missing), ("added", check.added)):
        for name in names:
            console.print(f"{problem}: {ascii(name)[1:-1]}{' (a link)' if name in check.links else ''}")
    for problem in check.problems:
        console.print(f"{package}: {problem}")
    if check.is_signature_valid:
        console.print(f"signed by {check.signer} with the key {check.signed_by}: the signature is valid")
    elif check.is_signature_valid is None:
        signed = f"signed with the key {check.signed_by}, not checked: add --key" if check.signed_by else "not signed"
        console.print(f"{package}: {signed}")
    if engine is not None and check.is_whole:
        console.print(f"{config}: its database has the same rows")
    if check.is_whole:
        console.print(
            f"{package}: whole, {count_text(check.files, 'file')}, {count_text(check.boards or 0, 'board')},"
            f" made {check.made}"
        )
    console.print(f"fingerprint {check.fingerprint}")
    if not check.is_whole:
        console.print(f"{package}: NOT WHOLE")
    return 0 if check.is_whole else 1


ArchivePath = Annotated[Path, typer.Argument(metavar="ARCHIVE", help="A tar file.", show_default=False)]


def backup(
    config: ConfigPath,
    archive: ArchivePath,
    images: Annotated[bool, typer.Option("--images", help="Also the images that were kept.")] = False,
    with_secrets: Annotated[
        bool,
        typer.Option("--with-secrets", help="Also secret keys and tokens; the archive is then yours alone (0600)."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Write a whole line into one archive while it runs: configuration, rules, experts, results, waiting images.

    An archive of that name is replaced once the new one is complete. Run it as the daemon's user.

    Example: coserve backup /etc/coserve/coserve.yaml /mnt/backup/line.tar
    """
    need_file(config)
    place = archive.absolute()
    need_folder(place.parent)
    from tools.backup.archive import write_backup
    from tools.backup.gentle import step_back

    step_back()
    with _bar() as progress:
        report = write_backup(config, place, with_images=images, with_secrets=with_secrets, progress=progress)
    for warning in () if as_json else report["warnings"]:
        console.print(f"warning: {warning}", style="yellow")
    versions = f"; {report['versions']} kept versions of experts take {size_text(report['versions_bytes'])} of it"
    without = f"; without the {count_text(report['left_out'], 'kept image')} (--images adds them)"
    more = (versions if report["versions"] else "") + (without if report["left_out"] else "")
    size = f"{count_text(report['files'], 'file')}, {size_text(report['bytes'])}"
    text = f"{archive}: {size}, results up to seq {report['last_seq']}, {_waiting(report['waiting'])}{more}"
    say({"archive": str(archive)} | report, text, as_json=as_json)


def restore(
    archive: ArchivePath,
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A new or empty folder.", show_default=False)],
    note: Note = None,
    as_json: AsJson = False,
) -> None:
    """Make a line again from an archive, in an empty folder: `coserve run FOLDER/coserve.yaml` then goes on.

    Example: coserve restore /mnt/backup/line.tar /srv/line
    """
    need_file(archive, "name an archive of coserve backup")
    from tools.backup.restore import unpack

    with _bar() as progress:
        restored = unpack(archive, folder, progress, note)
    lacking = count_text(restored.left_out, "kept image")
    without = f"; without the {lacking}, which the archive does not hold (backup --images)"
    text = (
        f"{folder}: {count_text(restored.files, 'file')} of {restored.made}, results up to seq {restored.last_seq},"
        f" {_waiting(restored.waiting)}{without if restored.left_out else ''}; edition {restored.edition} is in"
        " force\n"
        f"Check it, then run it:  {as_typed(f'check {restored.config}')}"
    )
    say({**asdict(restored), "config": str(restored.config)}, text, as_json=as_json)


def _waiting(images: int) -> str:
    return f"{count_text(images, 'image')} that wait{'s' if images == 1 else ''}"


@contextmanager
def _bar() -> Iterator[Callable[[str, int, int], None]]:
    """Yield a function that moves a bar (name, bytes done, bytes in all), on a terminal only."""
    from tools.query.formats import clean_up_on_signals

    clean_up_on_signals()
    with Bars(console=errors, transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda name, done, total: bar.update(task, description=name[-40:], completed=done, total=total)


db_app = typer.Typer(
    cls=Commands, no_args_is_help=True, help="Copy, check and prune the results database, also while the line runs."
)

_POLL_S = 0.2


@db_app.command("backup")
def db_backup(
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


@db_app.command("check")
def db_check(
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
