"""Whether an expert answers as its original: the same images through both, the largest difference measured."""

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import cv2
import numpy as np
import torch
from torch import nn

from experts.errors import ExpertError, ImageError
from experts.slot import Slot, SlotPool
from experts.spec import ExpertSpec, Task
from experts.vision.architectures import Triple
from experts.vision.decode import Image, decode
from experts.vision.detections import select_detections
from experts.vision.infer import infer, normalise, probabilities
from experts.vision.layouts import TORCH_DTYPES
from experts.vision.preprocess import Prepared, fit, to_square

#: As many images of a folder are used at most.
_MAX_IMAGES = 32
#: Boxes are compared where the original is at least this sure, or at its surest places.
_CONFIDENT = 0.05
_SUREST = 100
#: How far an end-to-end head's scores weigh against pixels when its boxes are paired with the original's.
_PIXELS_PER_CONFIDENCE = 1000.0
#: To choose a dtype: images of a batch, batches of each, and when a dtype is given up before.
_TIMED_BATCH, _TIMED_ROUNDS, _HOPELESS = 4, 6, 3.0


@dataclass(frozen=True, slots=True)
class Agreement:
    """The largest differences found: of confidences, and of box edges in input pixels (0 for classifiers).

    `same_labels` counts the images with the same labels in both answers: a classifier's best, a detector's boxes'.
    """

    confidence: float
    box_pixels: float
    images: int
    same_labels: int

    @property
    def labels_agree(self) -> bool:
        """Whether no image is called something else."""
        return self.same_labels == self.images


@dataclass(frozen=True, slots=True)
class Reference:
    """What the framework's own model answers to each square, in batches of one."""

    outputs: tuple[torch.Tensor, ...]


