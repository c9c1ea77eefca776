"""Fuzzed messages against a real daemon over real sockets, beside an honest publisher that goes on all the while."""

import json
import platform
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import zmq

from daemon.config.settings import load_config
from tests.stress.audit import ResultsAudit, audit
from tests.stress.growth import ResourceMonitor
from tests.stress.hostile import connected
from tests.stress.line import OPEN_BOARD_TYPE, make_jpegs, make_small_line
from tests.stress.mutate import Frames, Mutator, Seed
from tests.stress.soak import INTAKE_BROKE, wait_for_verdicts
from tests.stress.steady import SteadyPublisher, quantile_ms
from tools.setup.service import Service

#: Messages under way at once: few enough that every answer finds room, and the honest one is not merely crowded out.
_WINDOW = 64
_SILENCE_S = 20.0
_HONEST_RATE = 20.0
_PROGRESS_EVERY_S = 10.0
#: Events of the daemon's log that show that a message broke something.
_BROKEN = (*INTAKE_BROKE, "writer_failed", "callback_failed")
_SETTINGS: dict[str, Any] = {
    "limits": {"backlog_images": 2000, "backlog_bytes": "256MB", "source_share": 0.25},
}


@dataclass(slots=True)
class FuzzReport:
    """Counts of a run. `answers` counts by type and code; `unanswered` messages got none, which is wrong."""

    seed: int
    frames: int = 0
    messages: int = 0
    answers: Counter[str] = field(default_factory=Counter)
    unanswered: int = 0
    surplus: int = 0
    malformed_answers: int = 0
    seconds: float = 0.0
    honest_accepted: int = 0
    honest_p99_ms: float | None = None
    honest_longest_ms: float | None = None
    honest_rejected: int = 0
    rss_before_mb: float = 0.0
    rss_after_mb: float = 0.0
    handles_before: int = 0
    handles_after: int = 0
    broken: dict[str, int] = field(default_factory=dict)
    books: ResultsAudit | None = None

    @property
    def holds(self) -> bool:
        """Return True if each message had its one answer, nothing broke and no honest image was refused."""
        wrong = self.unanswered or self.surplus or self.malformed_answers or self.honest_rejected or self.broken
        return not wrong and self.books is not None and self.books.holds

    def as_dict(self) -> dict[str, Any]:
        # asdict would count the pairs of a Counter anew.
        return {
            "machine": platform.platform(),
            "holds": self.holds,
            **asdict(self),
            "answers": dict(self.answers),
        }


def run_fuzz(frames: int, seed: int, on_progress: Callable[[FuzzReport], None] = lambda _: None) -> FuzzReport:
    """Send at least so many frames (a message has one to seven) and account for each message."""
    report = FuzzReport(seed)
    with tempfile.TemporaryDirectory(prefix="coserve-fuzz-") as scratch:
        folder = Path(scratch) / "line"
        config = make_small_line(folder, _SETTINGS)
        log = folder / "daemon.log"
        with Service(config, log) as service:
            assert service.process is not None
            endpoints = load_config(config).endpoints
            monitor = ResourceMonitor(service.process.pid, folder)
            honest = SteadyPublisher(endpoints.intake[1], "honest", make_jpegs(8, 20_000), _HONEST_RATE)
            honest.start()
            _send_all(report, Mutator(seed, _valid_messages()), monitor, endpoints.intake, frames, on_progress)
            honest.stop()
            waits_s = honest.take_waits_s()
            report.honest_p99_ms, report.honest_longest_ms = quantile_ms(waits_s, 0.99), quantile_ms(waits_s, 1.0)
            report.honest_accepted = honest.tally.accepted
            report.honest_rejected = len(honest.tally.rejected) + honest.unanswered
            wait_for_verdicts(endpoints.control)
        report.books = audit(folder / "inspection.db", [("honest", report.honest_accepted)])
        text = log.read_text(encoding="utf-8", errors="replace")
        report.broken = {event: text.count(f"event={event}") for event in _BROKEN if f"event={event}" in text}
    return report


def _valid_messages() -> list[Seed]:
    """Return one of each kind of message; the images belong to boards without an end."""
    payloads = make_jpegs(3, 3_000, seed=5)
    board = {"type": OPEN_BOARD_TYPE, "serial": "F1", "lot": "L", "station": "S", "attempt": 1}
    inspect = {
        "type": "inspect", "id": "f/1", "source": "fuzz", "board": board, "component": "P", "designator": "P1",
        "captured_at": "2026-11-21T09:28:11.123Z", "deadline_ms": 60_000, "encoding": "image",
    }  # fmt: skip
    raw = {**inspect, "id": "f/2", "encoding": "raw", "shape": [20, 30, 3], "dtype": "uint8"}
    generate = {"type": "generate", "id": "g", "source": "fuzz", "model": "m", "prompt": "p", "max_new_tokens": 4}
    return [
        *(Seed({**inspect, "id": f"f/1{number}"}, payload) for number, payload in enumerate(payloads)),
        Seed(raw, bytes(20 * 30 * 3)),
        Seed({"type": "hello", "source": "fuzz"}, None),
        Seed({"type": "results_since", "seq": 0, "limit": 3}, None),
        Seed(generate, None),
    ]


def _send_all(
    report: FuzzReport,
    mutator: Mutator,
    monitor: ResourceMonitor,
    intakes: list[str],
    frames: int,
    on_progress: Callable[[FuzzReport], None],
) -> None:
    """Send windows of messages on one connection per endpoint, and expect exactly one answer to each."""
    began_s = progress_at_s = time.monotonic()
    with zmq.Context() as context:
        dealers = [connected(context, endpoint) for endpoint in intakes]
        while report.frames < frames:
            for dealer in dealers:
                _send_window(report, mutator, dealer)
            report.seconds = time.monotonic() - began_s
            if not report.rss_before_mb and report.frames >= max(1, frames // 10):
                sample = monitor.sample()
                report.rss_before_mb, report.handles_before = sample["rss_mb"], sample["handles"]
            if time.monotonic() > progress_at_s + _PROGRESS_EVERY_S:
                progress_at_s = time.monotonic()
                on_progress(report)
        time.sleep(0.3)
        for dealer in dealers:
            while dealer.poll(0):
                dealer.recv_multipart()
                report.surplus += 1
            dealer.close(linger=0)
    sample = monitor.sample()
    report.rss_after_mb, report.handles_after = sample["rss_mb"], sample["handles"]


def _send_window(report: FuzzReport, mutator: Mutator, dealer: "zmq.Socket[bytes]") -> None:
    messages: list[Frames] = [mutator.next() for _ in range(_WINDOW)]
    for message in messages:
        dealer.send_multipart(message)
        report.frames += len(message)
    report.messages += len(messages)
    for answered in range(len(messages)):
        if not dealer.poll(int(_SILENCE_S * 1000)):
            report.unanswered += len(messages) - answered
            return
        kind = _kind_of(dealer.recv_multipart())
        if kind is None:
            report.malformed_answers += 1
        else:
            report.answers[kind] += 1


def _kind_of(frames: list[bytes]) -> str | None:
    """Return the type and code of an answer; None if it is malformed."""
    try:
        magic, text = frames[-2:]
        answer = json.loads(text)
        is_whole = magic == b"CS1" and len(text) <= 65_536 and {"id", "source"} <= answer.keys()
        return (
            " ".join(filter(None, (answer["type"], answer.get("code")))) if is_whole and answer["credit"] >= 1 else None
        )
    except (ValueError, KeyError):
        return None
