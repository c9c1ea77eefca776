"""`coserve bench compute`: batches through our slots beside plain eager torch, and executors beside threads."""

import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tools.cli.console import AsJson, console, errors, fail, print_json, print_table

if TYPE_CHECKING:
    from torch import nn

    from experts.slot import Slot
    from experts.spec import Answer, ExpertSpec
    from experts.vision.preprocess import Prepared
    from tools.profile.executors import Pair
    from tools.profile.samples import Samples
    from tools.training.expert_file import ImportReport

#: What is compared, and the side of its input in pixels.
NETWORKS = {"resnet18": 224, "resnet101": 224, "yolo11n": 320, "yolov8n": 320}
#: What a processor with bfloat16 instructions has to reach over plain eager torch on ResNets.
TARGET = 1.7
_CLASSES = 6
#: A side that is so many times slower than plain torch is not run more than twice.
_HOPELESS = 2.0


@dataclass(frozen=True, slots=True)
class Side:
    """One network, batch size and way to run it. `ratio` is over plain torch: above 1 is faster.

    `same_labels` is the share of images with the same labels as plain torch's answer. `confidence` and `box_pixels`
    are the largest differences of all outputs, unsure ones too, that the import found.
    """

    network: str
    batch: int
    side: str
    batch_ms: float
    ratio: float
    same_labels: float
    confidence: float = 0.0
    box_pixels: float = 0.0


def register(app: typer.Typer) -> None:
    """Add this module's command to `app`."""
    app.command()(compute)


def compute(
    networks: Annotated[str, typer.Option(help="resnet18 … resnet152, yolov5n … yolo26x, with commas.")] = ",".join(
        NETWORKS
    ),
    batches: Annotated[str, typer.Option(help="Batch sizes, with commas between.")] = "1,8",
    dtypes: Annotated[str, typer.Option(help="How slots compute: float32, bfloat16, float16.")] = "float32,bfloat16",
    rounds: Annotated[int, typer.Option(min=1, help="Runs of each side, in turn; the median counts.")] = 9,
    threads: Annotated[int, typer.Option(min=1, help="Intra-op threads of both sides.")] = 1,
    as_json: AsJson = False,
) -> None:
    """Pixels to answers: our slots (folded, fused, channels-last) beside plain eager torch in float32, same run.

    Weights are random, images are rendered parts. Then executors × threads, images per second.

    Example: coserve bench compute --networks resnet18 --batches 1,8
    """
    import torch

    from experts.slot import LayoutShelf
    from experts.vision.architectures import ARCHITECTURES, DTYPES
    from tools.profile.executors import try_pairs
    from tools.profile.measure import Effort
    from tools.profile.samples import rendered_samples

    names, ways = networks.split(","), dtypes.split(",")
    for kind, asked, known in (("network", names, ARCHITECTURES), ("dtype", ways, DTYPES)):
        if unknown := [name for name in asked if name not in known]:
            fail(f"unknown {kind} {unknown[0]!r}; known are {', '.join(known)}", status=2)
    if not all(size.isdecimal() and int(size) for size in batches.split(",")):
        fail(f"expected batch sizes such as 1,8, not {batches!r}", status=2)
    torch.set_num_threads(threads)
    samples, sides = rendered_samples(), list[Side]()
    sizes = [int(size) for size in batches.split(",")]
    with tempfile.TemporaryDirectory(prefix="coserve-compute-") as folder, _bar() as advance:
        for number, name in enumerate(names):
            advance(name, number / (len(names) + 1))
            sides += compare_network(name, sizes, ways, rounds, samples, Path(folder))
        advance("executors × threads", len(names) / (len(names) + 1))
        _, reports = _make(names[0], ["float32"], samples, Path(folder))
        pairs = try_pairs("cpu", reports["float32"].spec, samples, Effort(), LayoutShelf())
    figures = {
        "cpu": cpu_facts(),
        "threads": threads,
        "images": samples.origin,
        "sides": [asdict(side) for side in sides],
        "pairs": [asdict(pair) for pair in pairs],
    }
    if as_json:
        print_json(figures)
        return
    _print(figures, sides, pairs)


def compare_network(
    name: str, batches: Sequence[int], dtypes: Sequence[str], rounds: int, samples: "Samples", folder: Path
) -> list[Side]:
    """Every side of one network, interleaved, medians."""
    import time
    from statistics import median

    from experts.vision.infer import infer

    original, reports = _make(name, dtypes, samples, folder)
    slots = {dtype: _slot(report.spec) for dtype, report in reports.items()}
    spec = next(iter(slots.values())).spec
    found: list[Side] = []
    for batch in batches:
        ready = samples.prepared(spec, batch)
        runs: dict[str, Callable[[], list[Answer]]] = {"plain": lambda ready=ready: plain_infer(original, spec, ready)}
        for dtype, slot in slots.items():
            runs[dtype] = lambda slot=slot, ready=ready: infer(slot, ready)
        answers, taken = {side: run() for side, run in runs.items()}, {side: list[float]() for side in runs}
        for number in range(rounds):
            for side, run in runs.items():
                if number > 1 and median(taken[side]) > _HOPELESS * median(taken["plain"]):
                    continue
                begin_s = time.perf_counter()
                run()
                taken[side].append((time.perf_counter() - begin_s) * 1e3)
        plain_ms = median(taken["plain"])
        for side, milliseconds in taken.items():
            same = share_of_same_labels(answers["plain"], answers[side])
            took_ms = median(milliseconds)
            proved = reports[side].agreement if side in reports else None
            differences = (proved.confidence, proved.box_pixels) if proved is not None else ()
            found.append(Side(name, batch, side, took_ms, plain_ms / took_ms, same, *differences))
    return found


