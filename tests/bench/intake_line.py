"""The line of the intake benchmark: one small expert, one board type, JPEGs of a given size, and its daemon.

`python -m tests.bench.intake_line CONFIG` runs a daemon that takes images and judges none.
"""

import io
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import numpy as np
from PIL import Image

from daemon.app import App
from daemon.dispatch.drive import Drive
from daemon.line.line import load_line
from tests.bench.intake_camera import BOARD_IMAGES
from tests.lines import a_line
from tools.setup.service import READY

_RULES = """\
boards:
  bench: {{components: {{part: {images}}}}}
classifiers:
  "*": {{expert: {expert}, pass: [ok], review_below: 0.0}}
"""
_MAX_COMMENT_BYTES = 65_533


def make_expert(folder: Path) -> None:
    """Write a catalog of one expert, `part`: ResNet-18 with random weights."""
    import torch

    from experts.catalog import write_catalog
    from experts.vision import frameworks
    from tools.training.importer import import_model

    torch.manual_seed(3)
    network = frameworks.torchvision().models.resnet18(num_classes=2)
    report = import_model(network, "resnet18", ["ok", "odd"], 96, folder, expert="part")
    write_catalog(folder / "catalog.yaml", {"part": report.entry})


def make_line(
    folder: Path, *, executors: int, make: Callable[[Path], None] = make_expert, expert: str = "part"
) -> Path:
    """Write a `coserve.yaml` in `folder` with everything it names; `expert`, of those that `make` writes, judges.

    Its limits are so large that every image is accepted and none is answered `busy`.
    """
    make(folder / "made")
    config = a_line(
        folder,
        folder / "made",
        devices={"cpu": {"expert_memory": "200MB", "executors": executors}},
        limits={"backlog_images": 10**7, "source_share": 1, "backlog_bytes": "1TB", "max_wait": "1h"},
        retention={"keep": []},
    )
    (folder / "rules.yaml").write_text(_RULES.format(images=BOARD_IMAGES, expert=expert), encoding="utf-8")
    return config


def a_jpeg_of(size_bytes: int, side: int | None = None) -> bytes:
    """Return a JPEG of exactly so many bytes: noise, `side` pixels or as many as fit, comments behind the header."""
    best = _noise(side) if side else b""
    next_side = 8
    while not side and len(jpeg := _noise(next_side)) <= size_bytes - 4:
        best, next_side = jpeg, next_side + 8
    if not best:
        raise ValueError(f"a JPEG has {len(_noise(8)) + 4} bytes at least, not {size_bytes}")
    comments = b""
    while (missing := size_bytes - len(best) - len(comments)) > 0:
        length = min(missing, _MAX_COMMENT_BYTES + 4)
        length -= 4 if 0 < missing - length < 4 else 0  # the next comment needs four bytes of its own
        comments += b"\xff\xfe" + (length - 2).to_bytes(2, "big") + bytes(length - 4)
    return best[:2] + comments + best[2:]


def _noise(side: int) -> bytes:
    pixels = np.random.default_rng(side).integers(0, 255, (side, side, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "JPEG", quality=85)
    return buffer.getvalue()


def _take_only(config: Path) -> None:
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    app = App(load_line(config), config)
    with patch.object(Drive, "accept"):  # accepted images wait for ever
        app.start()
        print(f"{READY}: {app.describe()}", flush=True)
        stop.wait()
        app.stop()


if __name__ == "__main__":
    _take_only(Path(sys.argv[1]))
