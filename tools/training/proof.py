"""Proves that an expert answers as its original: the same images through both, the largest difference measured."""

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import cv2
import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from experts.errors import ExpertError
from experts.spec import ExpertSpec, Task
from experts.vision.architectures import Triple
from experts.vision.heads import probabilities
from experts.vision.infer import infer, normalise, select_detections
from experts.vision.layouts import TORCH_DTYPES
from experts.vision.preprocess import Image, fit, to_square
from experts.vision.slot import Slot, loaded_slot
from tools.training.detector_loop import limited_threads
from tools.training.held_out import ImageBoxes, match_boxes

#: Boxes are compared where the original is at least this sure, or at its surest places.
_CONFIDENT = 0.05
_SUREST = 100
#: A box is where one of the original's is if they overlap so much.
_SAME_PLACE_IOU = 0.5
#: Weight of a score against pixels when boxes of an end-to-end head are paired with the original's.
_PIXELS_PER_CONFIDENCE = 1000.0
#: To choose a dtype: images of a batch, batches of each dtype, and how many times slower than the fastest one a dtype
#: is given up.
_TIMED_BATCH, _TIMED_ROUNDS, _HOPELESS = 4, 6, 3.0

#: A framework's own model's answer to each square, in batches of one.
OriginalOutputs = tuple[torch.Tensor, ...]


@dataclass(frozen=True, slots=True)
class Agreement:
    """The largest differences: of confidences, and of box edges in input pixels (0 for classifiers).

    `same_labels` counts the images with the same labels in both answers: a classifier's best, a detector's boxes'.
    `mean_precision` is of a detector's boxes if the original's are the truth: 1 if all are the same, 0 if it has none.
    """

    confidence: float
    box_pixels: float
    images: int
    same_labels: int
    mean_precision: float | None = None


def pattern_images(count: int = 8, seed: int = 7) -> list[Image]:
    """Return seeded pictures with edges, gradients and noise in several sizes, in place of real ones."""
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


def squares(images: Sequence[Image], task: Task, size: int) -> list[Image]:
    return [to_square(image, task, size) for image in images]


def original_outputs(
    original: nn.Module, inputs: Sequence[Image], normalisation: tuple[Triple, Triple]
) -> OriginalOutputs:
    """Return the answers of a framework's model in evaluation mode, with the framework's own arithmetic."""
    mean, std = (torch.tensor(values, dtype=torch.float32).view(1, 3, 1, 1) for values in normalisation)
    device = next(original.parameters()).device
    outputs: list[torch.Tensor] = []
    with torch.inference_mode():
        for square in inputs:
            images = (torch.from_numpy(square).permute(2, 0, 1)[None].float() / 255 - mean) / std
            output = original(images.to(device))
            outputs.append((output[0] if isinstance(output, tuple) else output).float().cpu())
    return tuple(outputs)


def compare(spec: ExpertSpec, images: Sequence[Image], outputs: OriginalOutputs) -> Agreement:
    """Load the expert into a slot, as the daemon does, and compare its answers with the original's."""
    slot = loaded_slot(spec)
    confidence = box_pixels = 0.0
    same_labels = 0
    boxes: list[ImageBoxes] = []
    truths: list[NDArray[np.float32]] = []
    for square, output in zip(squares(images, spec.task, spec.input_size), outputs, strict=True):
        batch, expected = torch.from_numpy(square[None]), _in_slot_form(output, slot)
        with torch.inference_mode():
            answer = slot.module(normalise(batch, spec, slot.layout.dtype))
        if spec.task == "classify":
            difference = float(np.abs(probabilities(answer, spec) - probabilities(expected, spec)).max()), 0.0
        elif slot.layout.end_to_end:
            difference = _compare_picked(answer[0], expected[0])
        else:
            difference = _compare_dense(answer[0], expected[0])
        # NaN is a disagreement with everything, NaN included.
        confidence = max(confidence, float(np.nan_to_num(difference[0], nan=np.inf, posinf=np.inf)))
        box_pixels = max(box_pixels, float(np.nan_to_num(difference[1], nan=np.inf, posinf=np.inf)))
        same_labels += _labels(answer, slot) == _labels(expected, slot)
        if spec.task == "detect":
            unsure = replace(spec, confidence_floor=_CONFIDENT)
            (rows,) = select_detections(answer.cpu(), unsure, end_to_end=slot.layout.end_to_end)
            boxes.append(ImageBoxes(rows[:, :4], rows[:, 5].astype(np.int64), rows[:, 4]))
            (rows,) = select_detections(expected, spec, end_to_end=slot.layout.end_to_end)
            truths.append(rows[:, (0, 1, 2, 3, 5)])
    mean_precision = match_boxes(boxes, truths, _SAME_PLACE_IOU).mean_average_precision() if boxes else None
    return Agreement(confidence, box_pixels, len(images), same_labels, mean_precision)


