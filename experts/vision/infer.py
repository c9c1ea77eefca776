"""A batch through a slot: pixels to answers. Softmax with temperature for classifiers, boxes for detectors."""

import functools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from experts.errors import ExpertError
from experts.spec import Answer, Detection, ExpertSpec
from experts.vision.architectures import Triple
from experts.vision.frameworks import greedy_nms
from experts.vision.guards import cannot_be_judged, picture_figures
from experts.vision.heads import classify_answers
from experts.vision.preprocess import Prepared
from experts.vision.slot import Slot

#: Boxes of different classes are moved this far apart, so that one suppression serves all classes (ultralytics).
_CLASS_OFFSET_PIXELS = 7680
#: At most this many candidates, the most confident, go into suppression (ultralytics).
_MAX_CANDIDATES = 30_000


def infer(slot: Slot, prepared: Sequence[Prepared], head: ExpertSpec | None = None) -> list[Answer]:
    """Return one answer per image, in order, by the expert in the slot or a backbone's `head`. Raises ExpertError."""
    answers: list[Answer] = []
    for answer in infer_each(slot, prepared, [head or slot.spec] * len(prepared)):
        if isinstance(answer, ExpertError):
            raise answer
        answers.append(answer)
    return answers


def infer_each(
    slot: Slot, prepared: Sequence[Prepared], experts: Sequence[ExpertSpec]
) -> Sequence[Answer | ExpertError]:
    """Return each image's answer from its own expert: the one in the slot, or a head of the backbone there.

    A head that cannot be used has its error in place of its answers. Raises ExpertError for all of them.
    """
    spec, stacked = slot.spec, np.stack([image.pixels for image in prepared])
    with torch.inference_mode(), slot.transfer.computing():
        pixels = slot.transfer.upload(stacked)
        output = slot.module(normalise(pixels, spec, slot.layout.dtype))
        output = output.cpu()
        if not bool(output.isfinite().all()):
            # Every comparison with such a number is false, so an image could pass without a judgement.
            raise ExpertError(
                spec.expert, "answers with numbers that are not finite; train or import it again", spec.file
            )
        if not spec.classes:
            answers = slot.layout.heads.answers(output, experts, spec)
        elif spec.task == "classify":
            answers = classify_answers(output, spec)
        else:
            answers = detect_answers(output, prepared, spec, end_to_end=slot.layout.end_to_end)
    return _guarded(answers, stacked, experts)


def _guarded(
    answers: Sequence[Answer | ExpertError], pixels: NDArray[np.uint8], experts: Sequence[ExpertSpec]
) -> Sequence[Answer | ExpertError]:
    """Add the guard `picture_quality` to answers about pictures outside their expert's limits."""
    if all(spec.pictures is None for spec in experts):
        return answers
    return [
        replace(answer, guards=("picture_quality", *answer.guards))
        if isinstance(answer, Answer) and spec.pictures is not None and cannot_be_judged(figures, spec.pictures)
        else answer
        for answer, figures, spec in zip(answers, picture_figures(pixels), experts, strict=True)
    ]


def normalise(pixels: torch.Tensor, spec: ExpertSpec, dtype: torch.dtype) -> torch.Tensor:
    """(B, S, S, 3) uint8 RGB to (B, 3, S, S), channels last, scaled to 0…1 and normalised per channel.

    One multiplication and addition over whole rows of pixels: one pass over memory instead of three; three channels
    side by side would leave most of a vector register empty.
    """
    count, height, width, channels = pixels.shape
    scale, offset = _row_constants(spec.mean, spec.std, width, pixels.device)
    rows = torch.addcmul(offset, pixels.view(count, height, width * channels).float(), scale)
    return rows.to(dtype).view(pixels.shape).permute(0, 3, 1, 2)


@functools.lru_cache(maxsize=256)
def _row_constants(mean: Triple, std: Triple, width: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scale and offset of a row of `width` pixels, so that a pixel p becomes (p / 255 - mean) / std."""
    with torch.inference_mode(mode=False):
        scale = torch.tensor([1 / (255 * deviation) for deviation in std], dtype=torch.float32).repeat(width)
        offset = torch.tensor([-m / deviation for m, deviation in zip(mean, std, strict=True)]).float().repeat(width)
        # Made on the CPU: a copy is complete when it returns, and every executor's stream may use it.
        return scale.to(device), offset.to(device)


def detect_answers(
    output: torch.Tensor, prepared: Sequence[Prepared], spec: ExpertSpec, *, end_to_end: bool
) -> list[Answer]:
    """Return boxes in pixels of the stored image, most confident first."""
    answers: list[Answer] = []
    for rows, image in zip(select_detections(output, spec, end_to_end=end_to_end), prepared, strict=True):
        detections = tuple(_detection(row, image, spec) for row in rows.tolist())
        best = detections[0] if detections else None
        answers.append(Answer(best.label if best else None, best.confidence if best else None, detections))
    return answers


def _detection(row: list[float], image: Prepared, spec: ExpertSpec) -> Detection:
    x1, y1, x2, y2, confidence, label = row
    return Detection(spec.classes[int(label)], confidence, image.to_stored((x1, y1, x2, y2)))


def select_detections(output: torch.Tensor, spec: ExpertSpec, *, end_to_end: bool) -> list[NDArray[np.float32]]:
    """Return (N, 6) per image: x1 y1 x2 y2 confidence class, by descending confidence.

    output: what `Detector` gives, on the CPU: (B, boxes, 6) from an end-to-end head, else (B, 4 + classes, anchors).
    The same boxes as ultralytics' non_max_suppression without multi_label, from xyxy.
    """
    if end_to_end:
        return [rows[rows[:, 4] > spec.confidence_floor][: spec.max_detections].numpy() for rows in output]
    return [_suppress(rows, spec) for rows in output]


def _suppress(rows: torch.Tensor, spec: ExpertSpec) -> NDArray[np.float32]:
    confidence, label = rows[4:].max(0)
    places = (confidence > spec.confidence_floor).nonzero().flatten()
    if len(places) > _MAX_CANDIDATES:
        places = places[confidence[places].argsort(descending=True)[:_MAX_CANDIDATES]]
    boxes, scores, labels = rows[:4, places].T.numpy(), confidence[places].numpy(), label[places].float().numpy()
    best = greedy_nms(boxes + labels[:, None] * _CLASS_OFFSET_PIXELS, scores, spec.nms_iou)[: spec.max_detections]
    return np.concatenate((boxes[best], scores[best, None], labels[best, None]), axis=1, dtype=np.float32)
