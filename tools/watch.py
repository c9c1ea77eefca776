"""Commands that send images: demo, camera."""

from pathlib import Path
from typing import Annotated

import typer

from tools.console import DEFAULT_CONFIG, AsJson, ConfigOption, ConfigPath, fail, print_json, print_table


def register(app: typer.Typer) -> None:
    """Add this module's commands to `app`."""
    for command in (demo, camera):
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
