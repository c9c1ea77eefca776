"""Results read from a scripted line: each once and in order through gaps, restarts, pruning, and another database."""

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import zmq
import zmq.auth

from coserve_client import (
    BoardResult,
    CurveClient,
    GenerationResult,
    InspectionResult,
    Results,
    ResultsError,
    ReviewResult,
)
from daemon.storage.database import rows
from tests.waiting import until

TOPIC = "inspection/b/S1/"


class ScriptedLine:
    """Both sockets of a line, in the thread of the test: `serve` answers the questions that have come.

    `stored` are the numbers of the kept results; `refusals` are sent in place of answers, each once.
    """

    def __init__(self, folder: Path, *stored: int, secret_key: Path | None = None, epoch: str | None = None) -> None:
        self.stored = list(stored)
        self.last_seq = max(stored, default=0)
        self.epoch = epoch
        self.uptime_s = 0.0
        self.refusals: list[dict[str, Any]] = []
        self.questions: list[dict[str, Any]] = []
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._secret_key = secret_key
        self._publisher = self._bind(zmq.PUB, f"ipc://{folder}/results.sock")
        self._router = self._bind(zmq.ROUTER, f"ipc://{folder}/intake.sock")

    def close(self) -> None:
        self._context.destroy(linger=0)

    def store(self, *numbers: int) -> None:
        self.stored = sorted({*self.stored, *numbers})
        self.last_seq = max(self.stored)

    def publish(self, *numbers: int) -> None:
        """Store these results, and send them on the live stream."""
        self.store(*numbers)
        for number in numbers:
            self._publisher.send_multipart([TOPIC.encode(), json.dumps({"seq": number}).encode()])

    def serve(self) -> None:
        """Answer what was asked, and send a heartbeat."""
        self.uptime_s += 1.0
        beat = {"seq": self.last_seq, "uptime_s": self.uptime_s, "epoch": self.epoch}
        self._publisher.send_multipart([b"heartbeat/", json.dumps(beat).encode()])
        while self._router.poll(0):
            identity, magic, header = self._router.recv_multipart()
            question = json.loads(header)
            self.questions.append(question)
            answer = self.refusals.pop() if self.refusals else self._answer(question)
            self._router.send_multipart([identity, magic, json.dumps(answer).encode()])

    def _bind(self, kind: int, endpoint: str) -> "zmq.Socket[bytes]":
        bound = self._context.socket(kind)
        if self._secret_key is not None:
            bound.curve_server = True
            bound.curve_publickey, bound.curve_secretkey = zmq.auth.load_certificate(self._secret_key)
        bound.bind(endpoint)
        return bound

    def _answer(self, question: dict[str, Any]) -> dict[str, Any]:
        if question["type"] == "hello":
            return {"type": "welcome", "id": question.get("id"), "last_seq": self.last_seq, "epoch": self.epoch}
        page = [number for number in self.stored if number > question["seq"]][:3]
        return {"type": "results", "items": [{"topic": TOPIC, "seq": number} for number in page]}


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:  # an ipc path is short
        yield Path(folder)


@contextmanager
def a_scripted_line(folder: Path, *stored: int, **settings: Any) -> Iterator[ScriptedLine]:
    line = ScriptedLine(folder, *stored, **settings)
    try:
        yield line
    finally:
        line.close()


def a_reader(folder: Path, **settings: Any) -> Results:
    return Results(f"ipc://{folder}/results.sock", f"ipc://{folder}/intake.sock", **settings)


def read(results: Results, line: ScriptedLine, count: int) -> list[int]:
    """Return the numbers of the next `count` results."""
    numbers: list[int] = []

    def is_complete() -> bool:
        line.serve()
        result = results.take(0.01) if len(numbers) < count else None
        numbers.extend([] if result is None else [result["seq"]])
        return len(numbers) == count and result is None

    until(is_complete)
    return numbers


@pytest.mark.parametrize("with_keys", [False, True])
def test_results_come_once_and_in_order_through_gaps_and_repetitions(folder: Path, with_keys: bool) -> None:
    for name in ("server", "client"):
        zmq.auth.create_certificates(folder, name)
    curve = CurveClient(folder / "server.key", folder / "client.key_secret") if with_keys else None
    secret_key = folder / "server.key_secret" if with_keys else None
    with (
        a_scripted_line(folder, *range(1, 8), secret_key=secret_key) as line,
        a_reader(folder, since=0, curve=curve) as results,
    ):
        assert read(results, line, 7) == [1, 2, 3, 4, 5, 6, 7]
        line.publish(8, 9)
        line.publish(8, 9)  # as after a restart
        line.publish(12)
        line.store(10, 11)
        assert read(results, line, 5) == [8, 9, 10, 11, 12]
        assert (results.seq, results.lost, results.trouble) == (12, 0, "")
        questions = len(line.questions)
        line.publish(13, 14)
        assert read(results, line, 2) == [13, 14]
        assert len(line.questions) == questions, "the live stream was complete"


