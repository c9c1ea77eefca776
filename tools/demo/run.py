"""Runs the demo: makes the line, starts its daemon, publishes boards, and shows verdicts beside the truth."""

import itertools
import shlex
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import cv2
import numpy as np
from sqlalchemy import Connection, text

from coserve_client import CoserveError, Publisher, publish_images
from daemon.config.settings import load_config
from daemon.units import count_text
from daemon.wire.control import ControlError, ask, must_listen
from tools.camera.render import PartPlacement, RenderedBoard, board_types, render_board
from tools.camera.render.images import DEFECT_RATE, board_plan, images_of
from tools.demo.line import describe_line, make_line
from tools.setup.service import Service
from tools.terminal.console import Bars, CommandError, as_typed, console, print_table
from tools.terminal.open_line import reading

SOURCE = "demo-camera"
_BOARD = """
SELECT b.verdict, i.designator, i.verdict, i.defect, d.x1, d.y1, d.x2, d.y2 FROM boards AS b
LEFT JOIN inspections AS i ON i.board_id = b.board_id AND i.status = 'done'
LEFT JOIN detections AS d ON d.inspection_id = i.inspection_id WHERE b.serial = :serial
"""
#: BGR, as OpenCV draws.
COLOURS = {"pass": (96, 200, 96), "fail": (48, 48, 235), "review": (40, 180, 245), "unknown": (200, 80, 200)}
_FONT = cv2.FONT_HERSHEY_SIMPLEX


@dataclass(frozen=True, slots=True)
class PartVerdict:
    """A part's verdict; boxes are x1 y1 x2 y2 in pixels of the part's image."""

    verdict: str
    defect: str | None
    boxes: list[tuple[float, float, float, float]] = field(default_factory=list[tuple[float, float, float, float]])


@dataclass(slots=True)
class JudgedBoard:
    """A published board with the line's verdict, `unknown` while it has none, and those of its parts by designator."""

    serial: str
    board: RenderedBoard
    verdict: str = "unknown"
    parts: dict[str, PartVerdict] = field(default_factory=dict[str, PartVerdict])

    def read(self, database: Connection) -> None:
        for verdict, designator, of_part, defect, *box in database.execute(text(_BOARD), {"serial": self.serial}):
            self.verdict = verdict or "unknown"
            if designator is not None:
                part = self.parts.setdefault(designator, PartVerdict(of_part, defect))
                part.boxes.extend([] if box[0] is None else [tuple(box)])

    def part(self, designator: str) -> PartVerdict:
        return self.parts.get(designator) or PartVerdict("unknown", None)


def draw_board(judged: JudgedBoard, path: Path) -> None:
    """Write `path` (PNG): each part framed in its verdict's colour, with its defect's name and the detector's boxes."""
    canvas = cv2.cvtColor(judged.board.image, cv2.COLOR_RGB2BGR)
    for placement in judged.board.placements:
        _draw_part(canvas, placement, judged.part(placement.designator))
    cv2.imwrite(str(path), np.vstack([_header(canvas.shape[1], judged), canvas]))


def _draw_part(canvas: np.ndarray, placement: PartPlacement, part: PartVerdict) -> None:
    colour = COLOURS[part.verdict]
    x1, y1, x2, y2 = placement.box
    cv2.rectangle(canvas, (x1, y1), (x2, y2), colour, 1 if part.verdict == "pass" else 2, cv2.LINE_AA)
    for box in part.boxes:
        left, top, right, bottom = (round(value) for value in placement.on_board(box))
        cv2.rectangle(canvas, (left, top), (right, bottom), COLOURS["review"], 1, cv2.LINE_AA)
    if part.verdict == "pass":
        return
    title = f"{placement.designator} {part.defect or part.verdict}"
    (width, height), _ = cv2.getTextSize(title, _FONT, 0.42, 1)
    left = min(x1, canvas.shape[1] - width - 4)
    bottom = y1 - 3 if y1 > height + 8 else y2 + height + 6
    cv2.rectangle(canvas, (left, bottom - height - 3), (left + width + 4, bottom + 3), colour, cv2.FILLED)
    cv2.putText(canvas, title, (left + 2, bottom), _FONT, 0.42, (255, 255, 255), 1, cv2.LINE_AA)


