"""The rules that the results were judged by, as the database keeps them: names of defects, reasons of verdicts."""

from collections.abc import Mapping, Sequence
from typing import Any

from daemon.dashboard.site.database import CachedAnswers, Database
from experts.spec import Detection
from routing_rules.compile import RulesError, compile_rules
from routing_rules.document import read_yaml_text
from routing_rules.load import validate
from routing_rules.reasons import StoredAnswer, deciding_reasons
from routing_rules.routes import Routes
from routing_rules.schema import RulesFile

#: A reload shows within this time; older versions never change.
_CACHE_S = 30.0
_MAX_CACHED = 16
#: Newest versions of the rules from which defects get their names.
_MAX_VERSIONS = 8

_NEWEST = f"SELECT text FROM rules_versions ORDER BY loaded_at DESC LIMIT {_MAX_VERSIONS}"  # noqa: S608 - our own number
_TEXT = "SELECT text FROM rules_versions WHERE rules_version = :version"
_BEGINNINGS = {"review": "Needs review", "fail": "Failed", "unknown": "Not judged"}
_NOT_JUDGED = {
    "deadline": "its time was over before its verdict",
    "expert_failed": "an expert could not be loaded, or ended with an error",
    "bad_image": "the image cannot be decoded",
    "rules_changed": "the rules or experts that it needs were removed",
    "no_expert": "no expert judges it yet",
}


class StoredRules:
    """Reads the stored rules, from any thread; answers are cached."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._cache = CachedAnswers(_CACHE_S, _MAX_CACHED)

    def defects(self) -> Mapping[str, str]:
        """Return the rules' label of each defect code, in the order of the rules, the newest rules first."""
        return self._cache.get("defects", self._defects)

    def defect(self, code: Any) -> str:
        """Return a defect's name and code, `bridge (D207)`; the code alone where the rules give it no name."""
        if not code:
            return ""
        label = self.defects().get(str(code), str(code))
        return label if label == code else f"{label.replace('_', ' ')} ({code})"

    def reason(
        self,
        board_type: str,
        image: Any,
        answers: Sequence[Any],
        boxes: Sequence[Any],
        size: tuple[int, int] | None,
    ) -> str:
        """Return the deciding step and its limit in a sentence; the verdict alone if the rules are not stored.

        `image` has verdict, reason, defect, component and rules_version; the others are its rows.
        """
        beginning = _BEGINNINGS.get(image.verdict, "")
        if image.reason:
            return f"{beginning}: {_NOT_JUDGED.get(image.reason, image.reason)}"
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
        labels: dict[str, str] = {}
        for row in self._database.rows(_NEWEST, limit=_MAX_VERSIONS):
            rules = validate(RulesFile, read_yaml_text(row.text, "rules"))[0]
            for label, code in (rules.defects if rules else {}).items():
                labels.setdefault(code, label)
        return labels

    def _routes(self, version: str) -> Routes | None:
        row = self._database.first(_TEXT, version=version)
        try:
            return compile_rules(read_yaml_text(row.text, "rules")) if row is not None else None
        except RulesError:
            return None
