"""Review and Defects as people use them, in a real Chromium before a real line: by keyboard alone, by touch, by two."""

import os
import signal
import sqlite3
import time
from contextlib import closing
from typing import TYPE_CHECKING, Any

import pytest

from tests.daemon.dashboard.browser import Pages, ShownLine, let_time_stand
from tests.waiting import PATIENCE_S

if TYPE_CHECKING:
    from playwright.sync_api import Page

EVIL = "<img src=x onerror=alert(1)>\"'&amp;"
#: Presses a key at a time in milliseconds.
PRESS_AT = (
    "([key, at]) => { setTimeout(() => document.body.dispatchEvent(new KeyboardEvent('keydown',"
    " {key, bubbles: true, cancelable: true})), at - Date.now()); }"
)


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
    """Give the reviewer's name by keyboard."""
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


@pytest.mark.parametrize("width", [1920, 1280, 390])
def test_the_fail_button_and_every_defect_show_their_whole_names(
    shown_line: ShownLine, open_page: Pages, width: int
) -> None:
    publish(shown_line, f"names{width}", 1)
    page = open_page(shown_line.url(f"/review?lot=names{width}"), width)
    begin(page, "Ida")
    page.locator(".review-item").wait_for()
    page.evaluate(
        "document.getElementById('review-fail').textContent = 'Fail: insufficient solder on both of its sides'"
    )
    for button in page.locator(".decide, .review-verdicts .button").all():
        assert button.evaluate("e => e.scrollWidth <= e.clientWidth && e.scrollHeight <= e.clientHeight"), button
    for code in page.locator(".code strong").all():
        assert code.evaluate("e => e.scrollWidth <= e.clientWidth"), code
    codes = page.locator("#review-codes")
    assert codes.evaluate("e => e.scrollWidth <= e.clientWidth"), "they wrap: nothing lies to the side"
    assert has_no_sideways_scroll(page)


def test_a_whole_review_by_touch_on_a_telephone(shown_line: ShownLine, open_page: Pages) -> None:
    ids = publish(shown_line, "touch", 3)
    page = open_page(shown_line.url("/review?lot=touch"), 390, dark=True)
    let_time_stand(page)
    begin(page, "Ben")
    shows(page, ids[0])
    assert has_no_sideways_scroll(page)
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


def test_the_second_reviewer_hears_who_decided_sees_the_new_state_and_nothing_is_lost(
    shown_line: ShownLine, open_page: Pages
) -> None:
    open_page.forgive("409")
    (image,) = publish(shown_line, "two", 1)
    first = open_page(shown_line.url(f"/review?lot=two&image={image}"))
    begin(first, "Eva")
    second = open_page(shown_line.url(f"/review?lot=two&image={image}"))
    begin(second, "Ben")
    first.keyboard.press("p")
    first.wait_for_selector("#review-empty:visible")
    second.keyboard.press("1")
    second.wait_for_selector("#review-problem:visible")
    with second.expect_response("**/review/next?*"):  # as every few seconds
        second.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
    second.wait_for_timeout(100)
    problem = second.inner_text("#review-problem")
    assert "Somebody else has decided" in problem
    assert "Eva decided pass" in problem
    assert "Eva" in second.inner_text(".review-standing")
    assert decisions(shown_line, image) == [(image, "pass", None, "Eva", None)]
    second.keyboard.press("1")  # now that it was seen
    second.wait_for_selector("#review-empty:visible")
    assert [row[1:4] for row in decisions(shown_line, image)] == [("pass", None, "Eva"), ("fail", "D301", "Ben")]
    first.keyboard.press("u")  # Eva takes back what Ben has overruled
    first.wait_for_selector("#review-problem:visible")
    assert "Ben decided fail D301" in first.inner_text("#review-problem")
    assert len(decisions(shown_line, image)) == 2


def test_of_two_who_decide_at_the_same_moment_one_is_written_and_the_other_hears(
    shown_line: ShownLine, open_page: Pages
) -> None:
    open_page.forgive("409")
    (image,) = publish(shown_line, "once", 1)
    pages = [open_page(shown_line.url(f"/review?lot=once&image={image}")) for _ in range(2)]
    for page, name in zip(pages, ("Eva", "Ben"), strict=True):
        begin(page, name)
    at_ms = time.time() * 1000 + 300
    for page, key in zip(pages, "px", strict=True):
        page.evaluate(PRESS_AT, [key, at_ms])
    for page in pages:
        page.wait_for_selector("#review-problem:visible, #review-empty:visible")
    refused = [page.locator("#review-problem").is_visible() for page in pages]
    assert sorted(refused) == [False, True]
    ((_, verdict, _, reviewer, _),) = decisions(shown_line, image)
    assert (verdict, reviewer) == (("unknown", "Ben") if refused[0] else ("pass", "Eva"))


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


