"""Review and Defects as people use them, in a real Chromium before a real line: by keyboard alone, by touch, by two."""

import os
import signal
import sqlite3
import time
from contextlib import closing
from typing import TYPE_CHECKING, Any

import pytest

from tests.daemon.dashboard.browser import Pages, ShownLine, let_time_stand
from tests.lines import a_jpeg
from tests.waiting import PATIENCE_S

if TYPE_CHECKING:
    from playwright.sync_api import Page

EVIL = "<img src=x onerror=alert(1)>\"'&amp;"


def publish(line: ShownLine, lot: str, count: int, *, component: str = "C0603", serial: str = "S1") -> list[int]:
    """Images of a lot of their own that wait for a decision; their inspection_ids."""
    board = {"type": "open-board", "serial": f"{lot}-{serial}"[:128], "lot": lot, "station": "AOI-1"}
    for number in range(count):
        line.send(a_jpeg(number, 160, 120), board=board, component=component, designator=f"P{number + 1}")
    kept = "SELECT inspection_id FROM inspections WHERE lot = ? AND image_path IS NOT NULL ORDER BY inspection_id"
    line.wait(lambda: len(line.rows(kept, lot)) == count)
    return [row[0] for row in line.rows(kept, lot)]


def decisions(line: ShownLine, *ids: int) -> list[tuple[Any, ...]]:
    query = "SELECT inspection_id, verdict, defect, reviewer, note FROM reviews ORDER BY review_id"
    return [row for row in line.rows(query) if row[0] in ids]


def begin(page: "Page", name: str) -> None:
    """Say who decides, by keyboard."""
    page.wait_for_selector("#reviewer:focus")
    page.keyboard.type(name)
    page.keyboard.press("Enter")
    page.wait_for_selector(".review-item")


def showing(page: "Page", image: int) -> None:
    page.wait_for_selector(f'.review-item[data-id="{image}"]')


def has_no_sideways_scroll(page: "Page") -> bool:
    return page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")


def test_a_whole_review_by_keyboard_alone(shown_line: ShownLine, open_page: Pages) -> None:
    ids = publish(shown_line, "keys", 5)
    page = open_page(shown_line.url("/review?lot=keys"), 1280)
    begin(page, "Eva Maier")
    showing(page, ids[0])
    page.wait_for_function("() => document.querySelector('.review-picture img').naturalWidth === 160")
    assert page.text_content("#review-left") == "5"
    page.keyboard.press("p")
    showing(page, ids[1])
    page.keyboard.press("1")  # the first code of the rules
    showing(page, ids[2])
    page.keyboard.press("n")
    page.keyboard.type("ask p the x")  # keys are letters here
    page.keyboard.press("Enter")
    page.keyboard.press("x")
    showing(page, ids[3])
    page.keyboard.press("u")
    showing(page, ids[2])
    page.keyboard.press("f")  # the line named no defect: which one?
    page.wait_for_selector("#review-codes.choosing")
    page.keyboard.press("f")
    showing(page, ids[3])
    page.keyboard.press("s")
    showing(page, ids[4])
    page.keyboard.press("p")
    showing(page, ids[3])  # skipped, so last
    page.keyboard.press("p")
    page.wait_for_selector("#review-empty:visible")
    assert decisions(shown_line, *ids) == [
        (ids[0], "pass", None, "Eva Maier", None),
        (ids[1], "fail", "D301", "Eva Maier", None),
        (ids[2], "unknown", None, "Eva Maier", "ask p the x"),
        (
            ids[2],
            "review",
            None,
            "daemon",
            f"undecided again: undo of review {review_of(shown_line, ids[2])} by Eva Maier",
        ),
        (ids[2], "fail", None, "Eva Maier", None),
        (ids[4], "pass", None, "Eva Maier", None),
        (ids[3], "pass", None, "Eva Maier", None),
    ]
    page.wait_for_function("() => document.getElementById('review-done').textContent === '5'")
    page.keyboard.press("?")
    assert page.locator("#help").get_by_text("Undo the last decision").is_visible()


def test_on_a_line_without_codes_a_fail_takes_two_presses_as_everywhere(
    shown_line: ShownLine, open_page: Pages
) -> None:
    ids = publish(shown_line, "no-codes", 2)
    page = open_page(shown_line.url("/review?lot=no-codes"))
    begin(page, "Eva")
    page.evaluate("document.querySelectorAll('.code').forEach((button) => button.remove())")
    page.keyboard.press("f")
    page.wait_for_selector("text=Write its code, or the same again for none")
    assert decisions(shown_line, *ids) == []
    page.keyboard.press("f")
    showing(page, ids[1])
    assert decisions(shown_line, *ids) == [(ids[0], "fail", None, "Eva", None)]


def review_of(line: ShownLine, image: int) -> int:
    return line.rows("SELECT min(review_id) FROM reviews WHERE inspection_id = ?", image)[0][0]