def pattern_images(count: int = 8, seed: int = 7) -> list[Image]:
    """Seeded pictures with edges, gradients and noise in several sizes, for where there are no real ones."""
    random = np.random.default_rng(seed)
    images: list[Image] = []
    for index in range(count):
        height, width = (int(side) for side in random.integers(96, 400, 2))
        ramp = np.linspace(0, 255, width, dtype=np.float32)[None, :, None] * random.random((1, 1, 3))
        canvas = np.broadcast_to(ramp, (height, width, 3)).astype(np.uint8).copy()
        for _ in range(6):
            x, y = (int(side) for side in (random.integers(0, width), random.integers(0, height)))
            colour = [int(channel) for channel in random.integers(0, 256, 3)]
            cv2.rectangle(canvas, (x, y), (x + width // 4, y + height // 5), colour, -1)
        noise = random.normal(0, 4 * (index + 1), canvas.shape)
        images.append(np.clip(canvas + noise, 0, 255).astype(np.uint8))
    return images


def image_folder(folder: Path) -> list[Image]:
    """The first images of a folder, by name, that decode; other files are passed over."""
    images: list[Image] = []
    for file in sorted(folder.rglob("*")):
        if len(images) == _MAX_IMAGES:
            break
        if file.is_file():
            try:
                images.append(decode(file.read_bytes(), "image"))
            except ImageError:
                continue
    return images


def squares(images: Sequence[Image], task: Task, size: int) -> list[Image]:
    """The images as inputs: (size, size, 3) uint8 RGB each."""
    return [to_square(image, task, size) for image in images]


def original_outputs(original: nn.Module, inputs: Sequence[Image], normalisation: tuple[Triple, Triple]) -> Reference:
    """What a framework's model in evaluation mode answers, with the framework's own arithmetic."""
    mean, std = (torch.tensor(values, dtype=torch.float32).view(1, 3, 1, 1) for values in normalisation)
    device = next(original.parameters()).device
    outputs: list[torch.Tensor] = []
    with torch.inference_mode():
        for square in inputs:
            images = (torch.from_numpy(square).permute(2, 0, 1)[None].float() / 255 - mean) / std
            output = original(images.to(device))
            outputs.append((output[0] if isinstance(output, tuple) else output).float().cpu())
    return Reference(tuple(outputs))


def compare(spec: ExpertSpec, images: Sequence[Image], reference: Reference) -> Agreement:
    """Load the expert into a slot, as the daemon does, and compare its answers with the original's."""
    pool = SlotPool("cpu", spec.weights_bytes)
    pool.load(spec)
    slot = pool.slot(spec.expert)
    confidence = box_pixels = 0.0
    same_labels = 0
    for square, expected in zip(squares(images, spec.task, spec.input_size), reference.outputs, strict=True):
        batch = torch.from_numpy(square[None])
        with torch.inference_mode():
            found = slot.module(normalise(batch, spec, slot.layout.dtype, channels_last=slot.layout.channels_last))
        if spec.task == "classify":
            difference = float(np.abs(probabilities(found, spec) - probabilities(expected, spec)).max()), 0.0
        elif slot.layout.end_to_end:
            difference = _compare_picked(found[0], expected[0])
        else:
            difference = _compare_dense(found[0], expected[0])
        # Not a number is a disagreement, whatever it is compared with.
        confidence = max(confidence, float(np.nan_to_num(difference[0], nan=np.inf)))
        box_pixels = max(box_pixels, float(np.nan_to_num(difference[1], nan=np.inf)))
        same_labels += _labels(found, slot) == _labels(_as_ours(expected, slot), slot)
    return Agreement(confidence, box_pixels, len(images), same_labels)


def why_unfit(adapted: nn.Module, dtype: str) -> str | None:
    """Why a folded network cannot be stored like this: a pool refuses weights that are not finite. None if it can."""
    kind = TORCH_DTYPES[dtype]
    for name, parameter in adapted.named_parameters():
        if not bool(parameter.isfinite().all()):
            return f"{name}, batch norms folded in, holds weights that are not finite numbers; train it again"
        if not bool(parameter.to(kind).isfinite().all()):
            return f"{name} holds weights beyond {torch.finfo(kind).max:g}, the largest {dtype}; import it as float32"
    return None


def batch_ms(specs: Sequence[ExpertSpec], images: Sequence[Image], device: str | None = None) -> list[float]:
    """Least milliseconds of a batch of four for each of some experts, in turn, on `device` or the first GPU there is.

    The least, since whatever else runs on the machine only adds; one thread, as executors have. An expert that takes
    many times as long as the fastest is not run to the end.
    """
    device = device or ("cuda:0" if torch.cuda.is_available() else "cpu")
    taken: list[list[float]] = [[] for _ in specs]
    slots: list[Slot] = []
    for spec in specs:
        pool = SlotPool(device, spec.weights_bytes)
        pool.load(spec)
        slots.append(pool.slot(spec.expert))
    ready = [fit(images[number % len(images)], specs[0].task, specs[0].input_size) for number in range(_TIMED_BATCH)]
    for round_number in range(_TIMED_ROUNDS):
        for slot, milliseconds in zip(slots, taken, strict=True):
            fastest = min((min(others) for others in taken if others), default=float("inf"))
            if round_number > 1 and min(milliseconds) > _HOPELESS * fastest:
                continue
            milliseconds.append(_one_thread_ms(slot, ready))
    return [min(milliseconds) for milliseconds in taken]


def _one_thread_ms(slot: Slot, ready: Sequence[Prepared]) -> float:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        begin_s = time.perf_counter()
        with suppress(ExpertError):  # numbers that are not finite take as long
            infer(slot, ready)
        return (time.perf_counter() - begin_s) * 1e3
    finally:
        torch.set_num_threads(threads)


def _labels(output: torch.Tensor, slot: Slot) -> list[int]:
    """What an answer (batch of one, in the form of a slot's) names: sorted class numbers."""
    if slot.spec.task == "classify":
        return [int(probabilities(output, slot.spec)[0].argmax())]
    (rows,) = select_detections(output.cpu(), slot.spec, end_to_end=slot.layout.end_to_end)
    return sorted(int(row[5]) for row in rows.tolist())


def _as_ours(expected: torch.Tensor, slot: Slot) -> torch.Tensor:
    """An original's answer in the form of a slot's: boxes as corners."""
    if slot.spec.task == "classify" or slot.layout.end_to_end:
        return expected
    centres, sizes = expected[:, :2], expected[:, 2:4]
    return torch.cat((centres - sizes / 2, centres + sizes / 2, expected[:, 4:]), 1)


def _compare_dense(found: torch.Tensor, expected: torch.Tensor) -> tuple[float, float]:
    """found: (4 + classes, A), corners; expected: the same with centres and sizes, as ultralytics answers."""
    centres, sizes = expected[:2], expected[2:4]
    corners = torch.cat((centres - sizes / 2, centres + sizes / 2))
    sureness = expected[4:].amax(0)
    threshold = min(_CONFIDENT, float(sureness.topk(min(_SUREST, len(sureness))).values[-1]))
    sure = sureness >= threshold
    confidence = (found[4:] - expected[4:]).abs().max()
    return float(confidence), float((found[:4] - corners).abs()[:, sure].max())


def _compare_picked(found: torch.Tensor, expected: torch.Tensor) -> tuple[float, float]:
    """Both (boxes, 6): pairs each of the original's surest boxes with the nearest of its class, as order may differ."""
    confidence = box_pixels = 0.0
    for row in expected[:_SUREST]:
        same = found[found[:, 5] == row[5]]
        if not len(same):
            return float("inf"), float("inf")
        boxes, scores = (same[:, :4] - row[:4]).abs().amax(1), (same[:, 4] - row[4]).abs()
        best = int((boxes + scores * _PIXELS_PER_CONFIDENCE).argmin())
        confidence, box_pixels = max(confidence, float(scores[best])), max(box_pixels, float(boxes[best]))
    return confidence, box_pixels
