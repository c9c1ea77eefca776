"""A board's failures in words (`coserve report`): by a template, or by a language model of the running line."""

import json
import time
import uuid
from collections import Counter
from collections.abc import Sequence
from typing import Any

import zmq

from daemon.config.plant_time import PlantTime
from daemon.config.settings import Config
from daemon.storage.database.reviews import DAEMON
from daemon.units import count_text
from daemon.wire.control import ControlError, must_listen
from daemon.wire.messages import MAGIC, encode
from routing_rules.defects import defect_in_words
from tools.query.reading import AttemptRecord, Row
from tools.terminal.open_line import plant_time

_SOURCE = "report"
_POLL_S = 0.1
_BOARD_VERDICTS = {
    "pass": "passed",
    "fail": "FAILED",
    "review": "needs a person's look",
    "unknown": "could not be judged whole",
    None: "is still open",
}
_LINE_SAYS = {"fail": "failed", "review": "unsure", "unknown": "not judged", "pass": "passed"}
_PERSON_SAYS = {"fail": "fails", "review": "needs another look", "unknown": "cannot be judged", "pass": "passes"}


class NoTextError(Exception):
    """The model wrote nothing; the text says why."""


def board_document(record: AttemptRecord) -> dict[str, Any]:
    board = (
        *("board_type", "serial", "attempt", "lot", "station", "completed_at", "expected", "inspected", "reason"),
        *("verdict", "decided_by", "decided_at", "note", "daemon_verdict", "attempts", "pending", "missing"),
    )
    image = ("designator", "component", "verdict", "defect", "reason", "decided_by", "note")
    findings = [
        {**{name: finding[name] for name in image}, "late": bool(finding["late"]), "seen": _seen(finding["stages"])}
        for finding in record.images
    ]
    return {**{name: record.board[name] for name in board}, "findings": findings}


def _seen(stages: Sequence[Row]) -> str:
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


def in_words(record: AttemptRecord, plant: PlantTime) -> str:
    """Return the template's report: a line for the board, and one for each image that did not pass."""
    board = record.board
    where = "".join(f", {name} {board[name]}" for name in ("lot", "station") if board[name])
    first = (
        f"Board {board['serial']} ({board['board_type']}{where}), attempt {board['attempt']} of {board['attempts']},"
        f" {_BOARD_VERDICTS[board['verdict']]}: {board['inspected']} of {board['expected']} positions inspected"
    )
    if board["pending"]:
        first += f", {count_text(board['pending'], 'image')} still to be judged"
    if board["reason"] == "time_limit":
        first += ", its time ran out"
    if board["decided_by"] not in (None, DAEMON):
        at = plant_time(plant, board["decided_at"])
        first += f"; decided by {board['decided_by']} at {at}{_quoted(board['note'])}"
        first += f", the line's verdict was {board['daemon_verdict']}"
    lines = [f"{first}.", *(f"- {_finding_in_words(record, image)}" for image in record.images)]
    for missing in board["missing"]:
        designators = missing.get("designators")
        where = f": {', '.join(designators)}" if designators else ""
        lines.append(f"- no image of {missing['count']} × {missing['component']}{where}.")
    return "\n".join(lines if len(lines) > 1 else [*lines, "Nothing was found wrong with it."])


def _finding_in_words(record: AttemptRecord, image: Row) -> str:
    """Return a person's or the line's verdict, and the answers of the line's experts."""
    place, answers = f"{image['designator']} ({image['component']})", _seen(image["stages"])
    reason = [f"reason {image['reason']}"] if image["reason"] else []
    late = ["its image came late, after the board had closed"] if image["late"] else []
    if image["decided_by"] == DAEMON:
        by = " by the line" if record.board["is_whole"] else ""
        verdict, line_says = f"{place} {_LINE_SAYS[image['verdict']]}{by}", []
    else:
        verdict = f"{place} {_PERSON_SAYS[image['verdict']]}, says {image['decided_by']}{_quoted(image['note'])}"
        of_line = f"{image['daemon_verdict']} {_defect(record, image['daemon_defect'])}".rstrip()
        line_says = [f"the line's verdict was {of_line}"]
    why = [*filter(None, [_defect(record, image["defect"]), *line_says, *reason, answers]), *late]
    return f"{verdict}: {'; '.join(why)}." if why else f"{verdict}."


def _defect(record: AttemptRecord, code: str | None) -> str:
    return defect_in_words(code, record.defects) if code else ""


def _quoted(note: str | None) -> str:
    return f" (“{note}”)" if note else ""


def written_by_model(config: Config, model: str, record: AttemptRecord, wait_s: float) -> str:
    """Return the model's text. Raises NoTextError if no daemon runs, it refuses, or takes over `wait_s`."""
    endpoint = _endpoint(config)
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
        answer = ask(_request(config, model, record, request_id, wait_s))
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


def _endpoint(config: Config) -> str:
    """Return the line's endpoint. Raises NoTextError if there is none."""
    for address in config.endpoints.intake:
        if address.startswith("ipc://"):
            return address
    raise NoTextError("the line has no ipc endpoint among endpoints.intake to ask it by")


def _text_of(item: dict[str, Any]) -> str:
    if item["status"] != "done":
        raise NoTextError(f"the request was not served: {item['reason']}")
    if not (item["text"] or "").strip():
        raise NoTextError("it wrote an empty text")
    return item["text"].strip()


def _request(config: Config, model: str, record: AttemptRecord, request_id: str, wait_s: float) -> dict[str, Any]:
    tasks, board = config.models[model].tasks, record.board
    return {
        "type": "generate",
        "id": request_id,
        "source": _SOURCE,
        "model": model,
        "task": "report" if "report" in tasks else None,
        "board": {"type": board["board_type"], "serial": board["serial"], "attempt": board["attempt"]},
        "deadline_ms": max(1, int(wait_s * 1000)),
        "prompt": f"Explain in plain words, for the person at the line, what is wrong with this board.\n\n"
        f"{in_words(record, config.plant.clock())}\n\nExplanation:",
    }