def why_unfit(adapted: nn.Module, dtype: str) -> str | None:
    """Return why a folded network cannot be stored as `dtype` (pools refuse weights that are not finite), or None."""
    kind = TORCH_DTYPES[dtype]
    for name, parameter in adapted.named_parameters():
        if not bool(parameter.isfinite().all()):
            return f"{name}, batch norms folded in, holds weights that are not finite numbers; train it again"
        if not bool(parameter.to(kind).isfinite().all()):
            return f"{name} holds weights beyond {torch.finfo(kind).max:g}, the largest {dtype}; import it as float32"
    return None


def batch_ms(specs: Sequence[ExpertSpec], images: Sequence[Image]) -> list[float]:
    """Return the least milliseconds of a batch of four of each expert, on the first GPU if there is one.

    The least, since other work on the machine only adds time; on one thread, as executors have. Experts take turns, and
    one that is several times slower than the fastest is not timed to the end.
    """
    device = "cuda:0" if torch.cuda.is_available() else "cpu"
    times_ms: list[list[float]] = [[] for _ in specs]
    slots = [loaded_slot(spec, device) for spec in specs]
    batch = [fit(images[number % len(images)], specs[0].task, specs[0].input_size) for number in range(_TIMED_BATCH)]
    for round_number in range(_TIMED_ROUNDS):
        for slot, milliseconds in zip(slots, times_ms, strict=True):
            fastest = min((min(others) for others in times_ms if others), default=float("inf"))
            if round_number > 1 and min(milliseconds) > _HOPELESS * fastest:
                continue
            with limited_threads(1):
                begin_s = time.perf_counter()
                with suppress(ExpertError):  # numbers that are not finite take as long
                    infer(slot, batch)
                milliseconds.append((time.perf_counter() - begin_s) * 1e3)
    return [min(milliseconds) for milliseconds in times_ms]


def _labels(output: torch.Tensor, slot: Slot) -> list[int]:
    """Return the sorted class numbers of an answer (batch of one, in a slot's form)."""
    if slot.spec.task == "classify":
        return [int(probabilities(output, slot.spec)[0].argmax())]
    (rows,) = select_detections(output.cpu(), slot.spec, end_to_end=slot.layout.end_to_end)
    return sorted(int(row[5]) for row in rows.tolist())


def _in_slot_form(output: torch.Tensor, slot: Slot) -> torch.Tensor:
    """Return an original's answer in a slot's form: boxes as corners."""
    if slot.spec.task == "classify" or slot.layout.end_to_end:
        return output
    centres, sizes = output[:, :2], output[:, 2:4]
    return torch.cat((centres - sizes / 2, centres + sizes / 2, output[:, 4:]), 1)


def _compare_dense(answer: torch.Tensor, expected: torch.Tensor) -> tuple[float, float]:
    """Both (4 + classes, A): corners, then a score per class. Boxes are compared where the original is surest."""
    sureness = expected[4:].amax(0)
    threshold = min(_CONFIDENT, float(sureness.topk(min(_SUREST, len(sureness))).values[-1]))
    sure = sureness >= threshold
    confidence = (answer[4:] - expected[4:]).abs().max()
    return float(confidence), float((answer[:4] - expected[:4]).abs()[:, sure].max())


def _compare_picked(answer: torch.Tensor, expected: torch.Tensor) -> tuple[float, float]:
    """Both (boxes, 6): pair each of the original's surest boxes with the nearest of its class; orders may differ.

    A box whose class the answer lacks counts as one of confidence 0 there; its place is not compared.
    """
    sure = expected[:_SUREST, None]
    boxes, scores = (answer[:, :4] - sure[..., :4]).abs().amax(2), (answer[:, 4] - sure[..., 4]).abs()
    is_same = answer[:, 5] == sure[..., 5]
    nearest = (boxes + scores * _PIXELS_PER_CONFIDENCE).where(is_same, float("inf")).argmin(1, keepdim=True)
    confidence = scores.gather(1, nearest).where(is_same.any(1, keepdim=True), sure[..., 4])
    return float(confidence.max()), float((boxes * is_same).gather(1, nearest).max())
