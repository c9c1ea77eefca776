"""A small real line for stress: experts with random weights, two board types, sockets of its own."""

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.contract.client import Line, everything_is_whole
from tests.lines import COSERVE_RUN, a_jpeg, make_experts
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


def make_small_line(folder: Path, limits: Mapping[str, Any]) -> Line:
    """Return a line whose experts compute with torch."""
    (folder / "made").mkdir(parents=True)
    make_experts(folder / "made")
    endpoints = {
        "intake": ["ipc://run/intake.sock", f"tcp://127.0.0.1:{free_port()}"],
        "results": "ipc://run/results.sock",
        "control": "ipc://run/control.sock",
    }
    settings = {"memory": "100MB", "endpoints": endpoints, "limits": limits}
    return Line(folder / "line", folder / "made", rules_of(0), COSERVE_RUN, **settings)


def rules_of(number: int) -> str:
    """Return rules; those of odd and even numbers differ."""
    return _RULES.format(expert=("R0402", "QFP64")[number % 2])


def assert_judged(line: Line, accepted: Mapping[str, int]) -> None:
    """Every image of these sources has one verdict, and their whole boards have closed as complete."""
    everything_is_whole(line)
    for source, images in accepted.items():
        judged = line.rows("SELECT count(DISTINCT image_id) FROM inspections WHERE source = ?", source)
        complete = "SELECT count(*) FROM boards WHERE serial LIKE ? AND reason = 'complete' AND inspected = expected"
        boards = line.rows(complete, f"{source}-%")
        assert (judged, boards) == ([(images,)], [(images // IMAGES_PER_BOARD,)]), source


def component_of(number: int) -> str:
    """Return the component of the image `number` of a board."""
    return "R" if number % IMAGES_PER_BOARD == IMAGES_PER_BOARD - 1 else "P"


def make_jpegs(count: int, size_bytes: int, seed: int = 3) -> list[bytes]:
    """Return `count` different small JPEG files, padded behind their end marker (decoders ignore that)."""
    dice = random.Random(seed)
    jpegs = [a_jpeg(dice.randrange(2**32), 96, 96) for _ in range(count)]
    return [jpeg + dice.randbytes(max(0, size_bytes - len(jpeg))) for jpeg in jpegs]
