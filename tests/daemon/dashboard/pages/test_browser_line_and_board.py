"""Every page's width and contrast, and Line and Board as a person meets them, in a real Chromium, by keys alone."""

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.daemon.dashboard.browser import Pages, ShownLine, let_time_stand, showing
from tests.daemon.dashboard.web import a_token

if TYPE_CHECKING:
    from playwright.sync_api import Page


#: Finds text with less contrast to its background than 4.5, which WCAG requires of ordinary text.
CONTRAST = """() => {
  const parse = (c) => c.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b].map((v) => (v /= 255) <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [.2126, .7152, .0722][i], 0);
  const behind = (e) => { for (; e; e = e.parentElement) { const c = parse(getComputedStyle(e).backgroundColor);
    if (c.length < 4 || c[3] > 0) return c; } return [255, 255, 255]; };
  return [...document.querySelectorAll("body *")].filter((e) => e.checkVisibility()
      && !e.closest(".visually-hidden, .skip, .picture")
      && [...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim()))
    .map((e) => { const [a, b] = [light(parse(getComputedStyle(e).color)), light(behind(e))];
      return [(Math.max(a, b) + .05) / (Math.min(a, b) + .05), e.outerHTML.slice(0, 120)]; })
    .filter(([ratio]) => ratio < 4.5);
}"""


TOKEN = "s" * 40
#: Every page with a navigation; {board} is a board with findings.
PAGES = ("/", "/?kiosk", "/boards", "/boards/{board}", "/defects", "/experts", "/experts/QFP64", "/machine", "/review")
#: Shows three thousand events, as a month brings them, and counts nodes and timers before and behind.
MANY_EVENTS = """() => {
  const textOf = (name) => document.querySelector(`[data-live=${name}]`).innerHTML;
  const parts = ["andon", "line", "figures"].map((name) => [name, textOf(name)]);
  const all = () => document.querySelectorAll("*").length;
  let timers = 0;
  const real = window.setInterval;
  window.setInterval = (...given) => { timers += 1; return real(...given); };
  for (const [name, text] of parts) show(name, text);
  const before = all();
  for (let round = 0; round < 100; round += 1)
    for (const [name, text] of parts) show(name, text.replaceAll("W2", `W${round}`));
  for (const [name, text] of parts) show(name, text);
  return { before, after: all(), timers };
}"""


@pytest.fixture(scope="module")
def guarded_line(tmp_path_factory: pytest.TempPathFactory, experts_folder: Path) -> Iterator[ShownLine]:
    folder = tmp_path_factory.mktemp("guarded")
    token = a_token(folder, TOKEN)
    with showing(folder / "line", experts_folder, security={"http_token": str(token)}) as line:
        yield line


def log_in(open_page: Pages, line: ShownLine, path: str) -> "Page":
    page = open_page(line.url(path))
    page.locator("#token").fill(TOKEN)
    page.keyboard.press("Enter")
    page.wait_for_url(line.url(path))
    return page


def board_of(line: ShownLine, serial: str) -> int:
    ((board_id,),) = line.rows("SELECT board_id FROM boards WHERE serial = ?", serial)
    return int(board_id)


@pytest.mark.parametrize(
    ("width", "dark"), [pytest.param(1920, False, marks=pytest.mark.test_all), (1280, True), (390, False)]
)
def test_pages_fit_their_screen_are_named_and_can_be_read(
    shown_line: ShownLine, open_page: Pages, width: int, dark: bool
) -> None:
    page = open_page(shown_line.url("/"), width=width, dark=dark)
    for path in PAGES:
        page.goto(shown_line.url(path.format(board=board_of(shown_line, "B0001"))))
        if path.startswith(("/boards", "/machine")):
            page.wait_for_selector("time[data-local]", state="attached")
        assert page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth"), path
        assert page.evaluate(CONTRAST) == [], path
        assert page.locator("h1").count() == 1
        assert page.title().endswith("· CoServe")
        for table in page.locator(".scroll").all():
            assert table.get_attribute("aria-label"), path
            assert table.get_attribute("tabindex") == "0", path
            if width < 700:
                assert table.evaluate("table => table.scrollWidth <= table.clientWidth"), (path, "rows are cards")
        for verdict in page.locator(".verdict").all_inner_texts():
            assert re.search(r"[A-Za-z]{2}", verdict), (path, "a word beside the colour and the sign")


