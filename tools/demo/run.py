"""Runs the demo: makes the line, starts its daemon, publishes boards, and shows verdicts beside the truth."""

import shlex
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import text

from coserve_client import CoserveError, Publisher, publish_images
from daemon.config.settings import load_config
from daemon.storage.database.connections import StoreError, open_for_reading
from daemon.units import count_text
from daemon.wire.control import ControlError, ask, must_listen
from tools.camera.render import RenderedBoard, board_types, render_board
from tools.camera.render.images import DEFECT_RATE, board_plan, images_of
from tools.demo.line import describe_line, make_line
from tools.setup.service import Service, ServiceError
from tools.terminal.console import CommandError, as_typed, console, print_table
from tools.terminal.progress import Bars

SOURCE = "demo-camera"
_PARTS = """
SELECT i.designator, i.verdict FROM inspections AS i
JOIN boards AS b ON b.board_id = i.board_id WHERE b.serial = :serial AND i.status = 'done'
"""
_VERDICTS = ("pass", "fail", "review", "unknown")


def part_verdicts(config: Path, serial: str) -> dict[str, str]:
    """Return the verdicts of the board `serial` by designator; empty if the line has not seen the board."""
    try:
        engine = open_for_reading(load_config(config).database)
    except StoreError:
        return {}
    try:
        with engine.connect() as connection:
            return dict(map(tuple, connection.execute(text(_PARTS), {"serial": serial})))
    finally:
        engine.dispose()


@dataclass(frozen=True, slots=True)
class JudgedBoard:
    """A published board with the line's verdicts of its parts by designator."""

    board: RenderedBoard
    verdicts: dict[str, str]

    @property
    def is_good(self) -> bool:
        return all(part.truth == "ok" for part in self.board.placements)

    @property
    def verdict(self) -> str:
        """The worst verdict of its parts, which is how the line judges a board."""
        found = set(self.verdicts.values())
        return next((verdict for verdict in ("fail", "unknown", "review") if verdict in found), "pass")


def run_demo(folder: Path, *, prepare_only: bool, boards: int, seed: int) -> int:
    """Make the line, run it and show its verdicts; return exit status 0 if every image got a verdict, else 1.

    Raises CommandError.
    """
    config = make_line(folder)
    console.print(describe_line(folder))
    if prepare_only:
        _show_next(config)
        return 0
    _must_not_run(config)
    began_s = time.monotonic()
    try:
        with Service(config, folder / "daemon.log"):
            rendered = _publish_boards(config, boards, seed)
    except (ServiceError, ControlError) as error:
        raise CommandError(str(error)) from None
    except CoserveError:
        log = folder / "daemon.log"
        raise CommandError(f"the daemon was killed, or hangs ({log} may say why): run the same command again") from None
    took_s = time.monotonic() - began_s
    judged = [JudgedBoard(board, part_verdicts(config, serial)) for serial, board in rendered.items()]
    _show_against_truth(judged)
    images = sum(len(board.board.placements) for board in judged)
    verdicts = Counter(verdict for board in judged for verdict in board.verdicts.values())
    done = verdicts.total() - verdicts["unknown"]
    console.print(f"{done} of {count_text(images, 'image')} judged in {took_s:.0f} s, the daemon's start included.")
    _show_next(config)
    return 0 if done == images else 1


def _must_not_run(config: Path) -> None:
    try:
        must_listen(load_config(config).endpoints.control)
    except ControlError:
        return
    more = as_typed(f"camera {shlex.quote(str(config))} --render 20 --rate 30")
    raise CommandError(f"the line in {config.parent} runs already: send it boards with `{more}`, or stop it first")


def _publish_boards(config: Path, boards: int, seed: int) -> dict[str, RenderedBoard]:
    endpoints, prefix = load_config(config).endpoints, _free_prefix(config)
    plan = board_plan(boards, seed, prefix)
    rendered: dict[str, RenderedBoard] = {}
    with Bars(console=console) as bar, Publisher(endpoints.intake[0], SOURCE) as camera:
        total = sum(len(board_types()[kind].places) for _, kind, _ in plan)
        task = bar.add_task(f"{count_text(boards, 'board')} through the line", total=total)
        for serial, kind, board_seed in plan:
            rendered[serial] = render_board(kind, board_seed, DEFECT_RATE)
            publish_images(camera, images_of(rendered[serial], serial, prefix))
            bar.update(task, completed=ask(endpoints.control, "status")["completed"])
        while (status := ask(endpoints.control, "status"))["backlog"]:
            bar.update(task, completed=status["completed"])
            time.sleep(0.1)
        bar.update(task, completed=total)
    return rendered


def _free_prefix(config: Path) -> str:
    """Return a lot name that no earlier run used: a repeated image id would be a duplicate."""
    number = 1
    while part_verdicts(config, f"D{number}-001"):
        number += 1
    return f"D{number}"


def _show_against_truth(boards: list[JudgedBoard]) -> None:
    counts: Counter[tuple[str, str]] = Counter()
    for board in boards:
        counts["good boards" if board.is_good else "boards with a defect", board.verdict] += 1
        for placement in board.board.placements:
            truth = "good parts" if placement.truth == "ok" else f"parts: {placement.truth.replace('_', ' ')}"
            counts[truth, board.verdicts.get(placement.designator, "unknown")] += 1
    names = ("good boards", "boards with a defect", "good parts")
    truths = [*names, *sorted({truth for truth, _ in counts} - set(names))]
    shown = [verdict for verdict in _VERDICTS if any(counts[truth, verdict] for truth in truths)]
    rows = [(truth, *(counts[truth, verdict] or "" for verdict in shown)) for truth in truths]
    print_table("What was rendered, and what the line says", ("", *shown), rows)


def _show_next(config: Path) -> None:
    line = shlex.quote(str(config))
    http = load_config(config).endpoints.http
    console.print("Next:")
    page = f"   then open {http}/" if http else ""
    console.print(f"  {as_typed(f'run {line}')}{page}", markup=False)
    console.print(f"  {as_typed(f'camera {line} --render 20 --rate 30')}   more boards, while it runs", markup=False)
    console.print(f"  {as_typed(f'results --verdict fail --config {line}')}   what failed, newest first", markup=False)
    console.print(f"  {as_typed('init line --images FOLDER')}   a line for your own pictures (README: Your line)")
