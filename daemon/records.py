"""The values that travel between the daemon's drivers: an image arrives, is accepted, is judged, is published."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from experts.spec import Detection
from routing_rules.routes import Guard, VerdictName

#: The most attributes of an attempt, and their bytes as UTF-8 JSON without spaces.
MAX_ATTRIBUTES = 32
MAX_ATTRIBUTES_BYTES = 4096


def attributes_text(attributes: Mapping[str, str]) -> str:
    """Return a board's attributes as stored: names in order, without spaces."""
    return json.dumps(attributes, ensure_ascii=False, sort_keys=True, separators=(",", ":"))


def attributes_fit(attributes: Mapping[str, str]) -> bool:
    return len(attributes) <= MAX_ATTRIBUTES and len(attributes_text(attributes).encode()) <= MAX_ATTRIBUTES_BYTES


@dataclass(frozen=True, slots=True)
class BoardRef:
    """A board as its publisher named it; `attempt` is None if the publisher named none."""

    type: str
    serial: str
    lot: str | None = None
    station: str | None = None
    attempt: int | None = None
    #: Sorted pairs of name and text.
    attributes: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Pixels:
    """The encoding of a payload: "image" (JPEG, PNG, BMP, TIFF) or "raw" with shape (h, w, c), uint8."""

    encoding: Literal["image", "raw"] = "image"
    shape: tuple[int, int, int] | None = None


@dataclass(frozen=True, slots=True)
class JournalKey:
    """The place of an accepted image's bytes: segment number, byte offset of the payload, its length in bytes."""

    segment: int
    offset: int
    length: int


#: Of an image whose bytes are not in the journal.
_NOWHERE = JournalKey(0, 0, 0)


@dataclass(frozen=True, slots=True)
class Image:
    """One picture of one component, as sent; once accepted, with its number and its place in the journal.

    Its payload travels beside it, and only until the journal has the bytes.
    """

    source: str
    image_id: str
    board: BoardRef
    component: str
    designator: str
    #: UTC text with milliseconds.
    captured_at: str | None = None
    deadline_ms: int | None = None
    pixels: Pixels = Pixels()
    #: Lower-case hex, "" if the publisher sent none: the scan of the payload checks it or fills it in.
    sha256: str = ""
    #: From here on set by the transaction that accepts the image. `attempt` is the number of its board's attempt,
    #: `edition` the one in which that began; `late` is True if it had closed before.
    inspection_id: int = 0
    board_id: int = 0
    attempt: int = 0
    edition: int = 0
    late: bool = False
    #: True if it is late, and its attempt had a picture of its position before: sent twice, or too soon for a retest.
    repeats: bool = False
    #: Found when it was accepted: a pass will be `review`, for this reason.
    guard: Guard | None = None
    key: JournalKey = _NOWHERE
    #: Monotonic seconds; after a restart derived from the wall clock.
    accepted_s: float = field(default=0.0, compare=False)


@dataclass(frozen=True, slots=True)
class Refused:
    """An image that the edition of its board cannot route, or of a closed attempt that has no place for it.

    It is decided with its row, after all other checks.
    """

    code: Literal["unknown_board", "unknown_component", "attempt_closed"]
    reason: str


@dataclass(frozen=True, slots=True)
class Duplicate:
    """An image or request that was accepted before: the sha256 of its payload, or its `Generation.content`."""

    content: object


@dataclass(frozen=True, slots=True)
class WriteFailed:
    """An image or request that is not stored: its publisher keeps it and sends it again."""

    reason: str


@dataclass(frozen=True, slots=True)
class Stage:
    """One expert's answer in a chain. `queued_ms` is this image's; `load_ms` and `infer_ms` are of its batch."""

    expert: str
    expert_version: str
    label: str | None
    confidence: float | None
    detections: tuple[Detection, ...]
    device: str
    executor: str
    batch_id: int
    batch_size: int
    queued_ms: float
    load_ms: float
    infer_ms: float
    expert_settings: str
    settings: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """The end of one image, written once and published from this alone.

    `reason` says why it is `unknown`, or which guard turned a pass into `review`; None otherwise.
    """

    image: Image
    verdict: VerdictName
    defect: str | None = None
    reason: str | None = None
    stages: tuple[Stage, ...] = ()


@dataclass(frozen=True, slots=True)
class Generation:
    """A request for text from its message to its row: as sent; then accepted, with its number; then ended."""

    source: str
    request_id: str
    model: str
    prompt: str
    max_new_tokens: int | None = None
    task: str | None = None
    slo_ms: float | None = None
    deadline_ms: int | None = None
    board: BoardRef | None = None
    stream: bool = False
    #: Of an accepted request; `accepted_s` as of an image.
    generation_id: int = 0
    accepted_s: float = field(default=0.0, compare=False)
    #: Of one that ended; `reason` says why there is no `text`.
    text: str | None = None
    reason: str | None = None
    mode: str | None = None
    prompt_tokens: int | None = None
    new_tokens: int | None = None
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    total_ms: float | None = None
    expert_fetches: int | None = None
    predictor_hit_rate: float | None = None
    brownout_threshold: float | None = None

    @property
    def image_id(self) -> str:
        """Return the `id` that answers repeat, under the name that it has for images."""
        return self.request_id

    @property
    def size_bytes(self) -> int:
        return len(self.prompt.encode())

    @property
    def content(self) -> tuple[str, str, int | None, str | None]:
        """Return what makes two requests with the same `id` ask for the same text."""
        return self.model, self.prompt, self.max_new_tokens, self.task


@dataclass(frozen=True, slots=True)
class ExpertSwitch:
    """One load into a pool (RESULTS.md, `expert_switches`). `at_wall_s` is seconds since the epoch."""

    at_wall_s: float
    executor: str
    device: str
    loaded: str
    evicted: tuple[str, ...]
    bytes: int
    load_ms: float
    tier: Literal["ram", "disk"]
    cause: Literal["demand", "prefetch", "startup", "pin"]


@dataclass(frozen=True, slots=True)
class BatchDone:
    """One batch that ended. Times are seconds since the epoch; `load_ms` is how long it waited for a load."""

    executor: str
    device: str
    expert: str
    architecture: str
    step: int
    images: int
    started_wall_s: float
    ended_wall_s: float
    load_ms: float
    infer_ms: float
    #: Step and wait in milliseconds of each image.
    waits: Sequence[tuple[int, float]] = ()


@dataclass(frozen=True, slots=True)
class QueueSample:
    """The queues at one moment: all requests, those of experts resident nowhere, those by device; busy executors."""

    at_wall_s: float
    under_way: int
    waiting: int
    unloaded: int
    queued: dict[str, int]
    busy: dict[str, float]


@dataclass(frozen=True, slots=True)
class ExpertVersion:
    """Weights that gave a verdict (RESULTS.md, `expert_versions`)."""

    expert: str
    expert_version: str
    sha256: str
    architecture: str
    classes: tuple[str, ...]
    bytes: int
    dtype: str
    origin: str


@dataclass(frozen=True, slots=True)
class Message:
    """One message of the results stream: its topic, its `seq` and its JSON body (with `seq` inside)."""

    seq: int
    topic: str
    body: dict[str, Any]
    #: That of its image, also where the verdict was no pass; not published.
    guard: Guard | None = None