def _header(width: int, judged: JudgedBoard) -> np.ndarray:
    header = np.full((34, width, 3), 32, np.uint8)
    counts = {name: sum(part.verdict == name for part in judged.parts.values()) for name in COLOURS}
    title = f"{judged.board.board_type}  {judged.serial}"
    cv2.putText(header, title, (10, 23), _FONT, 0.6, (240, 240, 240), 1, cv2.LINE_AA)
    x = width - 10
    for name, count in reversed(counts.items()):
        title = f"{name} {count}"
        x -= cv2.getTextSize(title, _FONT, 0.55, 1)[0][0]
        cv2.putText(header, title, (x, 23), _FONT, 0.55, COLOURS[name], 1, cv2.LINE_AA)
        x -= 18
    return header


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
            judged = _publish_boards(config, boards, seed)
    except ControlError as error:
        raise CommandError(str(error)) from None
    except CoserveError:
        log = folder / "daemon.log"
        raise CommandError(f"the daemon was killed, or hangs ({log} may say why): run the same command again") from None
    took_s = time.monotonic() - began_s
    with reading(load_config(config)) as engine, engine.connect() as database:
        for board in judged:
            board.read(database)
    _show_against_truth(judged)
    images = sum(len(board.board.placements) for board in judged)
    done = sum(part.verdict != "unknown" for board in judged for part in board.parts.values())
    console.print(f"{done} of {count_text(images, 'image')} judged in {took_s:.0f} s, the daemon's start included.")
    _draw(folder / "boards", judged)
    _show_next(config)
    return 0 if done == images else 1


def _must_not_run(config: Path) -> None:
    try:
        must_listen(load_config(config).endpoints.control)
    except ControlError:
        return
    more = as_typed(f"camera {shlex.quote(str(config))} --render 20 --rate 30")
    raise CommandError(f"the line in {config.parent} runs already: send it boards with `{more}`, or stop it first")


def _publish_boards(config: Path, boards: int, seed: int) -> list[JudgedBoard]:
    endpoints, prefix = load_config(config).endpoints, _free_prefix(config)
    plan = board_plan(boards, seed, prefix)
    sent: list[JudgedBoard] = []
    with Bars(console=console) as bar, Publisher(endpoints.intake[0], SOURCE) as camera:
        total = sum(len(board_types()[kind].places) for _, kind, _ in plan)
        task = bar.add_task(f"{count_text(boards, 'board')} through the line", total=total)
        for serial, kind, board_seed in plan:
            sent.append(JudgedBoard(serial, render_board(kind, board_seed, DEFECT_RATE)))
            publish_images(camera, images_of(sent[-1].board, serial, prefix))
            bar.update(task, completed=ask(endpoints.control, "status")["completed"])
        while (status := ask(endpoints.control, "status"))["backlog"]:
            bar.update(task, completed=status["completed"])
            time.sleep(0.1)
        bar.update(task, completed=total)
    return sent


def _free_prefix(config: Path) -> str:
    """Return a lot name that no earlier run used: a repeated image id would be a duplicate."""
    with reading(load_config(config)) as engine, engine.connect() as database:
        used = set(database.scalars(text("SELECT DISTINCT lot FROM boards")))
    return next(name for name in map("D{}".format, itertools.count(1)) if name not in used)


def _show_against_truth(boards: list[JudgedBoard]) -> None:
    counts: Counter[tuple[str, str]] = Counter()
    for board in boards:
        is_good = all(part.truth == "ok" for part in board.board.placements)
        counts["good boards" if is_good else "boards with a defect", board.verdict] += 1
        for placement in board.board.placements:
            truth = "good parts" if placement.truth == "ok" else f"parts: {placement.truth.replace('_', ' ')}"
            counts[truth, board.part(placement.designator).verdict] += 1
    names = ("good boards", "boards with a defect", "good parts")
    truths = [*names, *sorted({truth for truth, _ in counts} - set(names))]
    shown = [verdict for verdict in COLOURS if any(counts[truth, verdict] for truth in truths)]
    rows = [(truth, *(counts[truth, verdict] or "" for verdict in shown)) for truth in truths]
    print_table("What was rendered, and what the line says", ("", *shown), rows)


def _draw(folder: Path, boards: list[JudgedBoard]) -> None:
    folder.mkdir(exist_ok=True)
    for board in boards:
        draw_board(board, folder / f"{board.serial}.png")
    failed = next((board for board in boards if board.verdict == "fail"), boards[0])
    console.print(f"Pictures of the boards with their findings: {folder}/{failed.serial}.png, …", markup=False)


def _show_next(config: Path) -> None:
    line = shlex.quote(str(config))
    http = load_config(config).endpoints.http
    console.print("Next:")
    page = f"   then open {http}/" if http else ""
    console.print(f"  {as_typed(f'run {line}')}{page}", markup=False)
    console.print(f"  {as_typed(f'camera {line} --render 20 --rate 30')}   more boards, while it runs", markup=False)
    console.print(f"  {as_typed(f'results --verdict fail --config {line}')}   what failed, newest first", markup=False)
    console.print(f"  {as_typed('init line --images FOLDER')}   a line for your own pictures (README: Your line)")
