"""Access to the pages, over real sockets, with the headers that browsers and others send."""

import asyncio
import http.client
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import anyio.to_thread
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from daemon.dashboard.site.live import LiveTopics
from daemon.dashboard.site.server import PageServer
from daemon.dashboard.site.web_app import web_app
from daemon.host import children
from daemon.wire.keys import Token
from tests.daemon.dashboard.web import Stream, Web, WebAnswer, a_token
from tests.waiting import PATIENCE_S, until

TOKEN = "0123456789abcdef" * 2
BEARER = f"Bearer {TOKEN}"
PATHS = (
    *("/", "/boards", "/boards/1", "/pictures/1", "/events?topic=line", "/metrics", "/healthz", "/readyz"),
    *("/nothing", "/../etc/passwd", "/review", "/defects", "/experts", "/machine"),
)


@pytest.fixture(scope="module")
def open_web(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Web]:
    with Web(tmp_path_factory.mktemp("open") / "line").running() as web:
        yield web


@pytest.fixture(scope="module")
def shut_web(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Web]:
    folder = tmp_path_factory.mktemp("shut")
    with Web(folder / "line", a_token(folder, TOKEN)).running() as web:
        yield web


def log_in(web: Web, token: str = TOKEN, target: str = "/boards", **headers: str) -> WebAnswer:
    return web.post("/login", f"token={token}&next={target}", **{"Origin": web.origin} | headers)


def cookie(answer: WebAnswer) -> str:
    return answer.headers["set-cookie"].split(";")[0]


@pytest.mark.parametrize("name", ["127.0.0.1", "localhost", "LOCALHOST", "[::1]", "127.8.8.8", "localhost."])
def test_on_loopback_every_loopback_name_is_answered(open_web: Web, name: str) -> None:
    for host in (name, f"{name}:{open_web.port}"):
        assert open_web.get("/boards", Host=host).status == 200


@pytest.mark.promise(
    "HTTP",
    "a web site that points its own name at this PC (DNS rebinding) | without a token, only requests to "
    "loopback names are answered",
)
@pytest.mark.parametrize(
    "name",
    [
        *("evil.example", "127.0.0.1.evil.example", "localhost.evil.example", "evil.example:9470", "192.168.1.5", ""),
        *("0.0.0.0", "127.1", "2130706433", "localhost@evil.example", "[", "127.0.0.1, evil.example"),  # noqa: S104
    ],
)
def test_a_site_that_points_its_own_name_here_is_refused(open_web: Web, name: str) -> None:
    for path in PATHS:
        assert open_web.get(path, Host=name).status in (400, 421), path


@pytest.mark.promise(
    "Access, pages and reviews",
    "Pages are served to clients with the token, or without one to this PC under a loopback name; the cookie "
    "is not the token",
)
def test_without_the_token_a_browser_sees_the_login_and_a_program_hears_what_is_missing(shut_web: Web) -> None:
    for path in PATHS:
        browser = shut_web.get(path)
        assert (browser.status, browser.headers["location"].startswith("/login?next=/")) == (303, True), path
        program = shut_web.get(path, Accept="application/json")
        assert (program.status, program.text) == (401, "a bearer token is needed\n"), path
        assert shut_web.post(path, Origin=shut_web.origin).status in (303, 401), path
    assert shut_web.get("/static/app.css").status == 200
    wrong = shut_web.get("/healthz", Accept="*/*", Authorization="Bearer wrong")
    assert (wrong.status, wrong.text) == (401, "this token is not the line's\n")
    for name in ("Bearer", "bearer"):
        assert shut_web.get("/boards", Authorization=f"{name} {TOKEN}").status == 200
    assert shut_web.get("/healthz", Authorization=BEARER, Accept="*/*").status == 503  # there is no daemon