def test_a_result_whose_processing_failed_comes_again_and_no_other_does(folder: Path) -> None:
    position = folder / "state" / "mes.position"
    with a_scripted_line(folder, 1, 2, 3, 4) as line:

        def fail_at_the_third() -> None:
            with a_reader(folder, since=0, position=position) as results:
                assert read(results, line, 3) == [1, 2, 3]
                raise RuntimeError("the plant's database is away")

        with pytest.raises(RuntimeError, match="away"):
            fail_at_the_third()
        with a_reader(folder, since=0, position=position) as results:
            assert read(results, line, 2) == [3, 4]
        line.store(5)
        with a_reader(folder, since=0, position=position) as results:
            assert results.seq == 4
            assert read(results, line, 1) == [5]
    position.write_bytes(position.read_bytes()[:5])
    with pytest.raises(ResultsError, match=r"mes\.position is not a position file: delete it to begin again"):
        a_reader(folder, position=position)


def test_results_that_the_line_has_deleted_are_counted_and_the_others_come(folder: Path) -> None:
    with a_scripted_line(folder, 6, 7, 9) as line, a_reader(folder, since=2) as results:
        assert read(results, line, 3) == [6, 7, 9]
        assert results.lost == 4
        line.store(10, 11, 12)
        line.stored = []
        until(lambda: line.serve() or (results.take(0.01) is None and results.lost == 7))
        line.publish(13)
        assert read(results, line, 1) == [13]


@pytest.mark.parametrize("epoch", [None, "a"])
def test_another_database_is_read_from_its_beginning(folder: Path, epoch: str | None) -> None:
    """Of a line before 1.1, which tells no epoch, it is known when its numbers end before the position."""
    with (
        a_scripted_line(folder, *range(1, 6), epoch=epoch) as line,
        a_reader(folder, since=0, position=folder / "position") as results,
    ):
        assert read(results, line, 5) == [1, 2, 3, 4, 5]
        line.uptime_s = 0.0  # the daemon was restarted
        line.stored, line.last_seq = [2, 3], 3  # and its database has lost the first result
        if epoch is not None:
            line.epoch = "b"
            line.store(4, 5, 6, 7)  # its numbers have grown past the position
        assert read(results, line, len(line.stored)) == line.stored
        line.publish(8) if epoch else line.publish(4)
        assert read(results, line, 1) == [8 if epoch else 4]
        assert (results.epoch, results.lost) == ("b" if epoch else None, 0)
    with a_scripted_line(folder, *line.stored, epoch=line.epoch) as line:
        line.store(9)
        with a_reader(folder, position=folder / "position") as results:
            assert read(results, line, 1)[0] > 3  # the position of the new numbers was kept


def test_a_busy_line_is_asked_again_and_a_refusal_is_an_error(folder: Path) -> None:
    with a_scripted_line(folder, 1, 2) as line, a_reader(folder, since=0) as results:
        line.refusals = [{"type": "busy", "retry_after_ms": 20}] * 2
        assert read(results, line, 2) == [1, 2]
        line.refusals = [{"type": "rejected", "code": "bad_field", "reason": "seq"}]
        line.store(3)
        with pytest.raises(ResultsError, match="refuses: bad_field: seq"):
            read(results, line, 1)


def test_a_silent_line_is_named_and_read_on_when_it_is_back(folder: Path) -> None:
    with a_reader(folder, since=0, silence_s=0.1) as results:
        until(lambda: results.take(0.01) is None and results.trouble)
        assert f"no answer from ipc://{folder}/results.sock" in results.trouble
        for stored in ([1, 2], [1, 2, 3, 4]):
            with a_scripted_line(folder, *stored) as line:
                assert read(results, line, 2) == stored[-2:]
                until(lambda line=line: not (line.serve() or results.take(0.01) or results.trouble))


def test_the_typed_messages_name_every_field_that_the_line_publishes() -> None:
    class AnyRow(dict[str, Any]):
        def __missing__(self, key: str) -> Any:
            return {"seq": 1, "failed": "[]", "missing": "[]", "board_type": "b", "serial": "s", "source": "s"}.get(key)

    bodies = {
        InspectionResult: rows.inspection_message(AnyRow(), [], []).body,
        BoardResult: rows.board_message(AnyRow()).body,
        GenerationResult: rows.generation_message(AnyRow()).body,
        ReviewResult: rows.review_message(AnyRow()).body,
    }
    for message, body in bodies.items():
        assert message.__required_keys__ <= {"kind", "topic", *body}
        assert message.__required_keys__ | message.__optional_keys__ >= {"kind", "topic", *body}