def test_on_a_telephone_the_page_line_has_three_screens_and_times_of_other_days_their_date(
    shown_line: ShownLine, open_page: Pages
) -> None:
    page = open_page(shown_line.url("/"), width=390)
    page.wait_for_selector(".tiles")
    assert page.evaluate("document.documentElement.scrollHeight") <= 3 * 844
    let_time_stand(page, 86400.0)
    page.set_viewport_size({"width": 1280, "height": 800})
    page.goto(shown_line.url("/boards"))
    page.wait_for_selector("time[data-local]", state="attached")
    shown = page.locator('time[data-style="time"]').all_inner_texts()
    assert shown
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d", text) for text in shown), shown


def test_boards_come_by_themselves_and_a_failed_image_changes_the_days_numbers(
    guarded_line: ShownLine, open_page: Pages
) -> None:
    line = guarded_line
    page = log_in(open_page, line, "/")
    page.get_by_text("No boards yet", exact=True).wait_for()
    page.locator('#live-state[data-state="on"]').wait_for()
    assert "–" in page.locator(".tile", has_text="First-pass yield").inner_text()
    board = {"type": "sensor-node", "serial": "<i>N1</i>", "lot": "L9"}
    for designator in ("R1", "R2"):
        line.send_image(board=board, component="R0402", designator=designator)
    row = page.locator("tr", has_text="<i>N1</i>")
    row.get_by_text("pass").wait_for()
    assert "2 / 2" in row.inner_text()
    page.locator(".tile", has_text="First-pass yield").get_by_text("100.0 %").wait_for()
    line.send_image(board={"type": "mainboard-a", "serial": "N2"}, component="QFP64", designator="U1")
    open_board = page.locator("tr", has_text="N2")
    open_board.get_by_text("1 / 4").wait_for()
    assert "open" in open_board.inner_text()
    page.locator(".tile", has_text="Images judged").get_by_text("1 fail").wait_for()
    line.control("drain")
    page.locator(".alarm", has_text="The line is draining").wait_for()
    page.locator("#announce", has_text="Alarm: The line is draining").wait_for(state="attached")
    line.control("drain", off=True)
    page.locator(".alarm", has_text="The line is draining").wait_for(state="detached")


def test_a_person_finds_a_board_and_its_findings_with_the_keyboard_alone(
    shown_line: ShownLine, open_page: Pages
) -> None:
    page = open_page(shown_line.url("/"))
    let_time_stand(page)
    page.locator('#live-state[data-state="on"]').wait_for()
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.keyboard.press("Enter")
    page.keyboard.press("?")
    assert page.locator("dialog#help").is_visible()
    page.keyboard.press("Escape")
    page.keyboard.press("j")
    page.keyboard.press("j")
    assert page.evaluate("document.activeElement.hasAttribute('data-row')")
    focused = page.evaluate("document.activeElement.id")
    assert focused.startswith("board-")
    shown_line.send(component="R0402", board={"type": "open-board", "serial": "came-meanwhile"}, designator="R1")
    page.locator("tr", has_text="came-meanwhile").wait_for()
    assert page.evaluate("document.activeElement.id") == focused, "a live part that is filled again leaves it there"
    page.keyboard.press("Enter")
    page.wait_for_url(re.compile(r"/boards/\d+$"))
    page.keyboard.press("g")
    page.keyboard.press("b")
    page.wait_for_url("**/boards")
    page.keyboard.press("/")
    page.keyboard.type("B0001")
    page.keyboard.press("Enter")
    page.wait_for_url(f"**/boards/{board_of(shown_line, 'B0001')}")
    assert page.locator("h1").inner_text().startswith("B0001")
    page.keyboard.press("t")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    page.reload()
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"