def test_the_cookie_is_not_the_token_and_neither_scripts_nor_other_sites_get_it(shut_web: Web) -> None:
    answer = log_in(shut_web)
    assert (answer.status, answer.headers["location"]) == (303, "/boards")
    header = answer.headers["set-cookie"]
    assert all(flag in header for flag in ("HttpOnly", "SameSite=strict"))
    assert TOKEN not in header
    assert "Secure" not in header
    assert "Secure" in log_in(shut_web, X_Forwarded_Proto="https").headers["set-cookie"]
    assert shut_web.get("/boards", Cookie=cookie(answer)).status == 200
    gone = shut_web.post("/logout", Cookie=cookie(answer), Origin=shut_web.origin)
    assert re.search(r'=""?; .*Max-Age=0', gone.headers["set-cookie"])


@pytest.mark.promise(
    "HTTP",
    "a stolen, changed or old cookie | it is signed with the token, and invalid after 30 days, after "
    "a new token, or after its logout; it does not contain the token",
)
def test_a_cookie_that_somebody_made_or_changed_or_kept_too_long_is_worth_nothing(shut_web: Web) -> None:
    name, value = cookie(log_in(shut_web)).split("=")
    until, number, mark = value.split(".")
    session = f"{until}.{number}"
    bad = (
        f"{int(until) + 1}.{number}.{mark}",
        f"{until}.{'0' * 16}.{mark}",
        f"{session}.{mark[:-1]}",
        f".{mark}",
        until,
    )
    bad += (f"{session}.{'0' * 64}", f"{session}.", TOKEN, f"1.{number}.{mark}", "ü.ü.ü")
    for wrong in (*(f"{name}={text}" for text in bad), "coserve=1"):
        assert shut_web.get("/boards", Cookie=wrong.encode().decode("latin-1")).status == 303, wrong
    for end, status in ((int(time.time()) + 60, 200), (int(time.time()) - 60, 303)):
        signed = f"{name}={end}.{number}.{Token(TOKEN.encode()).sign(f'session {end}.{number}')}"
        assert shut_web.get("/boards", Cookie=signed).status == status


def test_a_logout_ends_its_session_and_no_other_also_across_a_restart(tmp_path: Path) -> None:
    web = Web(tmp_path / "line", a_token(tmp_path, TOKEN))
    with web.running():
        ended, other = cookie(log_in(web)), cookie(log_in(web))
        with closing(Stream(web.host, Cookie=ended)) as ended_stream:
            assert web.post("/logout", Cookie=ended, Origin=web.origin).status == 303
            assert ended_stream.is_ended()
        assert web.get("/events?topic=line", Cookie=ended).status == 303
        assert [web.get("/boards", Cookie=each).status for each in (ended, other)] == [303, 200]
    with web.running():
        assert [web.get("/boards", Cookie=each).status for each in (ended, other)] == [303, 200]
        file = web.folder / "logged_out"
        assert (len(file.read_text().split()), file.stat().st_mode & 0o777) == (1, 0o600)
        assert cookie(log_in(web)) != cookie(log_in(web))
        assert "logout_not_kept" not in web.log()
        file.unlink()
        file.mkdir()
        assert web.post("/logout", Cookie=other, Origin=web.origin).status == 303
        assert web.get("/boards", Cookie=other).status == 303
        assert "logout_not_kept" in web.log()


