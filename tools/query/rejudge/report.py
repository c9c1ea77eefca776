"""What would change: verdict by verdict, and against what reviewers decided. Plain values, for tables, JSON and CSV."""

import csv
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from daemon.units import spreadsheet_cell
from tools.query.rejudge.run import Rejudged

_COLUMNS = (
    *("inspection_id", "board_type", "serial", "designator", "component"),
    *("verdict", "defect", "would_be", "would_be_defect", "reviewer", "final_verdict", "effect", "image_path"),
)


@dataclass(frozen=True, slots=True)
class Effects:
    """Changes against reviewers: what they had to correct and would not any more, and what they would have to.

    `false_calls_gone`: failed, passed by a reviewer, would pass. `escapes_caught`: passed, failed by a reviewer, would
    fail or go to review. `new_false_calls` and `new_escapes`: judged as the reviewer does now, and would not be.
    """

    false_calls_gone: int = 0
    escapes_caught: int = 0
    new_false_calls: int = 0
    new_escapes: int = 0


def effect_of(found: Rejudged) -> str | None:
    """Which of `Effects` a changed image counts to."""
    was, final, now = found.image.verdict, found.image.final, found.verdict
    if final == "pass" and was == "fail" and now == "pass":
        return "false_calls_gone"
    if final == "fail" and was == "pass" and now in ("fail", "review"):
        return "escapes_caught"
    if final == "pass" and was != "fail" and now == "fail":
        return "new_false_calls"
    if final == "fail" and was != "pass" and now == "pass":
        return "new_escapes"
    return None


def summary(found: Sequence[Rejudged]) -> dict[str, Any]:
    """Counts: `changes` by verdict before and after, `effects` against reviewers, boards that are touched."""
    judged = [one for one in found if one.unread is None]
    changed = [one for one in judged if one.is_changed]
    table = Counter((one.image.verdict, one.verdict) for one in changed)
    effects = Counter(effect for one in changed if (effect := effect_of(one)) is not None)
    return {
        "rejudged": len(judged),
        "unchanged": len(judged) - len(changed),
        "changed": len(changed),
        "boards": len({(one.image.board_type, one.image.serial) for one in changed}),
        "unread": len(found) - len(judged),
        "changes": [{"from": was, "to": now, "images": count} for (was, now), count in sorted(table.items())],
        "reviewed": sum(one.image.final is not None for one in judged),
        "effects": asdict(Effects(**effects)),
    }


def rows(found: Sequence[Rejudged]) -> list[dict[str, Any]]:
    """A row for each image that would change, newest first."""
    return [_row(one) for one in found if one.is_changed]


def _row(one: Rejudged) -> dict[str, Any]:
    image = one.image
    values = (
        *(image.inspection_id, image.board_type, image.serial, image.designator, image.component),
        *(image.verdict, image.defect, one.verdict, one.defect, image.reviewer, image.final),
        *(effect_of(one), image.image_path),
    )
    return dict(zip(_COLUMNS, values, strict=True))


def write_csv(path: Path, changed: Sequence[dict[str, Any]]) -> None:
    """The rows of all changes; the header alone where there are none."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(_COLUMNS)
        writer.writerows([spreadsheet_cell(row[name]) for name in _COLUMNS] for row in changed)
