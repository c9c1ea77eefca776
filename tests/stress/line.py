"""A small real line for stress: experts with random weights, two board types, sockets of its own."""

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.lines import a_jpeg, a_line, make_experts
from tests.ports import free_port

BOARD_TYPE = "stress"
#: Images of one board; a board closes when it has as many.
IMAGES_PER_BOARD = 4
#: Boards of this type have no end: for publishers that send what they like.
OPEN_BOARD_TYPE = "open"

#: Two experts in turn judge the component P, so that a reload changes something.
_RULES = """\
boards:
  stress: {{time_limit: 10m, components: {{P: 3, R: 1}}}}
  open: {{extras: allow, components: {{P: 1}}}}
classifiers:
  P: {{expert: {expert}, pass: [ok, odd, bad], review_below: 0.0}}
  R: {{expert: C0603, pass: [ok, odd, bad], review_below: 1.0}}
"""


def make_small_line(folder: Path, settings: Mapping[str, Any] | None = None) -> Path:
    """Make a line in `folder` and return the path of its `coserve.yaml`."""
    make_experts(folder / "made")
    endpoints = {
        "intake": ["ipc://run/intake.sock", f"tcp://127.0.0.1:{free_port()}"],
        "results": "ipc://run/results.sock",
        "control": "ipc://run/control.sock",
    }
    config = a_line(folder, folder / "made", memory="100MB", **{"endpoints": endpoints, **(settings or {})})
    write_rules(folder, 0)
    return config


def write_rules(folder: Path, number: int) -> None:
    """Write rules that come into force with the next reload; those of odd and even numbers differ."""
    rules = _RULES.format(expert=("R0402", "QFP64")[number % 2])
    (folder / "rules.yaml").write_text(rules, encoding="utf-8")


def component_of(number: int) -> str:
    """Return the component of the image `number` of a board."""
    return "R" if number % IMAGES_PER_BOARD == IMAGES_PER_BOARD - 1 else "P"


def make_jpegs(count: int, size_bytes: int, seed: int = 3) -> list[bytes]:
    """Return `count` different small JPEG files, padded behind their end marker (decoders ignore that)."""
    dice = random.Random(seed)
    jpegs = [a_jpeg(dice.randrange(2**32), 96, 96) for _ in range(count)]
    return [jpeg + dice.randbytes(max(0, size_bytes - len(jpeg))) for jpeg in jpegs]
