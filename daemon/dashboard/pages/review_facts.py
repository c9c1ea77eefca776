"""What stands beside an image while somebody decides about it: what was said of it, and a good part to compare with."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Row

from daemon.dashboard.pages import questions_review as questions
from daemon.dashboard.site.cached_answers import KeptByKey
from daemon.dashboard.site.database import Database, TooMuchToCount
from daemon.dashboard.site.pictures import Pictures, Size
from daemon.storage.database.reviews import Review, decisions
from routing_rules.document import read_yaml_text
from routing_rules.load import validate
from routing_rules.schema import RulesFile

_KEEPS_S = 30.0
#: Codes, filters, and the good parts of each component.
_MOST_KEPT = 1000
_MOST_CODES = 60
_ROWS = 200


@dataclass(frozen=True, slots=True)
class Code:
    """A defect that a person may name; `says` is the rules' label for it, if there is one."""

    code: str
    says: str | None


@dataclass(frozen=True, slots=True)
class Reference:
    """A good part of the same component."""

    inspection_id: int
    size: Size
    designator: str
    is_reviewed: bool


@dataclass(frozen=True, slots=True)
class Item:
    """One image as the page shows it."""

    image: Row[Any]
    size: Size | None
    answers: Sequence[Row[Any]]
    boxes: Sequence[Row[Any]]
    past: Sequence[Review]
    standing: Review | None
    reference: Reference | None

    @property
    def newest(self) -> int | None:
        """What the reviewer has seen: the last row of `reviews`."""
        return self.past[-1].review_id if self.past else None

    @property
    def why_no_picture(self) -> str:
        """Said in place of a picture."""
        if self.image.is_copied_later:
            return "The picture is being copied to the images folder: it comes in a moment."
        if self.image.image_path is None:
            return "No picture: it was not kept, or was pruned. Decide by what the experts said, or look at the board."
        return "No picture: its file cannot be shown any more. Decide by what the experts said, or look at the board."


class Facts:
    """Reads what belongs to an image; what changes seldom is asked for at most every half a minute."""

    def __init__(self, database: Database, pictures: Pictures) -> None:
        self._database = database
        self._pictures = pictures
        self._kept = KeptByKey(_KEEPS_S, _MOST_KEPT)

    def item(self, inspection_id: int) -> Item | None:
        """None where there is no such image."""
        rows = self._database.rows
        found = rows(questions.image(inspection_id), limit=1)
        if not found:
            return None
        past = [Review(**row._mapping) for row in rows(questions.past(inspection_id), limit=_ROWS)]
        standing = decisions(past)
        return Item(
            image=found[0],
            size=self._pictures.size(found[0].image_path),
            answers=rows(questions.answers(inspection_id), limit=_ROWS),
            boxes=rows(questions.boxes(inspection_id), limit=_ROWS),
            past=past,
            standing=standing[-1] if standing else None,
            reference=self._reference(found[0]),
        )

    def codes(self) -> list[Code]:
        """Those of the rules first, in their order, then what people and the line named: numbers that stay."""
        return self._kept.get("codes", self._codes)

    def facets(self) -> dict[str, list[tuple[str, int]]]:
        """By filter, its values and how many images wait with each."""
        return self._kept.get("facets", self._facets)

    def _codes(self) -> list[Code]:
        text = self._database.rows(questions.rules(), limit=1)
        rules = validate(RulesFile, read_yaml_text(text[0].text, "rules"))[0] if text else None
        found = {code: label for label, code in reversed((rules.defects if rules else {}).items())}
        codes = [Code(code, says if says != code else None) for code, says in reversed(found.items())]
        for question in (questions.codes_of_people(), questions.codes_of_line()):
            for row in self._database.rows(question, limit=_MOST_CODES):
                code = row[0]
                if code not in found:
                    found[code] = code
                    codes.append(Code(code, None))
        return codes[:_MOST_CODES]

    def _facets(self) -> dict[str, list[tuple[str, int]]]:
        rows = self._database.rows(questions.some_waiting(), limit=questions.FACETS_OF)
        columns = {"type": "board_type", "lot": "lot", "component": "component", "verdict": "verdict"}
        found = {name: _frequent(getattr(row, column) for row in rows) for name, column in columns.items()}
        experts = self._database.rows(questions.experts_of_waiting(), limit=_ROWS)
        return found | {"expert": [(str(row[0]), int(tuple(row)[1])) for row in experts]}

    def _reference(self, image: Row[Any]) -> Reference | None:
        """The good part that is most alike: the same place of the same board type, by a person's word, the newest."""
        parts = self._kept.get(f"good {image.component}", lambda: self._good_parts(image.component))
        ranked = sorted(
            (part for part in parts if part.inspection_id != image.inspection_id),
            key=lambda part: (part.board_type != image.board_type, part.designator != image.designator),
        )
        for part in ranked[:3]:
            size = self._pictures.size(part.image_path)
            if size is not None:
                return Reference(part.inspection_id, size, part.designator, bool(part.is_reviewed))
        return None

    def _good_parts(self, component: str) -> list[Row[Any]]:
        try:
            return [
                row
                for question in questions.good_parts(component)
                for row in self._database.rows(question, limit=questions.REFERENCES, at_most_s=1.0)
            ]
        except TooMuchToCount:
            return []  # a comparison is a help: nobody waits for it


def _frequent(values: Iterable[str | None]) -> list[tuple[str, int]]:
    """Most frequent first."""
    counts = Counter(value for value in values if value is not None)
    return sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:_ROWS]
