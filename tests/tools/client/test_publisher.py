"""The Python publisher against a scripted daemon: exact accounts through busy, silence and loss."""

import threading

import pytest

from coserve_client import CameraImage, PublishAccount, Publisher, publish_images
from coserve_client import publisher as publisher_module
from tests.tools.client.scripted_daemon import BOARD, Answer, ScriptedDaemon, accept


class Clock:
    """The publisher's time, which moves when a test says so: a slow machine is not a silent daemon."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(publisher_module, "time", clock)
    return clock


def some_images(count: int) -> list[CameraImage]:
    return [CameraImage(f"i{n}", b"bytes", BOARD, "R0402", {"designator": f"R{n}"}) for n in range(count)]


def send(publisher: Publisher, image_id: str = "i", payload: bytes = b"x") -> None:
    publisher.send(image_id, payload, board=BOARD, component="R0402")


def begin(publisher: Publisher, count: int, until_open: int) -> None:
    """Send, and take answers until so many are missing."""
    for image in some_images(count):
        publisher.send(image.image_id, image.payload, board=BOARD, component="R0402", **image.more)
    while publisher.outstanding > until_open:
        publisher.step(1.0)


def test_busy_is_sent_again_after_its_time_and_ends_once() -> None:
    def busy_twice(_header: Answer, times: int) -> Answer:
        return {"type": "busy", "retry_after_ms": 20} if times < 3 else {"type": "accepted"}

    with ScriptedDaemon(busy_twice) as daemon, Publisher(daemon.endpoint, "cam", silence_s=60.0) as publisher:
        account = publish_images(publisher, some_images(20))
    assert (account.accepted, account.busy, account.resent) == (20, 40, 40)
    assert set(daemon.seen.values()) == {3}


def test_silence_is_answered_by_sending_again(clock: Clock) -> None:
    def deaf_once(header: Answer, times: int) -> Answer | None:
        if header["id"] == "i3" and times == 1:
            return None
        return {"type": "accepted"} if times == 1 else {"type": "duplicate", "differs": False}

    with ScriptedDaemon(deaf_once) as daemon, Publisher(daemon.endpoint, "cam") as publisher:
        begin(publisher, 10, until_open=1)
        clock.now_s += 5.0
        account = publisher.finish()
    assert (account.accepted, account.duplicate, account.resent) == (9, 1, 1)
    assert {image for image, times in daemon.seen.items() if times > 1} == {"i3"}


def test_a_late_pair_of_answers_counts_once(clock: Clock) -> None:
    may_continue = threading.Event()

    def hanging(header: Answer, times: int) -> Answer:
        if header["id"] == "i3":
            assert may_continue.wait(60.0)
        return {"type": "accepted"} if times == 1 else {"type": "duplicate", "differs": False}

    with ScriptedDaemon(hanging) as daemon, Publisher(daemon.endpoint, "cam") as publisher:
        try:
            begin(publisher, 10, until_open=7)
            clock.now_s += 5.0
            publisher.step(0.0)
        finally:
            may_continue.set()
        account = publisher.finish()
        assert (account.accepted, account.duplicate, account.resent) == (10, 0, 7)
        send(publisher, "i10")  # behind the second answers
        assert publisher.finish().accepted == 11
    assert sum(daemon.seen.values()) == 10 + 7 + 1


def test_an_answer_that_came_while_the_publisher_itself_stood_still_is_heard(clock: Clock) -> None:
    sent = threading.Event()

    def late(header: Answer, times: int) -> Answer | None:
        sent.wait(60)
        return accept(header, times)

    with ScriptedDaemon(late) as daemon, Publisher(daemon.endpoint, "cam") as publisher:
        send(publisher)
        sent.set()
        assert publisher._socket.poll(60_000)
        clock.now_s += 3600.0
        assert publisher.finish().accepted == 1


def test_what_could_never_be_accounted_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match="source"):
        Publisher("tcp://127.0.0.1:1", "a camera")
    with ScriptedDaemon() as daemon, Publisher(daemon.endpoint, "cam") as publisher:
        with pytest.raises(ValueError, match="id"):
            send(publisher, "a b")
        with pytest.raises(ValueError, match="header"):
            publisher.send("i", b"x", board=BOARD, component="R0402", note="x" * 70_000)
        assert publisher.account == PublishAccount()
