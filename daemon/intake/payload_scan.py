"""Scan a payload before it is accepted: structure, size in pixels, sha256; nothing is decoded.

Large payloads are scanned in a thread of their own, source by source in turn: one of 64 MB takes some 50 ms to hash,
and no other publisher's image waits for that.
"""

import hashlib
import threading
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from daemon.policy.fair_queue import Turns
from daemon.records import Pixels
from experts.errors import ImageHeaderError
from experts.vision.structure import MAX_STEPS, ImageFacts, check_size, check_structure


def check_image(payload: bytes, pixels: Pixels, max_pixels: int, max_steps: int = MAX_STEPS) -> ImageFacts:
    """Check the structure of `payload`; raise ImageHeaderError if it cannot be judged or is too large.

    Raise LongWalkError if it has more than `max_steps` parts, and more steps could be taken.
    """
    if pixels.encoding != "raw":
        return check_structure(payload, max_pixels, max_steps)
    height, width, channels = pixels.shape or (0, 0, 0)
    check_size(width, height, max_pixels)
    expected = height * width * channels
    if len(payload) != expected:
        shape = [height, width, channels]
        raise ImageHeaderError(f"shape {shape} needs {expected} bytes, the payload has {len(payload)}")
    return ImageFacts("raw", width, height)


@dataclass(frozen=True, slots=True)
class PayloadScan:
    """A payload's sha256 (lower-case hex), and the flaw of its structure; None if it is sound."""

    sha256: str
    flaw: ImageHeaderError | None


def scan_payload(payload: bytes, pixels: Pixels, max_pixels: int, max_steps: int = MAX_STEPS) -> PayloadScan:
    """Return the scan of a payload. LongWalkError if its structure has more than `max_steps` parts."""
    flaw: ImageHeaderError | None = None
    try:
        check_image(payload, pixels, max_pixels, max_steps)
    except ImageHeaderError as error:
        flaw = error.with_traceback(None)  # it outlives this call, and must not keep the payload alive
    return PayloadScan(hashlib.sha256(payload).hexdigest(), flaw)


@dataclass(frozen=True, slots=True)
class ScanRequest:
    """A payload to scan; `done` is called with its scan, None if that failed."""

    source: str
    payload: bytes
    pixels: Pixels
    max_pixels: int
    done: Callable[[PayloadScan | None], None]


class PayloadScanner:
    """`scan` is called from any thread, `done` in the scanner's. The caller bounds how much waits."""

    def __init__(self) -> None:
        self._waiting: Turns[ScanRequest] = Turns()
        self._changed = threading.Condition()
        self._stopping = False
        self._log = structlog.get_logger("intake")
        self._thread = threading.Thread(target=self._run, name="payload-scanner")

    def start(self) -> None:
        self._thread.start()

    def scan(self, request: ScanRequest) -> None:
        with self._changed:
            self._waiting.add((request.source,), request, len(request.payload))
            self._changed.notify()

    def stop(self) -> None:
        """Finish the running scan and end; waiting payloads are dropped."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        while (request := self._next()) is not None:
            try:
                scan = scan_payload(request.payload, request.pixels, request.max_pixels)
            except Exception:  # noqa: BLE001 - one image must not stop the line
                self._log.exception("payload_scan_failed", source=request.source)
                scan = None
            request.done(scan)
            del request  # frees the payload before the next one comes

    def _next(self) -> ScanRequest | None:
        with self._changed:
            while not self._stopping and not len(self._waiting):
                self._changed.wait()
            return None if self._stopping else self._waiting.take(1, 0)[0]
