"""The folder of a line for bare boards: its rules and its configuration, ready for `coserve run`."""

import re
from collections.abc import Sequence
from pathlib import Path

from tools.deeppcb.tiles import LABELS

#: The board type of tiles whose pattern has no classifier of its own, and that classifier.
BOARD, ANY_PATTERN = "bare-board", "any-pattern"
DETECTOR = "bare-board-defects"
CLEAN, SUSPECT = "clean", "suspect"

_RULES = """\
# Bare boards (DeepPCB by S. Tang and others, MIT licence): tiles of {count} known patterns, and of any other.
# Written by `coserve train deeppcb`; check it with:  coserve rules check rules.yaml

boards:                            # one tile is a board here, and its component type is its pattern
{boards}

classifiers:                       # `clean` ends here as a pass; `suspect` goes on, and the detector decides
{classifiers}

detectors:
  defects:                         # a suspect tile in which it finds nothing is a `review` (`on_clear`, docs/rules.md)
    expert: {detector}
    fail_on: {fail_on}
    review_on: {review_on}

defects: {codes}
"""

_CONFIG = """\
# The line of `coserve train deeppcb`: coserve run coserve.yaml
endpoints:
  intake: ["ipc://run/intake.sock", "tcp://127.0.0.1:5570"]
  results: tcp://127.0.0.1:5571
  control: ipc://run/control.sock
rules: rules.yaml
catalog: experts/catalog.yaml
devices:
  cpu: {expert_memory: 400MB, executors: 2}    # eight classifiers of 45 MB and the detector of 12 MB
"""


def render_rules(patterns: Sequence[str], threshold: float) -> str:
    """Rules with a classifier for each pattern, a catch-all, and the detector behind those that say `suspect`.

    `threshold` is the confidence from which a box is a failure; surer than half of it is looked at by an operator.
    """
    judged = f"pass: [{CLEAN}], then: {{{SUSPECT}: defects}}"
    width = max(len(name) + 1 for name in (BOARD, *patterns))
    boards = [f"  {name + ':':{width}} {{components: {{{name}: 1}}}}" for name in patterns]
    boards.append(f"  {BOARD + ':':{width}} {{extras: allow, components: {{{ANY_PATTERN}: 1}}}}   # any other pattern")
    experts = [*((name, name) for name in patterns), ('"*"', ANY_PATTERN)]
    rows = [f"  {name + ':':{width}} {{expert: {_text(expert)}, {judged}}}" for name, expert in experts]
    return _RULES.format(
        count=len(patterns),
        boards="\n".join(boards),
        classifiers="\n".join(rows),
        detector=DETECTOR,
        fail_on=_by_label(threshold),
        review_on=_by_label(threshold / 2),
        codes="{" + ", ".join(f"{label}: B{number:02}" for number, label in enumerate(LABELS, 1)) + "}",
    )


def write_line(folder: Path, patterns: Sequence[str], threshold: float) -> Path:
    """`rules.yaml` and `coserve.yaml` beside the folder `experts`; returns the latter."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "rules.yaml").write_text(render_rules(patterns, threshold), encoding="utf-8")
    config = folder / "coserve.yaml"
    config.write_text(_CONFIG, encoding="utf-8")
    return config


def _by_label(confidence: float) -> str:
    return "{" + ", ".join(f"{label}: {confidence:.2f}" for label in LABELS) + "}"


def _text(name: str) -> str:
    """A folder named 00041 would be read as a number."""
    return name if re.match("[A-Za-z]", name) else f'"{name}"'