@pytest.mark.promise(
    "HTTP",
    "guessing the token | a guess takes a second, and a token has at least 32 characters. Where "
    "connections run out, guesses are cut first; cookies never wait",
)
def test_wrong_tokens_wait_and_cost_no_honest_user_the_login(shut_web: Web) -> None:
    answers: list[tuple[int, float]] = []
    cut: list[int] = []
    is_over = threading.Event()

    def guess(way: int) -> None:
        while not is_over.is_set():
            began_s = time.monotonic()
            cut.append(way)  # where there are more than connections
            with suppress(OSError, http.client.HTTPException):
                wrong = log_in(shut_web, "wrong") if way % 2 else shut_web.get("/boards", Authorization="Bearer wrong")
                answers.append((wrong.status, time.monotonic() - began_s))
                cut.remove(way)

    honest = cookie(log_in(shut_web))
    guessing = [threading.Thread(target=guess, args=(number,)) for number in range(160)]
    for thread in guessing:
        thread.start()
    try:
        until(lambda: len(answers) > 10 or len(cut) > 200)
        for _ in range(3):
            began_s = time.monotonic()
            assert log_in(shut_web).status == 303
            assert time.monotonic() - began_s > 0.9, "a guesser would know it by its speed"
            assert shut_web.get("/boards", Authorization=BEARER).status == 200
            assert shut_web.get("/boards", Cookie=honest).status == 200
    finally:
        is_over.set()
        for thread in guessing:
            thread.join()
    assert {status for status, _ in answers} <= {401}
    assert all(took_s > 0.9 for _, took_s in answers)
    wrong = log_in(shut_web, "wrong")
    assert (wrong.status, "set-cookie" in wrong.headers) == (401, False)
    assert "This is not the token" in wrong.text


@pytest.mark.parametrize("target", ["//evil.example", "https://evil.example", "/\\evil.example", "javascript:alert(1)"])
def test_the_login_leads_to_this_site_only(shut_web: Web, target: str) -> None:
    answer = log_in(shut_web, target=target)
    assert (answer.status, answer.headers["location"]) == (303, "/")
    assert 'name="next" value="/"' in shut_web.get(f"/login?next={target}".replace("\\", "%5C")).text


@pytest.mark.promise(
    "HTTP",
    "a form on another site (CSRF), a picture of ours in its page | refused by `Origin` and `Sec-Fetch-Site`; "
    "the cookie is `SameSite=Strict`",
)
def test_nothing_is_taken_from_another_sites_page(open_web: Web, shut_web: Web) -> None:
    for web, extra in ((open_web, {}), (shut_web, {"Cookie": cookie(log_in(shut_web))})):
        refused: tuple[dict[str, str], ...] = (
            *({}, {"Origin": "http://evil.example"}, {"Origin": "null"}, {"Origin": ""}, {"Origin": "http://[x"}),
            *({"Sec_Fetch_Site": "same-site"}, {"Sec_Fetch_Site": "none"}, {"Origin": "http://127.0.0.1:1"}),
            {"Origin": "http://evil.example", "Sec_Fetch_Site": "same-origin"},
            {"Origin": web.origin, "Sec_Fetch_Site": "cross-site"},
            {"Referer": f"{web.origin}/"},
        )
        for headers in refused:
            assert web.post("/logout", **headers, **extra).status == 403, headers
        for method in ("PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"):
            assert web.get("/boards", method, **extra).status == 405
        assert web.post("/logout", Origin=web.origin, **extra).status == 303
        again = {"Cookie": cookie(log_in(web))} if extra else {}
        assert web.post("/logout", Sec_Fetch_Site="same-origin", **again).status == 303
    assert shut_web.post("/logout", Authorization=BEARER).status == 303
    assert open_web.post("/logout", Authorization="Bearer anything").status == 403


MALFORMED = (
    *(b"http://[x", b"[x", b"http://]", b"[::1", b"[::1]x:1", b"//[", b"http://a:b", b":99999", b"\xff\xfe"),
    *(b"x" * 8000, b"9" * 5000, b"-1", b"1e9", b"\xb2", b"0x10", b"1, 2", b"null", b"%00", b"%ED%A0%80", b"{" * 500),
    *(b"bytes=0-", b"bytes=-", b"bytes=9-1", b"bytes=" + b"0-1," * 999, b"bytes=" + b"9" * 5000 + b"-", b"bytes=a-b"),
    *(b"multipart/form-data", b"multipart/form-data; boundary=", b"application/x-www-form-urlencoded; charset=nothing"),
    *(b"Mon, 99 Foo 99999 99:99:99 GMT", b'"' * 99, b"W/", b'coserve="\\777', b"Bearer", b"=;=", b","),
)
HEADERS = (
    *("Host", "Origin", "Cookie", "Content-Length", "Range", "If-Range", "If-None-Match", "If-Modified-Since"),
    *("Content-Type", "Authorization", "Accept", "Accept-Encoding", "Last-Event-ID", "Sec-Fetch-Site", "Referer"),
    *("X-Forwarded-Proto", "X-Forwarded-For", "Forwarded", "Expect", "Upgrade", "TE"),
    *("Transfer-Encoding", "Connection"),
)
#: Read where a file is asked for; the others where a form is sent.
OF_FILES = {"Range", "If-Range", "If-None-Match", "If-Modified-Since", "Accept-Encoding"}