def test_a_whole_review_by_touch_on_a_telephone(shown_line: ShownLine, open_page: Pages) -> None:
    ids = publish(shown_line, "touch", 3)
    page = open_page(shown_line.url("/review?lot=touch"), 390, dark=True)
    let_time_stand(page)
    begin(page, "Ben")
    showing(page, ids[0])
    assert has_no_sideways_scroll(page)
    tap = page.touchscreen.tap
    for number, (selector, after) in enumerate(
        (("[data-decide=pass]", 1), (".code >> nth=0", 2), ("#review-undo", 1)), 1
    ):
        let_time_stand(page, number)  # what comes within a quarter of a second is taken for the second half of a tap
        box = page.locator(selector).bounding_box()
        assert box
        assert box["height"] >= 40, "a thumb must find it"
        tap(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
        showing(page, ids[after])
    let_time_stand(page, 9)
    page.tap("[data-decide=unknown]")
    showing(page, ids[2])
    page.tap("[data-decide=pass]")  # at once: a tap too many, nobody has seen this image
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
    said = second.inner_text("#review-problem")
    assert "Somebody else was there" in said
    assert "Eva decided pass" in said
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
    press = (
        "([key, at]) => { setTimeout(() => document.body.dispatchEvent(new KeyboardEvent('keydown',"
        " {key, bubbles: true, cancelable: true})), at - Date.now()); }"
    )
    at_ms = time.time() * 1000 + 300
    for page, key in zip(pages, "px", strict=True):
        page.evaluate(press, [key, at_ms])
    for page in pages:
        page.wait_for_selector("#review-problem:visible, #review-empty:visible")
    told = [page.locator("#review-problem").is_visible() for page in pages]
    assert sorted(told) == [False, True]
    ((_, verdict, _, reviewer, _),) = decisions(shown_line, image)
    assert (verdict, reviewer) == (("unknown", "Ben") if told[0] else ("pass", "Eva"))


def test_a_decision_that_cannot_be_stored_stays_in_the_page_and_is_tried_again(
    shown_line: ShownLine, open_page: Pages
) -> None:
    open_page.forgive("503")
    ids = publish(shown_line, "locked", 2)
    page = open_page(shown_line.url("/review?lot=locked"))
    begin(page, "Eva")
    showing(page, ids[0])
    with closing(
        sqlite3.connect(shown_line.folder / "inspection.db", isolation_level=None, timeout=PATIENCE_S)
    ) as other:
        other.execute("BEGIN IMMEDIATE")
        page.keyboard.press("1")
        page.wait_for_selector("#review-retry:visible")
        assert "fail D301" in page.inner_text("#review-problem")
        assert "kept here" in page.inner_text("#review-problem")
        assert page.get_attribute(".review-item", "data-id") == str(ids[0])
        other.execute("ROLLBACK")
    while page.locator("#review-retry").is_visible():
        page.keyboard.press("r")
        page.wait_for_timeout(200)
    showing(page, ids[1])
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
    showing(page, ids[0])
    assert "No picture" in page.inner_text(".review-picture")
    assert EVIL in page.inner_text(".review-item")
    page.keyboard.press("n")
    page.keyboard.type(EVIL)
    page.keyboard.press("Enter")
    page.fill("#review-code", EVIL)
    page.keyboard.press("Enter")
    showing(page, ids[1])
    page.keyboard.press("u")
    showing(page, ids[0])
    assert EVIL in page.inner_text(".review-item")
    assert decisions(shown_line, *ids)[0] == (ids[0], "fail", EVIL, f"Eva {EVIL}", EVIL)
    page.goto(shown_line.url("/defects?range=7d&trend=lot"))
    page.wait_for_selector("#pareto-title")


def test_zoom_and_a_good_part_beside_it_by_keys(shown_line: ShownLine, open_page: Pages) -> None:
    good = publish(shown_line, "good", 1, component="R0402")
    (image,) = publish(shown_line, "compare", 1, component="R0402")
    asked = shown_line.control("review", inspection_id=good[0], verdict="pass", reviewer="Eva")
    assert asked["type"] == "ok", asked
    asked = shown_line.control("review", inspection_id=image, verdict="review", reviewer="Eva", note="look again")
    assert asked["type"] == "ok", asked
    page = open_page(shown_line.url(f"/review?lot=compare&image={image}"))
    begin(page, "Eva")
    showing(page, image)
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
    page.wait_for_selector("[data-chart] canvas")
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
    showing(page, image)
    assert has_no_sideways_scroll(page)
    page.keyboard.press("p")
    shown_line.wait(lambda: decisions(shown_line, image))
    assert decisions(shown_line, image)[-1][1] == "pass"


def test_what_was_skipped_still_comes_last_when_the_web_process_was_started_anew(
    shown_line: ShownLine, open_page: Pages
) -> None:
    open_page.forgive("ERR_|Failed to load")
    ids = publish(shown_line, "anew", 4)
    page = open_page(shown_line.url("/review?lot=anew"))
    begin(page, "Ada Anew")
    for image in (ids[0], ids[1]):
        showing(page, image)
        page.keyboard.press("s")
    showing(page, ids[2])
    (before,) = (one for one in shown_line.status()["children"] if one["name"] == "dashboard")
    os.kill(before["pid"], signal.SIGKILL)
    shown_line.wait(lambda: shown_line.status()["children"][0]["pid"] not in (before["pid"], None))
    shown_line.wait_until_it_shows()
    page.goto(shown_line.url("/review?lot=anew"))
    for image in (ids[2], ids[3], ids[0], ids[1]):
        showing(page, image)
        page.keyboard.press("p")
    page.wait_for_selector("#review-empty:visible")


def test_what_was_skipped_comes_last_and_the_counts_keep_up(shown_line: ShownLine, open_page: Pages) -> None:
    ids = publish(shown_line, "skips", 11)
    page = open_page(shown_line.url("/review?lot=skips"), 1280)
    begin(page, "Ida Ott")
    page.route("**/skip", lambda route: (time.sleep(0.3), route.continue_()))  # a slow network
    for image in ids[:2]:
        showing(page, image)
        page.keyboard.press("s")
    for number, image in enumerate([*ids[2:], *ids[:2]], start=1):
        showing(page, image)
        page.keyboard.press("p")
        page.wait_for_function(f"() => document.getElementById('review-you').textContent === ' ({number} by you)'")
    page.wait_for_selector("#review-empty:visible")
    page.keyboard.press("u")
    page.wait_for_function("() => document.getElementById('review-you').textContent === ' (10 by you)'")
