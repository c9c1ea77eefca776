"""Pictures and releases over slow links: a transfer may take any time, as long as its parts come."""

import hashlib
import http.client
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from daemon.dashboard.site import server
from daemon.dashboard.site.live import LiveTopics
from daemon.plant.hub import make_app
from daemon.plant.picture_store import FolderPictures
from daemon.plant.settings import HubSettings
from daemon.wire.keys import Token
from tests.waiting import PATIENCE_S

CONTENT = b"\xff\xd8" + bytes(6 << 20)
SHA256 = hashlib.sha256(CONTENT).hexdigest()
HEADERS = {"Authorization": "Bearer line-1"}


@contextmanager
def serving(folder: Path) -> Iterator[tuple[str, int]]:
    """Serve a hub that gives a client a second for each part."""
    settings = HubSettings(database="postgresql://nobody@127.0.0.1/none", releases=folder / "releases")
    pictures, keys = FolderPictures(folder / "pictures"), {"line-1": Token(b"line-1")}
    hub: Any = SimpleNamespace(settings=settings, pictures=pictures, keys=keys, token=Token(b"hub"))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        hub_server = server.PageServer(make_app(hub), LiveTopics(), request_s=1.0)
        thread = threading.Thread(target=hub_server.run, args=([listener],))
        thread.start()
        try:
            yield listener.getsockname()
        finally:
            hub_server.should_exit = True
            thread.join(PATIENCE_S)


def test_a_picture_that_is_sent_slowly_arrives_and_a_sender_who_stops_is_cut_off(tmp_path: Path) -> None:
    with serving(tmp_path) as address, closing(http.client.HTTPConnection(*address, timeout=PATIENCE_S)) as sender:
        sender.putrequest("PUT", f"/pictures/{SHA256}")
        for name, value in (HEADERS | {"Content-Length": str(len(CONTENT))}).items():
            sender.putheader(name, value)
        sender.endheaders()
        for start in range(0, len(CONTENT), 1 << 20):
            sender.send(CONTENT[start : start + (1 << 20)])
            time.sleep(0.5)
        assert sender.getresponse().status == 201
        with socket.create_connection(address, timeout=PATIENCE_S) as silent:
            head = f"PUT /pictures/{SHA256} HTTP/1.1\r\nHost: h\r\nAuthorization: Bearer line-1\r\n"
            silent.sendall(f"{head}Content-Length: 9\r\n\r\nx".encode())
            with suppress(ConnectionResetError):
                assert silent.recv(1) == b""
    assert FolderPictures(tmp_path / "pictures").get(SHA256) == CONTENT
