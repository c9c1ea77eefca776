"""Select boxes from a detector's output: confidence floor, class-aware non-maximum suppression, a maximum number."""

import numpy as np
import torch
from numpy.typing import NDArray

from experts.spec import ExpertSpec
from experts.vision.frameworks import greedy_nms

#: Boxes of different classes are moved this far apart, so that one suppression serves all classes (ultralytics).
_CLASS_OFFSET_PIXELS = 7680
#: At most so many candidates go into suppression, the most confident ones (ultralytics).
_MAX_CANDIDATES = 30_000


def select_detections(output: torch.Tensor, spec: ExpertSpec, *, end_to_end: bool) -> list[NDArray[np.float32]]:
    """Per image (N, 6): x1 y1 x2 y2 confidence class, by descending confidence.

    output: what `Detector` gives, on the CPU: (B, boxes, 6) from an end-to-end head, else (B, 4 + classes, anchors).
    The same boxes as ultralytics' non_max_suppression without multi_label, from xyxy.
    """
    if end_to_end:
        return [rows[rows[:, 4] > spec.confidence_floor][: spec.max_detections].numpy() for rows in output]
    return [_suppress(rows, spec) for rows in output]


def _suppress(rows: torch.Tensor, spec: ExpertSpec) -> NDArray[np.float32]:
    """rows: (4 + classes, anchors)."""
    confidence, label = rows[4:].max(0)
    places = (confidence > spec.confidence_floor).nonzero().flatten()
    if len(places) > _MAX_CANDIDATES:
        places = places[confidence[places].argsort(descending=True)[:_MAX_CANDIDATES]]
    boxes, scores, labels = rows[:4, places].T.numpy(), confidence[places].numpy(), label[places].float().numpy()
    best = greedy_nms(boxes + labels[:, None] * _CLASS_OFFSET_PIXELS, scores, spec.nms_iou)[: spec.max_detections]
    return np.concatenate((boxes[best], scores[best, None], labels[best, None]), axis=1, dtype=np.float32)
