"""The publisher for cameras: at once, to the spool and back, in order, counted; kills, full disks, wrong keys."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import zmq
import zmq.auth

from coserve_client import CoserveError, CurveClient, NoRoomError, PublishError, SpoolError, SpoolingPublisher, spooling
from coserve_client.spool import Spool
from tests import ROOT
from tests.small_disk import small_disk
from tests.tools.client.scripted_daemon import BOARD, Answer, a_daemon, accept
from tests.waiting import PATIENCE_S, until


@pytest.fixture(autouse=True)
def _soon_on_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spooling, "_SILENCE_S", PATIENCE_S)  # who is slow on this machine is not silent
    monkeypatch.setattr(spooling, "_SPILL_AFTER_S", 0.05)
    monkeypatch.setattr(spooling, "_RETRY_S", 0.1)


@pytest.fixture
def short_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spooling, "_SILENCE_S", 0.3)


def nobody() -> str:
    """An endpoint where nobody listens, and a daemon may later."""
    with a_daemon(accept) as probe:
        return probe.endpoint


def show(publisher: SpoolingPublisher, *numbers: int, size: int = 100) -> None:
    for number in numbers:
        publisher.publish(f"i{number}", bytes(size), board=BOARD, component="R0402", designator=f"R{number}")


def files(spool: Path) -> list[str]:
    return sorted(path.name for path in spool.glob("*.image"))


def test_what_the_daemon_takes_never_touches_the_disk_and_is_accounted(tmp_path: Path) -> None:
    told: list[tuple[str, str]] = []
    with a_daemon(accept) as daemon:
        with SpoolingPublisher(
            daemon.endpoint,
            "cam",
            tmp_path / "spool",
            on_answer=lambda image, answer: told.append((image, answer["type"])),
        ) as publisher:
            show(publisher, *range(200))
            assert publisher.wait(PATIENCE_S)
            account = publisher.account
        assert account.as_dict() == {"published": 200, "accepted": 200}
        assert account.complete
        assert daemon.order == [f"i{n}" for n in range(200)]
        assert [image for image, _ in told] == daemon.order
        assert 1 < daemon.most_outstanding <= 8
    assert files(tmp_path / "spool") == []


def test_publish_returns_while_nobody_answers_and_while_the_disk_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk_hangs = threading.Event()
    go_on = threading.Event()
    write = Spool.write

    def hanging(spool: Spool, entries: Any) -> None:
        disk_hangs.set()
        assert go_on.wait(PATIENCE_S)
        write(spool, entries)

    monkeypatch.setattr(Spool, "write", hanging)
    publisher = SpoolingPublisher(nobody(), "cam", tmp_path / "spool")
    show(publisher, 1)
    assert disk_hangs.wait(PATIENCE_S)
    show(publisher, *range(2, 100))
    assert publisher.account.in_memory == 99
    go_on.set()
    assert publisher.close(0.0).spooled == 99


@pytest.mark.usefixtures("short_silence")
def test_what_waited_on_the_disk_comes_first_and_in_order_when_the_daemon_is_there(tmp_path: Path) -> None:
    endpoint, spool = nobody(), tmp_path / "spool"
    with SpoolingPublisher(endpoint, "cam", spool) as publisher:
        show(publisher, *range(30))
        until(lambda: publisher.account.spooled == 30)
        assert len(files(spool)) == 30
        until(lambda: f"no answer from {endpoint}" in publisher.trouble)
        with a_daemon(accept, endpoint) as daemon:
            until(lambda: daemon.order)
            show(publisher, *range(30, 40))
            assert publisher.wait(PATIENCE_S)
            assert list(dict.fromkeys(daemon.order)) == [f"i{n}" for n in range(40)]
            until(lambda: not publisher.trouble)  # a moment after the answer that ends it
    assert publisher.account.complete
    assert files(spool) == []


CAMERA = """\
import sys, time
from pathlib import Path
from coserve_client import SpoolingPublisher
publisher = SpoolingPublisher(sys.argv[1], "cam", Path(sys.argv[2]))
for number in range(25):
    publisher.publish(f"i{number}", b"%d" % number, board={"type": "b", "serial": "S1"}, component="R0402")
while publisher.account.spooled < 25:
    time.sleep(0.01)
