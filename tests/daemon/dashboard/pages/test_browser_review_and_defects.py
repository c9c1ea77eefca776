"""Review and Defects as people use them, in a real Chromium before a real line: by keyboard alone, by touch, by two."""

import sqlite3
from contextlib import closing
from typing import TYPE_CHECKING, Any

from tests.daemon.dashboard.browser import Pages, ShownLine, let_time_stand
from tests.waiting import PATIENCE_S

if TYPE_CHECKING:
    from playwright.sync_api import Page


def publish(line: ShownLine, lot: str, count: int, *, component: str = "C0603", serial: str = "S1") -> list[int]:
    """Publish images of a lot that wait for a decision, and return their inspection_ids."""
    board = {"type": "open-board", "serial": f"{lot}-{serial}"[:128], "lot": lot, "station": "AOI-1"}
    for number in range(count):
        line.send_image(board=board, component=component, designator=f"P{number + 1}")
    query = "SELECT inspection_id FROM inspections WHERE lot = ? AND image_path IS NOT NULL ORDER BY inspection_id"
    line.wait(lambda: len(line.rows(query, lot)) == count)
    return [row[0] for row in line.rows(query, lot)]


def decisions(line: ShownLine, *ids: int) -> list[tuple[Any, ...]]:
    query = "SELECT inspection_id, verdict, defect, reviewer, note FROM reviews ORDER BY review_id"
    return [row for row in line.rows(query) if row[0] in ids]


def begin(page: "Page", name: str) -> None:
    page.wait_for_selector("#reviewer:focus")
    page.keyboard.type(name)
    page.keyboard.press("Enter")
    page.wait_for_selector(".review-item")


def shows(page: "Page", *images: int, press: str = "") -> None:
    """Wait for each of these images in turn, and press a key at each."""
    for image in images:
        page.wait_for_selector(f'.review-item[data-id="{image}"]')
        if press:
            page.keyboard.press(press)


def has_no_sideways_scroll(page: "Page") -> bool:
    return page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")


def test_a_whole_review_by_keyboard_alone(shown_line: ShownLine, open_page: Pages) -> None:
    ids = publish(shown_line, "keys", 6)
    page = open_page(shown_line.url("/review?lot=keys"), 1280)
    begin(page, "Eva Maier")
    shows(page, ids[0])
    page.wait_for_function("() => document.querySelector('.review-picture img').naturalWidth === 160")
    assert page.text_content("#review-left") == "6"
    page.keyboard.press("p")
    shows(page, ids[1], press="1")  # the first code of the rules
    shows(page, ids[2], press="n")
    page.keyboard.type("ask p the x")  # keys are letters here
    page.keyboard.press("Enter")
    page.keyboard.press("x")
    shows(page, ids[3], press="u")
    shows(page, ids[2], press="f")  # the line named no defect: which one?
    page.wait_for_selector("#review-codes.choosing")
    page.keyboard.press("f")
    shows(page, ids[3], press="s")
    shows(page, ids[4], press="p")
    shows(page, ids[5])
    page.evaluate("document.querySelectorAll('.code').forEach((button) => button.remove())")  # a line without codes
    page.keyboard.press("f")
    page.wait_for_selector("text=Write its code, or the same again for none")
    assert decisions(shown_line, ids[5]) == []
    page.keyboard.press("f")
    shows(page, ids[3], press="p")  # skipped, so last
    page.wait_for_selector("#review-empty:visible")
    ((undone,),) = shown_line.rows("SELECT min(review_id) FROM reviews WHERE inspection_id = ?", ids[2])
    assert decisions(shown_line, *ids) == [
        (ids[0], "pass", None, "Eva Maier", None),
        (ids[1], "fail", "D301", "Eva Maier", None),
        (ids[2], "unknown", None, "Eva Maier", "ask p the x"),
        (ids[2], "review", None, "daemon", f"undecided again: undo of review {undone} by Eva Maier"),
        (ids[2], "fail", None, "Eva Maier", None),
        (ids[4], "pass", None, "Eva Maier", None),
        (ids[5], "fail", None, "Eva Maier", None),
        (ids[3], "pass", None, "Eva Maier", None),
    ]
    page.wait_for_function("() => document.getElementById('review-done').textContent === '6'")
    page.keyboard.press("?")
    assert page.locator("#help").get_by_text("Undo the last decision").is_visible()


#: Shows a good part where the page would.
GOOD_PART = """() => document.querySelector(".review-info").insertAdjacentHTML(
  "afterbegin", '<figure class="panel review-reference"><div class="picture">a part</div></figure>')"""


def test_a_whole_review_by_touch_on_a_telephone(shown_line: ShownLine, open_page: Pages) -> None:
    ids = publish(shown_line, "touch", 3)
    page = open_page(shown_line.url("/review?lot=touch"), 390, dark=True)
    let_time_stand(page)
    begin(page, "Ben")
    shows(page, ids[0])
    assert has_no_sideways_scroll(page)
    # Both pictures stand before the buttons; this line has kept no good part yet.
    page.evaluate(GOOD_PART)
    names = (".review-picture", ".review-reference", "[data-decide=pass]")
    picture, good, button = [page.locator(name).bounding_box() or {} for name in names]
    assert 0 < picture["y"] + picture["height"] <= button["y"]
    assert 0 < good["y"] + good["height"] <= button["y"]
    tap = page.touchscreen.tap
    for number, (selector, after) in enumerate(
        (("[data-decide=pass]", 1), ("[data-code] >> nth=0", 2), ("#review-undo", 1)), 1
    ):
        let_time_stand(page, number)  # what comes within a quarter of a second is taken for the second half of a tap
        box = page.locator(selector).bounding_box()
        assert box
        assert box["height"] >= 40, "a thumb must find it"
        tap(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
        shows(page, ids[after])
    let_time_stand(page, 9)
    page.tap("[data-decide=unknown]")
    shows(page, ids[2])
    page.tap("[data-decide=pass]")  # at once: a tap too many, this image was not seen yet
    assert page.locator("#review.sending").count() == 0
    assert page.get_attribute(".review-item", "data-id") == str(ids[2])
    assert [row[:4] for row in decisions(shown_line, *ids)] == [
        (ids[0], "pass", None, "Ben"),
        (ids[1], "fail", "D301", "Ben"),
        (ids[1], "review", None, "daemon"),
        (ids[1], "unknown", None, "Ben"),
    ]


def test_a_decision_that_cannot_be_stored_stays_in_the_page_and_is_tried_again(
    shown_line: ShownLine, open_page: Pages
) -> None:
    open_page.forgive("503")
    ids = publish(shown_line, "locked", 2)
    page = open_page(shown_line.url("/review?lot=locked"))
    begin(page, "Eva")
    shows(page, ids[0])
    with closing(
        sqlite3.connect(shown_line.folder / "inspection.db", isolation_level=None, timeout=PATIENCE_S)
    ) as database:
        database.execute("BEGIN IMMEDIATE")
        page.keyboard.press("1")
        page.wait_for_selector("#review-retry:visible")
        assert "fail, void" in page.inner_text("#review-problem")
        assert "kept here" in page.inner_text("#review-problem")
        assert page.get_attribute(".review-item", "data-id") == str(ids[0])
        database.execute("ROLLBACK")
    while page.locator("#review-retry").is_visible():
        page.keyboard.press("r")
        page.wait_for_timeout(200)
    shows(page, ids[1])
    assert [row[1:3] for row in decisions(shown_line, *ids)] == [("fail", "D301")]
