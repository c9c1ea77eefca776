"""`coserve doctor`: looks at everything that a line needs of its PC, in seconds, and changes nothing."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tools.terminal.console import DEFAULT_CONFIG, AsJson, as_typed, console, fail, print_json

if TYPE_CHECKING:
    from tools.setup.doctor.context import DoctorContext, Finding

_SIGNS = {"ok": ("✓", "green"), "warn": ("!", "yellow"), "wrong": ("✗", "red")}


def doctor(
    config: Annotated[
        Path | None,
        typer.Argument(
            metavar="[CONFIG]",
            help="The line's coserve.yaml; default: ./coserve.yaml, else the service's.",
            show_default=False,
        ),
    ] = None,
    user: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Who will run the line; the service's user where it is installed."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Find what is wrong on this PC (driver, memory, disks, clock, permissions, ports, …), and say what to do about it.

    Takes seconds, and disturbs no line that runs. Exit status 1 if something is wrong.

    Example: coserve doctor demo/coserve.yaml
    """
    if config is not None and not config.is_file():
        fail(f"no file {config}: name the line's coserve.yaml, or make one with: {as_typed('init')}", status=2)
    from tools.setup.doctor.context import examine_line

    path = config or (DEFAULT_CONFIG if DEFAULT_CONFIG.is_file() else None)
    try:
        context = examine_line(path, user)
    except KeyError:
        fail(f"user {user} does not exist", status=2)
    findings: list[Finding] = []
    for finding in run_checks(context):
        findings.append(finding)
        if not as_json:
            _show(finding)
    bad = [finding for finding in findings if finding.grade == "wrong"]
    if as_json:
        print_json({"ok": not bad, "findings": [asdict(finding) for finding in findings]})
    else:
        warned = sum(finding.grade == "warn" for finding in findings)
        console.print(f"\n{len(findings)} findings: {len(bad)} wrong, {warned} to look at")
    raise SystemExit(1 if bad else 0)


def run_checks(context: "DoctorContext") -> "Iterator[Finding]":
    """Run every check in turn. A check that fails itself is a finding, and the others go on."""
    from tools.setup.doctor import disks, doors, line, machine
    from tools.setup.doctor.context import warn

    checks: Iterable[Callable[[DoctorContext], Iterator[Finding]]] = (
        line.configuration,
        line.daemon,
        machine.libraries,
        line.packages,
        machine.memory,
        machine.processors,
        machine.user_limits,
        disks.disks,
        line.database,
        doors.permissions,
        doors.secrets,
        doors.ports,
        doors.brokers,
        line.service,
        machine.clock,
    )
    for check in checks:
        try:
            yield from check(context)
        except Exception as error:  # noqa: BLE001 - one failed check must not hide the others
            so = f"could not be looked at: {type(error).__name__}: {error}"
            yield warn(check.__name__.replace("_", " "), so, "look at it by hand, and report this")


def _show(finding: "Finding") -> None:
    sign, colour = _SIGNS[finding.grade]
    console.print(f"[{colour}]{sign}[/] [bold]{finding.check:<13}[/] ", end="", markup=True)
    console.print(finding.so, markup=False)
    if finding.do:
        console.print(f"  {'':<13} → {finding.do}", markup=False, style=colour)