print("spooled", flush=True)
sys.stdin.read()
"""


def test_what_was_spooled_survives_the_kill_of_its_process(tmp_path: Path) -> None:
    endpoint, spool = nobody(), tmp_path / "spool"
    with subprocess.Popen(
        [sys.executable, "-c", CAMERA, endpoint, str(spool)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as camera:
        assert camera.stdout is not None
        assert camera.stdout.readline() == "spooled\n"
        with pytest.raises(SpoolError, match=f"in use by process {camera.pid}"):
            SpoolingPublisher(endpoint, "cam", spool)
        camera.send_signal(signal.SIGKILL)
    for age, path in enumerate(sorted(spool.glob("*.image"))):
        os.utime(path, (10**9 - age, 10**9 - age))  # the clock was set back: it has no say in the order
    with a_daemon(accept, endpoint) as daemon, SpoolingPublisher(endpoint, "cam", spool) as publisher:
        show(publisher, 25)
        assert publisher.wait(PATIENCE_S)
        assert daemon.order == [f"i{n}" for n in range(26)]
        assert daemon.payloads["i7"] == b"7"
        assert publisher.account.as_dict() == {"published": 1, "found in the spool": 25, "accepted": 26}


def test_nothing_of_the_camera_reads_the_clock_on_the_wall() -> None:
    for file in (ROOT / "tools/client/coserve_client").glob("*.py"):
        text = file.read_text(encoding="utf-8")
        assert "time.time(" not in text, file
        assert "datetime" not in text, file


def a_spool_with(tmp_path: Path, count: int) -> tuple[str, Path]:
    endpoint, spool = nobody(), tmp_path / "spool"
    with SpoolingPublisher(endpoint, "cam", spool) as publisher:
        show(publisher, *range(count))
        publisher.close(0.0)
    return endpoint, spool


def test_entries_that_are_not_what_was_written_are_set_aside_by_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    endpoint, spool = a_spool_with(tmp_path, 8)
    names = files(spool)
    for name, damage in zip(
        names,
        (lambda b: b[:-1], lambda _: b"", lambda b: b[:-1] + b"!", lambda b: b[:20] + b"?" + b[21:]),
        strict=False,
    ):
        (spool / name).write_bytes(damage((spool / name).read_bytes()))
    (spool / names[4]).unlink()
    (spool / names[4]).mkdir()
    with a_daemon(accept, endpoint) as daemon, SpoolingPublisher(endpoint, "cam", spool) as publisher:
        assert publisher.wait(PATIENCE_S)
        assert daemon.order == ["i5", "i6", "i7"]
        account = publisher.account
    assert (account.recovered, account.accepted, account.set_aside, account.lost) == (8, 3, 5, 5)
    assert not account.complete
    assert sorted(path.name for path in (spool / "set_aside").iterdir()) == names[:5]
    assert sum("spool_entry_set_aside" in line and "checksum" in line for line in caplog.messages) == 3
    with a_daemon(accept, endpoint), SpoolingPublisher(endpoint, "cam", spool) as publisher:
        assert publisher.account.recovered == 0
        show(publisher, 8)
        assert publisher.wait(PATIENCE_S)


def test_a_full_spool_refuses_by_an_exception_and_loses_nothing_that_it_took(tmp_path: Path) -> None:
    endpoint, spool = nobody(), tmp_path / "spool"
    with SpoolingPublisher(endpoint, "cam", spool, spool_bytes=20_000) as publisher:
        taken = [f"i{number}" for number in range(30) if took(publisher, number)]
        with pytest.raises(NoRoomError, match=f"image 'i30' was not taken: the spool {spool} holds"):
            show(publisher, 30, size=900)
        account = publisher.account
        assert 10 < len(taken) == account.published == 31 - account.refused
        until(lambda: publisher.account.spooled == len(taken))
        assert sum(path.stat().st_size for path in spool.glob("*.image")) <= 20_000
        with a_daemon(accept, endpoint) as daemon:
            assert publisher.wait(PATIENCE_S)
            assert list(dict.fromkeys(daemon.order)) == taken
            show(publisher, 99, size=900)
            assert publisher.wait(PATIENCE_S)
    assert publisher.account.accepted == len(taken) + 1


def test_memory_is_bounded_while_the_disk_refuses_and_all_of_it_is_sent_when_there_is_room(tmp_path: Path) -> None:
    endpoint = nobody()
    with small_disk(tmp_path / "disk", size="1m") as disk:
        ballast = disk / "ballast"
        with SpoolingPublisher(endpoint, "cam", disk / "spool", memory_bytes=100_000) as publisher:
            ballast.write_bytes(bytes(1_000_000 - 8192))
            fill(publisher, size=20_000)
            until(lambda: "No space left on device" in publisher.trouble)
            fill(publisher, size=20_000)  # what the disk had taken by then has made room in memory
            published = publisher.account.published
            with pytest.raises(NoRoomError, match="bytes of memory wait for daemon and disk"):
                show(publisher, published, size=20_000)
            ballast.unlink()
            until(lambda: publisher.account.spooled == published)
            assert not publisher.account.in_memory
            with a_daemon(accept, endpoint, most_bytes=20_000) as daemon:
                assert publisher.wait(PATIENCE_S)
                assert daemon.order == [f"i{n}" for n in range(published)]
                assert publisher.account.accepted == published


def test_closing_onto_a_disk_that_refuses_says_how_many_images_are_lost(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", size="1m") as disk:
        publisher = SpoolingPublisher(nobody(), "cam", disk / "spool")
        (disk / "ballast").write_bytes(bytes(1_000_000))
        show(publisher, 1, 2, 3, size=100_000)
        with pytest.raises(PublishError, match=r"3 images are lost.*No space left on device"):
            publisher.close(0.2)


def test_a_spool_of_another_source_is_refused_also_where_its_label_is_gone(tmp_path: Path) -> None:
    endpoint, spool = a_spool_with(tmp_path, 2)
    for damage in (None, b"{", "unlink"):
        if damage == "unlink":
            (spool / "spool.json").unlink()
        elif isinstance(damage, bytes):
            (spool / "spool.json").write_bytes(damage)
        with pytest.raises(SpoolError, match="belongs to source 'cam', not to 'other'"):
            SpoolingPublisher(endpoint, "other", spool)
    with a_daemon(accept, endpoint), SpoolingPublisher(endpoint, "cam", spool) as publisher:
        assert publisher.wait(PATIENCE_S)


def test_two_publishers_on_one_spool_are_one_too_many(tmp_path: Path) -> None:
    with a_daemon(accept) as daemon, SpoolingPublisher(daemon.endpoint, "cam", tmp_path / "spool") as publisher:
        with pytest.raises(SpoolError, match=f"in use by process {os.getpid()}: stop it first, or name another"):
            SpoolingPublisher(daemon.endpoint, "cam", tmp_path / "spool")
        show(publisher, 1)
        assert publisher.wait(PATIENCE_S)
    with SpoolingPublisher(daemon.endpoint, "cam", tmp_path / "spool"):
        pass


@pytest.mark.usefixtures("short_silence")
def test_wrong_keys_are_a_silent_daemon_and_the_right_ones_send_what_waited(tmp_path: Path) -> None:
    for name in ("server", "wrong", "camera"):
        zmq.auth.create_certificates(tmp_path, name)
    secret = tmp_path / "camera.key_secret"
    with a_daemon(accept, secret_key=tmp_path / "server.key_secret") as daemon:
        with SpoolingPublisher(
            daemon.endpoint, "cam", tmp_path / "spool", curve=CurveClient(tmp_path / "wrong.key", secret)
        ) as publisher:
            show(publisher, 1, 2)
            until(lambda: publisher.trouble and publisher.account.spooled == 2)
            assert "coserve keys list" in publisher.trouble
        assert publisher.account.as_dict() == {"published": 2, "accepted": 0, "left in the spool": 2}
        assert daemon.order == []
        with SpoolingPublisher(
            daemon.endpoint, "cam", tmp_path / "spool", curve=CurveClient(tmp_path / "server.key", secret)
        ) as publisher:
            assert publisher.wait(PATIENCE_S)
            assert publisher.account.accepted == 2
    keys = CurveClient(tmp_path / "server.key", tmp_path / "camera.key")
    with pytest.raises(CoserveError, match="has no secret key"):
        SpoolingPublisher(daemon.endpoint, "cam", tmp_path / "spool", curve=keys)
    with SpoolingPublisher(daemon.endpoint, "cam", tmp_path / "spool"):
        pass  # the one that failed has let go of the spool


def test_a_daemon_that_is_busy_for_long_gets_everything_once_and_memory_stays_bounded(tmp_path: Path) -> None:
    is_busy = threading.Event()
    is_busy.set()

    def busy(_header: Answer, _times: int) -> Answer:
        return {"type": "busy", "retry_after_ms": 30} if is_busy.is_set() else {"type": "accepted"}

    with (
        a_daemon(busy) as daemon,
        SpoolingPublisher(daemon.endpoint, "cam", tmp_path / "spool", memory_bytes=40_000) as publisher,
    ):
        for number in range(200):
            until(lambda number=number: took(publisher, number))
        until(lambda: publisher.account.spooled == 200)
        until(lambda: publisher.account.busy > 40)
        assert not publisher.trouble
        is_busy.clear()
        assert publisher.wait(PATIENCE_S)
        assert publisher.account.accepted == 200
        assert list(dict.fromkeys(daemon.order)) == [f"i{n}" for n in range(200)]


def fill(publisher: SpoolingPublisher, size: int) -> None:
    while took(publisher, publisher.account.published, size):
        pass


def took(publisher: SpoolingPublisher, number: int, size: int = 900) -> bool:
    try:
        show(publisher, number, size=size)
    except NoRoomError:
        return False
    return True


def test_refusals_of_the_daemon_are_counted_logged_and_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def fussy(header: Answer, _times: int) -> Answer:
        match header["id"]:
            case "i1":
                return {"type": "rejected", "code": "unknown_board", "reason": "the rules name no board type 'b'"}
            case "i2":
                return {"type": "duplicate", "differs": True}
            case _:
                return {"type": "accepted"}

    told: list[str] = []

    def tell(image_id: str, answer: Any) -> None:
        told.append(f"{image_id} {answer['type']}")
        raise RuntimeError("the caller's own trouble")

    with (
        a_daemon(fussy) as daemon,
        SpoolingPublisher(daemon.endpoint, "cam", tmp_path / "s", on_answer=tell) as publisher,
    ):
        show(publisher, 0, 1, 2)
        show(publisher, 3, size=2000)
        assert publisher.wait(PATIENCE_S)
        account = publisher.account
    assert sorted(told) == ["i0 accepted", "i1 rejected", "i2 duplicate", "i3 rejected"]
    assert account.as_dict() == {
        "published": 4,
        "accepted": 1,
        "duplicate": 1,
        "of another image": 1,
        "rejected too_large": 1,
        "rejected unknown_board": 1,
    }
    assert account.lost == 3
    assert "i1: unknown_board: the rules name no board type 'b'" in account.refusals
    assert sum("image_not_taken" in line for line in caplog.messages) == 3
    assert sum("on_answer_failed" in line for line in caplog.messages) == 4


def test_an_id_that_is_on_its_way_waits_for_its_first_answer(tmp_path: Path) -> None:
    def second_is_a_duplicate(_header: Answer, times: int) -> Answer:
        return {"type": "accepted"} if times == 1 else {"type": "duplicate", "differs": False}

    with (
        a_daemon(second_is_a_duplicate) as daemon,
        SpoolingPublisher(daemon.endpoint, "cam", tmp_path / "s") as publisher,
    ):
        show(publisher, 1, 1, 2)
        assert publisher.wait(PATIENCE_S)
        assert (publisher.account.accepted, publisher.account.duplicate) == (2, 1)


def test_what_could_never_be_accounted_or_comes_after_the_end_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="source"):
        SpoolingPublisher("tcp://127.0.0.1:1", "a camera", tmp_path / "spool")
    with (
        a_daemon(accept) as daemon,
        SpoolingPublisher(daemon.endpoint, "cam", tmp_path / "spool") as publisher,
        pytest.raises(ValueError, match="id"),
    ):
        publisher.publish("a b", b"x", board=BOARD, component="R0402")
    with pytest.raises(PublishError, match="closed"):
        publisher.publish("i", b"x", board=BOARD, component="R0402")
    assert publisher.close().published == 0
