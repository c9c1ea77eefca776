"""`coserve review`: decide about an image or a whole board, through the daemon or, if none runs, in its place."""

import getpass
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tools.terminal.console import DEFAULT_CONFIG, AsJson, ConfigOption, console, fail, print_json, print_table

if TYPE_CHECKING:
    from daemon.config.plant_time import PlantTime


def review(
    image: Annotated[
        str | None,
        typer.Argument(
            metavar="ID", help="The image: its inspection_id (with --board a serial or board_id).", show_default=False
        ),
    ] = None,
    verdict: Annotated[
        str | None, typer.Argument(metavar="VERDICT", help="pass, fail, unknown or review.", show_default=False)
    ] = None,
    defect: Annotated[
        str | None,
        typer.Option(metavar="CODE", help="What is wrong, with fail: a code or its label; else the line's own."),
    ] = None,
    new_code: Annotated[
        bool, typer.Option("--new-code", help="Take a --defect that neither rules nor results have.")
    ] = False,
    note: Annotated[str | None, typer.Option(metavar="TEXT", help="What the next reader should know.")] = None,
    reviewer: Annotated[
        str | None, typer.Option(metavar="NAME", help="Who decides; without it, the user of this terminal.")
    ] = None,
    after: Annotated[
        int | None, typer.Option(metavar="REVIEW", min=1, help="Overrule this review, which you have seen.")
    ] = None,
    undo: Annotated[
        str | None, typer.Option("--undo", metavar="ID", help="Take back the newest decision about this image.")
    ] = None,
    board: Annotated[
        bool,
        typer.Option("--board", help="ID is a board's serial (its newest attempt) or board_id: release or scrap it."),
    ] = False,
    board_type: Annotated[
        str | None, typer.Option("--type", help="With --board, ID is a serial of this board type.")
    ] = None,
    show: Annotated[bool, typer.Option("--list", help="Print what waits for a decision, oldest board first.")] = False,
    limit: Annotated[int, typer.Option(min=1, max=10_000, help="Images of --list.")] = 50,
    config: ConfigOption = DEFAULT_CONFIG,
    as_json: AsJson = False,
) -> None:
    """Decide about an image or a board: what a person says counts, the line's verdict stays beside it.

    With --board the decision is about the whole board, such as one with a missing or unjudgeable image.

    Example: coserve review 1042 fail --defect D207 --note "pad 3" --reviewer Eva --config demo/coserve.yaml
    """
    if sum((show, undo is not None, image is not None)) != 1:
        fail("name an image and a verdict, or --undo ID, or --list: see coserve review --help", status=2)
    name = undo or image or ""
    number = _number(name) if name and not board else None
    if undo is not None and (verdict is not None or defect is not None or note is not None):
        fail("--undo takes no verdict, defect or note: it restores the decision before", status=2)
    if image is not None and verdict is None:
        fail("which verdict? pass, fail, unknown or review: coserve review ID VERDICT", status=2)
    if board_type is not None and not board:
        fail("--type goes with --board SERIAL", status=2)
    from tools.query.review import decide, find_board, waiting_images
    from tools.terminal.open_line import settings_of

    settings = settings_of(config)
    if show:
        rows = waiting_images(settings, limit + 1)
        if as_json:
            print_json(rows[:limit])
        else:
            _print_waiting(rows, limit, settings.plant.clock())
        return
    subject = {"inspection_id": number} if not board else {"board_id": find_board(settings, name, board_type)}
    what = {**subject, "undo": True} if undo is not None else {**subject, "verdict": verdict}
    fields = {"defect": defect, "note": note, "reviewer": reviewer or getpass.getuser(), "newest": after}
    review = decide(config, settings, what | fields, new_code=new_code)
    if as_json:
        print_json(review)
    else:
        console.print(_sentence(review, is_undone=undo is not None), markup=False)


def _number(text: str) -> int:
    if not text.isdecimal() or len(text) > 100 or int(text) < 1:
        fail(f"ID: expected a whole number from 1, not {text!r}: `coserve review --list` shows it", status=2)
    return int(text)


def _sentence(review: Mapping[str, Any], *, is_undone: bool) -> str:
    defect = f" {review['defect']}" if review["defect"] else ""
    subject, answer = f"image {review['inspection_id']}", review["verdict"]
    if review["board_id"] is not None:
        subject, answer = f"board {review['board_id']}", review["board_verdict"]
    verdict = f"{subject} is {answer}{defect}{' again' if is_undone else ''}"
    return f"{verdict}, says {review['reviewer']} (review {review['review_id']})"


def _print_waiting(rows: list[dict[str, Any]], limit: int, plant: "PlantTime") -> None:
    from tools.terminal.open_line import plant_time, times_note

    if not rows:
        console.print("nothing waits for a decision")
        return
    columns = ("id", "serial", "designator", "line says", "defect", "since", "component", "board", "lot", "picture")
    cells = [
        (
            *(row["inspection_id"], f"{row['serial']} #{row['attempt']}", row["designator"], row["verdict"]),
            *(
                row["defect"] or row["reason"],
                plant_time(plant, row["completed_at"], "short"),
                row["component"],
                row["board_type"],
            ),
            *(row["lot"], row["image_path"]),
        )
        for row in rows[:limit]
    ]
    title = f"Waiting for a decision; {times_note(plant)}"
    print_table(title, columns, cells, unbroken=("id", "line says", "since"), more="--json has them")
    if len(rows) > limit:
        console.print(f"and more: --limit {limit * 2}")
