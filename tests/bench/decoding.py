"""`coserve bench decoding`: what it costs to keep a poison image from the daemon, per image, in one run.

In process with marks (what the daemon does), beside a decoder that lives in a child, with payload and pixels in shared
memory, and a child for each image. What children cost is processor time that inference does not get.
"""

import io
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import numpy as np
import typer

from daemon.intake.image_header import check_image
from daemon.records import JournalKey, Pixels
from daemon.storage.decode_marks import DecodeMarks
from daemon.storage.suspect_images import decode_apart
from experts.vision.decode import decode
from tools.cli.console import print_json, print_table

_ROUNDS = 5
_MAX_PIXELS = 64_000_000
#: The child of the second way: told a payload's length and the size of its pixels, it decodes from one shared memory
#: into the other.
_CHILD = """
import sys, numpy as np
from multiprocessing import shared_memory, resource_tracker
from experts.vision.decode import decode
resource_tracker.register = lambda *_: None
payload, pixels = (shared_memory.SharedMemory(name) for name in sys.argv[1:3])
for line in sys.stdin:
    image = decode(bytes(payload.buf[: int(line)]), "image")
    np.frombuffer(pixels.buf, np.uint8, image.size).reshape(image.shape)[:] = image
    print(*image.shape, flush=True)
payload.close(); del image; pixels.close()
"""


@dataclass(frozen=True, slots=True)
class Cost:
    """One way to decode: milliseconds per image on the clock, and of processors, children included."""

    way: str
    ms: float
    cpu_ms: float
    images: int


@contextmanager
def _living_child(largest: int, most_pixels: int) -> Iterator[Callable[[bytes], Any]]:
    payload, pixels = SharedMemory(create=True, size=largest), SharedMemory(create=True, size=3 * most_pixels)
    child = subprocess.Popen(
        [sys.executable, "-c", _CHILD, payload.name, pixels.name],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdin is not None
    assert child.stdout is not None
    assert payload.buf is not None
    requests, replies, place = child.stdin, child.stdout, payload.buf

    def decode_there(data: bytes) -> Any:
        place[: len(data)] = data
        print(len(data), file=requests, flush=True)
        shape = tuple(map(int, replies.readline().split()))
        # A copy: the place is for the next image while this one is still being prepared.
        return np.ndarray(shape, np.uint8, pixels.buf).copy()

    try:
        yield decode_there
    finally:
        requests.close()
        child.wait(10.0)
        replies.close()
        place.release()
        for memory in (payload, pixels):
            memory.close()
            memory.unlink()


def _measure(way: str, images: int, one: Callable[[], object], children: bool) -> Cost:
    one()
    clock_s: list[float] = []
    cpu_s: list[float] = []
    for _ in range(_ROUNDS):
        began_s, began_cpu_s = time.perf_counter(), _cpu_s(children=children)
        for _ in range(images):
            one()
        clock_s.append(time.perf_counter() - began_s)
        cpu_s.append(_cpu_s(children=children) - began_cpu_s)
    return Cost(way, median(clock_s) / images * 1e3, median(cpu_s) / images * 1e3, images)


def _cpu_s(*, children: bool) -> float:
    """Processor time of this process, and with `children` of those that have ended or still run."""
    own = resource.getrusage(resource.RUSAGE_SELF)
    total = own.ru_utime + own.ru_stime
    if children:
        ended = resource.getrusage(resource.RUSAGE_CHILDREN)
        total += ended.ru_utime + ended.ru_stime
        for task in Path("/proc/self/task").iterdir():
            for child in (task / "children").read_text().split():
                fields = Path("/proc", child, "stat").read_text().rpartition(")")[2].split()
                total += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return total


def a_picture(payload_bytes: int) -> bytes:
    """A JPEG of about that size: noise that was made smooth, as a photograph of a part is."""
    from PIL import Image

    side = 64
    while True:
        pixels = np.random.default_rng(1).integers(0, 255, (side // 4, side // 4, 3), dtype=np.uint8)
        buffer = io.BytesIO()
        Image.fromarray(pixels).resize((side, side)).save(buffer, "JPEG", quality=90)
        if buffer.tell() >= payload_bytes:
            return buffer.getvalue()
        side += 32


def measure(payload_bytes: int, images: int) -> list[Cost]:
    payload, pixels = a_picture(payload_bytes), Pixels()
    facts = check_image(payload, pixels, _MAX_PIXELS)
    with tempfile.TemporaryDirectory() as folder:
        marks = DecodeMarks(Path(folder) / "marks")
        mark, key = marks.place(), JournalKey(1, 16, len(payload))

        def marked() -> None:
            mark(key)
            decode(payload, "image")
            mark(None)

        costs = [
            _measure("header check (at intake)", images * 20, lambda: check_image(payload, pixels, _MAX_PIXELS), False),
            _measure("in process", images, lambda: decode(payload, "image"), False),
            _measure("in process, marked", images, marked, False),
        ]
        marks.close(clean=True)
    with _living_child(len(payload), facts.width * facts.height) as decode_there:
        costs.append(_measure("a child that lives", images, lambda: decode_there(payload), True))
    costs.append(_measure("a child each", max(2, images // 100), lambda: decode_apart(payload, pixels, 30.0), True))
    return costs


def register(app: typer.Typer) -> None:
    @app.command(epilog="Example: coserve bench decoding --size 100")
    def decoding(  # pyright: ignore[reportUnusedFunction]
        size: Annotated[int, typer.Option(help="Kilobytes of the JPEG.", min=1)] = 100,
        images: Annotated[int, typer.Option(help="Images of each round.", min=2)] = 200,
        as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    ) -> None:
        """What it costs to keep an image that crashes its decoder from the daemon."""
        costs = measure(size * 1000, images)
        if as_json:
            print_json({"cpu": platform.processor(), "kilobytes": size, "costs": [asdict(cost) for cost in costs]})
            return
        rows = [[cost.way, f"{cost.ms:.3f}", f"{cost.cpu_ms:.3f}"] for cost in costs]
        print_table(f"Decoding JPEGs of {size} KB", ["way", "ms per image", "of processors"], rows)
