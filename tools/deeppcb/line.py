"""The folder of a line for bare boards: its rules and its configuration, ready for `coserve run`."""

from collections.abc import Sequence
from pathlib import Path

from tools.deeppcb.tiles import LABELS

ANY_PATTERN = "any-pattern"
DETECTOR = "bare-board-defects"
CLEAN, SUSPECT = "clean", "suspect"

_RULES = """\
# Bare boards (DeepPCB by S. Tang and others, MIT licence): tiles of {count} known patterns, and of any other.
# Written by `coserve train deeppcb`; check it with:  coserve rules check rules.yaml

boards:
  bare-board:
    extras: allow                  # tiles of patterns that are not listed are judged too, by `any-pattern`
    components: {components}

classifiers:                       # the component type of a tile is its board pattern
{classifiers}
  "*": {{{every}, {judged}}}

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
    width = max([len(ANY_PATTERN), *map(len, patterns)])
    rows = [f"  {name + ':':{width + 1}} {{expert: {name}, {judged}}}" for name in patterns]
    return _RULES.format(
        count=len(patterns),
        components="{" + ", ".join(f"{name}: 1" for name in patterns or [ANY_PATTERN]) + "}",
        classifiers="\n".join(rows),
        every=f"expert: {ANY_PATTERN}",
        judged=judged,
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
