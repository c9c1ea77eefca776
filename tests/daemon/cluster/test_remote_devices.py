"""The daemon's side of a device on another PC: each order ends once, whatever happens to the device."""

import threading
from typing import Any

import pytest

from daemon.cluster.messages import SentImage
from daemon.cluster.remote_devices import RemoteDevice, RemotePool
from daemon.config.settings import Device
from daemon.dispatch.pool import Batch, Fault
from daemon.policy.request import ExecutorId, PoolFacts, PoolId
from daemon.records import JournalKey, Pixels
from daemon.storage.journal import JournalError
from experts.errors import ExpertError
from tests.daemon.dispatch.simulated_line import a_line, a_spec
from tests.waiting import until

ORDER = {"do": "load"}
EXECUTOR = ExecutorId("pc2-cpu/0")


class Peer:
    """What a device posts, and the answers that end its calls; the drive is a real one, turned by hand."""

    def __init__(self) -> None:
        self.line = a_line(budgets={"pc2-cpu": 60, "cpu": 60}, executors=["pc2-cpu", "cpu"])
        self.posted: list[dict[str, Any]] = []
        self.ended: list[dict[str, Any] | None] = []
        settings = Device(host="pc2/cpu", expert_memory=60)
        self.device = RemoteDevice("pc2-cpu", settings, 1000, lambda head, *_: self.posted.append(head))
        facts = PoolFacts(PoolId("pc2-cpu"), "cpu", 60, 1, host="pc2")
        self.pool = RemotePool(facts, [EXECUTOR], self.device, self.read)

    def read(self, key: JournalKey) -> bytes:
        if key.offset == 1:
            raise JournalError(1, 1, "it is damaged")
        return b"x"

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
    peer.device.tell("unload")
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

    def load() -> None:
        with pytest.raises(ExpertError) as caught:
            peer.pool.slots.load(a_spec("A1"))
        raised.append(caught.value)

    loader = threading.Thread(target=load)
    loader.start()
    until(lambda: peer.posted)
    peer.device.answered({"call": peer.posted[0]["call"]} | answer)
    loader.join(10)
    (error,) = raised
    assert error.expert == "A1"
    assert ("as the bytes that it loaded" in error.message) == ("error" not in answer)


def an_answer(label: Any = "ok", confidence: Any = 0.9, *boxes: Any) -> dict[str, Any]:
    return {"label": label, "confidence": confidence, "detections": [*boxes]}


OK = an_answer()


def judged(*reports: dict[str, Any], images: int, size: int = 1) -> Batch:
    """Run a batch of images, the second of them damaged, about which a worker makes these reports, one a message."""
    peer, ended = Peer(), list[Batch]()
    peer.found("first")
    peer.pool.start()
    sent = [SentImage(JournalKey(1, number, size), Pixels()) for number in range(images)]
    peer.pool.run(Batch(7, EXECUTOR, a_spec("A1"), sent, [None] * images), ended.append)
    for number, report in enumerate(reports):
        until(lambda number=number: len(peer.posted) > number)
        whole = {
            "infer_ms": 5.0,
            "memory_limit": None,
            "device_error": None,
            "sizes": [[80, 60]] * len(report["answers"]),
        }
        peer.device.answered({"call": peer.posted[number]["call"], "report": whole | report})
    peer.pool.stop(10)
    (batch,) = ended
    return batch


@pytest.mark.parametrize(
    "report",
    [
        {"answers": [OK]},
        {"answers": [OK, OK, OK]},
        {"answers": [OK, OK], "sizes": [[80, 60]]},
        {"answers": [OK, an_answer("never heard of")]},
        {"answers": [OK, an_answer(None, None)]},
        {"answers": [OK, an_answer("ok", float("nan"))]},
        {"answers": [OK, an_answer("ok", 0.9, {"label": "ok", "confidence": 0.9, "box": [1, 2, 3]})]},
        {"answers": [OK, {"kind": "forgotten", "detail": "a fault that no drive knows"}]},
        {"answers": [OK, 5]},
        {"answers": [OK, OK], "infer_ms": float("nan")},
        {"answers": [OK, OK], "infer_ms": "slow"},
        {"answers": [OK, OK], "memory_limit": 0},
    ],
)
def test_a_report_that_is_not_about_these_images_is_an_error_of_its_device(report: dict[str, Any]):
    batch = judged(report, images=3)
    assert [answer.kind for answer in batch.answers if isinstance(answer, Fault)] == [
        "expert_failed",
        "bad_image",
        "expert_failed",
    ]
    assert "its worker sent no report" in (batch.device_error or "")
    assert not batch.is_lost


def test_a_batch_too_large_for_one_message_crosses_in_parts_and_is_reported_once():
    reports = [{"answers": [OK] * count, "memory_limit": limit} for count, limit in [(1, 1), (2, None), (1, 4)]]
    batch = judged(*reports, images=5, size=60 << 20)
    assert [isinstance(answer, Fault) for answer in batch.answers] == [False, True, False, False, False]
    assert batch.sizes == [(80, 60), (0, 0), (80, 60), (80, 60), (80, 60)]
    assert (batch.number, batch.infer_ms, batch.memory_limit, batch.device_error) == (7, 15.0, 1, None)
