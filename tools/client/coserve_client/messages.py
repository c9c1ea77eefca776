"""The answers to images, and the messages of the results stream (PROTOCOL.md), as typed dictionaries.

`kind` and `topic` are added by `Results`; everything else is as the line published it. A newer line may send more
fields than are named here.
"""

from typing import Literal, NotRequired, TypedDict

Verdict = Literal["pass", "fail", "review", "unknown"]


class BoardReference(TypedDict):
    """A board as its camera named it, with the number of its attempt."""

    type: str
    serial: str
    attempt: int
    lot: NotRequired[str]
    station: NotRequired[str]
    attributes: NotRequired[dict[str, str]]


class DetectionResult(TypedDict):
    """One finding of a detector. `box`: left, top, right, bottom, in pixels of the image."""

    label: str
    confidence: float
    box: list[float]


class StageResult(TypedDict):
    """The answer of one expert to one image."""

    expert: str
    version: str
    settings: NotRequired[str]
    label: str | None
    confidence: float | None
    detections: list[DetectionResult]
    device: str
    batch: int
    queued_ms: float
    load_ms: float
    infer_ms: float


class _Message(TypedDict):
    topic: str
    seq: int
    at: str


class InspectionResult(_Message):
    """The verdict on one image. `reason` is None unless the verdict is `unknown`."""

    kind: Literal["inspection"]
    inspection_id: NotRequired[int]
    id: str
    source: str
    board: BoardReference
    component: str
    designator: str
    verdict: Verdict
    defect: str | None
    reason: str | None
    late: bool
    stages: list[StageResult]
    latency_ms: float
    rules_version: str
    edition: NotRequired[int]


class ReviewPosition(TypedDict):
    designator: str
    component: str


class FailedPosition(ReviewPosition):
    """A position of a board with the verdict `fail`."""

    defect: str | None


class UnknownPosition(ReviewPosition):
    reason: str | None


class MissingComponent(TypedDict):
    """Positions of a board without a verdict. `designators` where the recipe lists them."""

    component: str
    count: int
    designators: NotRequired[list[str]]


class BoardResult(_Message):
    """The verdict on one attempt at a board; the worst verdict wins."""

    kind: Literal["board"]
    board: BoardReference
    verdict: Verdict
    expected: int
    inspected: int
    failed: list[FailedPosition]
    review: NotRequired[list[ReviewPosition]]
    unknown: NotRequired[list[UnknownPosition]]
    missing: list[MissingComponent]
    reason: Literal["complete", "time_limit"]
    rules_version: NotRequired[str]
    edition: NotRequired[int]


class GenerationResult(_Message):
    """A finished text of a language model."""

    kind: Literal["generation"]
    id: str
    source: str
    model: str
    mode: str | None
    task: str | None
    text: str | None
    prompt_tokens: int | None
    new_tokens: int | None
    ttft_ms: float | None
    tpot_ms: float | None
    total_ms: float | None
    status: Literal["done", "unknown"]
    reason: str | None


class ReviewResult(_Message):
    """A person's decision on an image, or on a whole attempt (`inspection_id` is None)."""

    kind: Literal["review"]
    review_id: int
    inspection_id: int | None
    board: BoardReference
    component: str | None
    designator: str | None
    verdict: Verdict
    defect: str | None
    reviewer: str
    note: str | None
    undo_of: int | None
    board_verdict: Verdict | None
    epoch: NotRequired[str | None]


class ImageAnswer(TypedDict):
    """The final answer to one image. `code` and `reason` say why it was rejected, `attempt` where it was accepted,
    `edition` by which rules and experts it is judged.
    """

    type: Literal["accepted", "duplicate", "rejected"]
    attempt: NotRequired[int]
    edition: NotRequired[int]
    differs: NotRequired[bool]
    code: NotRequired[str]
    reason: NotRequired[str]


Result = InspectionResult | BoardResult | GenerationResult | ReviewResult
