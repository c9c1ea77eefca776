"""The token of `endpoints.http`: its file, and the addresses that need one."""

import hmac
import socket
from pathlib import Path

import pytest

from daemon.errors import StartError
from daemon.wire.endpoints import check_http
from daemon.wire.keys import CredentialError, read_token
from daemon.wire.sockets import bind_http

TOKEN = "0123456789abcdef" * 2


def a_token(folder: Path, text: str = TOKEN + "\n", mode: int = 0o600) -> Path:
    file = folder / "token"
    file.unlink(missing_ok=True)
    file.write_text(text)
    file.chmod(mode)
    return file


@pytest.mark.promise("Access, pages and reviews", "The HTTP token is compared in constant time")
def test_a_token_is_compared_in_constant_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[bytes, bytes]] = []
    honest = hmac.compare_digest
    monkeypatch.setattr(hmac, "compare_digest", lambda a, b: compared.append((a, b)) or honest(a, b))
    token = read_token(a_token(tmp_path))
    for header in ("Bearer wrong", f"Basic {TOKEN}", "", f"Bearer {TOKEN}"):
        token.matches(header)
    assert [ours for _, ours in compared] == [TOKEN.encode()] * 4


@pytest.mark.parametrize(
    ("text", "mode", "says"),
    [
        (TOKEN, 0o644, "can be read by everybody"),
        (TOKEN, 0o640, "can be read by its group"),
        ("short", 0o600, "at least 32"),
        ("", 0o600, "at least 32"),
        (TOKEN + " " + TOKEN, 0o600, "at least 32"),
        ("ü" * 40, 0o600, "at least 32"),
    ],
)
def test_a_token_file_that_cannot_be_a_secret_is_refused_without_telling_it(
    tmp_path: Path, text: str, mode: int, says: str
) -> None:
    file = a_token(tmp_path, text, mode)
    with pytest.raises(CredentialError, match=says) as caught:
        read_token(file)
    (problem,) = check_http("http://127.0.0.1:9470", file)
    assert problem.startswith("security.http_token: ")
    for message in (problem, str(caught.value)):
        assert not text or text not in message.replace("shorter", "")


def test_the_token_has_no_text_of_its_own(tmp_path: Path) -> None:
    token = read_token(a_token(tmp_path))
    assert TOKEN not in f"{token} {token!r} {vars(token).keys()}"


def test_beyond_loopback_a_token_is_needed(tmp_path: Path) -> None:
    """What is beyond loopback: test_endpoints.py."""
    for endpoint in ("http://[::]:9470", "http://plant-pc:9470"):
        (problem,) = check_http(endpoint, None)
        assert "security.http_token" in problem
        assert check_http(endpoint, a_token(tmp_path)) == []
    assert check_http("http://[::1]:9470", None) == []


def test_what_is_bound_is_looked_at_again() -> None:
    with pytest.raises(StartError, match="needs a token"):
        bind_http("http://0.0.0.0:0", has_token=False)


def test_a_port_in_use_is_said_with_the_endpoint() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        endpoint = f"http://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(StartError, match=endpoint):
            bind_http(endpoint, has_token=False)
