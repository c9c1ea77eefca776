"""A person's decision about an image or a whole attempt: one object for pages, control, command and rows."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from daemon.wire.control import ControlError
from daemon.wire.messages import MAX_INTEGER, NAME, NAME_EXPECTED, shown

#: The reviewer of the line's own verdicts, as in the view `final_verdicts`.
DAEMON = "daemon"
VERDICTS = ("pass", "fail", "unknown", "review")
MAX_BOXES = 300
#: Notes of rows that undo a decision.
UNDECIDED = "undecided again: "
UNDO = re.compile(rf"(?:{UNDECIDED})?undo of review ([0-9]{{1,19}}) by (.+)")
#: A label, and x1, y1, x2, y2 in pixels of the image.
DrawnBox = tuple[str, float, float, float, float]

_FIELDS = ("inspection_id", "board_id", "verdict", "reviewer", "defect", "note", "newest", "undo", "boxes")


@dataclass(frozen=True, slots=True)
class Decision:
    """A decision to write. `newest` is the last row that its reviewer saw, if any; `verdict` None undoes it."""

    inspection_id: int | None
    reviewer: str
    newest: int | None
    verdict: str | None
    defect: str | None = None
    note: str | None = None
    board_id: int | None = None
    boxes: tuple[DrawnBox, ...] = ()

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> "Decision":
        """Read the fields of control's `review`; ControlError `bad_field` says which one is wrong and why."""
        unknown = sorted(set(fields) - set(_FIELDS))
        if unknown:
            raise _wrong(unknown[0], f"expected one of {', '.join(_FIELDS)}")
        undo = fields.get("undo", False)
        if not isinstance(undo, bool):
            raise _wrong("undo", f"expected true or false, got {shown(undo)}")
        inspection_id, board_id = _subject(fields)
        reviewer = _reviewer(fields)
        verdict, defect, note = fields.get("verdict"), _name(fields, "defect"), _name(fields, "note")
        if undo:
            for extra in ("verdict", "defect", "note", "boxes"):
                if fields.get(extra) is not None:
                    raise _wrong(extra, "undoing restores the decision before and takes no new one")
            return cls(inspection_id, reviewer, _number(fields, "newest"), None, board_id=board_id)
        if verdict not in VERDICTS:
            raise _wrong("verdict", f"expected one of {', '.join(VERDICTS)}, got {shown(verdict)}")
        if defect is not None and verdict != "fail":
            raise _wrong("defect", f"only a fail has one, this is a {verdict}")
        if note is not None and (UNDO.fullmatch(note) or note.startswith(UNDECIDED)):
            raise _wrong("note", "these words mark what was undone: say it in other words")
        boxes = _boxes(fields)
        if boxes and board_id is not None:
            raise _wrong("boxes", "are drawn on an image: name its inspection_id")
        return cls(inspection_id, reviewer, _number(fields, "newest"), verdict, defect, note, board_id, boxes)

    @property
    def fields(self) -> dict[str, Any]:
        """Return the fields of control's `review`, as `from_fields` reads them."""
        names = ("inspection_id", "board_id", "verdict", "reviewer", "defect", "note", "newest")
        fields = {name: value for name in names if (value := getattr(self, name)) is not None}
        fields |= {"boxes": [{"label": label, "box": corners} for label, *corners in self.boxes]} if self.boxes else {}
        return fields if self.verdict is not None else fields | {"undo": True}

    @property
    def subject(self) -> str:
        return f"image {self.inspection_id}" if self.board_id is None else f"board {self.board_id}"


def _wrong(name: str, problem: str) -> ControlError:
    return ControlError("bad_field", f"{name}: {problem}")


def not_stored(error: Exception) -> str:
    return f"the decision is not stored: {getattr(error, 'orig', None) or error}: try again"


def _number(fields: Mapping[str, Any], name: str) -> int | None:
    value = fields.get(name)
    if value is None or (type(value) is int and 1 <= value <= MAX_INTEGER):
        return value
    raise _wrong(name, f"expected an integer from 1, got {shown(value)}")


def _subject(fields: Mapping[str, Any]) -> tuple[int | None, int | None]:
    inspection_id, board_id = _number(fields, "inspection_id"), _number(fields, "board_id")
    if (inspection_id is None) == (board_id is None):
        both = "is missing: name" if board_id is None else "one decision is about"
        raise _wrong("inspection_id", f"{both} an image (inspection_id) or a whole board (board_id)")
    return inspection_id, board_id


def _reviewer(fields: Mapping[str, Any]) -> str:
    reviewer = _name(fields, "reviewer")
    if reviewer is None or not reviewer.strip():
        raise _wrong("reviewer", "is missing: a decision says who made it")
    if reviewer.strip().lower() == DAEMON:
        raise _wrong("reviewer", f"{shown(reviewer)} is the line itself: say who you are")
    return reviewer


def _boxes(fields: Mapping[str, Any]) -> tuple[DrawnBox, ...]:
    values: Any = fields.get("boxes")
    if values is None:
        return ()
    if not isinstance(values, list) or len(cast("list[Any]", values)) > MAX_BOXES:
        raise _wrong("boxes", f"expected a list of at most {MAX_BOXES} boxes")
    return tuple(_box(f"boxes[{at}]", value) for at, value in enumerate(values))


def _box(name: str, value: Any) -> DrawnBox:
    match value:
        case {"label": str(label), "box": [x1, y1, x2, y2]} if len(value) == 2 and NAME.fullmatch(label):
            is_number = all(type(corner) in (int, float) for corner in (x1, y1, x2, y2))
            if is_number and 0 <= x1 < x2 <= MAX_INTEGER and 0 <= y1 < y2 <= MAX_INTEGER:
                return label, float(x1), float(y1), float(x2), float(y2)
    expected = f'{{"label", "box": [x1, y1, x2, y2]}}: {NAME_EXPECTED}, and pixels with 0 <= x1 < x2, 0 <= y1 < y2'
    raise _wrong(name, f"expected {expected}")


def _name(fields: Mapping[str, Any], name: str) -> str | None:
    value = fields.get(name)
    if value is None or (isinstance(value, str) and NAME.fullmatch(value)):
        return value
    raise _wrong(name, f"expected {NAME_EXPECTED}, got {shown(value)}")
