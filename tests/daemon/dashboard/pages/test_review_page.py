"""The page Review over HTTP: images and what it shows of them, refusals, and the offers to several reviewers.

Deciding needs a daemon: test_browser_review_and_defects.py.
"""

import json
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote, urlencode

import pytest

from daemon.units import utc_text
from tests.daemon.dashboard.web import EVIL, Web, a_picture

SEAT, OTHER = "0123456789abcdef", "fedcba9876543210"
EVA = "coserve_reviewer=Eva"
RULES = """
boards: {mainboard-a: {components: {R0402: 2}}}
classifiers: {"*": {expert: "{component}", pass: [ok]}}
defects: {tombstone: D101, bridge: D207}
"""


@pytest.fixture(scope="module")
def web(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Web]:
    """Three images that wait, on two boards, one of them with a hostile name; a good part; one decided."""
    line = Web(tmp_path_factory.mktemp("review") / "line")
    line.sql("INSERT INTO rules_versions VALUES ('ffffffffffff', 'ff', '2026-11-22T00:00:00.000Z', :text)", text=RULES)
    line.add_board(1, "A1")
    line.add_board(2, EVIL, lot="L2", station=None)
    line.add_image(1, 1, "fail", defect="D207", image_path="images/2026-11-21/000000/1.png")
    line.add_image(2, 1, "pass", designator="R1", image_path="images/2026-11-21/000000/2.png")
    line.add_image(3, 2, "review", designator=EVIL, component="C0603")
    line.add_image(4, 2, "unknown", reason="deadline", component="C0603")
    line.add_image(5, 2, "fail", defect=EVIL, component="C0603")
    line.add_image(6, 1, None)
    line.add_stage(1, label="tombstone", confidence=0.97)
    line.add_stage(1, 1, expert="solder", label=None, confidence=None)
    line.add_stage(3, expert=EVIL, label=EVIL)
    line.add_box(1, 1, "bridge", 0.61, 10.5, 20, 30, 44)
    line.add_review(5, "fail", EVIL, defect="D500", note=EVIL)
    line.add_image(7, 1, "pass", image_path="images/2026-11-21/000000/1.png", component="BGA")
    line.add_stage(7, 0, expert="BGA")
    line.add_stage(7, 1, expert="balls", label=EVIL, confidence=0.9)
    line.add_version("BGA", classes='["ok", "tilted"]')
    line.add_version("balls", classes=json.dumps(["void", EVIL, "void"]))
    line.add_version("balls", expert_version="ffffffffffff", classes='["older"]')
    line.add_box(7, 1, EVIL, 0.9, 1, 2, 3, 4)
    line.add_review(7, "fail", EVIL, review_id=70)
    line.add("drawn_boxes", review_id=70, label=EVIL, x1=1, y1=2, x2=3, y2=4)
    for number in (1, 2):
        line.add_picture(f"images/2026-11-21/000000/{number}.png", a_picture())
    with line.running() as running:
        yield running


def following(web: Web, seat: str = SEAT, cookie: str = EVA, **fields: object) -> dict[str, Any]:
    answer = web.get("/review/next", query={"seat": seat} | fields, Cookie=cookie)
    assert answer.status == 200, answer.text
    return answer.json


def ids(web: Web, seat: str = SEAT, cookie: str = EVA, **fields: object) -> list[int]:
    return [item["id"] for item in following(web, seat, cookie, **fields)["items"]]


def test_the_reviewers_name_is_asked_once_and_remembered(web: Web) -> None:
    first = web.get("/review?lot=L2")
    assert "Who decides?" in first.text
    assert 'id="review-stage"' not in first.text
    body = f"reviewer={quote('Zoë Müller; x=1')}&next={quote('/review?lot=L2')}"
    answer = web.post("/review/name", body, Origin=web.origin)
    assert (answer.status, answer.headers["location"]) == (303, "/review?lot=L2")
    cookie = answer.headers["set-cookie"]
    assert all(flag in cookie for flag in ("HttpOnly", "SameSite=strict"))
    page = web.get("/review", Cookie=cookie.split(";")[0])
    assert "Zoë Müller; x=1" in page.text
    assert "Who decides?" not in page.text


