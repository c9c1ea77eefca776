"""Writes the files of the demo's line, coserve.yaml and rules.yaml, for a person to read."""

from pathlib import Path

from tools.camera.render import board_types
from tools.demo.training import DETECTORS

#: Which component types go on to which detector, as patterns; together they cover the library.
_PATTERNS = {"solder-chip": ("R*", "C*", "LED*"), "solder-leaded": ("SOT*", "SOIC*", "QFP*", "HDR*")}
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


def write_configuration(folder: Path) -> Path:
    """Write `folder/coserve.yaml` unless it is there: it is the user's to change."""
    path = folder / "coserve.yaml"
    if not path.exists():
        text = Path(__file__).with_name("coserve.yaml").read_text(encoding="utf-8")
        path.write_text(text.replace("{folder}", str(folder)), encoding="utf-8")
    return path


def write_rules(folder: Path, fail_on: dict[str, dict[str, float]], review_below: float) -> Path:
    """Write `folder/rules.yaml` for the four board types.

    `fail_on` is detector to label to confidence; below `review_below` a classifier's answer is a `review`.
    """
    lines = [
        "# Which expert looks at which component, and what passes. Check:  coserve rules check rules.yaml",
        "boards:",
    ]
    for board in board_types().values():
        lines += [f"  {board.name}:", "    time_limit: 60s", "    components:"]
        lines += [f"      {part}: [{', '.join(names)}]" for part, names in board.designators().items()]
    lines += ["", "classifiers:   # the first pattern that matches; what passes goes on to the shared solder detector"]
    for detector, patterns in _PATTERNS.items():
        lines += [
            f'  "{pattern}": {{expert: "{{component}}", pass: [ok], review_below: {review_below}, then: {detector},'
            " pass_rate: 0.95}"
            for pattern in patterns
        ]
    lines += ["", "detectors:"]
    for detector in DETECTORS:
        limits = ", ".join(f"{label}: {limit:.2f}" for label, limit in fail_on[detector.expert].items())
        lines.append(f"  {detector.expert}: {{expert: {detector.expert}, fail_on: {{{limits}}}}}")
    lines += ["", "defects:"]
    lines += [f"  {label}: {code}   # {label.replace('_', ' ')}" for label, code in _CODES.items()]
    path = folder / "rules.yaml"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path
