"""The daemon's side of a device on another PC: each order ends once, whatever happens to the device."""

import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from daemon.cluster.messages import receive
from daemon.cluster.remote_devices import ClusterDevices, RemoteDevice, RemoteExecutor, RemotePool
from daemon.config.settings import Device, load_config
from daemon.dispatch.orders import Answered, BatchOrder, BatchReport, ImageOrder, Unanswered
from daemon.policy.request import ExecutorFacts, ExecutorId, PoolFacts, PoolId, RequestId
from daemon.records import JournalKey, Pixels
from daemon.storage.journal import JournalError
from experts.errors import ExpertError
from experts.spec import Answer
from tests.daemon.dispatch.simulated_line import a_line, a_spec
from tests.simulated import SimulatedDevices
from tests.waiting import until

ORDER = {"do": "load"}


class Peer:
    """What a device posts, and the answers that end its calls; the drive is a real one, turned by hand."""

    def __init__(self) -> None:
        self.line = a_line(budgets={"pc2-cpu": 60, "cpu": 60}, executors=["pc2-cpu", "cpu"])
        self.posted: list[dict[str, Any]] = []
        self.ended: list[dict[str, Any] | None] = []
        settings = Device(host="pc2/cpu", expert_memory=60)
        self.device = RemoteDevice("pc2-cpu", settings, 1000, lambda head, *_: self.posted.append(head))

    def call(self) -> None:
        self.device.call(self.device.life, self.ended.append, ORDER)

    def found(self, life: str, *, is_heard: bool = True) -> None:
        self.device.found(life, self.line.drive)
        if is_heard:
            self.line.turn()

    def lost(self, reason: str = "the cable is cut") -> None:
        self.device.lost(reason, self.line.drive)


def test_a_device_is_used_only_after_the_drive_has_heard_that_it_is_back():
    peer = Peer()
    peer.call()
    peer.found("first", is_heard=False)
    peer.call()
    assert (peer.ended, peer.posted) == ([None, None], [])
    peer.line.turn()
    peer.call()
    assert peer.posted == [ORDER | {"device": "pc2-cpu", "life": "first", "call": peer.posted[0]["call"]}]
    peer.device.answered({"call": peer.posted[0]["call"], "bytes": 5})
    assert len(peer.ended) == 3
    assert peer.ended[2] == {"call": peer.posted[0]["call"], "bytes": 5}


def test_what_is_under_way_ends_once_when_the_device_is_lost_and_late_answers_are_dropped():
    peer = Peer()
    peer.found("first")
    peer.call()
    peer.call()
    peer.lost()
    assert peer.ended == [None, None]
    peer.found("second")
    for head in peer.posted:
        peer.device.answered({"call": head["call"]})
    peer.lost()
    assert peer.ended == [None, None]


def test_an_order_for_an_earlier_life_never_reaches_the_next_one():
    peer = Peer()
    peer.found("first")
    life = peer.device.life
    peer.lost()
    peer.found("second")
    peer.device.call(life, peer.ended.append, ORDER)
    peer.device.tell({"do": "unload"})
    assert peer.ended == [None]
    assert [head["life"] for head in peer.posted] == ["second"]
    # It is back and lost again before the drive has heard of it: nothing is sent to what is not there.
    peer.lost()
    peer.found("third", is_heard=False)
    peer.lost()
    peer.line.turn()
    peer.call()
    assert peer.ended == [None, None]


@pytest.mark.parametrize(
    "answer",
    [{}, {"bytes": None}, {"bytes": "5"}, {"bytes": 5.0}, {"bytes": -1}, {"error": 5}, {"error": [1]}],
)
def test_an_answer_that_no_load_has_is_an_error_of_that_load(answer: dict[str, Any]):
    peer, raised = Peer(), list[ExpertError]()
    peer.found("first")
    pool = RemotePool(PoolFacts(PoolId("pc2-cpu"), "cpu", 60, 1, host="pc2"), peer.device)

    def load() -> None:
        with pytest.raises(ExpertError) as caught:
            pool.load(a_spec("A1"))
        raised.append(caught.value)

    loader = threading.Thread(target=load)
    loader.start()
    until(lambda: peer.posted)
    peer.device.answered({"call": peer.posted[0]["call"]} | answer)
    loader.join(10)
    (error,) = raised
    assert error.expert == "A1"
    assert ("as the bytes that it loaded" in error.message) == ("error" not in answer)


def a_result(label: Any = "ok", confidence: Any = 0.9, *boxes: Any) -> dict[str, Any]:
    return {"answer": {"label": label, "confidence": confidence, "detections": [*boxes]}, "image_size": [80, 60]}


OK = a_result()
REPORT = {"infer_ms": 5.0, "memory_limit": None, "device_error": None}


