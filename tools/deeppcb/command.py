"""`coserve train deeppcb`: real bare boards, from the data set's folder to a line that runs."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from tools.cli.console import AsJson, as_typed, console, errors, fail, print_json


def register(train_app: typer.Typer) -> None:
    """Add the command to `coserve train`."""
    train_app.command("deeppcb")(train_deeppcb)


def train_deeppcb(
    data: Annotated[Path, typer.Option(metavar="FOLDER", help="Your copy of DeepPCB, or data of its form.")],
    out: Annotated[Path, typer.Option(help="Folder for the line.")] = Path("deeppcb"),
    minutes: Annotated[float, typer.Option(min=0.01, help="How long to train, in all.")] = 85.0,
    detector: Annotated[
        Path | None, typer.Option(help="A detector.training of before; trains classifiers only.")
    ] = None,
    threads: Annotated[int, typer.Option(min=1, help="Processor threads; 1 beside other work.")] = 2,
    seed: Annotated[int, typer.Option(help="Another seed, another start.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Train a line for bare boards on DeepPCB (S. Tang and others, MIT licence), and report on its val.txt.

    A training of the detector that was interrupted goes on when the command is given again.

    Example: coserve train deeppcb --data path/to/DeepPCB --out deeppcb
    """
    if detector is not None and not detector.is_file():
        fail(f"no file {detector}", status=2)
    from rich.progress import BarColumn, TaskID, TaskProgressColumn, TextColumn, TimeElapsedColumn

    from tools.cli.progress import Bars
    from tools.deeppcb.report import print_report
    from tools.deeppcb.run import run
    from tools.deeppcb.tiles import DataError
    from tools.training.detector_loop import TrainingError

    columns: tuple[Any, ...] = (
        TextColumn("{task.description:12}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
    )
    with Bars(*columns, console=errors) as bars:
        tasks: dict[str, TaskID] = {}

        def show(name: str, share: float) -> None:
            if name not in tasks:
                tasks[name] = bars.add_task(name, total=1.0)
            bars.update(tasks[name], completed=share)

        try:
            trained = run(data, out, minutes, detector=detector, threads=threads, seed=seed, on_progress=show)
        except (DataError, TrainingError) as error:
            bars.stop()
            fail(str(error), status=1)
    if as_json:
        print_json({"config": str(trained.config), **asdict(trained.report), "minutes": trained.minutes})
        return
    print_report(trained.report)
    spent = ", ".join(f"{name} {minutes_:.1f}" for name, minutes_ in trained.minutes.items())
    console.print(f"minutes: {spent}\nthe line: {as_typed(f'run {trained.config}')}", markup=False)
