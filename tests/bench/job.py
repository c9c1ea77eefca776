"""One run of one side: what its process is told, and what it tells back, as JSON files."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import TypeAdapter

from daemon.policy.matrix import Performance
from daemon.policy.presets import PRESETS
from daemon.records import JournalKey
from tests.bench.workload import Trace

Disk = Literal["cold", "paced"]
DISKS: tuple[Disk, ...] = ("cold", "paced")
#: The paper's SATA SSD.
PACED_BYTES_PER_S = 530e6

ORDINARY, NAIVE, RAY = "samba-ordinary", "naive", "ray-serve"
#: The sides that are no policies of ours.
OTHER_SIDES = (ORDINARY, NAIVE, RAY)
SIDES = (*PRESETS, *OTHER_SIDES)


def is_stationary(side: str) -> bool:
    """Whether a side serves images as they come, so that a part of a run says what the whole would.

    Who groups images serves the popular experts first: only the whole trace says how fast it is. Ray Serve's router
    groups too, for it prefers a replica that has the model.
    """
    if side in OTHER_SIDES:
        return side != RAY
    return PRESETS[side].binding == "arrival" and PRESETS[side].arrange == "last"


@dataclass(frozen=True, slots=True)
class Job:
    """`catalog` names the stock, `keys` the pictures in `journal`: two per picture, see pictures.py.

    `memory_bytes` is for experts, in all; `executors` and `threads` are of the whole side: a side with one executor
    has all threads. After `limit_s` the side is stopped and what it finished counts. `record` is for a trace.
    """

    side: str
    trace: Trace
    catalog: Path
    journal: Path
    keys: tuple[JournalKey, ...]
    memory_bytes: int
    disk: Disk
    limit_s: float
    scratch: Path
    executors: int = 2
    threads: int = 2
    max_batch: int = 8
    matrix: tuple[Performance, ...] = ()
    deadline_s: float | None = None
    warm: bool = False
    record: Path | None = None

    def key(self, picture: int, *, goes_on: bool) -> JournalKey:
        return self.keys[2 * picture + goes_on]


@dataclass(frozen=True, slots=True)
class Run:
    """What one side did. `seconds` is from the first image's arrival to the last verdict, or to the limit.

    `waits_s` are from an image's arrival to the start of its first expert's batch, `latencies_s` to its verdict, both
    of the images that ended. `loads` are those after the initial fill; None where the side cannot say.
    """

    side: str
    images: int
    seconds: float
    stopped: bool
    loads: int | None
    loaded_bytes: int | None
    waits_s: tuple[float, ...]
    latencies_s: tuple[float, ...]
    unknown: int = 0
    late: int = 0
    note: str = ""

    @property
    def images_per_s(self) -> float:
        return self.images / self.seconds if self.seconds else 0.0


JOB = TypeAdapter(Job)
RUN = TypeAdapter(Run)
