"""The HTTP endpoint over real sockets: clients that get an answer, its text, and clients that are slow on purpose."""

import errno
import hmac
import http.client
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from daemon.errors import StartError
from daemon.monitor.answers import Vitals, health
from daemon.monitor.http_server import HttpServer
from daemon.monitor.metrics import Metrics
from daemon.wire.endpoints import check_http
from daemon.wire.keys import TokenError, read_token
from tests.waiting import PATIENCE_S, until

WELL = Vitals("ready")
TOKEN = "0123456789abcdef" * 2
PATHS = ("/metrics", "/healthz", "/readyz", "/", "/nothing", "/../etc/passwd", "/metrics?name[]=x")


def a_token(folder: Path, text: str = TOKEN + "\n", mode: int = 0o600) -> Path:
    file = folder / "token"
    file.unlink(missing_ok=True)
    file.write_text(text)
    file.chmod(mode)
    return file


@contextmanager
def a_server(token: Path | None = None, vitals: Vitals = WELL, host: str = "127.0.0.1") -> Iterator[tuple[str, int]]:
    server = HttpServer(f"http://{host}:0", Metrics().registry, token)
    _, port = server.start(lambda: health(vitals)).rsplit(":", 1)
    try:
        yield "127.0.0.1" if host == "0.0.0.0" else host.strip("[]"), int(port)  # noqa: S104 - where it is bound
    finally:
        server.stop()


def get(where: tuple[str, int], path: str, authorization: str | None = None, method: str = "GET") -> tuple[int, str]:
    connection = http.client.HTTPConnection(*where, timeout=60)
    try:
        connection.request(method, path, headers={"Authorization": authorization} if authorization else {})
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]"])
def test_loopback_needs_no_token_and_tells_metrics_health_and_readiness(host: str) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        if "::" in host:
            pytest.skip("this machine has no IPv6")
    with a_server(host=host) as where:
        status, text = get(where, "/metrics")
        assert (status, "coserve_images_accepted_total" in text) == (200, True)
        assert get(where, "/healthz") == (200, "alive\n")
        assert get(where, "/readyz") == (200, "ready\n")
        assert get(where, "/nothing")[0] == 404
        assert get(where, "/metrics", method="POST")[0] == 405
        assert get(where, "/metrics", method="OPTIONS")[0] == 405


def ask(where: tuple[str, int], request: bytes) -> bytes:
    with socket.create_connection(where, timeout=60) as peer:
        peer.sendall(request)
        peer.shutdown(socket.SHUT_WR)
        return b"".join(iter(lambda: peer.recv(4096), b""))


@pytest.mark.parametrize("stands_in", [False, True])
def test_a_site_that_points_its_own_name_at_the_probes_is_refused(stands_in: bool) -> None:
    server = HttpServer("http://127.0.0.1:0", Metrics().registry, stands_in=stands_in)
    where = ("127.0.0.1", int(server.start(lambda: health(WELL)).rsplit(":", 1)[1]))
    try:
        for path in PATHS:
            for name in (
                "evil.example",
                "127.0.0.1.evil.example",
                "192.168.1.5:9470",
                "",
                "[",
                "localhost, evil.example",
            ):
                assert b" 421 " in ask(where, f"GET {path} HTTP/1.1\r\nHost: {name}\r\n\r\n".encode()), (path, name)
        twice = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n"
        assert b" 421 " in ask(where, twice)
        for host in (b"", b"Host: localhost:9470\r\n", b"Host: 127.0.0.1\r\n", b"Host: [::1]:1\r\n"):
            assert b" 200 " in ask(where, b"GET /healthz HTTP/1.1\r\n" + host + b"\r\n")
    finally:
        server.stop()


