"""Commands that send images and look at verdicts: demo, camera, results."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from tools.console import DEFAULT_CONFIG, AsJson, ConfigOption, ConfigPath, fail, print_json, print_table

#: What fits a terminal of 80 columns; `--json` has everything.
_IMAGE_COLUMNS = ("board_type", "serial", "designator", "component", "verdict", "defect", "reason")
_BOARD_COLUMNS = ("board_type", "serial", "attempt", "verdict", "reason", "inspected", "expected")


class VerdictName(StrEnum):
    """The four verdicts, as the command line takes them."""

    PASS = "pass"  # noqa: S105 - a verdict
    FAIL = "fail"
    REVIEW = "review"
    UNKNOWN = "unknown"


def register(app: typer.Typer) -> None:
    """Add this module's commands to `app`."""
    for command in (demo, camera, results):
        app.command()(command)


def demo(
    folder: Annotated[Path, typer.Option("--dir", help="Where the line is made.")] = Path("demo"),
    prepare_only: Annotated[bool, typer.Option("--prepare-only", help="Make the line, do not run it.")] = False,
    boards: Annotated[int, typer.Option(min=1, help="Boards that the camera shows.")] = 20,
    seed: Annotated[int, typer.Option(help="Which boards: another seed, other boards.")] = 7,
) -> None:
    """Make a small line (rendered boards, experts trained on them, rules), run it, and show the verdicts.

    The first run trains for some minutes; later runs use what it made.

    Example: coserve demo --dir demo
    """
    from tools.demo.run import run_demo

    raise SystemExit(run_demo(folder, prepare_only=prepare_only, boards=boards, seed=seed))


def camera(
    config: ConfigPath,
    folder: Annotated[
        Path | None,
        typer.Argument(
            help="Images: FOLDER/BOARD_TYPE/SERIAL/DESIGNATOR.COMPONENT.png (or .jpg, .bmp, .tif)", show_default=False
        ),
    ] = None,
    render: Annotated[int | None, typer.Option(min=1, metavar="N", help="Render N boards of the demo instead.")] = None,
    rate: Annotated[
        float | None, typer.Option(min=0.01, help="Images per second; without it, as fast as the daemon takes them.")
    ] = None,
    source: Annotated[str, typer.Option(help="The camera's name.")] = "camera",
    seed: Annotated[int, typer.Option(help="Which boards --render draws.")] = 7,
    lot: Annotated[str | None, typer.Option(help="The lot that the boards belong to.")] = None,
    serials: Annotated[str | None, typer.Option(metavar="PREFIX", help="Serials of rendered boards begin so.")] = None,
    as_json: AsJson = False,
) -> None:
    """Publish images to the daemon, with a progress bar, and an account of its answers at the end.

    Exit status 1 if an image was rejected or the daemon stopped answering.

    Example: coserve camera demo/coserve.yaml --render 5 --rate 50
    """
    if (folder is None) == (render is None):
        fail("name either a FOLDER of images or --render N", status=2)
    from tools.camera.command import publish_folder, publish_rendered

    if folder is not None:
        account = publish_folder(config, folder, rate=rate, source=source, lot=lot)
    else:
        account = publish_rendered(config, render or 1, rate=rate, source=source, seed=seed, lot=lot, prefix=serials)
    if as_json:
        print_json(account.as_dict())
    else:
        print_table(f"Account of {source}", ("answer", "images"), list(account.as_dict().items()))
    raise SystemExit(0 if account.complete else 1)


def results(
    config: ConfigOption = DEFAULT_CONFIG,
    board: Annotated[str | None, typer.Option(metavar="SERIAL", help="One board's serial.")] = None,
    verdict: Annotated[VerdictName | None, typer.Option(help="Only this verdict.")] = None,
    component: Annotated[str | None, typer.Option(help="Only this component type.")] = None,
    boards: Annotated[bool, typer.Option("--boards", help="Boards instead of images.")] = False,
    limit: Annotated[int, typer.Option(min=1, help="The newest so many.")] = 50,
    as_json: AsJson = False,
) -> None:
    """The newest verdicts in the database, newest first.

    Example: coserve results --verdict fail --limit 20 --config demo/coserve.yaml
    """
    from tools.results import newest_boards, newest_inspections

    wanted = verdict.value if verdict else None
    if boards:
        rows = newest_boards(config, serial=board, verdict=wanted, limit=limit)
    else:
        rows = newest_inspections(config, serial=board, verdict=wanted, component=component, limit=limit)
    if as_json:
        print_json(rows)
    elif not rows:
        print_table("Results: none", (), ())
    else:
        columns = _BOARD_COLUMNS if boards else _IMAGE_COLUMNS
        print_table("Boards" if boards else "Results", columns, [[row[name] for name in columns] for row in rows])
