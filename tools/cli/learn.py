"""`coserve learn`: trains another version of an expert with people's decisions, as a candidate."""

from pathlib import Path
from typing import Annotated, Any

import typer

from daemon.units import count_text
from tools.cli.rejudge import print_summary
from tools.cli.train import Play, Seed, Symmetry, Threads, pixels_of, training_bar
from tools.terminal.console import (
    DEFAULT_CONFIG,
    AsJson,
    ConfigOption,
    as_typed,
    console,
    exit_on,
    print_json,
    print_table,
)
from tools.terminal.option_values import since_option, time_window


def learn(
    name: Annotated[str, typer.Argument(metavar="EXPERT", help="A classifier of the catalog.", show_default=False)],
    config: ConfigOption = DEFAULT_CONFIG,
    training: Annotated[
        Path | None,
        typer.Option(
            "--with",
            metavar="FOLDER",
            help="The folder that it was trained on: LABEL/*.png.",
            exists=True,
            file_okay=False,
        ),
    ] = None,
    since: Annotated[str | None, since_option("Judge images again from then on.")] = "7d ago",
    sample: Annotated[int, typer.Option(min=1, help="Judge at most this many again, chosen at random.")] = 2000,
    play: Play = "0px",
    symmetry: Symmetry = False,
    seed: Seed = 0,
    threads: Threads = 1,
    as_json: AsJson = False,
) -> None:
    """Train another version of a classifier with the pictures that people decided about, and compare it.

    It is kept as a candidate: nothing changes until `coserve experts promote`. The command prints its mistakes on
    pictures held out (never of a board that it learned from) beside those of the version in service, and what it would
    change in the images of the last days. The page Teach of the expert shows the same with pictures.

    Example: coserve learn R0402 --with training/R0402 --config demo/coserve.yaml
    """
    from experts.versions import VersionsError
    from tools.experts.line import open_line
    from tools.learn import learn as learn_expert
    from tools.training.classifier import TrainingPlan
    from tools.training.fit import Schedule

    since, _ = time_window(config, since, None, None)
    plan = TrainingPlan(Schedule(12, seed=seed), threads, play=pixels_of(play), symmetry=symmetry)
    line = open_line(config)
    with exit_on(VersionsError), training_bar(name) as on_share:
        learned = learn_expert(line, name, training, plan, since=since, sample=sample, on_progress=on_share)
    if as_json:
        print_json(learned)
        return
    _print(learned, config)


def _print(learned: dict[str, Any], config: Path) -> None:
    from tools.training.report import COLUMNS

    name, version = learned["expert"], learned["version"]
    for note in learned["notes"]:
        console.print(f"note: {note}", markup=False)
    for reason, count in learned["left_out"].items():
        console.print(f"left out: {count_text(count, 'picture')}, {reason}", markup=False)
    rows = [(label, count, learned["decided"].get(label)) for label, count in learned["pictures"].items()]
    print_table(f"{name} learned from", ("label", "pictures", "decided on the line"), rows)
    print_table(f"{name} {version} on pictures held out", COLUMNS, learned["table"])
    compared = learned["compared"]
    if compared is None:
        console.print(f"{learned['in_service']}, in service, has answered none of them: the two are not compared")
    else:
        rows = [
            (f"{learned['in_service']}, in service", *compared["in_service"].values()),
            (f"{version}, learned", *compared["learned"].values()),
        ]
        print_table("On pictures that neither has learned from", ("version", "escapes", "false calls"), rows)
        console.print(compared["says"])
    print_summary(learned["rejudged"], learned["list"], "--json")
    console.print(f"{name} {version} is kept as a candidate; next, if it is better:", markup=False)
    console.print(as_typed(f"experts shadow {name} {version} --config {config}"), markup=False)
    console.print(as_typed(f"experts promote {name} {version} --config {config}"), markup=False)
