"""Experts and Machine in a real browser: memory, work of the executors, and the way to one expert by keys alone."""

from collections.abc import Iterator

import pytest

from tests.daemon.dashboard.browser import Pages, ShownLine, let_time_stand, showing


@pytest.fixture(scope="module")
def line(tmp_path_factory: pytest.TempPathFactory, experts_folder) -> Iterator[ShownLine]:
    with showing(tmp_path_factory.mktemp("experts") / "line", experts_folder) as line:
        line.fill()
        line.control("pin", expert="yolo-solder", device="cpu")
        line.wait(lambda: any(expert["pinned"] for expert in line.control("experts")["experts"]))
        yield line


#: Measures at one moment: the picture is made anew whenever the memory changes.
SEEN = """() => {
  const maps = [...document.querySelectorAll(".memory svg.map")].filter((map) => map.getBoundingClientRect().width);
  const map = maps[0];
  return {
    maps: maps.length,
    width: map.getBoundingClientRect().width,
    titles: [...map.querySelectorAll("title")].map((title) => title.textContent).join(" "),
    pinned: map.querySelectorAll("g.pinned").length,
    letters: map.querySelector("text").getBoundingClientRect().height,
  };
}"""


def test_memory_and_work_are_pictures_that_can_be_read_with_tables_queues_disks_and_versions(
    open_page: Pages, line: ShownLine
) -> None:
    page = open_page(line.url("/experts"), width=390, dark=True)
    page.locator(".memory svg.map:visible").wait_for()
    drawing = page.evaluate(SEEN)
    assert drawing["maps"] == 1
    assert 0.7 * 390 < drawing["width"] <= 390
    names = {expert["expert"] for pool in line.control("memory")["pools"] for expert in pool["experts"]}
    assert all(name in drawing["titles"] for name in names)
    assert drawing["pinned"] >= 1
    assert drawing["letters"] >= 9  # large enough to be read
    page.get_by_text("As a table").first.click()
    table = page.get_by_role("region", name="What is in memory")
    assert table.get_by_text("resident, pinned").count() == 1
    assert (
        page.locator("[data-live=loads] svg.bars:visible, [data-live=loads] :text('No expert was loaded')").count() >= 1
    )
    listed = page.locator(".scroll[aria-label='All experts']")
    assert listed.evaluate("table => table.scrollWidth <= table.clientWidth"), "no column is cut"
    page.goto(line.url("/machine?seconds=300"))
    picture = page.locator("svg.time:visible:not(.lines)")
    picture.wait_for()
    titles = " ".join(picture.locator("title").all_text_contents())
    assert "images in" in titles
    assert "loads, " in titles
    page.locator("svg.lines:visible").nth(1).wait_for()
    page.locator("main", has_text=line.status()["rules_version"]).wait_for()
    text = page.inner_text("main")
    for heading in ("Executors", "Temperature", "Disk", "Retention", "In force", "Processes beside the line"):
        assert heading in text
    assert "dashboard" in text


def test_an_expert_is_found_and_opened_with_the_keyboard_alone(open_page: Pages, line: ShownLine) -> None:
    page = open_page(line.url("/"))
    let_time_stand(page)
    page.keyboard.press("g")
    page.keyboard.press("e")
    page.wait_for_url("**/experts")
    page.keyboard.press("/")
    page.keyboard.type("qfp")
    page.keyboard.press("Enter")
    page.wait_for_url("**/experts?q=qfp*")
    page.locator("#main").focus()
    page.keyboard.press("j")
    page.keyboard.press("Enter")
    page.wait_for_url("**/experts/QFP64")
    assert page.get_by_role("heading", level=1).inner_text() == "QFP64"
    assert "Its confidence in training is not known" in page.inner_text("main")
    assert "mainboard-a" in page.get_by_role("region", name="Where the rules use it").inner_text()
    page.locator("svg.bars:visible").wait_for()
    page.locator(".thumbs img").first.scroll_into_view_if_needed()
    page.wait_for_function("() => document.querySelector('.thumbs img').naturalWidth > 0")
