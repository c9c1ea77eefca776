"""What `coserve export` prints, and how it ends."""

from dataclasses import asdict
from pathlib import Path

from daemon.units import size_text
from tools.backup.gentle import step_back
from tools.cli.console import as_typed, console, errors, fail, print_json
from tools.cli.open_line import opened
from tools.query.files import leave_cleanly, why
from tools.query.package.chosen import Selection
from tools.query.package.verify import verify_package
from tools.query.package.write import FolderInUseError, PackageError, write_package


def make_package(config: Path, selection: Selection, out: Path, *, with_weights: bool, as_json: bool) -> None:
    """Write a package and say what it holds."""
    if not out.absolute().parent.is_dir():
        fail(f"no folder {out.absolute().parent}", status=2)
    step_back()
    leave_cleanly()

    def progress(what: str) -> None:
        if errors.is_terminal:
            errors.print(f"{what} …", markup=False)

    with opened(config) as (settings, engine):
        try:
            report = write_package(
                config, settings, engine, selection, out, with_weights=with_weights, progress=progress
            )
        except FolderInUseError as error:
            fail(str(error), status=2)
        except PackageError as error:
            fail(str(error), status=1)
        except OSError as error:
            fail(why(error, out), status=1)
    if as_json:
        print_json({"package": str(out), **asdict(report)})
        return
    for warning in report.warnings:
        console.print(f"warning: {warning}", markup=False, style="yellow")
    console.print(
        f"{out}: {report.boards:,} boards, {report.images:,} images, {report.pictures:,} pictures;"
        f" {report.files:,} files, {size_text(report.bytes)}",
        markup=False,
    )
    for reason, count in report.missing.items():
        console.print(f"  {count:,} images without a picture: {reason}", markup=False)
    console.print(f"fingerprint {report.fingerprint}\nCheck it:  {as_typed(f'export --verify {out}')}", markup=False)


def check_package(package: Path, *, as_json: bool) -> int:
    """Say whether a package is whole; 1 where it is not."""
    if not package.is_dir():
        fail(f"no folder {package}", status=2)
    try:
        found = verify_package(package)
    except PackageError as error:
        fail(str(error), status=1)
    except OSError as error:
        fail(why(error, package), status=1)
    if as_json:
        print_json({"package": str(package), "is_whole": found.is_whole, **asdict(found)})
        return 0 if found.is_whole else 1
    for what, names in (("changed", found.changed), ("missing", found.missing), ("added", found.added)):
        for name in names:
            console.print(f"{what}: {ascii(name)[1:-1]}{' (a link)' if name in found.links else ''}", markup=False)
    if found.is_whole:
        console.print(
            f"{package}: whole, {found.files:,} files, {found.boards} boards, made {found.made}", markup=False
        )
    console.print(f"fingerprint {found.fingerprint}", markup=False)
    return 0 if found.is_whole else 1
