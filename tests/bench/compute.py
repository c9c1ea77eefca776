"""`coserve bench compute`: batches through our slots beside plain eager torch, and executors beside threads."""

import copy
import itertools
import math
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated

import typer

from tests.bench.options import DeviceNames, chosen_devices
from tests.bench.rounds import run_in_turn
from tests.bench.tables import print_rows
from tools.terminal.console import AsJson, console, errors, fail, print_json
from tools.terminal.option_values import must_be_one_of

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray
    from torch import Tensor, nn

    from experts.spec import Answer, ExpertSpec
    from experts.vision.preprocess import Prepared
    from experts.vision.slot import LayoutShelf, Slot
    from tools.profile.samples import Samples
    from tools.training.expert_file import ImportReport

#: The networks that are compared, and the side of their input in pixels.
NETWORKS = {"resnet18": 224, "resnet101": 224, "yolo11n": 320, "yolov8n": 320}
_DTYPES = ("float32", "bfloat16")
_CLASSES = 6
#: The largest batch that may be asked for: beyond it, memory is gigabytes and the rate no higher.
_MAX_BATCH = 256
#: A side that is so many times slower than plain torch is not run more than twice.
_HOPELESS = 2.0


@dataclass(frozen=True, slots=True)
class ComputeFigures:
    """One network, batch size and way to run it. `ratio` is over plain torch: above 1 is faster.

    `part` is "answers", from pixels to answers, or "network", which is the network alone.

    `same_labels` is the share of images with the same labels as plain torch's answer. `confidence` and `box_pixels`
    are the largest differences of all outputs, unsure ones too, that the import found.
    """

    device: str
    network: str
    batch: int
    part: str
    side: str
    batch_ms: float
    ratio: float
    same_labels: float
    confidence: float = 0.0
    box_pixels: float = 0.0


def bench_compute(
    networks: Annotated[str, typer.Option(help="resnet18 … resnet152, yolov5n … yolo26x, with commas.")] = ",".join(
        NETWORKS
    ),
    batches: Annotated[str, typer.Option(help="Batch sizes, with commas between.")] = "1,8",
    rounds: Annotated[int, typer.Option(min=1, help="Runs of each side, in turn; the median counts.")] = 9,
    device: DeviceNames = None,
    as_json: AsJson = False,
) -> None:
    """Pixels to answers: our slots (folded, fused, packed) beside plain eager torch in float32, same run.

    On a GPU beside eager torch as one would write it there: channels-last, in the slot's dtype.
    Weights are random, images are rendered parts, and both sides have one thread.

    Example: coserve bench compute --networks resnet18 --batches 1,8
    """
    import torch

    from daemon.line.profile import this_machine
    from experts.vision.architectures import ARCHITECTURES
    from tools.profile.samples import drawn_samples
    from tools.terminal.console import Bars

    names = networks.split(",")
    for name in names:
        must_be_one_of("--networks", name, ARCHITECTURES)
    if not all(size.isdecimal() and 1 <= int(size) <= _MAX_BATCH for size in batches.split(",")):
        fail(f"--batches: expected whole numbers from 1 to {_MAX_BATCH} such as 1,8, not {batches!r}", status=2)
    torch.set_num_threads(1)
    samples, figures = drawn_samples(), list[ComputeFigures]()
    sizes, devices = [int(size) for size in batches.split(",")], chosen_devices(device)
    with tempfile.TemporaryDirectory(prefix="coserve-compute-") as folder, Bars(console=errors) as bar:
        task = bar.add_task("starting", total=len(names) * len(devices))
        for where, name in itertools.product(devices, names):
            bar.update(task, description=f"{where}: {name}")
            figures += compare_network(name, sizes, _DTYPES, rounds, samples, Path(folder), where)
            bar.advance(task)
    machine = this_machine()
    where = f"{machine.cpu}, {machine.cores} cores, {torch.backends.cpu.get_cpu_capability()}"
    sides = [asdict(each) for each in figures]
    if as_json:
        print_json({"machine": where, "images": samples.origin, "sides": sides})
        return
    print_rows("Pixels to answers, and the network alone, one thread, random weights", sides)
    console.print(f"{where}; {samples.origin}", markup=False)


