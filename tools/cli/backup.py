"""`coserve backup` and `coserve restore`: a whole line into one file while it runs, and out of it again."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from daemon.units import count_text, size_text
from tools.terminal.console import AsJson, ConfigPath, as_typed, console, errors, need_file, need_folder, say
from tools.terminal.option_values import Note

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
    need_folder(archive.absolute().parent)
    from tools.backup.archive import write_backup
    from tools.backup.gentle import step_back

    step_back()
    with _bar() as progress:
        report = write_backup(
            config, archive.absolute(), with_images=images, with_secrets=with_secrets, progress=progress
        )
    for warning in () if as_json else report.warnings:
        console.print(f"warning: {warning}", style="yellow")
    versions = f"; {report.versions} kept versions of experts take {size_text(report.versions_bytes)} of it"
    without = f"; without the {count_text(report.left_out, 'kept image')} (--images adds them)"
    more = (versions if report.versions else "") + (without if report.left_out else "")
    size = f"{count_text(report.files, 'file')}, {size_text(report.bytes)}"
    text = f"{archive}: {size}, results up to seq {report.last_seq}, {_waiting(report.waiting)}{more}"
    say({"archive": str(archive), **asdict(report)}, text, as_json=as_json)


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
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=errors, disable=not errors.is_terminal, transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda name, done, total: bar.update(task, description=name[-40:], completed=done, total=total)
