"""Writes the files of the demo's line, coserve.yaml and rules.yaml, for a person to read."""

import json
from dataclasses import dataclass
from pathlib import Path

from experts.durable import replace_durably
from tools.camera.render import board_types, part_types

#: The detector of each package family's solder.
SOLDER_DETECTORS = {
    "chip": "solder-chip",
    "led": "solder-chip",
    "electrolytic": "solder-chip",
    "sot23": "solder-leaded",
    "soic": "solder-leaded",
    "qfp": "solder-leaded",
    "connector": "solder-leaded",
}
_CODES = {
    "missing": "D101",
    "shifted": "D102",
    "rotated": "D103",
    "reversed": "D104",
    "tombstone": "D105",
    "wrong_part": "D106",
    "bridge": "D201",
    "insufficient": "D202",
    "lifted_lead": "D203",
}


@dataclass(frozen=True, slots=True)
class Thresholds:
    """The confidences of the rules, chosen on boards that no training saw (`thresholds.json` beside the weights).

    `review_below`, by component: an answer below it goes to review. `fail_on`, by package family and solder label: a
    box at or above it fails the part.
    """

    review_below: dict[str, float]
    fail_on: dict[str, dict[str, float]]


def read_thresholds(experts: Path) -> Thresholds:
    """Read `thresholds.json` beside the weights."""
    return Thresholds(**json.loads((experts / "thresholds.json").read_text("utf-8")))


def write_configuration(folder: Path) -> Path:
    """Write `folder/coserve.yaml` unless it exists: the user may have edited it."""
    path = folder / "coserve.yaml"
    if not path.exists():
        text = Path(__file__).with_name("coserve.yaml").read_text(encoding="utf-8")
        replace_durably(path, text.replace("{folder}", str(folder)))
    return path


def write_rules(folder: Path, thresholds: Thresholds) -> Path:
    """Write `folder/rules.yaml` for the four board types."""
    lines = [
        "# Which expert looks at which component, and what passes. Check:  coserve rules check rules.yaml",
        "boards:",
    ]
    for board in board_types().values():
        lines += [f"  {board.name}:", "    time_limit: 60s", "    components:"]
        lines += [f"      {part}: [{', '.join(names)}]" for part, names in board.designators().items()]
    lines += ["", "classifiers:   # what passes goes on to the detector of its package family's solder"]
    for name, part in part_types().items():
        answers = f'expert: "{name}", pass: [ok], review_below: {thresholds.review_below[name]:.2f}'
        lines.append(f'  "{name}": {{{answers}, then: solder-{part.family}, pass_rate: 0.95}}')
    lines += ["", "detectors:   # families share experts, but not the confidence from which a box is a defect"]
    for family, limits in thresholds.fail_on.items():
        text = ", ".join(f"{label}: {limit:.2f}" for label, limit in limits.items())
        lines.append(f"  solder-{family}: {{expert: {SOLDER_DETECTORS[family]}, fail_on: {{{text}}}}}")
    labels = {label for part in part_types().values() for label in part.labels}
    labels |= {label for limits in thresholds.fail_on.values() for label in limits}
    lines += ["", "defects:"]
    lines += [f"  {label}: {code}   # {label.replace('_', ' ')}" for label, code in _CODES.items() if label in labels]
    path = folder / "rules.yaml"
    replace_durably(path, "\n".join(lines) + "\n")
    return path