def compare_network(
    name: str,
    batches: Sequence[int],
    dtypes: Sequence[str],
    rounds: int,
    samples: "Samples",
    folder: Path,
    device: str = "cpu",
    shelf: "LayoutShelf | None" = None,
) -> list[ComputeFigures]:
    """Measure every side of one network on one device, interleaved, and return medians."""
    import numpy as np
    import torch

    from experts.vision.graphs import WARM_UPS
    from experts.vision.infer import infer
    from experts.vision.layouts import TORCH_DTYPES

    original, reports = _make(name, dtypes, samples, folder)
    slots = {dtype: _slot(report.spec, device, shelf) for dtype, report in reports.items()}
    spec, place = next(iter(slots.values())).spec, next(iter(slots.values())).transfer.device
    eager = {"plain": original.to(place)}
    if device != "cpu":  # as one would write it for a GPU
        for dtype in dtypes:
            network = copy.deepcopy(original).to(TORCH_DTYPES[dtype])
            network = network.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]  # torch's stub lacks it
            eager[f"eager {dtype}"] = network
    figures: list[ComputeFigures] = []
    for batch in batches:
        prepared = samples.prepared(spec, batch)
        pixels = np.stack([image.pixels for image in prepared])
        answers: dict[str, Callable[[], list[Answer]]] = {
            side: partial(plain_infer, network, spec, prepared) for side, network in eager.items()
        }
        answers |= {dtype: partial(infer, slot, prepared) for dtype, slot in slots.items()}
        networks = {side: _network_alone(network, pixels, spec) for side, network in eager.items()}
        networks |= {dtype: _network_alone(slot.module, pixels, spec) for dtype, slot in slots.items()}
        given = {side: run() for side, run in answers.items()}
        for part, runs in (("answers", answers), ("network", networks)):
            for run in runs.values():
                for _ in range(WARM_UPS + 1):
                    run()
            batches_ms = run_in_turn(
                {side: partial(_milliseconds, run) for side, run in runs.items()},
                rounds,
                on_run=lambda _side: None,
                is_wanted=lambda side, ms: len(ms[side]) < 2 or median(ms[side]) <= _HOPELESS * median(ms["plain"]),
            )
            medians = {side: median(milliseconds) for side, milliseconds in batches_ms.items()}
            for side, batch_ms in medians.items():
                same = share_of_same_labels(given["plain"], given[side])
                agreement = reports[side].agreement if side in reports else None
                differences = (agreement.confidence, agreement.box_pixels) if agreement is not None else (0.0, 0.0)
                ratio = medians["plain"] / batch_ms
                figures.append(ComputeFigures(device, name, batch, part, side, batch_ms, ratio, same, *differences))
    return figures


def _milliseconds(run: Callable[[], object]) -> float:
    begin_s = time.perf_counter()
    run()
    return (time.perf_counter() - begin_s) * 1e3


def plain_infer(original: "nn.Module", spec: "ExpertSpec", prepared: "Sequence[Prepared]") -> "list[Answer]":
    """Compute as one would write it: in the network's dtype, device and memory format (NCHW or channels-last), batch
    norms in place, the framework's own suppression.
    """
    import numpy as np
    import torch

    weight = next(parameter for parameter in original.parameters() if parameter.dim() == 4)
    mean, std = (torch.tensor(values, device=weight.device).view(1, 3, 1, 1) for values in (spec.mean, spec.std))
    with torch.inference_mode():
        pixels = torch.from_numpy(np.stack([image.pixels for image in prepared])).to(weight.device).permute(0, 3, 1, 2)
        images = ((pixels.float() / 255 - mean) / std).to(weight.dtype)
        output = original(images.contiguous(memory_format=_memory_format(weight)))
        return _original_answers(output if spec.task == "classify" else output[0], spec, prepared)


def _memory_format(weight: "Tensor") -> "torch.memory_format":
    import torch

    is_last = weight.is_contiguous(memory_format=torch.channels_last) and not weight.is_contiguous()
    return torch.channels_last if is_last else torch.contiguous_format