@pytest.mark.promise(
    "HTTP",
    "headers that are not what they should be | each is answered, none with 500, and none writes to the log",
)
@pytest.mark.parametrize("header", HEADERS)
def test_no_header_breaks_an_answer(shut_web: Web, header: str) -> None:
    web, first = shut_web, "GET /static/app.js" if header in OF_FILES else "POST /login"
    usual = {"Host": web.host, "Origin": web.origin, "Content-Type": "application/x-www-form-urlencoded"}
    usual |= {"Cookie": cookie(log_in(web)), "Accept": "text/html", "Connection": "close"}
    before = web.log()
    for value in MALFORMED:
        body = b"token=x" if first.startswith("POST") else b""
        lines = {name.encode(): text.encode() for name, text in usual.items()}
        lines |= {b"Content-Length": str(len(body)).encode(), header.encode(): value}
        head = b"".join(name + b": " + text + b"\r\n" for name, text in lines.items())
        with socket.create_connection(("127.0.0.1", web.port), timeout=PATIENCE_S) as peer:
            peer.sendall(f"{first} HTTP/1.1\r\n".encode() + head + b"\r\n" + body)
            peer.shutdown(socket.SHUT_WR)
            with suppress(ConnectionResetError):
                answer = peer.recv(65536)
                is_answered = answer[9:12] in (b"", b"200", b"206", b"303", b"304", b"503")
                assert is_answered or answer[9:10] == b"4", (first, value, answer)
    assert web.log() == before, "a request fills the log"


def test_another_sites_page_may_link_here_and_not_make_us_work(open_web: Web) -> None:
    for mode, status in (("no-cors", 403), ("cors", 403), ("navigate", 200)):
        assert open_web.get("/boards", Sec_Fetch_Site="cross-site", Sec_Fetch_Mode=mode).status == status
    head = open_web.get("/boards", "HEAD")
    assert (head.status, head.text) == (200, "")


def test_every_answer_forbids_scripts_of_others_frames_and_guessed_types(open_web: Web, shut_web: Web) -> None:
    answers = [
        *(open_web.get(path) for path in ("/", "/boards", "/boards/99", "/nothing", "/static/app.js", "/pictures/9")),
        *(open_web.get("/boards", Host="evil.example"), open_web.get("/boards", "PUT"), open_web.post("/boards")),
        *(shut_web.get("/boards"), shut_web.get("/boards", Accept="*/*")),
    ]
    for answer in answers:
        policy = answer.headers["content-security-policy"]
        assert "default-src 'self'" in policy
        assert "frame-ancestors 'none'" in policy
        assert "unsafe" not in policy
        assert answer.headers["x-frame-options"] == "DENY"
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert "server" not in answer.headers
    assert answers[1].headers["cache-control"] == "no-store"


