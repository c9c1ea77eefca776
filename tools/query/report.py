"""A board's failures in words (`coserve report`): by a template, or by a language model of the running line."""

import json
import time
import uuid
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import zmq
from sqlalchemy import Engine

from daemon.config.settings import Config
from daemon.storage.database.reviews import DAEMON
from daemon.wire.control import ControlError, must_listen
from daemon.wire.frames import MAGIC, encode
from tools.query.reading import Row, read_attempt

_SOURCE = "report"
_POLL_S = 0.1
_BOARD_VERDICTS = {
    "pass": "passed",
    "fail": "FAILED",
    "review": "needs a person's look",
    "unknown": "could not be judged whole",
    None: "is still open",
}
_IMAGE_VERDICTS = {"fail": "failed", "review": "unsure", "unknown": "not judged", "pass": "passed"}


@dataclass(frozen=True, slots=True)
class BoardFinding:
    """One image that did not pass. `seen` are the answers of its experts, in words."""

    designator: str
    component: str
    verdict: str
    defect: str | None
    reason: str | None
    decided_by: str
    late: bool
    seen: str


@dataclass(frozen=True, slots=True)
class BoardReport:
    """One attempt at a board. `verdict` is None while it is open."""

    board_type: str
    serial: str
    attempt: int
    attempts: int
    lot: str | None
    station: str | None
    completed_at: str | None
    expected: int
    inspected: int
    pending: int
    verdict: str | None
    reason: str | None
    findings: tuple[BoardFinding, ...]
    missing: tuple[dict[str, Any], ...]


class NoTextError(Exception):
    """The model wrote nothing; the text says why."""


def report_board(engine: Engine, serial: str, board_type: str | None, attempt: int | None) -> BoardReport:
    """Return the report of the attempt, or of the newest. Raises UnknownInspectionError."""
    record = read_attempt(engine, serial, board_type, attempt)
    copied = ("attempt", "lot", "station", "completed_at", "expected", "inspected", "verdict", "reason", "board_type")
    findings = [
        BoardFinding(
            **{name: image[name] for name in ("designator", "component", "verdict", "defect", "reason", "decided_by")},
            late=bool(image["late"]),
            seen=_answers_in_words(image["stages"]),
        )
        for image in record.images
    ]
    return BoardReport(
        **{name: record.board[name] for name in copied},
        serial=serial,
        attempts=record.attempts,
        pending=record.pending,
        findings=tuple(findings),
        missing=tuple(json.loads(record.board["missing"] or "[]")),
    )


def _answers_in_words(stages: Sequence[Row]) -> str:
    """Return the answers of an image's experts: `R0402 saw tombstone (0.97)`, `yolo-solder found 2 × bridge`."""
    answers: dict[str, str] = {}
    for stage in stages:
        expert, label, confidence = stage["expert"], stage["label"], stage["confidence"]
        if label is not None:
            answers[expert] = f"{expert} saw {label}" + ("" if confidence is None else f" ({confidence:.2f})")
        elif expert not in answers:
            boxes = Counter(box["label"] for box in stage["boxes"])
            counts = ", ".join(f"{count} × {name}" for name, count in boxes.items()) or "nothing"
            answers[expert] = f"{expert} found {counts}"
    return "; ".join(answers.values())


def in_words(board: BoardReport) -> str:
    """Return the report by the template: a line for the board, and one for each finding."""
    lot = f", lot {board.lot}" if board.lot else ""
    station = f", station {board.station}" if board.station else ""
    lines = [
        f"Board {board.serial} ({board.board_type}{lot}{station}), attempt {board.attempt} of {board.attempts},"
        f" {_BOARD_VERDICTS[board.verdict]}: {board.inspected} of {board.expected} positions inspected"
        + (f", {board.pending} images still to be judged" if board.pending else "")
        + (", its time ran out" if board.reason == "time_limit" else "")
        + "."
    ]
    lines += [f"- {_finding_in_words(finding)}" for finding in board.findings]
    for missing in board.missing:
        designators = missing.get("designators")
        where = f": {', '.join(designators)}" if designators else ""
        lines.append(f"- no image of {missing['count']} × {missing['component']}{where}.")
    if len(lines) == 1:
        lines.append("Nothing was found wrong with it.")
    return "\n".join(lines)


def _finding_in_words(finding: BoardFinding) -> str:
    verdict = f"{finding.designator} ({finding.component}) {_IMAGE_VERDICTS[finding.verdict]}"
    why = [f"defect {finding.defect}"] if finding.defect else []
    why += [f"reason {finding.reason}"] if finding.reason else []
    why += [finding.seen] if finding.seen else []
    why += [f"decided by {finding.decided_by}"] if finding.decided_by != DAEMON else []
    why += ["its image came late, after the board had closed"] if finding.late else []
    return f"{verdict}: {'; '.join(why)}." if why else f"{verdict}."


def written_by_model(config: Config, model: str, board: BoardReport, wait_s: float) -> str:
    """Return the model's text. Raises NoTextError if no daemon runs, it refuses, or it takes longer than `wait_s`."""
    endpoint = next((address for address in config.endpoints.intake if address.startswith("ipc://")), None)
    if endpoint is None:
        raise NoTextError("the line has no ipc endpoint among endpoints.intake to ask it by")
    try:
        must_listen(endpoint)
    except ControlError as error:
        raise NoTextError(error.reason) from None
    until_s = time.monotonic() + wait_s
    context: zmq.Context[Any] = zmq.Context()
    try:
        dealer = context.socket(zmq.DEALER)
        dealer.linger = 0
        dealer.connect(endpoint)

        def ask(header: dict[str, Any]) -> dict[str, Any]:
            dealer.send_multipart([MAGIC, encode(header)])
            if not dealer.poll(max(1, int((until_s - time.monotonic()) * 1000))):
                raise NoTextError(f"the daemon did not answer within {wait_s:g} s")
            return json.loads(dealer.recv_multipart()[-1])

        since = ask({"type": "hello"})["last_seq"]
        request_id = f"report-{uuid.uuid4().hex}"
        answer = ask(_request(config, model, board, request_id, wait_s))
        if answer["type"] != "accepted":
            raise NoTextError(f"the daemon refused it: {answer.get('reason', answer['type'])}")
        while time.monotonic() < until_s:
            page = ask({"type": "results_since", "seq": since, "limit": 1000})
            since = page.get("last_seq", since)
            for item in page.get("items", ()):
                if item["topic"] == f"generation/{_SOURCE}/" and item["id"] == request_id:
                    return _text_of(item)
            if not page.get("more"):
                time.sleep(_POLL_S)
    finally:
        context.destroy(linger=0)
    raise NoTextError(f"it wrote nothing within {wait_s:g} s")


def _text_of(item: dict[str, Any]) -> str:
    if item["status"] != "done":
        raise NoTextError(f"the request was not served: {item['reason']}")
    if not (item["text"] or "").strip():
        raise NoTextError("it wrote an empty text")
    return item["text"].strip()


def _request(config: Config, model: str, board: BoardReport, request_id: str, wait_s: float) -> dict[str, Any]:
    tasks = config.models[model].tasks
    return {
        "type": "generate",
        "id": request_id,
        "source": _SOURCE,
        "model": model,
        "task": "report" if "report" in tasks else None,
        "board": {"type": board.board_type, "serial": board.serial, "attempt": board.attempt},
        "deadline_ms": max(1, int(wait_s * 1000)),
        "prompt": f"Explain in plain words, for the person at the line, what is wrong with this board.\n\n"
        f"{in_words(board)}\n\nExplanation:",
    }
