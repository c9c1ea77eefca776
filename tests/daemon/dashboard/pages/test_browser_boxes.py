"""Boxes that people draw and correct on Review, in a real Chromium before a real line: by mouse, touch and keys."""

import sqlite3
from contextlib import closing
from typing import TYPE_CHECKING, Any

import pytest

from tests.daemon.dashboard.browser import Pages, ShownLine
from tests.daemon.dashboard.pages.test_browser_review_and_defects import begin, publish, shows

if TYPE_CHECKING:
    from playwright.sync_api import Page

#: The pictures of the line (ShownLine.send_image).
WIDTH, HEIGHT = 160, 120
Box = tuple[str, float, float, float, float]


def an_image(line: ShownLine, lot: str, *boxes: Box, component: str = "QFP64") -> int:
    """Publish an image in which the detector `yolo-solder` found `boxes`."""
    (image,) = publish(line, lot, 1, component=component)
    with closing(sqlite3.connect(line.folder / "inspection.db")) as database, database:
        database.executemany(
            "INSERT INTO detections (inspection_id, step, label, confidence, x1, y1, x2, y2)"
            " VALUES (?, 1, ?, 0.9, ?, ?, ?, ?)",
            [(image, *box) for box in boxes],
        )
    return image


def drawn(line: ShownLine, image: int) -> list[Any]:
    query = (
        "SELECT label, x1, y1, x2, y2 FROM drawn_boxes"
        " WHERE review_id = (SELECT max(review_id) FROM reviews WHERE inspection_id = ?) ORDER BY box_id"
    )
    return line.rows(query, image)


def opened(line: ShownLine, open_page: Pages, lot: str, image: int, width: int = 1280) -> "Page":
    page = open_page(line.url(f"/review?lot={lot}&image={image}"), width)
    begin(page, "Eva")
    shows(page, image)
    page.wait_for_function("() => document.querySelector('.review-picture img').complete")
    page.wait_for_timeout(300)  # buttons take no tap that began at the image before
    return page


def at(page: "Page", x: float, y: float) -> tuple[float, float]:
    """Return where a pixel of the image is on the screen."""
    svg = page.locator(".review-picture > .picture svg").bounding_box()
    assert svg
    return svg["x"] + x * svg["width"] / WIDTH, svg["y"] + y * svg["height"] / HEIGHT


def pull(page: "Page", start: tuple[float, float], end: tuple[float, float]) -> None:
    """Drag with the mouse between two pixels of the image."""
    page.mouse.move(*at(page, *start))
    page.mouse.down()
    page.mouse.move(*at(page, *((a + b) / 2 for a, b in zip(start, end, strict=True))))
    page.mouse.move(*at(page, *end))
    page.mouse.up()


def near(*boxes: Box) -> list[Any]:
    return [(box[0], *(pytest.approx(value, abs=0.7) for value in box[1:])) for box in boxes]


def test_boxes_of_a_detector_are_corrected_with_the_mouse_and_stored_with_the_decision(
    shown_line: ShownLine, open_page: Pages
) -> None:
    image = an_image(shown_line, "mouse", ("bridge", 10, 10, 60, 50), ("void", 20, 20, 40, 40), ("void", 90, 5, 99, 9))
    page = opened(shown_line, open_page, "mouse", image)
    page.get_by_role("button", name="Mark").click()
    assert page.locator("[data-label][aria-pressed=true]").inner_text().split() == ["1", "bridge"]
    pull(page, (120, 110), (70, 60))  # a new one, from its lower right corner
    pull(page, (95, 85), (105, 90))  # it is selected: moved
    pull(page, (80, 80), (75, 80))  # its left side
    page.keyboard.press("2")
    page.mouse.click(*at(page, 30, 30))  # of two under the pointer the smaller one
    pull(page, (40, 40), (44, 46))  # its lower right corner
    page.mouse.click(*at(page, 95, 7))
    page.get_by_role("button", name="Delete").click()
    page.mouse.click(*at(page, 150, 30))  # nothing is there
    pull(page, (150, 30), (190, 50))  # as far as the image reaches
    page.locator(".review-marks").get_by_role("button", name="Done").click()
    page.wait_for_selector("text=Boxes: 4.")
    page.keyboard.press("1")
    page.wait_for_selector("#review-empty:visible")
    assert drawn(shown_line, image) == near(
        ("bridge", 10, 10, 60, 50), ("void", 20, 20, 44, 46), ("void", 75, 65, 130, 115), ("void", 150, 30, 160, 50)
    )
    page.goto(shown_line.url(f"/review?image={image}"))
    shows(page, image)
    assert "decided by Eva with 4 boxes" in page.inner_text(".review-standing")
    assert page.locator(".review-picture .drawn title").all_text_contents() == ["bridge Eva", *["void Eva"] * 3]
    page.keyboard.press("b")
    assert page.locator(".review-picture rect").count() == 4, "those of Eva, without the detector's"


def test_boxes_are_drawn_and_corrected_by_keys_alone_and_escape_leaves_them_as_they_were(
    shown_line: ShownLine, open_page: Pages
) -> None:
    image = an_image(shown_line, "keyboard", ("bridge", 10, 10, 60, 50), ("void", 20, 20, 40, 40))
    page = opened(shown_line, open_page, "keyboard", image)
    for key in ("b", "a", "Delete", "Tab", "Delete", "Escape"):
        page.keyboard.press(key)
    assert page.locator(".review-picture rect").count() == 2
    assert page.locator(".review-picture .drawn").count() == 0
    page.keyboard.press("b")
    page.locator(".review-picture").focus()
    for key in ("Tab", "Tab", "Delete", "a", *["ArrowLeft"] * 3, "ArrowUp", *["Shift+ArrowRight"] * 2, "3"):
        page.keyboard.press(key)
    assert page.locator(".review-picture rect:focus").get_attribute("aria-label") == "label0"
    assert shown_line.rows("SELECT * FROM reviews WHERE inspection_id = ?", image) == []
    svg = page.locator(".review-picture > .picture svg").bounding_box()
    assert svg
    step = 4 * WIDTH / svg["width"]
    page.keyboard.press("s")  # nothing is skipped by mistake
    page.keyboard.press("f")  # ends marking too
    page.wait_for_selector("#review-empty:visible")
    assert drawn(shown_line, image) == near(
        ("bridge", 10, 10, 60, 50), ("label0", 64 - 3 * step, 48 - step, 96 - step, 72 - step)
    )