def test_a_new_token_voids_every_cookie_and_a_bad_one_changes_nothing(tmp_path: Path) -> None:
    token = a_token(tmp_path, TOKEN)
    with Web(tmp_path / "line", token).running() as web:
        assert web.process
        before = cookie(log_in(web))
        token.write_text("short", encoding="utf-8")
        web.process.send_signal(signal.SIGHUP)
        until(lambda: "reload_refused" in web.log())
        assert web.get("/boards", Cookie=before).status == 200
        token.write_text(TOKEN[::-1], encoding="utf-8")
        web.process.send_signal(signal.SIGHUP)
        until(lambda: web.get("/boards", Cookie=before).status == 303)
        assert web.get("/boards", Authorization=f"Bearer {TOKEN[::-1]}").status == 200
        assert TOKEN not in web.log()


def test_too_long_requests_are_refused(open_web: Web) -> None:
    assert open_web.post("/logout", "x" * 70_000, Origin=open_web.origin).status == 413
    head = f"POST /login HTTP/1.1\r\nHost: {open_web.host}\r\nOrigin: {open_web.origin}\r\n"
    head += "Content-Type: application/x-www-form-urlencoded\r\nTransfer-Encoding: chunked\r\n\r\n"
    chunks = (b"2710\r\n" + b"x" * 10_000 + b"\r\n") * 10
    long_header = b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 40_000
    for request, answer in ((head.encode() + chunks, b"HTTP/1.1 4"), (long_header, b"HTTP/1.1 400 ")):
        with socket.create_connection(("127.0.0.1", open_web.port), timeout=PATIENCE_S) as peer:
            peer.sendall(request)
            assert peer.recv(4096).startswith(answer)
    assert open_web.get("/boards?serial=" + "x" * 129).status == 422
    assert open_web.get("/boards").status == 200
    assert "Traceback" not in open_web.log()


@pytest.mark.promise(
    "HTTP",
    "silent, slow or many clients | 128 connections, 64 of them live; a request has 5 s, a client "
    "that does not read is cut. A further connection replaces the oldest one that waits for its "
    "client. Pages leave 16 connections to `/healthz`, `/readyz` and `/metrics`",
)
def test_clients_that_hold_connections_keep_nobody_out(open_web: Web) -> None:
    """Silent ones, ones that never end their request, and noise."""
    peers: list[socket.socket] = []
    try:
        for number in range(200):
            peer = socket.create_connection(("127.0.0.1", open_web.port), timeout=PATIENCE_S)
            peers.append(peer)
            with suppress(OSError):  # it may be cut off already
                peer.sendall((b"", b"GET / HTTP/1.1\r\nHost: x\r\n", b"\x00\xff\r\n\r\n")[number % 3])
        for _ in range(5):
            assert open_web.get("/boards").status == 200
    finally:
        for peer in peers:
            peer.close()


@pytest.mark.parametrize("way", ["half a body", "unread answers"])
def test_half_sent_bodies_and_unread_answers_without_a_token_reset_no_honest_request(shut_web: Web, way: str) -> None:
    head = f"POST /login HTTP/1.1\r\nHost: {shut_web.host}\r\nOrigin: {shut_web.origin}\r\nContent-Length: 1000\r\n"
    form = "Content-Type: application/x-www-form-urlencoded\r\n\r\ntoken="
    page = f"GET /static/app.css HTTP/1.1\r\nHost: {shut_web.host}\r\n\r\n"
    request = (head + form if way == "half a body" else page * 300).encode()
    peers: list[socket.socket] = []
    try:
        for _ in range(160):
            peer = socket.socket()
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            peers.append(peer)
            peer.settimeout(PATIENCE_S)
            peer.connect(("127.0.0.1", shut_web.port))
            with suppress(OSError):
                peer.sendall(request)
        for path in ("/healthz", "/metrics") * 5:
            assert "no answer from the daemon" in shut_web.get(path, Authorization=BEARER).text
        until(lambda: shut_web.get("/boards", Authorization=BEARER).status == 200)  # 503 while files are still sent
        for _ in range(5):
            assert shut_web.get("/boards", Authorization=BEARER).status == 200
            assert log_in(shut_web).status == 303
    finally:
        for peer in peers:
            peer.close()