def _original_answers(output: "Tensor", spec: "ExpertSpec", prepared: "Sequence[Prepared]") -> "list[Answer]":
    """Return the answers to a framework's own output, a detector's after the framework's own suppression."""
    import torch

    from experts.vision.frameworks import ultralytics
    from experts.vision.infer import classify_answers

    if spec.task == "classify":
        return classify_answers(output.cpu(), spec)
    ultralytics()
    from ultralytics.utils.nms import non_max_suppression

    rows = non_max_suppression(output.float(), spec.confidence_floor, spec.nms_iou, max_det=spec.max_detections)
    return [_answer(torch.Tensor(boxes).tolist(), image, spec) for boxes, image in zip(rows, prepared, strict=True)]


def _network_alone(network: "nn.Module", pixels: "NDArray[np.uint8]", spec: "ExpertSpec") -> Callable[[], object]:
    """Return a run of a network, its input ready in its dtype, device and memory format."""
    import torch

    from experts.vision.infer import normalise

    weight = next(parameter for parameter in network.parameters() if parameter.dim() == 4)
    place = next(parameter.device for parameter in network.parameters() if parameter.device.type != "meta")
    images = normalise(torch.from_numpy(pixels), spec, torch.float32).contiguous()
    images = images.to(place, weight.dtype, memory_format=_memory_format(weight))
    synchronise = torch.cuda.synchronize if place.type == "cuda" else lambda: None

    def run() -> None:
        with torch.inference_mode():
            network(images)
        synchronise()

    return run


def share_of_same_labels(expected: "Sequence[Answer]", answers: "Sequence[Answer]") -> float:
    """Return the share of images whose two answers name the same labels."""
    return sum(_labels(left) == _labels(right) for left, right in zip(expected, answers, strict=True)) / len(answers)


def random_expert(name: str, dtype: str, samples: "Samples", folder: Path) -> "ExpertSpec":
    """Return an expert with random weights, written to `folder`."""
    return _make(name, [dtype], samples, folder)[1][dtype].spec


def _make(
    name: str, dtypes: Sequence[str], samples: "Samples", folder: Path
) -> "tuple[nn.Module, dict[str, ImportReport]]":
    """Return the framework's model with random weights, and the same network as an expert for each dtype."""
    import numpy as np
    import torch

    from experts.vision.architectures import ARCHITECTURES
    from experts.vision.networks import build_original
    from experts.vision.preprocess import decode, to_square
    from tools.training.expert_file import Form
    from tools.training.importer import import_model

    architecture, size = ARCHITECTURES[name], NETWORKS.get(name, 224)
    images = [decode(payload, "image") for payload in samples.payloads[:4]]
    torch.manual_seed(5)
    original = build_original(architecture, _CLASSES)
    with torch.no_grad():  # statistics of real inputs, so that answers differ from image to image
        squares = np.stack([to_square(image, architecture.task, size) for image in images])
        original.train()(torch.from_numpy(squares).permute(0, 3, 1, 2).float() / 255)
    original.eval()
    labels = [f"label{number}" for number in range(_CLASSES)]
    reports: dict[str, ImportReport] = {}
    for dtype in dtypes:
        form = Form(dtype=dtype, tolerance=math.inf, origin="random weights")
        reports[dtype] = import_model(
            original, name, labels, size, folder, expert=f"{name}-{dtype}", images=images, form=form
        )
    return original, reports


def _labels(answer: "Answer") -> tuple[str | None, ...]:
    return tuple(sorted(box.label for box in answer.detections)) if answer.detections else (answer.label,)


def _slot(spec: "ExpertSpec", device: str, shelf: "LayoutShelf | None") -> "Slot":
    from experts.vision.slot import LayoutShelf, SlotPool

    pool = SlotPool(device, spec.weights_bytes, shelf or LayoutShelf(packs=True))
    pool.load(spec)
    return pool.slot(spec.expert)


def _answer(boxes: list[list[float]], image: "Prepared", spec: "ExpertSpec") -> "Answer":
    from experts.spec import Answer, Detection

    detections = tuple(
        Detection(spec.classes[int(label)], confidence, image.to_stored((x1, y1, x2, y2)))
        for x1, y1, x2, y2, confidence, label in boxes
    )
    if not detections:
        return Answer(None, None)
    return Answer(detections[0].label, detections[0].confidence, detections)
