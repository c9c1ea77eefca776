"""`coserve export`: an audit package of boards, or a check of one."""

from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from daemon.host.folders import make_folder
from daemon.units import count_text, size_text
from tools.cli.results import Texts
from tools.terminal.console import (
    DEFAULT_CONFIG,
    AsJson,
    ConfigOption,
    as_typed,
    console,
    fail,
    need_folder,
    os_errors_end,
    print_json,
    print_step,
)
from tools.terminal.open_line import opened
from tools.terminal.option_values import shift_option, since_option, time_window, until_option


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
