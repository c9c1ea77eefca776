"""Defects of stored rules: the code that the database keeps, and the label that people read and type."""

from collections.abc import Iterable, Mapping

from routing_rules.document import read_yaml_text
from routing_rules.load import validate
from routing_rules.schema import RulesFile

#: Newest versions of the rules from which defects get their names.
MAX_VERSIONS = 8


def defect_labels(texts: Iterable[str]) -> dict[str, str]:
    """Return the label of each defect code; the first of the rules' `texts` wins."""
    labels: dict[str, str] = {}
    for text in texts:
        rules = validate(RulesFile, read_yaml_text(text, "rules"))[0]
        for label, code in (rules.defects if rules else {}).items():
            labels.setdefault(code, label)
    return labels


def defect_in_words(code: str, labels: Mapping[str, str]) -> str:
    """Return a defect's name and code, `wrong part (D106)`; the code alone without a name in the rules."""
    label = labels.get(code, code)
    return label if label == code else f"{label.replace('_', ' ')} ({code})"


def defect_code(typed: str, labels: Mapping[str, str]) -> str | None:
    """Return the code of a typed code, label, or both as pages show them; None if the rules have no such defect."""
    if typed in labels:
        return typed
    wanted = _plain(typed)
    names = (
        (code, {_plain(code), _plain(label), _plain(defect_in_words(code, labels))}) for code, label in labels.items()
    )
    return next((code for code, spellings in names if wanted in spellings), None)


def _plain(text: str) -> str:
    return " ".join(text.replace("_", " ").split()).casefold()
