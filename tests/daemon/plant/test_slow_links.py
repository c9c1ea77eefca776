"""Uploads to a hub: any time as long as parts come, in files, a few of a line at once, and safe from strangers."""

import hashlib
import http.client
import logging
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from structlog.testing import capture_logs

from daemon.dashboard.site import server
from daemon.dashboard.site.access import TokenGuesses
from daemon.dashboard.site.live import LiveTopics
from daemon.plant.hub import LineQuotas, make_app
from daemon.plant.picture_store import FolderPictures
from daemon.plant.settings import HubSettings, Pictures
from daemon.wire.keys import Token
from tests.waiting import PATIENCE_S, until

CONTENT = b"\xff\xd8" + bytes(6 << 20)
SHA256 = hashlib.sha256(CONTENT).hexdigest()


@contextmanager
def serving(folder: Path, request_s: float = PATIENCE_S) -> Iterator[tuple[str, int]]:
    """Serve a hub that gives a client `request_s` for each part."""
    stored: dict[str, Any] = {"releases": folder / "releases", "pictures": Pictures(folder=folder / "pictures")}
    settings = HubSettings(database="postgresql://nobody@127.0.0.1/none", **stored)
    keys: Any = {name: Token(name.encode()) for name in ("line-1", "line-2")}
    hub: Any = SimpleNamespace(settings=settings, pictures=FolderPictures(folder / "pictures"), keys=keys)
    hub.token, hub.guesses, hub.quotas = Token(b"hub"), TokenGuesses(), LineQuotas(MagicMock())
    hub.quotas.require_room = lambda _: None
    with socket.create_server(("127.0.0.1", 0)) as listener:
        hub_server = server.PageServer(make_app(hub), LiveTopics(), request_s=request_s)
        thread = threading.Thread(target=hub_server.run, args=([listener],))
        thread.start()
        try:
            yield listener.getsockname()
        finally:
            hub_server.should_exit = True
            thread.join(PATIENCE_S)


def test_a_picture_that_is_sent_slowly_arrives_and_a_sender_who_stops_is_cut_off(tmp_path: Path) -> None:
    with serving(tmp_path, 3.0) as address, closing(begin(address, sent=0)) as sender:
        for start in range(0, len(CONTENT), 1 << 20):
            sender.send(CONTENT[start : start + (1 << 20)])
            time.sleep(0.5)  # longer than 3 s in all
        assert sender.getresponse().status == 201
        with socket.create_connection(address, timeout=PATIENCE_S) as silent:
            head = f"PUT /pictures/{SHA256} HTTP/1.1\r\nHost: h\r\nAuthorization: Bearer line-1\r\n"
            silent.sendall(f"{head}Content-Length: 9\r\n\r\nx".encode())
            with suppress(ConnectionResetError):
                assert silent.recv(1) == b""
    assert FolderPictures(tmp_path / "pictures").get(SHA256) == CONTENT


def begin(address: tuple[str, int], line: str = "line-1", sent: int = -1 << 20) -> http.client.HTTPConnection:
    """Send all of a picture but its last megabyte, or as much as `sent`."""
    sender = http.client.HTTPConnection(*address, timeout=PATIENCE_S)
    sender.putrequest("PUT", f"/pictures/{SHA256}")
    for name, value in {"Authorization": f"Bearer {line}", "Content-Length": str(len(CONTENT))}.items():
        sender.putheader(name, value)
    sender.endheaders()
    sender.send(CONTENT[:sent])
    return sender


def spooled(folder: Path) -> list[int]:
    """Return the sizes of this process' open files without a name in the hub's folder of pictures."""
    sizes: list[int] = []
    for fd in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            if fd.readlink().is_relative_to(folder / "pictures"):
                sizes.append(fd.stat().st_size)
    return sizes


@pytest.mark.promise(
    "Delivery to the plant",
    "An upload to the hub lies in a file, of a line four at once; whatever breaks leaves nothing, and one log line",
)
def test_an_upload_waits_in_a_file_without_a_name_and_a_line_has_four_at_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with serving(tmp_path) as address, capture_logs() as logs, caplog.at_level(logging.ERROR):
        senders = [begin(address) for _ in range(4)]
        until(lambda: len(spooled(tmp_path)) == 4 and min(spooled(tmp_path)) > 4 << 20, lambda: spooled(tmp_path))
        with closing(begin(address)) as fifth, suppress(ConnectionError):
            answer = fifth.getresponse()
            assert (answer.status, b"line-1 sends 4 pictures already" in answer.read()) == (503, True)
        with closing(begin(address, "line-2")) as other:
            other.send(CONTENT[-1 << 20 :])
            assert other.getresponse().status == 201
        for sender in senders:
            sender.close()
        until(lambda: len([log for log in logs if log["event"] == "upload_broken"]) == 4, lambda: logs)
        assert {log["line"] for log in logs if log["event"] == "upload_broken"} == {"line-1"}
    assert spooled(tmp_path) == []
    assert [file.name for file in (tmp_path / "pictures").rglob("*") if file.is_file()] == [SHA256]
    assert caplog.records == [], "no traceback of a sender who leaves"


def test_no_number_of_silent_connections_cuts_an_upload_that_was_admitted(tmp_path: Path) -> None:
    with serving(tmp_path) as address, closing(begin(address)) as sender:
        until(lambda: spooled(tmp_path) != [], lambda: spooled(tmp_path))
        silent = [socket.create_connection(address, timeout=PATIENCE_S) for _ in range(2 * server._MAX_CONNECTIONS)]
        until(lambda: is_cut(silent[0]), lambda: "the oldest silent connection stays")
        sender.send(CONTENT[-1 << 20 :])
        assert sender.getresponse().status == 201
        for connection in silent:
            connection.close()


def is_cut(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        return connection.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionError:
        return True


def test_a_wrong_key_waits_for_its_answer_at_the_hub_as_on_the_pages(tmp_path: Path) -> None:
    with serving(tmp_path) as address, closing(http.client.HTTPConnection(*address, timeout=PATIENCE_S)) as guesser:
        for path in (f"/pictures/{SHA256}", "/releases"):
            began_s = time.monotonic()
            guesser.request("GET", path, headers={"Authorization": "Bearer wrong"})
            answer = guesser.getresponse()
            assert (answer.status, b"is not the line's" in answer.read()) == (401, True)
            assert time.monotonic() - began_s > 0.9, "a guesser could try thousands"
