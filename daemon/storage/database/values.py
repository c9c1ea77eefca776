"""What the store is asked and what it answers, as values."""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from daemon.records import Accepted, JournalKey, Pixels, Published


@dataclass(frozen=True, slots=True)
class Clock:
    """Where times come from: `wall_s` for stamps, `monotonic_s` for durations, so that setting the clock moves none."""

    wall_s: Callable[[], float] = time.time
    monotonic_s: Callable[[], float] = time.monotonic


@dataclass(frozen=True, slots=True)
class Known:
    """An image that is accepted already."""

    inspection_id: int
    payload_sha256: str


@dataclass(frozen=True, slots=True)
class CopyRequest:
    """An image that stays after its verdict: copy it from the journal, then its bytes there may go."""

    inspection_id: int
    key: JournalKey
    pixels: Pixels
    completed_at: str


@dataclass(frozen=True, slots=True)
class Kept:
    """A durable copy; `image_path` is None where the journal could not give the bytes back."""

    inspection_id: int
    image_path: str | None


@dataclass(slots=True)
class Written:
    """What one transaction of results did: messages by `seq`, (source, bytes) of finished images, copies to make."""

    published: list[Published] = field(default_factory=list[Published])
    done: list[tuple[str, int]] = field(default_factory=list[tuple[str, int]])
    keep: list[CopyRequest] = field(default_factory=list[CopyRequest])
    freed_journal: bool = False


@dataclass(frozen=True, slots=True)
class Recovery:
    """What a restart finds: images without verdict, the rules their attempts opened with, where numbers go on.

    `rules_texts` holds the rules of open attempts and of pending images by version; `last_batch_id` is the highest
    in `stages`, since views tell batches apart by it.
    """

    pending: list[Accepted]
    rules_texts: dict[str, str]
    last_seq: int
    last_batch_id: int


@dataclass(slots=True)
class Memory:
    """What the writer knows without asking: true to the last commit, never ahead of it.

    `due` is a heap of (monotonic seconds, board type, serial, attempt); `segments` counts rows in `pending`.
    """

    due: list[tuple[float, str, str, int]] = field(default_factory=list[tuple[float, str, str, int]])
    accepted_s: dict[int, float] = field(default_factory=dict[int, float])
    segments: Counter[int] = field(default_factory=Counter[int])
    written_once: set[tuple[str, ...]] = field(default_factory=set[tuple[str, ...]])
