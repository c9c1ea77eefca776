"""The rules that the results were judged by, as the database keeps them: names of defects, reasons of verdicts."""

from collections.abc import Mapping, Sequence
from typing import Any

from daemon.dashboard.site.database import CachedAnswers, Database
from experts.spec import Detection
from routing_rules.compile import RulesError, compile_rules
from routing_rules.defects import MAX_VERSIONS, defect_code, defect_in_words, defect_labels
from routing_rules.document import read_yaml_text
from routing_rules.reasons import REASONS, StoredAnswer, deciding_reasons
from routing_rules.routes import Routes

#: A reload shows within this time; older versions never change.
_CACHE_S = 30.0
_MAX_CACHED = 16

_NEWEST = f"SELECT text FROM rules_versions ORDER BY loaded_at DESC LIMIT {MAX_VERSIONS}"  # noqa: S608 - our own number
_TEXT = "SELECT text FROM rules_versions WHERE rules_version = :version"
_BEGINNINGS = {"review": "Needs review", "fail": "Failed", "unknown": "Not judged"}


class StoredRules:
    """The stored rules, cached, for any thread."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._cache = CachedAnswers(_CACHE_S, _MAX_CACHED)

    def defects(self) -> Mapping[str, str]:
        """Return labels by defect code, in the order of the rules, newest rules first."""
        return self._cache.get("defects", self._defects)

    def defect(self, code: Any) -> str:
        """Name a defect: `bridge (D207)`; its code alone where the rules give no name."""
        return defect_in_words(str(code), self.defects()) if code else ""

    def code(self, typed: str) -> str:
        return defect_code(typed, self.defects()) or typed

    def reason(
        self, board_type: str, image: Any, answers: Sequence[Any], boxes: Sequence[Any], size: tuple[int, int] | None
    ) -> str:
        """Explain the deciding step of `image` and its limit; the verdict alone without stored rules."""
        beginning = _BEGINNINGS.get(image.verdict, "")
        if image.reason:
            return f"{beginning}: {REASONS.get(image.reason, (image.reason,))[0]}"
        routes = self._cache.get(image.rules_version, lambda: self._routes(image.rules_version))
        if not beginning or routes is None:
            return beginning
        given = [
            StoredAnswer(
                answer.expert,
                answer.label,
                answer.confidence,
                [
                    Detection(box.label, box.confidence, (box.x1, box.y1, box.x2, box.y2))
                    for box in boxes
                    if box.step == answer.step
                ],
            )
            for answer in answers
        ]
        decided = deciding_reasons(routes.first_step(board_type, image.component), given, size)
        if decided is None or (decided[0].verdict, decided[0].defect) != (image.verdict, image.defect):
            return beginning
        return f"{beginning}: {'; '.join(decided[1])}"

    def _defects(self) -> dict[str, str]:
        return defect_labels(row.text for row in self._database.rows(_NEWEST, limit=MAX_VERSIONS))

    def _routes(self, version: str) -> Routes | None:
        row = self._database.first(_TEXT, version=version)
        try:
            return compile_rules(read_yaml_text(row.text, "rules")) if row is not None else None
        except RulesError:
            return None
