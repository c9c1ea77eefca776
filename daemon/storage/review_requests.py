"""Control's `review`: a person's decision about an image or a whole attempt, or its undoing, written by the writer."""

from collections.abc import Mapping
from concurrent.futures import CancelledError
from dataclasses import asdict
from typing import Any, cast

from sqlalchemy.exc import SQLAlchemyError

from daemon.storage.database.reviews import DAEMON, DrawnBox, ReviewDecision, is_undo
from daemon.storage.writer import Writer
from daemon.wire.control import ControlError
from daemon.wire.messages import MAX_INTEGER, NAME, NAME_EXPECTED, shown

VERDICTS = ("pass", "fail", "unknown", "review")

_FIELDS = ("inspection_id", "board_id", "verdict", "reviewer", "defect", "note", "newest", "undo", "boxes")
MAX_BOXES = 300
#: A writer that takes longer waits for a disk or for another program's lock: control must go on answering.
_WAIT_S = 1.0


def decision(fields: Mapping[str, Any]) -> ReviewDecision:
    """Read a decision from a request's fields; ControlError `bad_field` says which field is wrong and why."""
    unknown = sorted(set(fields) - set(_FIELDS))
    if unknown:
        raise ControlError("bad_field", f"{unknown[0]}: expected one of {', '.join(_FIELDS)}")
    undo = fields.get("undo", False)
    if not isinstance(undo, bool):
        raise ControlError("bad_field", f"undo: expected true or false, got {shown(undo)}")
    inspection_id, board_id = _number(fields, "inspection_id"), _number(fields, "board_id")
    if (inspection_id is None) == (board_id is None):
        both = "is missing: name" if board_id is None else "one decision is about"
        raise ControlError("bad_field", f"inspection_id: {both} an image (inspection_id) or a whole board (board_id)")
    reviewer = _reviewer(fields)
    verdict, defect, note = fields.get("verdict"), _name(fields, "defect"), _name(fields, "note")
    if undo:
        extra = next((name for name in ("verdict", "defect", "note", "boxes") if fields.get(name) is not None), None)
        if extra:
            raise ControlError("bad_field", f"{extra}: undoing restores the decision before and takes no new one")
        return ReviewDecision(inspection_id, reviewer, _number(fields, "newest"), None, board_id=board_id)
    if verdict not in VERDICTS:
        raise ControlError("bad_field", f"verdict: expected one of {', '.join(VERDICTS)}, got {shown(verdict)}")
    if defect is not None and verdict != "fail":
        raise ControlError("bad_field", f"defect: only a fail has one, this is a {verdict}")
    if is_undo(note):
        raise ControlError("bad_field", "note: these words mark what was undone: say it in other words")
    boxes = _boxes(fields)
    if boxes and board_id is not None:
        raise ControlError("bad_field", "boxes: are drawn on an image: name its inspection_id")
    return ReviewDecision(inspection_id, reviewer, _number(fields, "newest"), verdict, defect, note, board_id, boxes)


def write_review(writer: Writer, fields: dict[str, Any]) -> dict[str, Any]:
    """Write the decision and return its committed row; ControlError if it is not written, or `no_answer` in time."""
    wanted = decision(fields)
    writing = writer.run(lambda store: store.review(wanted, writer.publish))
    try:
        return asdict(writing.result(_WAIT_S))
    except CancelledError:
        raise ControlError("not_stored", "the decision is not stored: the daemon stops") from None
    except TimeoutError:
        if writing.cancel():
            reason = "the decision is not stored: the database or the disk is busy: try again"
            raise ControlError("not_stored", reason) from None
        reason = "the disk is slow, and the decision may or may not be stored: try again, it counts once"
        raise ControlError("no_answer", reason) from None
    except (SQLAlchemyError, OSError) as error:
        raise ControlError("not_stored", not_stored(error)) from None


def not_stored(error: Exception) -> str:
    return f"the decision is not stored: {getattr(error, 'orig', None) or error}: try again"


def _number(fields: Mapping[str, Any], name: str) -> int | None:
    value = fields.get(name)
    if value is None or (type(value) is int and 1 <= value <= MAX_INTEGER):
        return value
    raise ControlError("bad_field", f"{name}: expected an integer from 1, got {shown(value)}")


def _reviewer(fields: Mapping[str, Any]) -> str:
    reviewer = _name(fields, "reviewer")
    if reviewer is None or not reviewer.strip():
        raise ControlError("bad_field", "reviewer: is missing: a decision says who made it")
    if reviewer.strip().lower() == DAEMON:
        raise ControlError("bad_field", f"reviewer: {shown(reviewer)} is the line itself: say who you are")
    return reviewer


def _boxes(fields: Mapping[str, Any]) -> tuple[DrawnBox, ...]:
    values: Any = fields.get("boxes")
    if values is None:
        return ()
    if not isinstance(values, list) or len(cast("list[Any]", values)) > MAX_BOXES:
        raise ControlError("bad_field", f"boxes: expected a list of at most {MAX_BOXES} boxes")
    return tuple(_box(f"boxes[{at}]", value) for at, value in enumerate(values))


def _box(name: str, value: Any) -> DrawnBox:
    match value:
        case {"label": str(label), "box": [x1, y1, x2, y2]} if len(value) == 2 and NAME.fullmatch(label):
            is_number = all(type(corner) in (int, float) for corner in (x1, y1, x2, y2))
            if is_number and 0 <= x1 < x2 <= MAX_INTEGER and 0 <= y1 < y2 <= MAX_INTEGER:
                return label, float(x1), float(y1), float(x2), float(y2)
    expected = f'{{"label", "box": [x1, y1, x2, y2]}}: {NAME_EXPECTED}, and pixels with 0 <= x1 < x2, 0 <= y1 < y2'
    raise ControlError("bad_field", f"{name}: expected {expected}")


def _name(fields: Mapping[str, Any], name: str) -> str | None:
    value = fields.get(name)
    if value is None or (isinstance(value, str) and NAME.fullmatch(value)):
        return value
    raise ControlError("bad_field", f"{name}: expected {NAME_EXPECTED}, got {shown(value)}")