class SlowPages:
    """A server whose page `slow` answers once `is_over` is set; its other pages answer at once."""

    def __init__(self, slow: str, *others: str) -> None:
        self.is_over, self.under_way = threading.Event(), list[Request]()
        routes = [Route(slow, self._answer), *(Route(path, lambda _request: Response("")) for path in others)]
        self._app, self._connections = Starlette(routes=routes), list[http.client.HTTPConnection]()

    async def _answer(self, request: Request) -> Response:
        self.under_way.append(request)
        while not self.is_over.is_set():
            await asyncio.sleep(0.01)
        return Response("x" * 10_000)

    @contextmanager
    def running(self) -> Iterator[None]:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.address = listener.getsockname()
            server = PageServer(self._app, LiveTopics())
            thread = threading.Thread(target=server.run, args=([listener],))
            thread.start()
            try:
                yield
            finally:
                self.is_over.set()
                for connection in self._connections:
                    connection.close()
                server.should_exit = True
                thread.join()

    def ask(self, path: str) -> http.client.HTTPConnection:
        connection = http.client.HTTPConnection(*self.address, timeout=PATIENCE_S)
        self._connections.append(connection)
        connection.request("GET", path)
        return connection

    def status(self, path: str) -> int:
        with closing(self.ask(path)) as connection:
            return connection.getresponse().status


def test_stuck_page_threads_stop_the_heartbeat(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(children, "_BEAT_EVERY_S", 0.01)
    heart, is_over = os.eventfd(0), threading.Event()
    site: Any = SimpleNamespace(live=LiveTopics(), database=SimpleNamespace(close=lambda: None))
    app = web_app(site, site, [], heart=heart)

    async def until_it_beats(beats: bool) -> None:
        has_beaten = not beats
        while has_beaten != beats:
            await asyncio.sleep(0.05)
            os.eventfd_write(heart, 1)  # so that the next line never waits
            has_beaten = os.eventfd_read(heart) > 1

    async def run() -> None:
        async with asyncio.timeout(PATIENCE_S), app.router.lifespan_context(app):
            pages = [asyncio.create_task(anyio.to_thread.run_sync(is_over.wait)) for _ in range(9)]
            try:
                await until_it_beats(False)
            finally:
                is_over.set()
            await asyncio.gather(*pages)
            await until_it_beats(True)

    asyncio.run(run())
    os.close(heart)


def test_pages_that_are_being_answered_leave_connections_for_probes() -> None:
    pages = SlowPages("/", "/healthz")
    with pages.running():
        asked = [pages.ask("/") for _ in range(112)]
        until(lambda: len(pages.under_way) == len(asked))
        assert {pages.ask("/").getresponse().status for _ in range(50)} == {503}
        assert {pages.ask("/healthz").getresponse().status for _ in range(50)} == {200}
        pages.is_over.set()
        assert {page.getresponse().status for page in asked} == {200}


@pytest.mark.promise(
    "Overload and hostile publishers",
    "150 connections with 20 requests for `/metrics` each, unread, leave `/healthz` and `/login` their answers",
)
def test_scrapes_and_requests_that_do_not_wait_for_answers_leave_connections_for_probes() -> None:
    pages = SlowPages("/metrics", "/healthz", "/")
    with pages.running(), ExitStack() as stack:
        peers = [stack.enter_context(socket.create_connection(pages.address)) for _ in range(150)]
        for number, peer in enumerate(peers):
            with suppress(OSError):
                peer.sendall(b"GET /metrics?peer=%d HTTP/1.1\r\nHost: localhost\r\n\r\n" % number * 20)
        until(lambda: len(pages.under_way) == 8)
        assert [pages.status(path) for path in ("/healthz", "/") * 20] == [200] * 40
        pages.is_over.set()
        until(lambda: pages.status("/metrics") == 200)
        answered = [request.url.query for request in pages.under_way]
        assert len(answered) == len(set(answered)), "of each connection one request is answered"
