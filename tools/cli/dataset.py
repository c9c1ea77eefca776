"""`coserve dataset`: exports pictures of a line for training or another program, and imports annotated ones."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from daemon.units import count_text
from tools.cli.results import VerdictOption
from tools.dataset import Format
from tools.terminal.console import DEFAULT_CONFIG, AsJson, ConfigOption, console, exit_on, fail, print_json, print_table
from tools.terminal.option_values import Commands, shift_option, since_option, time_window, until_option

Texts = list[str] | None
Out = Annotated[Path, typer.Option(metavar="DIR", help="A new or empty folder.", show_default=False)]

dataset_app = typer.Typer(
    cls=Commands, no_args_is_help=True, help="Export pictures as data sets, import annotated ones."
)


@dataset_app.command("export")
def export_dataset(
    out: Out,
    form: Annotated[Format, typer.Option("--format", help="folders: as coserve train reads them.", show_default=False)],
    config: ConfigOption = DEFAULT_CONFIG,
    reviewed: Annotated[bool, typer.Option("--reviewed", help="Only what a person has decided.")] = False,
    verdict: Annotated[VerdictOption | None, typer.Option(help="Only with this final verdict.")] = None,
    low_confidence: Annotated[bool, typer.Option("--low-confidence", help="Only where an expert was unsure.")] = False,
    below: Annotated[float | None, typer.Option(min=0, max=1, help="For --low-confidence; default: 0.8.")] = None,
    lot: Annotated[Texts, typer.Option(metavar="LOT", help="Of this lot; repeat for several.")] = None,
    serial: Annotated[Texts, typer.Option(metavar="SERIAL", help="Of boards of this serial.")] = None,
    board_type: Annotated[Texts, typer.Option("--type", metavar="TYPE", help="Of boards of this type.")] = None,
    component: Annotated[Texts, typer.Option(metavar="COMPONENT", help="Of this component type.")] = None,
    expert: Annotated[Texts, typer.Option(metavar="EXPERT", help="Judged by this expert.")] = None,
    since: Annotated[str | None, since_option("Judged then or later.")] = None,
    until: Annotated[str | None, until_option("Judged before; a day counts whole.")] = None,
    shift: Annotated[str | None, shift_option()] = None,
    limit: Annotated[int, typer.Option(min=1, help="Refuse more pictures than this.")] = 10_000,
    as_json: AsJson = False,
) -> None:
    """Write stored pictures with people's decisions and boxes; DIR is complete, or it is not there.

    Example: coserve dataset export --out training --format folders --since 7d --config demo/coserve.yaml
    """
    if below is not None and not low_confidence:
        fail("--below goes with --low-confidence: add it, or leave --below out", status=2)
    from daemon.errors import ConfigError
    from daemon.line.line import load_rules_and_catalog
    from tools.backup.gentle import step_back
    from tools.dataset.stored import read_pictures
    from tools.dataset.write import write_dataset
    from tools.query.formats import clean_up_on_sigterm, os_errors_end
    from tools.query.package.write import need_room
    from tools.query.rows import RowFilters
    from tools.terminal.open_line import opened

    equal = {"lot": lot, "serial": serial, "board_type": board_type, "component": component, "expert": expert}
    equal = {name: values for name, values in {**equal, "verdict": [verdict] if verdict else None}.items() if values}
    filters = RowFilters(equal, *time_window(config, since, until, shift))
    below = 0.8 if low_confidence and below is None else below
    step_back()
    clean_up_on_sigterm()
    with opened(config) as (settings, engine), os_errors_end(out), exit_on(ConfigError):
        routes, catalog = load_rules_and_catalog(settings)
        pictures = read_pictures(
            engine, filters, settings.images, routes, catalog, limit, reviewed=reviewed, below=below
        )
        out.absolute().parent.mkdir(parents=True, exist_ok=True)
        size_bytes = sum(each.file.stat().st_size for each in pictures if each.file.is_file())
        need_room(settings, out, size_bytes, "a data set")
        _print(out, *write_dataset(pictures, form, out), as_json=as_json)


@dataset_app.command("import")
def import_dataset(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="annotations.json, data.yaml, or a folder.")],
    form: Annotated[Format, typer.Option("--format", help="Its format.", show_default=False)],
    out: Out,
    images: Annotated[Path | None, typer.Option(metavar="DIR", help="Its pictures; default: images beside it.")] = None,
    as_json: AsJson = False,
) -> None:
    """Turn an annotated data set into a folder for `coserve train detector` (boxes) or `coserve train classifier`.

    Example: coserve dataset import annotations.json --format coco --out training
    """
    if images is not None and form != "coco":
        fail(f"--images goes with coco; {form} says itself where pictures are", status=2)
    if not (file.is_dir() if form == "folders" else file.is_file()):
        fail(f"no {'folder' if form == 'folders' else 'file'} {file}", status=2)
    from tools.dataset.read import read_dataset
    from tools.dataset.write import write_dataset
    from tools.query.formats import os_errors_end

    with os_errors_end(out):
        pictures = read_dataset(file, form, images)
        has_boxes = any(each.boxes for each in pictures)
        _print(out, *write_dataset(pictures, "yolo" if has_boxes else "folders", out), as_json=as_json)


def _print(out: Path, counts: Mapping[tuple[str, str], int], left_out: Mapping[str, int], *, as_json: bool) -> None:
    columns, rows = ("component", "label", "pictures"), [(*names, number) for names, number in sorted(counts.items())]
    if as_json:
        listed = [dict(zip(columns, row, strict=True)) for row in rows]
        print_json({"folder": str(out), "pictures": listed, "left_out": left_out})
        return
    print_table(f"Pictures in {out}", columns, rows)
    for reason, number in left_out.items():
        console.print(f"{count_text(number, 'picture')} left out: {reason}", markup=False)
