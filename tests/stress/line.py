"""A small real line for stress: a few small experts with random weights, one board type, sockets of its own."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import yaml

from tools.setup.service import free_port

BOARD_TYPE = "stress"
#: Images of one board; a board closes when it has as many.
IMAGES_PER_BOARD = 4
COMPONENT = "P"
#: Boards of this type have no end: for publishers that send what they like.
OPEN_BOARD_TYPE = "open"

#: Two texts of the same judgement, so that a reload has something to do. One review in `IMAGES_PER_BOARD` images.
RULES = (
    """\
boards:
  stress: {time_limit: 10m, components: {P: 3, R: 1}}
  open: {extras: allow, components: {P: 1}}
classifiers:
  P: {expert: part-000, pass: [ok, defect], review_below: 0.0}
  R: {expert: part-001, pass: [ok, defect], review_below: 1.0}
""",
    """\
boards:
  stress: {time_limit: 10m, components: {P: 3, R: 1}}
  open: {extras: allow, components: {P: 1}}
classifiers:
  P: {expert: part-002, pass: [ok, defect], review_below: 0.0}
  R: {expert: part-001, pass: [ok, defect], review_below: 1.0}
""",
)


def make_small_line(folder: Path, settings: Mapping[str, Any] | None = None, *, memory: str = "100MB") -> Path:
    """The path of a `coserve.yaml` in `folder`; experts that lie there from before are used again."""
    from tests.bench.stock import Recipe, make_stock

    make_stock(folder / "experts", Recipe(3, 0, "resnet18", "yolo11n", 64))
    write_rules(folder, 0)
    config: dict[str, Any] = {
        "endpoints": {
            "intake": ["ipc://run/intake.sock", f"tcp://127.0.0.1:{free_port()}"],
            "results": "ipc://run/results.sock",
            "control": "ipc://run/control.sock",
        },
        "rules": "rules.yaml",
        "catalog": "experts/catalog.yaml",
        "devices": {"cpu": {"expert_memory": memory, "executors": 1}},
        **(settings or {}),
    }
    path = folder / "coserve.yaml"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    return path


def write_rules(folder: Path, number: int) -> None:
    """Put one of `RULES` in force with the next reload."""
    (folder / "rules.yaml").write_text(RULES[number % len(RULES)], encoding="utf-8")


def component_of(number: int) -> str:
    """The component of the image `number` of a board."""
    return "R" if number % IMAGES_PER_BOARD == IMAGES_PER_BOARD - 1 else "P"


def make_jpegs(count: int, size_bytes: int, seed: int = 3) -> list[bytes]:
    """`count` different small JPEG files, padded behind their end marker to `size_bytes` (decoders ignore that)."""
    dice = np.random.default_rng(seed)
    found: list[bytes] = []
    for _ in range(count):
        blocks = dice.integers(0, 255, (16, 16, 3), dtype=np.uint8)
        pixels = cv2.resize(blocks, (96, 96), interpolation=cv2.INTER_CUBIC)
        _, encoded = cv2.imencode(".jpg", pixels)
        jpeg = encoded.tobytes()
        found.append(jpeg + dice.bytes(max(0, size_bytes - len(jpeg))))
    return found