def test_what_a_browser_remembers_as_skipped_comes_last_for_its_reviewer_alone(web: Web) -> None:
    assert ids(web, "1" * 16, "coserve_reviewer=Uma", skipped="4,1") == [3, 4, 1]
    assert ids(web, "1" * 16, "coserve_reviewer=Ole") == [1, 3, 4]
    for wrong in ("x", "1,,2", "1 OR 1=1", ",".join(["1"] * 201), "1" * 20):
        refused = web.get("/review/next", query={"seat": SEAT, "skipped": wrong}, Cookie=EVA)
        assert (refused.status, "skipped" in refused.text) == (422, True)


def test_what_waits_comes_oldest_board_first_or_newest(web: Web) -> None:
    answer = following(web)
    assert [item["id"] for item in answer.pop("items")] == [1, 3, 4]
    assert answer == {"left": 3, "left_is_least": False, "done": 0, "done_by_you": 0}
    assert ids(web, order="newest") == [3, 4, 1]
    assert ids(web, held="1,3") == [4]
    assert ids(web, held=f"{'9' * 25},1") == [3, 4], "nonsense numbers are ignored"
    assert ids(web, count=0) == []


@pytest.mark.parametrize(
    ("which", "images"),
    [
        ({"type": "mainboard-a"}, [1, 3, 4]),
        ({"lot": "L2"}, [3, 4]),
        ({"station": "AOI-1"}, [1]),
        ({"component": "C0603", "verdict": "unknown"}, [4]),
        ({"expert": "solder"}, [1]),
        ({"defect": "D207"}, [1]),
        ({"lot": "' OR '1'='1"}, []),
        ({"component": "x'; DROP TABLE reviews; --"}, []),
        ({"expert": "%"}, []),
    ],
)
def test_filters_choose_and_are_only_ever_values(web: Web, which: dict[str, str], images: list[int]) -> None:
    assert ids(web, **which) == images
    assert web.get(f"/review?{urlencode(which)}", Cookie=EVA).status == 200


def test_codes_are_those_of_the_rules_first_then_what_was_named_before(web: Web) -> None:
    page = web.get("/review", Cookie=EVA).text
    places = [page.index(f'data-code="{code}"') for code in ("D101", "D207", "D500")]
    assert places == sorted(places)
    assert "tombstone" in page


def test_without_a_daemon_a_decision_is_not_stored_and_says_so(web: Web) -> None:
    endless = web.post("/review/items/1", "verdict=fail&boxes=[1e400]", Origin=web.origin, Cookie=EVA)
    assert endless.status == 422
    answer = web.post("/review/items/1", "verdict=pass&newest=", Origin=web.origin, Cookie=EVA)
    assert (answer.status, answer.json["code"]) == (503, "no_daemon")
    assert "coserve run" in answer.json["reason"]
    assert web.sql("SELECT count(*) FROM reviews") == [(2,)]


def test_what_one_page_shows_is_offered_to_others_last(web: Web) -> None:
    third, tom, ute = "00112233445566aa", "coserve_reviewer=Tom", "coserve_reviewer=Ute"
    for seat in (SEAT, "1" * 16):  # the pages of the tests before show nothing more
        ids(web, seat, count=0)
    assert ids(web, OTHER, tom, count=1, held="1") == [3]
    assert ids(web, third, ute) == [4, 1, 3]
    assert ids(web, third, ute, skipped="4")[-1] == 4


def test_a_review_that_the_reviewer_undid_is_not_offered_to_be_undone_again(web: Web) -> None:
    def last() -> dict[str, Any]:
        return web.get("/review/last", Cookie="coserve_reviewer=Uwe").json

    web.add_review(3, "pass", "Uwe")
    assert last() == {}, "it is not of today"
    web.add_review(4, "pass", "Uwe", at=utc_text(time.time()))
    ((newest,),) = web.sql("SELECT max(review_id) FROM reviews")
    assert last() == {"id": 4, "newest": newest}
    assert following(web, count=0)["done"] == 1
    web.add_review(4, "unknown", "Uwe", undo_of=newest, note="undecided again: undone")
    assert last() == {}
    assert 4 in ids(web, "aaaaaaaaaaaaaaaa")