def test_an_image_whose_picture_is_gone_says_so_and_hostile_texts_are_only_texts(
    shown_line: ShownLine, open_page: Pages
) -> None:
    open_page.forgive("404")
    ids = publish(shown_line, "gone", 2, serial=EVIL)
    for (path,) in shown_line.rows("SELECT image_path FROM inspections WHERE inspection_id = ?", ids[0]):
        (shown_line.folder / path).unlink()
    page = open_page(shown_line.url("/review?lot=gone"))
    page.on("dialog", lambda dialog: pytest.fail(f"a script ran: {dialog.message}"))
    begin(page, f"Eva {EVIL}")
    shows(page, ids[0])
    assert "No image" in page.inner_text(".review-picture")
    assert EVIL in page.inner_text(".review-item")
    page.keyboard.press("n")
    page.keyboard.type(EVIL)
    page.keyboard.press("Enter")
    page.fill("#review-code", EVIL)
    page.keyboard.press("Enter")
    shows(page, ids[1])
    page.keyboard.press("u")
    shows(page, ids[0])
    assert EVIL in page.inner_text(".review-item")
    assert decisions(shown_line, *ids)[0] == (ids[0], "fail", EVIL, f"Eva {EVIL}", EVIL)
    page.goto(shown_line.url("/defects?range=7d&trend=lot"))
    page.wait_for_selector("#pareto-title")


def test_zoom_and_a_good_part_beside_it_by_keys(shown_line: ShownLine, open_page: Pages) -> None:
    good = publish(shown_line, "good", 1, component="R0402")
    (image,) = publish(shown_line, "compare", 1, component="R0402")
    for inspection_id, verdict in ((good[0], "pass"), (image, "review")):
        answer = shown_line.control("review", inspection_id=inspection_id, verdict=verdict, reviewer="Eva")
        assert answer["type"] == "ok", answer
    page = open_page(shown_line.url(f"/review?lot=compare&image={image}"))
    begin(page, "Eva")
    shows(page, image)
    before = page.locator(".review-picture .picture").bounding_box()
    page.keyboard.press("z")
    after = page.locator(".review-picture .picture").bounding_box()
    assert before
    assert after
    assert after["width"] == pytest.approx(2 * before["width"], rel=0.05)
    page.keyboard.press("c")
    assert page.locator(".review-picture .good img").get_attribute("src") != f"/pictures/{image}"
    page.keyboard.press("c")
    assert page.locator(".review-picture .good").count() == 0


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (390, True)])
def test_from_a_number_of_the_defects_to_its_images_and_to_a_decision(
    shown_line: ShownLine, open_page: Pages, width: int, dark: bool
) -> None:
    shown_line.wait(lambda: shown_line.rows("SELECT count(*) FROM boards WHERE verdict = 'fail'")[0][0] >= 2)
    page = open_page(shown_line.url("/defects?range=7d&by=defect"), width, dark)
    page.wait_for_selector(".defects-bar .meter")
    assert has_no_sideways_scroll(page)
    row = page.locator("tbody[data-rows] tr", has_text="missing_void").first
    row.locator("a").focus()
    page.keyboard.press("Enter")
    page.wait_for_selector("h1:has-text('Images')")
    assert has_no_sideways_scroll(page)
    link = page.locator("tbody a[data-row]").first
    image = int(link.inner_text())
    link.focus()
    page.keyboard.press("Enter")
    begin(page, "Eva")
    shows(page, image)
    assert has_no_sideways_scroll(page)
    page.keyboard.press("p")
    shown_line.wait(lambda: decisions(shown_line, image))
    assert decisions(shown_line, image)[-1][1] == "pass"


def test_skipped_images_come_last_also_after_a_restart_of_the_web_process_and_the_counts_keep_up(
    shown_line: ShownLine, open_page: Pages
) -> None:
    open_page.forgive("ERR_|Failed to load")
    ids = publish(shown_line, "skips", 8)
    page = open_page(shown_line.url("/review?lot=skips"), 1280)
    begin(page, "Ida Ott")
    shows(page, *ids[:2], press="s")
    for number, image in enumerate(ids[2:4], start=1):
        shows(page, image, press="p")
        page.wait_for_function(f"() => document.getElementById('review-you').textContent === ' ({number} by you)'")
    shows(page, ids[4])
    (before,) = (child for child in shown_line.status()["children"] if child["name"] == "dashboard")
    os.kill(before["pid"], signal.SIGKILL)
    shown_line.wait(lambda: shown_line.status()["children"][0]["pid"] not in (before["pid"], None))
    shown_line.wait_until_it_shows()
    page.goto(shown_line.url("/review?lot=skips"))
    shows(page, *ids[4:], *ids[:2], press="p")
    page.wait_for_selector("#review-empty:visible")
    page.wait_for_function("() => document.getElementById('review-you').textContent === ' (8 by you)'")
    page.keyboard.press("u")
    page.wait_for_function("() => document.getElementById('review-you').textContent === ' (7 by you)'")
