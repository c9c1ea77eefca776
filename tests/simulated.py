"""Lines on simulated devices: real daemons, sockets and databases, weights files of a few kilobytes, and no torch.

`python -m tests.simulated CONFIG` runs such a line's daemon, as `coserve run CONFIG` runs one on this PC's devices.
"""

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from daemon.dispatch.simulated import SimulatedDevices
from daemon.serve import serve
from experts.catalog import write_catalog
from experts.spec import Answer, ExpertSpec
from experts.vision.architectures import ARCHITECTURES, PLAIN_HEAD, layout_id
from experts.vision.preprocess import Prepared
from experts.weights import Block, write_weights
from tests.lines import CLASSIFIERS
from tools.setup.service import Service

#: For `Service(config, log, command=DAEMON)`.
DAEMON = ("tests.simulated",)
_INPUT_SIZE = 64


def answer(spec: ExpertSpec, image: Prepared) -> Answer:
    """Return the same label for the same pixels, at .9; detectors see nothing."""
    if spec.task == "detect":
        return Answer(None, None)
    return Answer(spec.classes[int(image.pixels.sum(dtype="int64")) % len(spec.classes)], 0.9)


def make_experts(folder: Path, *, weights_bytes: int = 4096) -> None:
    """Write the experts of tests/lines.py with weights that nothing computes with, and their catalog."""
    entries = {name: _expert(folder, name, "resnet18", ("ok", "odd", "bad"), weights_bytes) for name in CLASSIFIERS}
    labels = ("bridge", "void", *(f"label{number}" for number in range(78)))
    entries["yolo-solder"] = _expert(folder, "yolo-solder", "yolo11n", labels, weights_bytes)
    write_catalog(folder / "catalog.yaml", entries)


def a_service(config: Path, log: Path) -> Service:
    return Service(config, log, command=DAEMON)


def _expert(folder: Path, name: str, kind: str, classes: Iterable[str], weights_bytes: int) -> dict[str, Any]:
    architecture, labels = ARCHITECTURES[kind], list(classes)
    form = {"dtype": "float32", "memory_format": "channels_last", "head": PLAIN_HEAD}
    metadata = {
        "architecture": kind,
        "classes": json.dumps(labels),
        "input_size": str(_INPUT_SIZE),
        **form,
        "layout": layout_id(architecture, len(labels), _INPUT_SIZE, *form.values()),
    }
    block = Block("weights", "U8", (weights_bytes,), name.encode().ljust(weights_bytes, b"\0"))
    sha256 = write_weights(folder / f"{name}.safetensors", [block], metadata)
    return {
        "architecture": kind,
        "file": f"{name}.safetensors",
        "classes": labels,
        "input_size": _INPUT_SIZE,
        "normalisation": architecture.normalisation,
        "sha256": sha256,
    }


if __name__ == "__main__":
    sys.exit(serve(Path(sys.argv[1]), SimulatedDevices(answer)))
