"""Real headless Chromium before a real line, for the tests of every page.

`open_page("http://…", width=390, dark=True)` returns a page of Playwright. A test fails at its end if the browser's
console has errors of scripts, failed requests or any request to another host. A test that expects a refusal says so:
`open_page.forgive("403")`.
"""

import re
import shutil
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest

from tests.contract.client import Line
from tests.lines import a_jpeg
from tests.ports import free_port
from tests.waiting import PATIENCE_S, until

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Page, Request

HEIGHTS = {1920: 1080, 1280: 800, 390: 844}
#: Verdicts that need no trained weights, on components with familiar names.
RULES = """\
boards:
  mainboard-a: {components: {R0402: [R1, R2], C0603: [C1], QFP64: [U1]}}
  sensor-node: {components: {R0402: [R1, R2]}}
  open-board: {extras: allow, components: {R0402: 1000}}
classifiers:
  R0402: {expert: R0402, pass: [ok, odd, bad], review_below: 0.0}
  C0603: {expert: C0603, pass: [ok, odd, bad], review_below: 1.0}
  QFP64: {expert: QFP64, pass: [ok, odd, bad], review_below: 0.0, then: solder}
detectors:
  solder: {expert: yolo-solder, require: {void: {min: 64}}}
defects: {void: D301}
"""
#: The boards that `fill` publishes: board type, serial, lot, parts, and the verdict of the board.
HOSTILE_SERIAL = "<b onload=alert(1)>&amp; 'é'"
BOARDS = (
    ("sensor-node", "A0001", "L1", "R1 R2", "pass"),
    ("sensor-node", "A0002", "L1", "R1 R2", "unknown"),
    ("mainboard-a", "B0001", "L1", "R1 R2 C1 U1", "fail"),
    ("mainboard-a", "B0002", "L2", "R1 R2 C1 U1", "fail"),
    ("open-board", "C0001", "L2", "C1 R1", None),
    ("sensor-node", HOSTILE_SERIAL, "L2", "R1 R2", "pass"),
)
PARTS = {"R": "R0402", "C": "C0603", "U": "QFP64"}
#: A connection that a page held open ends with the page.
_ENDED = ("net::ERR_ABORTED",)


@pytest.fixture(scope="module")
def browser() -> Iterator["Browser"]:
    """Debian's Chromium, headless, one for each module: while it runs, asyncio.run cannot be used in this thread."""
    playwright = pytest.importorskip("playwright.sync_api", reason="needs the package playwright (extra dev)")
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("needs chromium: make system-tools")
    with playwright.sync_playwright() as started:
        running = started.chromium.launch(
            executable_path=chromium,
            args=["--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"],
            timeout=PATIENCE_S * 1000,
        )
        yield running
        running.close()


def let_time_stand(page: "Page", ahead_s: float = 0.0) -> None:
    """Stop the page's clock `ahead_s` from now: on a busy machine two keys or taps would be too far apart."""
    page.clock.set_fixed_time(time.time() + ahead_s)


class Pages:
    def __init__(self, browser: "Browser") -> None:
        self._browser = browser
        self._contexts: list[BrowserContext] = []
        self._forgiven: list[str] = []
        self.complaints: list[str] = []

    def __call__(
        self, url: str, width: int = 1280, dark: bool = False, wait_until: str = "load", **context: Any
    ) -> "Page":
        """Open a page in a new context (no cookies), as wide as a desktop screen (1280) or a telephone's (390)."""
        opened = self._browser.new_context(
            viewport={"width": width, "height": HEIGHTS.get(width, 800)},
            color_scheme="dark" if dark else "light",
            has_touch=width < 600,
            **context,
        )
        opened.set_default_timeout(PATIENCE_S * 1000)
        self._contexts.append(opened)
        page = opened.new_page()
        home = urlsplit(url).netloc

        def on_request(request: "Request") -> None:
            parts = urlsplit(request.url)
            if parts.scheme not in ("data", "blob", "about") and parts.netloc != home:
                self.complaints.append(f"a request to another host: {request.url}")

        def on_failure(request: "Request") -> None:
            if request.failure not in _ENDED:
                self.complaints.append(f"a request failed: {request.url} {request.failure}")

        def on_console(message: "ConsoleMessage") -> None:
            if message.type == "error":
                self.complaints.append(f"in the console: {message.text} ({message.location.get('url', '')})")

        page.on("request", on_request)
        page.on("requestfailed", on_failure)
        page.on("console", on_console)
        page.on("pageerror", lambda error: self.complaints.append(f"an error of a script: {error}"))
        page.goto(url, wait_until=wait_until)  # pyright: ignore[reportArgumentType]
        return page

    def forgive(self, pattern: str) -> None:
        """Expect complaints that match, for example `forgive("403")`."""
        self._forgiven.append(pattern)

    def close(self) -> list[str]:
        for context in self._contexts:
            context.close()
        return [text for text in self.complaints if not any(re.search(pattern, text) for pattern in self._forgiven)]


@pytest.fixture
def open_page(browser: "Browser") -> Iterator[Pages]:
    """`open_page(url, width=1280, dark=False)`; the browser's complaints fail the test."""
    pages = Pages(browser)
    yield pages
    complaints = pages.close()
    assert not complaints, "\n".join(complaints)


class ShownLine(Line):
    """A line with a dashboard: `line.url("/review")`."""

    def __init__(self, folder: Path, experts: Path, rules: str = RULES, **settings: Any) -> None:
        self.http = f"http://127.0.0.1:{free_port()}"
        settings.setdefault("retention", {"keep": ["pass", "fail", "review", "unknown"]})
        super().__init__(folder, experts, rules, **settings)
        config = self.config.read_text(encoding="utf-8")
        self.config.write_text(config.replace("endpoints:\n", f"endpoints:\n  http: {self.http}\n"), encoding="utf-8")

    def url(self, path: str = "/") -> str:
        return self.http + path

    def wait_until_it_shows(self) -> None:
        """The web process is a child of its own, and starts after the line is ready."""
        until(self._shows, lambda: f"no page answers at {self.http}; see {self.folder}/daemon.log")

    def _shows(self) -> bool:
        try:
            urllib.request.urlopen(self.url("/login"), timeout=PATIENCE_S).close()  # noqa: S310 - our own http
        except OSError:
            return False
        return True

    def send_image(self, **fields: Any) -> str:
        return self.send(a_jpeg(self.count, 160, 120), **fields)

    def fill(self) -> None:
        for board_type, serial, lot, parts, verdict in BOARDS:
            board = {"type": board_type, "serial": serial, "lot": lot, "station": "AOI-1"}
            late = {"deadline_ms": 1} if verdict == "unknown" else {}
            for designator in parts.split():
                self.send_image(board=board, component=PARTS[designator[0]], designator=designator, **late)
        self.idle()
        self.wait(lambda: self.rows("SELECT count(*) FROM inspections WHERE status <> 'done'") == [(0,)])


@contextmanager
def showing(folder: Path, experts: Path, rules: str = RULES, **settings: Any) -> Iterator[ShownLine]:
    """An empty line whose daemon runs and whose dashboard answers."""
    line = ShownLine(folder, experts, rules, **settings)
    with line.service():
        line.wait_until_it_shows()
        yield line


@pytest.fixture(scope="module")
def shown_line(tmp_path_factory: pytest.TempPathFactory, experts_folder: Path) -> Iterator[ShownLine]:
    """A module's own small line with its dashboard, filled with boards of several verdicts."""
    with showing(tmp_path_factory.mktemp("shown") / "line", experts_folder) as line:
        line.fill()
        yield line