def test_no_header_breaks_an_answer_of_the_probes(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    values = (
        b"http://[x",
        b"[x",
        b"[::1",
        b"\xff\xfe",
        b"-1",
        b"9" * 5000,
        b"\xb2",
        b"Bearer \xff",
        b"Bearer",
        b"=;",
        b"\x00",
    )
    names = (b"Host", b"Authorization", b"Content-Length", b"Content-Type", b"Cookie", b"Origin", b"Range", b"Expect")
    for token in (None, a_token(tmp_path)):
        with a_server(token) as where:
            for name in names:
                for value in values:
                    answer = ask(where, b"GET /healthz HTTP/1.1\r\n" + name + b": " + value + b"\r\n\r\n")
                    assert answer[9:12] in (b"200", b"400", b"401", b"421"), (name, value, answer)
    assert capfd.readouterr().err == ""


NO_ANSWER = "stuck: the writer thread has not answered for 12 s; the log says more"


@pytest.mark.parametrize(
    ("vitals", "status", "ready"),
    [
        (Vitals("starting"), 503, "starting: the first experts are being loaded"),
        (Vitals("draining"), 503, "draining"),
        (Vitals("draining", refuses=["it is draining"]), 503, "draining: takes no images: it is draining"),
        (Vitals("ready"), 200, "ready"),
        (Vitals("degraded", troubles=["A cannot be loaded"]), 200, "degraded: A cannot be loaded"),
        (Vitals("degraded", refuses=["the disk is full"]), 503, "degraded: takes no images: the disk is full"),
        (Vitals("degraded", unjudged=["no rows"], troubles=["x"]), 503, "degraded: images get no verdict: no rows"),
        (Vitals("ready", held_by=("writer", 9.9)), 200, "ready"),
        (Vitals("ready", held_by=("writer", 12.3)), 503, NO_ANSWER),
        (Vitals(""), 503, ""),
    ],
)
def test_health_is_that_an_image_can_pass_and_readiness_that_images_are_taken_and_judged(
    vitals: Vitals, status: int, ready: str
) -> None:
    with a_server(vitals=vitals) as where:
        assert get(where, "/healthz") == ((503, f"{NO_ANSWER}\n") if ready == NO_ANSWER else (200, "alive\n"))
        assert get(where, "/readyz") == (status, f"{ready}\n")


def test_with_a_token_every_path_needs_it(tmp_path: Path) -> None:
    with a_server(a_token(tmp_path), host="0.0.0.0") as where:  # noqa: S104 - that is what is tested
        for path in PATHS:
            for missing in (None, TOKEN, "Bearer", "Bearer ", f"Basic {TOKEN}"):
                assert get(where, path, missing) == (401, "a bearer token is needed\n"), (path, missing)
            for wrong in (f"Bearer {TOKEN[:-1]}", f"Bearer {TOKEN}0"):
                assert get(where, path, wrong) == (401, "this token is not the line's\n"), (path, wrong)
        assert get(where, "/metrics", f"Bearer {TOKEN}")[0] == 200
        assert get(where, "/readyz", f"bearer {TOKEN}") == (200, "ready\n")


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
    with pytest.raises(TokenError, match=says) as caught:
        read_token(file)
    (problem,) = check_http("http://127.0.0.1:9470", file)
    assert problem.startswith("security.http_token: ")
    for message in (problem, str(caught.value)):
        assert not text or text not in message.replace("shorter", "")


def test_all_that_is_wrong_with_a_token_file_is_said_at_once(tmp_path: Path) -> None:
    with pytest.raises(TokenError, match=r"chmod 600(.|\n)*; and .* at least 32 ASCII characters"):
        read_token(a_token(tmp_path, "short", 0o644))


def test_the_token_has_no_text_of_its_own(tmp_path: Path) -> None:
    token = read_token(a_token(tmp_path))
    assert TOKEN not in f"{token} {token!r} {vars(token).keys()}"


@pytest.mark.parametrize("host", ["0.0.0.0", "[::]", "192.168.1.5", "plant-pc", "2130706433", "0x7f.1"])  # noqa: S104
def test_beyond_loopback_a_token_is_needed(tmp_path: Path, host: str) -> None:
    endpoint = f"http://{host}:9470"
    (problem,) = check_http(endpoint, None)
    assert "security.http_token" in problem
    assert check_http(endpoint, a_token(tmp_path)) == []


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "[::1]", "[::ffff:127.0.0.1]", "localhost"])
def test_on_loopback_a_token_is_a_choice(host: str) -> None:
    assert check_http(f"http://{host}:9470", None) == []


