"""Runs the demo: makes the line, runs its daemon and a camera as processes, shows verdicts against the truth."""

import json
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn

from daemon.config.settings import load_config
from daemon.units import count_text
from daemon.wire.control import ControlError, ask
from tools.camera.render import RenderedBoard, board_types, render_board
from tools.camera.rendered import DEFECT_RATE, board_plan
from tools.demo.boards import PartVerdict, draw_board, part_verdicts
from tools.setup.service import Service, ServiceError
from tools.terminal.console import as_typed, console, fail, print_table, quiet_start
from tools.terminal.progress import Bars

SOURCE = "demo-camera"

QUESTIONS = {
    "first-pass yield of each board type and lot": "SELECT board_type, lot, boards, first_pass_yield FROM board_yield",
    "which defects, and where": (
        "SELECT component, defect, count, share FROM defect_pareto ORDER BY count DESC LIMIT 8"
    ),
    "how long an image waits for its verdict": "SELECT hour, inspections, p50_ms, p95_ms, max_ms FROM latency_by_hour",
    "what loading experts costs": (
        "SELECT expert, images, mean_batch, loads, load_share FROM expert_usage ORDER BY loads DESC LIMIT 8"
    ),
}


@dataclass(frozen=True, slots=True)
class JudgedBoard:
    """A published board with the line's verdicts of its parts."""

    serial: str
    board: RenderedBoard
    verdicts: dict[str, PartVerdict]


def run_demo(folder: Path, *, prepare_only: bool, boards: int, seed: int) -> int:
    """Make the line, run it and show its verdicts; return exit status 0 if every image got a verdict, else 1."""
    from tools.demo.prepare import prepare

    report = prepare(folder)
    console.print(report.summary())
    config = folder / "coserve.yaml"
    if prepare_only:
        console.print("The line is ready.")
        _show_live(config)
        return 0
    prefix = _free_prefix(config)
    plan = board_plan(boards, seed, prefix)
    began_s = time.monotonic()
    try:
        with Service(config, folder / "daemon.log") as service:
            console.print(
                f"The daemon runs (process {service.process.pid if service.process else '?'}, log {service.log})."
            )
            _publish_and_wait(config, boards, seed, prefix)
    except ServiceError as error:
        fail(str(error), status=1)
    took_s = time.monotonic() - began_s
    console.print("Drawing the boards …")
    judged_boards = [
        JudgedBoard(serial, render_board(kind, board_seed, DEFECT_RATE), part_verdicts(config, serial))
        for serial, kind, board_seed in plan
    ]
    _draw(folder / "boards", judged_boards)
    judged = _show_against_truth(judged_boards)
    images = sum(len(judged_board.board.placements) for judged_board in judged_boards)
    console.print(
        f"{judged} of {count_text(images, 'image')} judged in {took_s:.1f} s, start and stop of the daemon included."
    )
    _show_questions(folder)
    _show_live(config)
    return 0 if judged == images else 1


def _publish_and_wait(config: Path, boards: int, seed: int, prefix: str) -> None:
    """Let a camera process publish, and follow the verdicts until the backlog is empty."""
    total = sum(len(board_types()[kind].places) for _, kind, _ in board_plan(boards, seed, prefix))
    command = [sys.executable, "-m", "tools", "camera", str(config), "--render", str(boards), "--seed", str(seed)]
    command += ["--source", SOURCE, "--lot", prefix, "--serials", prefix, "--json"]
    camera = subprocess.Popen(  # noqa: S603 - our own command, no shell
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=quiet_start()
    )
    endpoint = load_config(config).endpoints.control
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Bars(*columns, console=console) as bar:
        task = bar.add_task(f"{boards} boards through the line", total=total)
        while True:
            try:
                status = ask(endpoint, "status")
            except ControlError as error:
                camera.kill()
                fail(f"the daemon stopped answering: {error}", status=1)
            bar.update(task, completed=status["completed"])
            if camera.poll() is not None and status["backlog"] == 0:
                break
            time.sleep(0.1)
        rate = status["images_per_s"]
    output, errors = camera.communicate()
    if camera.returncode not in (0, 1) or not output:
        fail(f"the camera process failed:\n{errors.strip()}", status=1)
    account: dict[str, Any] = json.loads(output)
    console.print(
        f"camera: {account['accepted']} of {account['sent']} images accepted;"
        f" line: {rate:.0f} images/s lately, {status['expert_switches']} expert switches"
    )


def _show_live(config: Path) -> None:
    """Print the command that runs the line, and the address of its pages."""
    http = load_config(config).endpoints.http
    console.print(f"To see it live:\n  {as_typed(f'run {config}')}", markup=False)
    if http:
        console.print(f"and, while it runs, open {http}/", markup=False)


def _free_prefix(config: Path) -> str:
    """Return a lot name that no earlier run used: an image's id is never used twice."""
    number = 1
    while part_verdicts(config, f"D{number}-001"):
        number += 1
    return f"D{number}"


def _draw(folder: Path, boards: list[JudgedBoard]) -> None:
    folder.mkdir(exist_ok=True)
    for board in boards:
        draw_board(board.board, board.serial, board.verdicts, folder / f"{board.serial}.png")
    console.print(f"Boards with boxes and verdicts: {folder}/{boards[0].serial}.png … {boards[-1].serial}.png")


def _show_against_truth(boards: list[JudgedBoard]) -> int:
    """Print the table of verdicts against the truth; return how many images were judged."""
    counts: Counter[tuple[str, str]] = Counter()
    for board in boards:
        for placement in board.board.placements:
            part = board.verdicts.get(placement.designator)
            counts[placement.truth, part.verdict if part else "none"] += 1
    truths = sorted({truth for truth, _ in counts}, key=lambda truth: (truth == "ok", truth))
    verdicts = ("fail", "review", "pass", "unknown", "none")
    rows = [(truth, *(counts[truth, verdict] or "" for verdict in verdicts)) for truth in truths]
    print_table("Verdicts against the truth (parts)", ("truth", *verdicts), rows)
    defects = sum(count for (truth, _), count in counts.items() if truth != "ok")
    caught = sum(counts[truth, verdict] for truth in truths if truth != "ok" for verdict in ("fail", "review"))
    good = sum(count for (truth, _), count in counts.items() if truth == "ok")
    false_calls = counts["ok", "fail"] + counts["ok", "review"]
    console.print(
        f"defects caught {caught} of {defects} ({caught / max(defects, 1):.3f}),"
        f" false calls {false_calls} of {good} good parts ({false_calls / max(good, 1):.3f})"
    )
    return sum(count for (_, verdict), count in counts.items() if verdict not in ("unknown", "none"))


def _show_questions(folder: Path) -> None:
    console.print("\nAsk the database next (any SQLite client):")
    for question, sql in QUESTIONS.items():
        console.print(f'  # {question}\n  sqlite3 -readonly -box {folder}/inspection.db "{sql}"', markup=False)
