"""The publisher for cameras: at once, to the spool and back, in order, counted; kills, full disks, wrong keys."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from coserve_client import NoRoomError, PublishError, SpoolError, SpoolingPublisher, spooling
from coserve_client.spool import Spool
from tests.small_disk import small_disk
from tests.tools.client.scripted_daemon import BOARD, ScriptedDaemon, accept, silent_endpoint
from tests.waiting import PATIENCE_S, until


@pytest.fixture(autouse=True)
def _spool_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spooling, "_SILENCE_S", PATIENCE_S)  # a slow machine is not a silent daemon
    monkeypatch.setattr(spooling, "_SPILL_AFTER_S", 0.05)
    monkeypatch.setattr(spooling, "_RETRY_S", 0.1)


@pytest.fixture
def short_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spooling, "_SILENCE_S", 0.3)


def a_camera(endpoint: str, folder: Path, **settings: Any) -> SpoolingPublisher:
    """A publisher with its spool in `folder`."""
    return SpoolingPublisher(endpoint, "cam", folder / "spool", **settings)


def publish(publisher: SpoolingPublisher, *numbers: int, size: int = 100) -> None:
    for number in numbers:
        publisher.publish(f"i{number}", bytes(size), board=BOARD, component="R0402", designator=f"R{number}")


def is_taken(publisher: SpoolingPublisher, number: int, size: int = 900) -> bool:
    try:
        publish(publisher, number, size=size)
    except NoRoomError:
        return False
    return True


def fill(publisher: SpoolingPublisher, size: int) -> None:
    while is_taken(publisher, publisher.account.published, size):
        pass


def entries(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("spool/*.image"))


def ids(count: int) -> list[str]:
    return [f"i{number}" for number in range(count)]


def test_what_the_daemon_takes_never_touches_the_disk_and_is_accounted(tmp_path: Path) -> None:
    answered: list[str] = []
    with ScriptedDaemon() as daemon:
        with a_camera(daemon.endpoint, tmp_path, on_answer=lambda image, _: answered.append(image)) as publisher:
            publish(publisher, *range(200))
            assert publisher.wait(PATIENCE_S)
            account = publisher.account
        assert account.as_dict() == {"published": 200, "accepted": 200}
        assert account.complete
        assert daemon.order == answered == ids(200)
        assert 1 < daemon.max_outstanding <= 8
    assert entries(tmp_path) == []


@pytest.mark.promise(
    "Cameras",
    "A Python publisher never blocks its camera, even if the daemon is away or the disk hangs",
)
def test_publish_returns_while_nobody_answers_and_while_the_disk_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk_hangs = threading.Event()
    may_continue = threading.Event()
    write = Spool.write

    def hanging(spool: Spool, entries: Any) -> None:
        disk_hangs.set()
        assert may_continue.wait(PATIENCE_S)
        write(spool, entries)

    monkeypatch.setattr(Spool, "write", hanging)
    publisher = a_camera(silent_endpoint(), tmp_path)
    publish(publisher, 1)
    assert disk_hangs.wait(PATIENCE_S)
    publish(publisher, *range(2, 100))
    assert publisher.account.in_memory == 99
    may_continue.set()
    assert publisher.close(0.0).spooled == 99


@pytest.mark.promise(
    "Cameras",
    "Images that the daemon does not accept wait on the camera's disk and are sent first and in order, even "
    "after a kill of the camera's process and whatever the clock says",
)
@pytest.mark.usefixtures("short_silence")
def test_what_waited_on_the_disk_comes_first_and_in_order_when_the_daemon_is_there(tmp_path: Path) -> None:
    endpoint = silent_endpoint()
    with a_camera(endpoint, tmp_path) as publisher:
        publish(publisher, *range(30))
        until(lambda: publisher.account.spooled == 30)
        assert len(entries(tmp_path)) == 30
        until(lambda: f"no answer from {endpoint}" in publisher.trouble)
        with ScriptedDaemon(accept, endpoint) as daemon:
            until(lambda: daemon.order)
            publish(publisher, *range(30, 40))
            assert publisher.wait(PATIENCE_S)
            assert list(dict.fromkeys(daemon.order)) == ids(40)
            until(lambda: not publisher.trouble)  # a moment after the answer that ends it
    assert publisher.account.complete
    assert entries(tmp_path) == []


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
    endpoint = silent_endpoint()
    command = [sys.executable, "-c", CAMERA, endpoint, str(tmp_path / "spool")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as camera:
        assert camera.stdout is not None
        assert camera.stdout.readline() == "spooled\n"
        with pytest.raises(SpoolError, match=f"in use by process {camera.pid}"):
            a_camera(endpoint, tmp_path)
        camera.send_signal(signal.SIGKILL)
    for age, name in enumerate(entries(tmp_path)):
        os.utime(tmp_path / "spool" / name, (10**9 - age, 10**9 - age))  # a clock that was set back changes no order
    with ScriptedDaemon(accept, endpoint) as daemon, a_camera(endpoint, tmp_path) as publisher:
        publish(publisher, 25)
        assert publisher.wait(PATIENCE_S)
        assert daemon.order == ids(26)
        assert daemon.payloads["i7"] == b"7"
        assert publisher.account.as_dict() == {"published": 1, "found in the spool": 25, "accepted": 26}


def fill_spool(folder: Path, count: int) -> str:
    """Leave images in a spool, and return the endpoint that they are for."""
    endpoint = silent_endpoint()
    with a_camera(endpoint, folder) as publisher:
        publish(publisher, *range(count))
        publisher.close(0.0)
    return endpoint


@pytest.mark.promise(
    "Cameras",
    "A damaged spool entry is named and set aside, the others are sent; a spool of another source, or of a "
    "running process, is refused",
)
def test_entries_that_are_not_what_was_written_are_set_aside_by_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    endpoint, spool = fill_spool(tmp_path, 8), tmp_path / "spool"
    names = entries(tmp_path)
    damages = (lambda b: b[:-1], lambda _: b"", lambda b: b[:-1] + b"!", lambda b: b[:20] + b"?" + b[21:])
    for name, damage in zip(names, damages, strict=False):
        (spool / name).write_bytes(damage((spool / name).read_bytes()))
    (spool / names[4]).unlink()
    (spool / names[4]).mkdir()
    with ScriptedDaemon(accept, endpoint) as daemon, a_camera(endpoint, tmp_path) as publisher:
        assert publisher.wait(PATIENCE_S)
        assert daemon.order == ["i5", "i6", "i7"]
        account = publisher.account
    assert (account.recovered, account.accepted, account.set_aside, account.lost) == (8, 3, 5, 5)
    assert not account.complete
    assert sorted(path.name for path in (spool / "set_aside").iterdir()) == names[:5]
    assert sum("spool_entry_set_aside" in line and "checksum" in line for line in caplog.messages) == 3
    with ScriptedDaemon(accept, endpoint), a_camera(endpoint, tmp_path) as publisher:
        assert publisher.account.recovered == 0
        publish(publisher, 8)
        assert publisher.wait(PATIENCE_S)


@pytest.mark.promise(
    "Cameras",
    "If the spool, the disk or the memory is full, an exception refuses the image; nothing already taken is lost",
)
def test_a_full_spool_refuses_by_an_exception_and_loses_nothing_that_it_took(tmp_path: Path) -> None:
    endpoint = silent_endpoint()
    with a_camera(endpoint, tmp_path, spool_bytes=20_000) as publisher:
        taken = [f"i{number}" for number in range(30) if is_taken(publisher, number)]
        with pytest.raises(NoRoomError, match=f"image 'i30' was not taken: the spool {tmp_path}/spool holds"):
            publish(publisher, 30, size=900)
        account = publisher.account
        assert 10 < len(taken) == account.published == 31 - account.refused
        until(lambda: publisher.account.spooled == len(taken))
        assert sum(path.stat().st_size for path in tmp_path.glob("spool/*.image")) <= 20_000
        with ScriptedDaemon(accept, endpoint) as daemon:
            assert publisher.wait(PATIENCE_S)
            assert list(dict.fromkeys(daemon.order)) == taken
            publish(publisher, 99, size=900)
            assert publisher.wait(PATIENCE_S)
    assert publisher.account.accepted == len(taken) + 1


@pytest.mark.test_all
def test_memory_is_bounded_while_the_disk_refuses_and_all_of_it_is_sent_when_there_is_room(tmp_path: Path) -> None:
    endpoint = silent_endpoint()
    with small_disk(tmp_path / "disk", size="1m") as disk:
        ballast = disk / "ballast"
        with a_camera(endpoint, disk, memory_bytes=100_000) as publisher:
            ballast.write_bytes(bytes(1_000_000 - 8192))
            fill(publisher, size=20_000)
            until(lambda: "No space left on device" in publisher.trouble)
            fill(publisher, size=20_000)  # into the memory of those that the disk had taken by then
            published = publisher.account.published
            with pytest.raises(NoRoomError, match="bytes of memory wait for daemon and disk"):
                publish(publisher, published, size=20_000)
            ballast.unlink()
            until(lambda: publisher.account.spooled == published)
            assert not publisher.account.in_memory
            with ScriptedDaemon(accept, endpoint) as daemon:
                assert publisher.wait(PATIENCE_S)
                assert daemon.order == ids(published)
                assert publisher.account.accepted == published


def test_closing_onto_a_disk_that_refuses_says_how_many_images_are_lost(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", size="1m") as disk:
        publisher = a_camera(silent_endpoint(), disk)
        (disk / "ballast").write_bytes(bytes(1_000_000))
        publish(publisher, 1, 2, 3, size=100_000)
        with pytest.raises(PublishError, match=r"3 images are lost.*No space left on device"):
            publisher.close(0.2)


def test_a_spool_of_another_source_is_refused(tmp_path: Path) -> None:
    endpoint = fill_spool(tmp_path, 2)
    with pytest.raises(SpoolError, match="belongs to source 'cam', not to 'other'"):
        SpoolingPublisher(endpoint, "other", tmp_path / "spool")
    with ScriptedDaemon(accept, endpoint), a_camera(endpoint, tmp_path) as publisher:
        assert publisher.wait(PATIENCE_S)


def test_refusals_are_counted_and_reported_and_each_kind_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    answers = {
        "i1": {"type": "rejected", "code": "unknown_board", "reason": "the rules name no board type 'b'"},
        "i2": {"type": "duplicate", "differs": True},
    }
    answered: list[str] = []

    def fail(image_id: str, answer: Any) -> None:
        answered.append(f"{image_id} {answer['type']}")
        raise RuntimeError("the caller's own trouble")

    with (
        ScriptedDaemon(lambda header, _: answers.get(header["id"], {"type": "accepted"}), max_bytes=1000) as daemon,
        a_camera(daemon.endpoint, tmp_path, on_answer=fail) as publisher,
    ):
        publish(publisher, 0, 1, 2)
        publish(publisher, 3, 4, size=2000)
        assert publisher.wait(PATIENCE_S)
        account = publisher.account
    assert sorted(answered) == ["i0 accepted", "i1 rejected", "i2 duplicate", "i3 rejected", "i4 rejected"]
    rows = {"published": 5, "accepted": 1, "duplicate": 1, "of another image": 1}
    assert account.as_dict() == rows | {"rejected too_large": 2, "rejected unknown_board": 1}
    assert account.lost == 4
    assert "i1: unknown_board: the rules name no board type 'b'" in account.refusals
    assert sum("image_not_taken" in line for line in caplog.messages) == 3
    assert sum("on_answer_failed" in line for line in caplog.messages) == 5