def test_a_name_that_means_loopback_elsewhere_is_not_served_without_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine whose /etc/hosts gives `localhost` another address."""
    answer = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("192.168.1.5", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: answer)
    assert check_http("http://localhost:9470", None) != []


def test_what_is_bound_is_looked_at_again(tmp_path: Path) -> None:
    server = HttpServer("http://0.0.0.0:0", Metrics().registry)
    with pytest.raises(StartError, match="needs a token"):
        server.start(lambda: health(WELL))


def test_a_port_in_use_is_said_with_the_endpoint() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        endpoint = f"http://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(StartError, match=endpoint):
            HttpServer(endpoint, Metrics().registry).start(lambda: health(WELL))


def test_a_new_token_is_in_force_after_a_reload_and_a_bad_one_is_not(tmp_path: Path) -> None:
    server = HttpServer("http://127.0.0.1:0", Metrics().registry, a_token(tmp_path))
    where = ("127.0.0.1", int(server.start(lambda: health(WELL)).rsplit(":", 1)[1]))
    try:
        a_token(tmp_path, TOKEN[::-1])
        assert server.reload() == []
        assert get(where, "/healthz", f"Bearer {TOKEN}")[0] == 401
        assert get(where, "/healthz", f"Bearer {TOKEN[::-1]}")[0] == 200
        a_token(tmp_path, TOKEN, 0o644)
        assert "everybody" in server.reload()[0]
        assert get(where, "/healthz", f"Bearer {TOKEN[::-1]}")[0] == 200
    finally:
        server.stop()


def test_clients_that_never_finish_their_request_keep_nobody_out_and_start_no_crowd_of_threads(tmp_path: Path) -> None:
    before = threading.active_count()
    with a_server(a_token(tmp_path)) as where:
        slow = [socket.create_connection(where, timeout=60) for _ in range(60)]
        try:
            for number, peer in enumerate(slow):
                try:
                    peer.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n" if number % 2 else b"G")
                except (ConnectionResetError, BrokenPipeError):
                    continue  # it had to make room already
            for _ in range(5):
                assert get(where, "/healthz", f"Bearer {TOKEN}") == (200, "alive\n")
            assert threading.active_count() - before < 40  # one for each of 16, and those that just end
        finally:
            for peer in slow:
                peer.close()


def test_a_request_that_trickles_is_cut_after_its_time() -> None:
    with a_server() as where, socket.create_connection(where, timeout=60) as peer:
        until_s = time.monotonic() + PATIENCE_S
        peer.settimeout(0.25)
        while time.monotonic() < until_s:
            try:
                peer.sendall(b"G")
                if peer.recv(1000) == b"":
                    break
            except TimeoutError:
                continue
            except OSError:
                break
        else:
            pytest.fail("a byte now and then kept the connection")


def test_what_is_no_http_stops_nothing(tmp_path: Path) -> None:
    with a_server(a_token(tmp_path)) as where:
        long_path = b"GET " + b"/x" * 40_000 + b" HTTP/1.1\r\n\r\n"
        for noise in (b"\x00" * 100, long_path, b"\xff\xd8\r\n\r\n", b"\r\n" * 300):
            with socket.create_connection(where, timeout=60) as peer:
                try:
                    peer.sendall(noise)
                    peer.shutdown(socket.SHUT_WR)
                    while peer.recv(4096):
                        pass
                except OSError as error:  # cut off in mid-sentence, which shutdown calls "not connected"
                    if error.errno not in (errno.ECONNRESET, errno.EPIPE, errno.ENOTCONN):
                        raise
        header = b"GET /metrics HTTP/1.1\r\nAuthorization: Bearer " + TOKEN.encode() + b"\r\n"
        with socket.create_connection(where, timeout=60) as peer:
            peer.sendall(header + b"Authorization: Bearer other\r\n\r\n")
            assert b" 401 " in peer.recv(4096).split(b"\r\n")[0] + b" "
        assert get(where, "/healthz", f"Bearer {TOKEN}")[0] == 200


def test_a_stop_finishes_the_requests_in_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_FINISH_S", "_REQUEST_S", "_Handler.timeout"):
        monkeypatch.setattr(f"daemon.monitor.http_server.{name}", 60.0)
    server = HttpServer("http://127.0.0.1:0", Metrics().registry)
    port = int(server.start(lambda: health(WELL)).rsplit(":", 1)[1])
    stopping = threading.Thread(target=server.stop)
    with socket.create_connection(("127.0.0.1", port), timeout=60) as peer:
        peer.sendall(b"GET /healthz HTTP/1.1\r\n")
        assert get(("127.0.0.1", port), "/healthz")[0] == 200, "a later request was answered: this one is in hand"
        stopping.start()
        until(lambda: all(thread.name != "http" for thread in threading.enumerate()), lambda: "it still takes requests")
        peer.sendall(b"Host: localhost\r\n\r\n")
        answer = b"".join(iter(lambda: peer.recv(4096), b""))
    stopping.join(60)
    assert answer.startswith(b"HTTP/1.0 200 ")
    assert answer.endswith(b"alive\n")
