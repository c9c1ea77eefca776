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
from tests.stress.account import Books, audit
from tests.stress.hostile import connected
from tests.stress.line import BOARD_TYPE, IMAGES_PER_BOARD, OPEN_BOARD_TYPE, make_jpegs, make_small_line
from tests.stress.mutate import Frames, Mutator, Seed
from tests.stress.sample import Watch
from tests.stress.soak import INTAKE_BROKE, percentile
from tests.stress.steady import SteadyPublisher
from tools.setup.service import Service

#: Messages under way at once: few enough that every answer finds room, and the honest one is not merely crowded out.
_WINDOW = 64
_SILENCE_S = 20.0
_HONEST_RATE = 20.0
_TELL_S = 10.0
#: What the daemon's log says where a message broke something.
_BROKEN = (*INTAKE_BROKE, "writer_failed", "callback_failed")
_SETTINGS: dict[str, Any] = {
    "limits": {"backlog_images": 2000, "backlog_bytes": "256MB", "source_images": 500, "source_bytes": "64MB"},
    "retention": {"segment": "16MB", "quarantine": "16MB"},
}


@dataclass(slots=True)
class Fuzzed:
    """What came of it. `answers` counts by type and code; `unanswered` are messages that got none, which is wrong."""

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
    books: Books | None = None

    @property
    def holds(self) -> bool:
        """Whether each message had its one answer, nothing broke and nobody honest was refused."""
        wrong = self.unanswered or self.surplus or self.malformed_answers or self.honest_rejected or self.broken
        return not wrong and self.books is not None and self.books.balance

    def as_dict(self) -> dict[str, Any]:
        # asdict would count the pairs of a Counter anew.
        said = {**asdict(self), "answers": dict(self.answers)}
        return {"machine": platform.platform(), "holds": self.holds, **said}


def run_fuzz(frames: int, seed: int, tell: Callable[[Fuzzed], None] = lambda _: None) -> Fuzzed:
    """Send at least so many frames (a message has one to seven) and account for each message."""
    told = Fuzzed(seed)
    with tempfile.TemporaryDirectory(prefix="coserve-fuzz-") as scratch:
        folder = Path(scratch)
        config = make_small_line(folder, _SETTINGS)
        log = folder / "daemon.log"
        with Service(config, log) as service:
            assert service.process is not None
            endpoints = load_config(config).endpoints
            watch = Watch(service.process.pid, folder)
            honest = SteadyPublisher(endpoints.intake[1], "honest", make_jpegs(8, 20_000), _HONEST_RATE)
            honest.start()
            _Fuzzer(told, Mutator(seed, _valid()), watch, tell).carry_out(endpoints.intake, frames)
            honest.stop()
            waits_ms = [wait_s * 1000 for wait_s in honest.take_waits_s()]
            told.honest_p99_ms, told.honest_longest_ms = percentile(waits_ms, 0.99), percentile(waits_ms, 1.0)
            told.honest_accepted = honest.tally.accepted
            told.honest_rejected = len(honest.tally.rejected) + honest.unanswered
            _wait_for_verdicts(endpoints.control)
        told.books = audit(folder / "inspection.db", [("honest", told.honest_accepted)], BOARD_TYPE, IMAGES_PER_BOARD)
        said = log.read_text(encoding="utf-8", errors="replace")
        told.broken = {event: said.count(f"event={event}") for event in _BROKEN if f"event={event}" in said}
    return told


def _valid() -> list[Seed]:
    """One of each kind of message; the images belong to boards without an end."""
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


def _wait_for_verdicts(control: str) -> None:
    from daemon.wire.control import ask

    until_s = time.monotonic() + 60
    while ask(control, "status", timeout_s=20.0)["backlog"] and time.monotonic() < until_s:
        time.sleep(0.1)


class _Fuzzer:
    """A window of messages on one connection per endpoint. Exactly one answer each: counted, whatever it says."""

    def __init__(self, told: Fuzzed, mutator: Mutator, watch: Watch, tell: Callable[[Fuzzed], None]) -> None:
        self._told = told
        self._mutator = mutator
        self._watch = watch
        self._tell = tell

    def carry_out(self, intakes: list[str], frames: int) -> None:
        began_s = tell_at_s = time.monotonic()
        told = self._told
        with zmq.Context() as context:
            dealers = [connected(context, endpoint) for endpoint in intakes]
            warm = max(1, frames // 10)
            while told.frames < frames:
                for dealer in dealers:
                    self._window(dealer)
                if not told.rss_before_mb and told.frames >= warm:
                    held = self._watch.look()
                    told.rss_before_mb, told.handles_before = held.rss_mb, held.handles
                if time.monotonic() > tell_at_s + _TELL_S:
                    tell_at_s = time.monotonic()
                    told.seconds = tell_at_s - began_s
                    self._tell(told)
            time.sleep(0.3)
            for dealer in dealers:
                while dealer.poll(0):
                    dealer.recv_multipart()
                    told.surplus += 1
                dealer.close(linger=0)
        told.seconds = time.monotonic() - began_s
        held = self._watch.look()
        told.rss_after_mb, told.handles_after = held.rss_mb, held.handles

    def _window(self, dealer: "zmq.Socket[bytes]") -> None:
        told = self._told
        messages: list[Frames] = [self._mutator.next() for _ in range(_WINDOW)]
        for message in messages:
            dealer.send_multipart(message)
            told.frames += len(message)
        told.messages += len(messages)
        for done in range(len(messages)):
            if not dealer.poll(int(_SILENCE_S * 1000)):
                told.unanswered += len(messages) - done
                return
            self._count(dealer.recv_multipart())

    def _count(self, frames: list[bytes]) -> None:
        try:
            magic, text = frames[-2:]
            answer = json.loads(text)
            assert magic == b"CS1" and len(text) <= 65_536 and {"id", "source", "credit"} <= answer.keys()  # noqa: PT018
            assert answer["credit"] >= 1
            self._told.answers[" ".join(filter(None, (answer["type"], answer.get("code"))))] += 1
        except (ValueError, AssertionError, KeyError):
            self._told.malformed_answers += 1