def plain_infer(original: "nn.Module", spec: "ExpertSpec", ready: "Sequence[Prepared]") -> "list[Answer]":
    """As one would write it: NCHW float32, batch norms in place, the framework's own suppression for detectors."""
    import numpy as np
    import torch

    from experts.vision.infer import classify_answers

    mean, std = (torch.tensor(values).view(1, 3, 1, 1) for values in (spec.mean, spec.std))
    with torch.inference_mode():
        pixels = torch.from_numpy(np.stack([image.pixels for image in ready])).permute(0, 3, 1, 2).contiguous()
        output = original((pixels.float() / 255 - mean) / std)
        if spec.task == "classify":
            return classify_answers(output, spec)
        from experts.vision.frameworks import ultralytics

        ultralytics()
        from ultralytics.utils.nms import non_max_suppression

        rows = non_max_suppression(output[0], spec.confidence_floor, spec.nms_iou, max_det=spec.max_detections)
        return [_answer(torch.Tensor(boxes).tolist(), image, spec) for boxes, image in zip(rows, ready, strict=True)]


def share_of_same_labels(expected: "Sequence[Answer]", found: "Sequence[Answer]") -> float:
    """Of answers to the same images."""
    pairs = list(zip(expected, found, strict=True))
    return sum(_labels(one) == _labels(other) for one, other in pairs) / len(pairs)


def cpu_facts() -> dict[str, Any]:
    """The processor, as far as it decides which dtype is fast."""
    import torch

    from daemon.line.profile import this_machine

    machine = this_machine()
    return {
        "model": machine.cpu,
        "cores": machine.cores,
        "capability": torch.backends.cpu.get_cpu_capability(),
        "bfloat16": has_bfloat16(Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()),
    }


def has_bfloat16(cpuinfo: Iterable[str]) -> bool:
    """Whether the processor multiplies bfloat16 (x86: AVX-512 or AMX; ARM: bf16)."""
    flags = next(
        (line.partition(":")[2].split() for line in cpuinfo if line.lower().startswith(("flags", "features"))), []
    )
    return any(flag in flags for flag in ("avx512_bf16", "amx_bf16", "bf16"))


def _make(
    name: str, dtypes: Sequence[str], samples: "Samples", folder: Path
) -> "tuple[nn.Module, dict[str, ImportReport]]":
    """The framework's model with random weights, and the same network as an expert for each dtype."""
    import math

    import numpy as np
    import torch

    from experts.vision.architectures import ARCHITECTURES
    from experts.vision.decode import decode
    from experts.vision.networks import build_original
    from experts.vision.preprocess import to_square
    from tools.training.expert_file import Form
    from tools.training.importer import import_model

    known, size = ARCHITECTURES[name], NETWORKS.get(name, 224)
    images = [decode(payload, "image") for payload in samples.payloads[:4]]
    torch.manual_seed(5)
    original = build_original(known, _CLASSES)
    with torch.no_grad():  # statistics of real inputs, so that answers differ from image to image
        squares = np.stack([to_square(image, known.task, size) for image in images])
        original.train()(torch.from_numpy(squares).permute(0, 3, 1, 2).float() / 255)
    original.eval()
    reports: dict[str, ImportReport] = {}
    for dtype in dtypes:
        form = Form(dtype=dtype, tolerance=math.inf, origin="random weights")
        labels = [f"label{number}" for number in range(_CLASSES)]
        reports[dtype] = import_model(
            original, name, labels, size, folder, expert=f"{name}-{dtype}", images=images, form=form
        )
    return original, reports


def _labels(answer: "Answer") -> tuple[str | None, ...]:
    return tuple(sorted(found.label for found in answer.detections)) if answer.detections else (answer.label,)


def _slot(spec: "ExpertSpec") -> "Slot":
    from experts.slot import SlotPool

    pool = SlotPool("cpu", spec.weights_bytes)
    pool.load(spec)
    return pool.slot(spec.expert)


def _answer(boxes: list[list[float]], image: "Prepared", spec: "ExpertSpec") -> "Answer":
    from experts.spec import Answer, Detection

    found = tuple(
        Detection(spec.classes[int(label)], confidence, image.placement.to_stored((x1, y1, x2, y2)))
        for x1, y1, x2, y2, confidence, label in boxes
    )
    return Answer(found[0].label if found else None, found[0].confidence if found else None, found)


def _print(figures: dict[str, Any], sides: Sequence[Side], pairs: "Sequence[Pair]") -> None:
    cpu = figures["cpu"]
    rows = [
        (
            side.network,
            side.batch,
            side.side,
            f"{side.batch_ms:.1f}",
            f"{side.ratio:.2f}",
            f"{side.same_labels:.0%}",
            f"{side.confidence:.0e}",
            f"{side.box_pixels:.0e}",
        )
        for side in sides
    ]
    columns = ("network", "batch", "side", "ms", "ratio", "labels", "conf.", "px")
    print_table(f"Pixels to answers, {figures['threads']} thread(s), random weights", columns, rows)
    tried = ", ".join(f"{pair.executors} × {pair.threads}: {pair.images_per_s:.1f}" for pair in pairs)
    console.print(f"executors × threads, images/s: {tried}")
    kind = f"target {TARGET} over plain on ResNets" if cpu["bfloat16"] else "without bfloat16 instructions"
    console.print(
        f"{cpu['model']}, {cpu['cores']} cores, {cpu['capability']}, {kind}; {figures['images']}", markup=False
    )


@contextmanager
def _bar() -> Iterator[Callable[[str, float], None]]:
    from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn

    from tools.cli.progress import Bars

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Bars(*columns, console=errors) as bar:
        task = bar.add_task("starting", total=1.0)
        yield lambda what, share: bar.update(task, description=what, completed=share)