def report_about(*results: Any, unreadable: bool = False, is_answered: bool = True, **fields: Any) -> BatchReport:
    """The report about two images, or about three of which the second cannot be read, that a worker makes so.

    `fields` are those of the report, or of the whole answer unless `is_answered`.
    """
    peer, reports = Peer(), list[BatchReport]()
    peer.found("first")
    images = [
        ImageOrder(RequestId(number), JournalKey(1, number, 1), Pixels()) for number in range(3 if unreadable else 2)
    ]

    def read(key: JournalKey) -> bytes:
        if unreadable and key.offset == 1:
            raise JournalError(1, 1, "it is damaged")
        return b"x"

    executor = RemoteExecutor(ExecutorFacts(ExecutorId("pc2-cpu/0"), PoolId("pc2-cpu")), peer.device, read)
    executor.start(reports.append)
    executor.submit(BatchOrder(7, a_spec("A1"), tuple(images)))
    until(lambda: peer.posted)
    answer = {"report": REPORT | {"results": [*results]} | fields} if is_answered else fields
    peer.device.answered({"call": peer.posted[0]["call"]} | answer)
    executor.stop(10)
    (report,) = reports
    return report


@pytest.mark.parametrize(
    "results",
    [
        [OK],
        [OK, OK, OK],
        [OK, a_result("never heard of")],
        [OK, a_result(None, None)],
        [OK, a_result("ok", float("nan"))],
        [OK, a_result("ok", 0.9, {"label": "ok", "confidence": 0.9, "box": [1, 2, 3]})],
        [OK, {"fault": "forgotten", "detail": "a fault that no drive knows"}],
        [OK, 5],
        [OK, OK, {"infer_ms": float("nan")}],
        [OK, OK, {"infer_ms": "slow"}],
        [OK, OK, {"memory_limit": 0}],
    ],
)
def test_a_report_that_is_not_about_these_images_is_an_error_of_its_device(results: list[Any]):
    fields = results.pop() if isinstance(results[-1], dict) and len(results[-1]) == 1 else {}
    report = report_about(*results, **fields)
    assert {type(result) for result in report.results} == {Unanswered}
    assert {result.fault for result in report.results if isinstance(result, Unanswered)} == {"expert_failed"}
    assert "its worker sent no report" in (report.device_error or "")
    assert not report.is_lost


def a_batch_of_large_images(peer: Peer, reports: list[BatchReport]) -> RemoteExecutor:
    """Send a batch of five images, each of 60 MiB by its key; the second is damaged."""

    def read(key: JournalKey) -> bytes:
        if key.offset == 1:
            raise JournalError(1, 1, "it is damaged")
        return b"x"

    executor = RemoteExecutor(ExecutorFacts(ExecutorId("pc2-cpu/0"), PoolId("pc2-cpu")), peer.device, read)
    executor.start(reports.append)
    images = tuple(ImageOrder(RequestId(n), JournalKey(1, n, 60 << 20), Pixels()) for n in range(5))
    executor.submit(BatchOrder(7, a_spec("A1"), images))
    return executor


def test_a_batch_too_large_for_one_message_crosses_in_parts_and_is_reported_once():
    peer, reports = Peer(), list[BatchReport]()
    peer.found("first")
    executor = a_batch_of_large_images(peer, reports)
    for number, (count, limit) in enumerate([(1, 1), (2, None), (1, 4)]):
        until(lambda number=number: len(peer.posted) > number)
        report = REPORT | {"results": [OK] * count, "memory_limit": limit}
        peer.device.answered({"call": peer.posted[number]["call"], "report": report})
    executor.stop(10)
    (report,) = reports
    assert [type(result) for result in report.results] == [Answered, Unanswered, *[Answered] * 3]
    assert (report.batch_id, report.infer_ms, report.memory_limit, report.device_error) == (7, 15.0, 1, None)


class Process:
    """The process behind the devices: it opens a connection, and reads only what the test reads."""

    def __init__(self, cluster: ClusterDevices) -> None:
        self.line, theirs = socket.socketpair()
        self.line.settimeout(60.0)
        (spec,) = cluster.children()
        with socket.socket(fileno=socket.dup(spec.pass_fds[0])) as control:
            socket.send_fds(control, [b"line"], [theirs.fileno()])
        theirs.close()
        self.stream = self.line.makefile("rb")

    def next(self) -> tuple[dict[str, Any], bytes]:
        message = receive(self.stream)
        assert message is not None
        return message

    def end(self) -> None:
        self.stream.close()
        self.line.close()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[ClusterDevices]:
    devices = {"pc2-cpu": {"host": "pc2/cpu", "expert_memory": 60}}
    lines = {"rules": "r", "catalog": "c", "cluster": {"address": "127.0.0.1:1"}, "devices": devices}
    (tmp_path / "coserve.yaml").write_text(yaml.safe_dump(lines), encoding="utf-8")
    config = load_config(tmp_path / "coserve.yaml", {})
    cluster = ClusterDevices(tmp_path / "coserve.yaml", config, SimulatedDevices(lambda *_: Answer("ok", 0.9)))
    yield cluster
    cluster.stop()
