"""A hub over HTTP that breaks off, or is not one: told by name, and tried again where that may help."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from daemon.registry.hub_store import HubStore
from daemon.registry.manifest import ReleaseError
from tests.small_site import a_site


@contextmanager
def a_hub_that_sends(answer: bytes) -> Iterator[HubStore]:
    """It answers one request with these bytes, and closes the connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        yield HubStore(f"http://127.0.0.1:{listener.getsockname()[1]}")
        thread.join()


def test_a_hub_that_breaks_off_in_an_answer_is_asked_again_and_nothing_is_refused():
    head = b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n"
    with a_hub_that_sends(head + b"{") as hub, pytest.raises(ReleaseError, match="the connection broke"):
        hub.manifest("line", 1)
    with a_hub_that_sends(head + b"{") as hub, pytest.raises(ReleaseError, match="the connection broke"):
        list(hub.pieces("0" * 64, 0))
    refusal = b"HTTP/1.1 503 Busy\r\nContent-Length: 1000\r\n\r\n{"
    with a_hub_that_sends(refusal) as hub, pytest.raises(ReleaseError, match="answers with HTTP 503"):
        hub.names()


@pytest.mark.parametrize("answer", [b"<!doctype html>", b"[]", b"{}", b"null", b"[" * 100_000])
def test_an_address_that_is_not_a_hub_is_named(answer: bytes):
    with a_site({"/releases": answer}) as url, pytest.raises(ReleaseError, match="does not answer as a hub"):
        HubStore(url).names()


def test_a_hubs_token_goes_nowhere_else(monkeypatch: pytest.MonkeyPatch):
    with a_site({"/releases": b"{}"}) as elsewhere:
        monkeypatch.setenv("http_proxy", elsewhere)
        moved = f"HTTP/1.1 302 Found\r\nLocation: {elsewhere}/releases\r\nContent-Length: 0\r\n\r\n"
        with a_hub_that_sends(moved.encode()) as hub, pytest.raises(ReleaseError, match="answers with HTTP 302"):
            hub.names()
