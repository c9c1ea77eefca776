"""`coserve report SERIAL`: what is wrong with a board, in plain words."""

from typing import Annotated

import typer

from tools.terminal.console import DEFAULT_CONFIG, AsJson, ConfigOption, console, fail, print_json


def report(
    serial: Annotated[str, typer.Argument(help="The board's serial.", show_default=False)],
    config: ConfigOption = DEFAULT_CONFIG,
    board_type: Annotated[str | None, typer.Option("--type", help="Its type, where several have this serial.")] = None,
    attempt: Annotated[int | None, typer.Option(min=1, help="An earlier attempt; the newest without it.")] = None,
    model: Annotated[str | None, typer.Option(help="The language model that writes; the first of `models`.")] = None,
    template: Annotated[
        bool, typer.Option("--template", help="By the template, also where a model is configured.")
    ] = False,
    wait_s: Annotated[float, typer.Option("--wait", min=0.1, help="Seconds that the model may take.")] = 30.0,
    as_json: AsJson = False,
) -> None:
    """Explain a board's failures from its rows: by a template, or by a language model that the running line serves.

    Where a model is configured and cannot write, the template does, and the output says so.

    Example: coserve report S0017 --config demo/coserve.yaml
    """
    from tools.query.reading import read_attempt
    from tools.query.report import NoTextError, board_document, in_words, written_by_model
    from tools.terminal.open_line import opened

    with opened(config) as (settings, engine):
        if model is not None and model not in settings.models:
            fail(f"{config} names no model {model}: {', '.join(settings.models) or 'it has none'}", status=2)
        board = read_attempt(engine, serial, board_type, attempt)
    writer, why = None if template else model or next(iter(settings.models), None), None
    by_template = text = in_words(board, settings.plant.clock())
    if writer is not None:
        try:
            text = written_by_model(settings, writer, board, wait_s)
        except NoTextError as error:
            writer, why = None, f"model {writer}: {error}"
    if as_json:
        print_json({"by": writer or "template", "why_not_the_model": why, "text": text, **board_document(board)})
        return
    console.print(text, markup=False)
    if writer is not None:
        console.print(f"(written by model {writer}; the rows say:)\n{by_template}", markup=False)
    elif not template:
        console.print(f"(by the template: {why or f'{config} names no language model'})", markup=False)
