"""Lines on simulated devices: real daemons, sockets and databases, weights files without networks, and no torch.

`python -m tests.simulated CONFIG` runs such a line's daemon, as `coserve run CONFIG` runs one on this PC's devices.
"""

import json
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from daemon.dispatch.pool import DevicePool, Mark, Read, device_pools
from daemon.dispatch.simulated import SimulatedMemory, SimulatedSlot
from daemon.policy.request import ExecutorFacts, PoolFacts
from daemon.serve import serve
from experts.catalog import write_catalog
from experts.errors import ExpertError, WeightsError
from experts.spec import Answer, Detection, ExpertSpec
from experts.vision.architectures import ARCHITECTURES, PLAIN_HEAD, layout_id
from experts.vision.preprocess import Prepared
from experts.weights import Block, verify_sha256, write_weights

if TYPE_CHECKING:
    from tools.setup.service import Service

#: For `Service(config, log, command=DAEMON)`.
DAEMON = ("tests.simulated",)
#: An image takes longer than a deadline of 1 ms.
_INFERENCE_S = 0.002
#: The sizes of the real ones (tests/lines.py), so that as many fit into a budget.
_CLASSIFIER_BYTES, _DETECTOR_BYTES = 44_728_320, 10_485_760
_INPUT_SIZE = 64
#: A line may name `cuda:0` to `cuda:15`.
_GPUS = 16


class SimulatedDevices:
    """Devices for a whole line: real threads over memory and networks that are simulated.

    A load reads the weights file and checks its digest. `answer(spec, image)` stands in for a network.
    """

    def __init__(self, answer: Callable[[ExpertSpec, Prepared], Answer]) -> None:
        self._answer = answer

    def gpu_count(self) -> int:
        return _GPUS

    def pools(
        self,
        facts: Sequence[PoolFacts],
        executors: Sequence[ExecutorFacts],
        read: Read,
        new_mark: Callable[[], Mark],
        max_pixels: int,
    ) -> list[DevicePool]:
        memories = {each.pool: SimulatedMemory(each.budget_bytes, _verify_weights) for each in facts}
        return device_pools(facts, executors, memories, self._infer, read, new_mark, max_pixels)

    def _infer(self, _slot: SimulatedSlot, images: Sequence[Prepared], experts: Sequence[ExpertSpec]) -> list[Answer]:
        return [self._answer(expert, image) for expert, image in zip(experts, images, strict=True)]


def _verify_weights(spec: ExpertSpec) -> None:
    try:
        verify_sha256(spec)
    except WeightsError as error:
        raise ExpertError(spec.expert, error.message, error.file) from error


def answer(spec: ExpertSpec, image: Prepared) -> Answer:
    """Return the same label for the same pixels, at .9, less sure at a higher temperature; detectors see nothing, or
    ten boxes, barely.

    Which of both hangs on the catalog: boxes are below any `confidence_floor` but 0.
    """
    time.sleep(_INFERENCE_S)
    if spec.task == "classify":
        return Answer(spec.classes[int(image.pixels.sum(dtype="int64")) % len(spec.classes)], 0.9**spec.temperature)
    if spec.confidence_floor > 0:
        return Answer(None, None)
    width, height = image.width, image.height
    boxes = tuple(
        Detection(
            spec.classes[-(n % 2)], 0.02 - 0.001 * n, (width * n / 10, height * n / 10, float(width), float(height))
        )
        for n in range(10)
    )
    return Answer(boxes[0].label, boxes[0].confidence, boxes)


def run(config: Path) -> int:
    """Run the daemon of `config`, as `coserve run` does; returns its exit status."""
    return serve(config, SimulatedDevices(answer))


def make_experts(folder: Path) -> None:
    """Write the experts of tests/lines.py with weights that nothing computes with, and their catalog."""
    from tests.lines import CLASSIFIERS  # here, because hundreds of daemons import this module and make none

    entries = {name: a_classifier(folder, name, ("ok", "odd", "bad")) for name in CLASSIFIERS}
    labels = ("bridge", "void", *(f"label{number}" for number in range(78)))
    entries["yolo-solder"] = _expert(folder, "yolo-solder", "yolo11n", labels, _DETECTOR_BYTES)
    write_catalog(folder / "catalog.yaml", entries)


def a_service(config: Path, log: Path, environ: Mapping[str, str] | None = None) -> "Service":
    """Return a daemon of `config` on simulated devices, not yet started."""
    from tools.setup.service import Service

    return Service(config, log, environ, command=DAEMON)


def a_classifier(folder: Path, name: str, labels: Iterable[str]) -> dict[str, Any]:
    """Write the weights of a classifier; return its entry in the catalog of `folder`."""
    return _expert(folder, name, "resnet18", labels, _CLASSIFIER_BYTES)


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
    sys.exit(run(Path(sys.argv[1])))
