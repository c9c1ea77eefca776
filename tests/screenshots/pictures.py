"""Pages of a dashboard as PNG files: real Chromium, at the widths of a wall, a desk and a telephone, kept small."""

import io
import shutil
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from PIL import Image

from daemon.errors import MissingExtraError

if TYPE_CHECKING:
    from playwright.sync_api import Browser
    from playwright.sync_api import Page as Tab

WIDTHS = {1920: 1080, 1280: 800, 390: 844}
#: What a page does after its first paint: charts are drawn, the first events come.
_SETTLE_MS = 1500
_COLOURS, _FEWEST_COLOURS = 256, 16
MAX_BYTES = 150_000


class ScreenshotError(Exception):
    """No pictures; the text says what is missing or which page failed."""


@dataclass(frozen=True, slots=True)
class Page:
    """One page to be shown: docs/img/dashboard-NAME-WIDTH.png, and NAME-dark for one in the dark.

    `begin` is what a person does first.
    """

    name: str
    path: str
    dark: bool = False
    begin: "Callable[[Tab], None] | None" = None


@contextmanager
def chromium() -> "Iterator[Browser]":
    """Debian's Chromium. ScreenshotError where it, or Playwright, is not installed."""
    try:
        from playwright.sync_api import sync_playwright
    except ModuleNotFoundError:
        raise ScreenshotError(str(MissingExtraError("playwright", "this", "dev"))) from None
    program = shutil.which("chromium")
    if program is None:
        raise ScreenshotError("needs chromium: make system-tools")
    with sync_playwright() as started:
        browser = started.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


def wait_for_pages(url: str) -> None:
    """Until the pages answer, which come up after the line; ScreenshotError after a minute."""
    until_s = time.monotonic() + 60.0
    while True:
        try:
            urllib.request.urlopen(f"{url}/", timeout=5).close()  # noqa: S310 - our own http
        except OSError:
            if time.monotonic() > until_s:
                raise ScreenshotError(f"no page answers at {url}: look at coserve status") from None
            time.sleep(0.1)
        else:
            return


def take(browser: "Browser", url: str, pages: Sequence[Page], folder: Path) -> list[Path]:
    """A picture of each page at each width. ScreenshotError names a page that does not answer 200."""
    folder.mkdir(parents=True, exist_ok=True)
    made: list[Path] = []
    for page in pages:
        for width, height in WIDTHS.items():
            context = browser.new_context(
                viewport={"width": width, "height": height},
                color_scheme="dark" if page.dark else "light",
                reduced_motion="reduce",
            )
            tab = context.new_page()
            answer = tab.goto(url + page.path)
            if answer is None or answer.status != 200:
                raise ScreenshotError(f"{page.path} answered {answer.status if answer else 'nothing'}")
            if page.begin:
                page.begin(tab)
            tab.wait_for_timeout(_SETTLE_MS)
            file = folder / f"dashboard-{page.name}{'-dark' if page.dark else ''}-{width}.png"
            file.write_bytes(small(tab.screenshot()))
            made.append(file)
            context.close()
    return made


def _with_palette(picture: Image.Image, colours: int) -> Image.Image:
    """Use `colours` colours, among them those of the largest areas exactly as they are."""
    areas = sorted(picture.getcolors(picture.width * picture.height) or [], reverse=True)[:8]
    chosen = picture.quantize(colours - 8, Image.Quantize.MAXCOVERAGE).getpalette() or []
    palette = Image.new("P", (1, 1))
    palette.putpalette([*(part for _, colour in areas for part in colour), *chosen])  # type: ignore[misc]
    return picture.quantize(palette=palette, dither=Image.Dither.NONE)


def small(png: bytes) -> bytes:
    """The same picture in at most MAX_BYTES: with a palette where it needs one, of ever fewer colours."""
    picture = Image.open(io.BytesIO(png)).convert("RGB")
    colours = 2 * _COLOURS
    while True:
        out = io.BytesIO()
        is_plain = colours > _COLOURS
        chosen = picture if is_plain else _with_palette(picture, colours)
        chosen.save(out, "PNG", optimize=True)
        if out.tell() <= MAX_BYTES or colours <= _FEWEST_COLOURS:
            return out.getvalue()
        colours = colours // 2 if is_plain else colours * 3 // 4