def test_a_board_shows_times_of_the_readers_zone_boxes_over_their_pixels_and_prints_without_buttons(
    shown_line: ShownLine, open_page: Pages
) -> None:
    board = shown_line.url(f"/boards/{board_of(shown_line, 'B0001')}")
    page = open_page(board, dark=True, timezone_id="Asia/Tokyo", locale="de-DE")
    moment = page.locator("dd time").first
    page.wait_for_selector("time[data-local]", state="attached")
    utc = moment.get_attribute("datetime")
    assert utc
    assert moment.get_attribute("title") == f"{utc[:10]} {utc[11:19]} UTC"
    assert (int(moment.inner_text()[11:13]) - int(utc[11:13])) % 24 == 9
    picture = page.locator(".cards .picture").first
    picture.scroll_into_view_if_needed()
    image = picture.locator("img")
    page.wait_for_function("() => document.querySelector('.picture img').naturalWidth")
    assert image.evaluate("(i) => [i.naturalWidth, i.naturalHeight]") == [160, 120]
    assert picture.locator("svg").get_attribute("viewBox") == "0 0 160 120"
    over, under = picture.locator("svg").bounding_box(), image.bounding_box()
    assert over
    assert under
    assert abs(over["width"] - under["width"]) < 1
    assert abs(over["height"] - under["height"]) < 1
    page.keyboard.press("b")
    assert not picture.locator("svg").is_visible()
    page.keyboard.press("j")
    page.keyboard.press("Enter")
    page.locator("#chosen .card").wait_for()
    page.emulate_media(media="print")
    assert not page.locator(".bar").is_visible()
    assert not page.locator("[data-print]").is_visible()
    assert page.locator("#chosen ~ section .card").first.is_visible()
    assert page.evaluate("getComputedStyle(document.documentElement).backgroundColor") == "rgb(255, 255, 255)"
    assert page.pdf(format="A4").startswith(b"%PDF")


@pytest.mark.promise(
    "A full disk, and years of results",
    "A page on a wall display takes no more memory after thousands of events, and says when it is cut off",
)
def test_a_display_on_a_wall_sounds_at_a_fail_grows_no_memory_and_says_when_it_is_cut_off(
    guarded_line: ShownLine, open_page: Pages
) -> None:
    open_page.forgive("ERR_|Failed to load resource")
    page = log_in(open_page, guarded_line, "/?kiosk")
    page.wait_for_function("() => document.getElementById('live-state').dataset.state === 'on'")
    page.locator("#sound").click()
    page.get_by_text("Sound on a fail: on", exact=True).wait_for()

    def send(serial: str, verdict: str) -> None:
        board = {"type": "sensor-node" if verdict == "pass" else "mainboard-a", "serial": serial}
        for designator in ("R1", "R2") if verdict == "pass" else ("R1", "R2", "C1", "U1"):
            component = {"R": "R0402", "C": "C0603", "U": "QFP64"}[designator[0]]
            guarded_line.send_image(board=board, component=component, designator=designator)
        page.locator(f".andon.{verdict}", has_text=serial).wait_for()

    send("W1", "pass")
    assert page.locator("#sound").get_attribute("data-played") is None
    send("W2", "fail")
    page.locator("#sound[data-played='1']").wait_for()
    page.reload()
    page.locator(".andon.fail", has_text="W2").wait_for()
    assert "on" in page.locator("#sound").inner_text(), "this browser remembers it"
    page.wait_for_function("() => document.getElementById('live-state').dataset.state === 'on'")
    nodes = page.evaluate(MANY_EVENTS)
    assert nodes["after"] <= nodes["before"] + 5, nodes
    assert nodes["timers"] == 0, nodes
    (web,) = guarded_line.status()["children"]
    page.evaluate("window.isOld = true")
    os.kill(web["pid"], signal.SIGKILL)
    page.locator("#live-state", has_text="reconnecting").wait_for()
    page.evaluate("document.body.classList.remove('kiosk')")
    assert "grayscale" in page.locator(".andon").evaluate("part => getComputedStyle(part).filter")
    page.evaluate("document.body.classList.add('kiosk')")  # a display alone reloads itself
    page.wait_for_function("() => !window.isOld", timeout=120_000)
    page.locator(".andon.fail", has_text="W2").wait_for()
