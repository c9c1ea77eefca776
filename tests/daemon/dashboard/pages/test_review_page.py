"""The page Review over HTTP: what it shows of whom, what it refuses, and who is offered what. Deciding needs a daemon:
test_browser_review_and_defects.py.
"""

import io
import json
from collections.abc import Iterator
from urllib.parse import quote, urlencode

import pytest
from PIL import Image

from tests.daemon.dashboard.web import AT, Web

fastapi = pytest.importorskip("fastapi", reason="needs the extra dashboard")

from daemon.dashboard.pages.review import ReviewOffers  # noqa: E402 - imports what the extra brings

EVIL = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>{{7*7}}"
SEAT, OTHER = "0123456789abcdef", "fedcba9876543210"
EVA = "coserve_reviewer=Eva"
RULES = """
boards: {mainboard-a: {components: {R0402: 2}}}
classifiers: {"*": {expert: "{component}", pass: [ok]}}
defects: {tombstone: D101, bridge: D207}
"""


def a_picture() -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (64, 48), (20, 120, 60)).save(buffer, "PNG")
    return buffer.getvalue()


@pytest.fixture(scope="module")
def web(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Web]:
    """Three images that wait, on two boards, one of them named by somebody hostile; a good part; one decided."""
    line = Web(tmp_path_factory.mktemp("review") / "line")
    line.sql("INSERT INTO rules_versions VALUES ('ffffffffffff', 'ff', '2026-11-22T00:00:00.000Z', :text)", text=RULES)
    line.add_board(1, "A1")
    line.add_board(2, EVIL, lot="L2", station=None)
    line.add_image(1, 1, "fail", defect="D207", image_path="images/2026-11-21/000000/1.png")
    line.add_image(2, 1, "pass", designator="R1", image_path="images/2026-11-21/000000/2.png")
    line.add_image(3, 2, "review", designator=EVIL[:120], component="C0603")
    line.add_image(4, 2, "unknown", reason="deadline", component="C0603")
    line.add_image(5, 2, "fail", defect=EVIL[:100], component="C0603")
    line.add_image(6, 1, None)
    line.add_stage(1, label="tombstone", confidence=0.97)
    line.add_stage(1, 1, expert="solder", label=None, confidence=None)
    line.add_stage(3, expert=EVIL[:60], label=EVIL[:60])
    line.sql("INSERT INTO detections VALUES (1, 1, 1, 'bridge', 0.61, 10.5, 20, 30, 44)")
    line.sql("INSERT INTO reviews VALUES (1, 5, :at, :name, 'fail', 'D500', :note)", at=AT, name=EVIL, note=EVIL)
    for number in (1, 2):
        line.add_picture(f"images/2026-11-21/000000/{number}.png", a_picture())
    with line.running() as running:
        yield running


def following(web: Web, seat: str = SEAT, who: str = EVA, **fields: object) -> dict:
    query = urlencode({"seat": seat, "since": "2026-11-21T00:00:00.000Z"} | fields)
    answer = web.get(f"/review/next?{query}", Cookie=who)
    assert answer.status == 200, answer.text
    return json.loads(answer.text)


def ids(web: Web, seat: str = SEAT, who: str = EVA, **fields: object) -> list[int]:
    return [item["id"] for item in following(web, seat, who, **fields)["items"]]


def test_who_decides_is_asked_once_and_remembered(web: Web) -> None:
    asked = web.get("/review?lot=L2")
    assert "Who decides?" in asked.text
    assert 'id="review-stage"' not in asked.text
    body = f"reviewer={quote('Zoë Müller; x=1')}&next={quote('/review?lot=L2')}"
    answer = web.post("/review/name", body, Origin=f"http://{web.host}")
    assert (answer.status, answer.headers["location"]) == (303, "/review?lot=L2")
    cookie = answer.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=strict" in cookie
    page = web.get("/review", Cookie=cookie.split(";")[0])
    assert "Zoë Müller; x=1" in page.text
    assert "Who decides?" not in page.text


def test_what_a_browser_remembers_as_skipped_comes_last_for_its_reviewer_alone(web: Web) -> None:
    assert ids(web, "1" * 16, "coserve_reviewer=Uma", skipped="4,1") == [3, 4, 1]
    assert ids(web, "1" * 16, "coserve_reviewer=Uma") == [3, 4, 1]
    assert ids(web, "1" * 16, "coserve_reviewer=Ole") == [1, 3, 4]
    for wrong in ("x", "1,,2", "1 OR 1=1", ",".join(["1"] * 201), "1" * 20):
        found = web.get(f"/review/next?{urlencode({'seat': SEAT, 'skipped': wrong})}", Cookie=EVA)
        assert (found.status, "skipped" in found.text) == (422, True)


@pytest.mark.parametrize("name", ["", "   ", "x" * 129, "a\nb", "\x00"])
def test_a_name_that_no_row_could_hold_is_refused(web: Web, name: str) -> None:
    answer = web.post("/review/name", f"reviewer={quote(name)}", Origin=f"http://{web.host}")
    assert answer.status == 422
    assert "set-cookie" not in answer.headers


@pytest.mark.parametrize("cookie", ["%ff%fe", "%00", "x" * 200, "%0d%0aSet-Cookie:a=b", "%20"])
def test_a_cookie_that_somebody_made_up_is_no_name(web: Web, cookie: str) -> None:
    assert "Who decides?" in web.get("/review", Cookie=f"coserve_reviewer={cookie}").text
    answer = web.post(
        "/review/items/1", "verdict=pass", Origin=f"http://{web.host}", Cookie=f"coserve_reviewer={cookie}"
    )
    assert (answer.status, json.loads(answer.text)["code"]) == (401, "no_name")


def test_what_waits_comes_oldest_board_first_or_newest(web: Web) -> None:
    found = following(web)
    assert [item["id"] for item in found["items"]] == [1, 3, 4]
    assert (found["left"], found["left_is_least"], found["done"], found["done_by_you"]) == (3, False, 1, 0)
    assert ids(web, order="newest") == [3, 4, 1]
    assert ids(web, held="1,3") == [4]
    assert ids(web, count=0) == []


@pytest.mark.parametrize(
    ("which", "found"),
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
def test_filters_choose_and_are_only_ever_values(web: Web, which: dict[str, str], found: list[int]) -> None:
    assert ids(web, **which) == found
    page = web.get(f"/review?{urlencode(which)}", Cookie=EVA)
    assert page.status == 200


def test_an_image_comes_with_what_was_said_its_boxes_and_a_good_part(web: Web) -> None:
    html = json.loads(web.get("/review/items/1", Cookie=EVA).text)["html"]
    for part in ("D207", "tombstone", "97.0", 'src="/pictures/1"', 'src="/pictures/2"', "passed by the line", "1 box"):
        assert part in html
    assert 'data-newest=""' in html
    assert '<rect x="10.5"' in html


def test_an_image_whose_picture_was_pruned_says_so_and_can_be_decided(web: Web) -> None:
    html = json.loads(web.get("/review/items/4", Cookie=EVA).text)["html"]
    assert "it was not kept, or was pruned" in html
    assert 'data-finished="yes"' in html
    assert "deadline" in html


def test_an_image_that_was_decided_shows_by_whom_and_which_row_was_seen(web: Web) -> None:
    html = json.loads(web.get("/review/items/5", Cookie=EVA).text)["html"]
    assert 'data-newest="1"' in html
    assert "D500" in html
    assert "decided" in html


def test_nothing_that_a_publisher_wrote_is_markup(web: Web) -> None:
    for path in ("/review/items/3", "/review/items/5", "/review", f"/review?lot={quote(EVIL[:120])}"):
        text = web.get(path, Cookie=EVA).text
        text = json.loads(text)["html"] if path.startswith("/review/items") else text
        assert "<script>alert" not in text
        assert "<img src=x" not in text
        assert "49" not in text.split("alert(2)")[-1][:20]


def test_codes_are_those_of_the_rules_first_then_what_was_named_before(web: Web) -> None:
    page = web.get("/review", Cookie=EVA).text
    places = [page.index(f'data-code="{code}"') for code in ("D101", "D207", "D500")]
    assert places == sorted(places)
    assert "tombstone" in page


@pytest.mark.parametrize(
    "path",
    [
        "/review?verdict=good",
        "/review?order=sideways",
        "/review?image=0",
        "/review?image=x",
        f"/review?image={'9' * 30}",
        f"/review?lot={'x' * 200}",
        "/review/items/0",
        "/review/items/../1",
        f"/review/items/{'9' * 30}",
        "/review/items/77",
        "/review/next",
        "/review/next?seat=x",
        f"/review/next?seat={SEAT}&held={'1,' * 500}",
        f"/review/next?seat={SEAT}&held=1;2",
        f"/review/next?seat={SEAT}&count=1000",
        f"/review/next?seat={SEAT}&since=yesterday",
    ],
)
def test_what_makes_no_sense_is_refused_and_never_an_error_of_ours(web: Web, path: str) -> None:
    assert web.get(path, Cookie=EVA).status in {404, 422}


def test_a_held_list_of_nonsense_numbers_is_only_ignored(web: Web) -> None:
    assert ids(web, held=f"{'9' * 25},1") == [3, 4]


def test_without_a_daemon_a_decision_is_not_stored_and_says_so(web: Web) -> None:
    answer = web.post("/review/items/1", "verdict=pass&newest=", Origin=f"http://{web.host}", Cookie=EVA)
    assert answer.status == 503
    said = json.loads(answer.text)
    assert said["code"] == "no_daemon"
    assert "coserve run" in said["reason"]
    assert web.sql("SELECT count(*) FROM reviews") == [(1,)]


def test_another_site_cannot_decide(web: Web) -> None:
    for path in ("/review/items/1", "/review/items/1/undo", "/review/items/1/skip", "/review/name"):
        answer = web.post(path, "verdict=pass&reviewer=x", Origin="http://evil.example", Cookie=EVA)
        assert answer.status == 403, path


def test_what_one_page_shows_is_offered_to_others_last(web: Web) -> None:
    third, tom, ute = "00112233445566aa", "coserve_reviewer=Tom", "coserve_reviewer=Ute"
    for image in (1, 3, 4):  # what the tests before were shown
        web.post(f"/review/items/{image}/skip", Origin=f"http://{web.host}", Cookie=EVA)
    assert ids(web, OTHER, tom, count=1, held="1") == [3]
    assert ids(web, third, ute) == [4, 1, 3]
    web.post("/review/items/4/skip", Origin=f"http://{web.host}", Cookie=ute)
    assert ids(web, third, ute)[-1] == 4
    assert ids(web, "ffffffffffffffff", ute)[-1] == 4, "the page was loaded anew"


def test_an_offer_is_soft_and_ends_with_a_decision() -> None:
    offers = ReviewOffers()
    assert offers.choose("a", "Ann", [1, 2, 3], [], 1) == [1]
    assert offers.choose("b", "Ben", [1, 2, 3], [], 2) == [2, 3]
    assert offers.choose("c", "Cem", [1, 2, 3], [], 3) == [1, 2, 3], "all are shown to somebody: the order as it is"
    offers.skip("Ann", 1)
    assert offers.choose("a", "Ann", [1, 2], [2], 1) == [1], "skipped, but there is nothing else"
    offers.forget(3)
    assert offers.choose("d", "Dan", [3, 2], [], 1) == [3]


def test_what_was_skipped_comes_after_all_else_and_the_longest_ago_first() -> None:
    offers = ReviewOffers()
    offers.skip("Ann", 2)
    offers.skip("Ann", 1)
    assert offers.choose("a", "Ann", [1, 2, 3, 4], [], 4) == [3, 4, 2, 1]
    offers.skip("Ann", 2)
    assert offers.choose("later", "Ann", [1, 2], [], 2) == [1, 2]


def test_a_skip_that_reached_a_new_process_first_keeps_its_place_among_those_the_browser_remembers() -> None:
    offers = ReviewOffers()
    offers.skip("Ann", 3)  # it was on its way when the process was started anew
    offers.remember("Ann", [4, 1, 3, 2])
    assert offers.choose("a", "Ann", [1, 2, 3, 4, 5], [], 5) == [5, 4, 1, 3, 2]
    offers.skip("Ann", 4)
    offers.remember("Ann", [1, 3, 2, 4])
    assert offers.choose("a", "Ann", [1, 2, 3, 4, 5], [5], 4) == [1, 3, 2, 4]
    offers.remember("Ann", [2, 1, 3, 4])  # two skips overtook each other on their way
    assert offers.choose("a", "Ann", [1, 2, 3, 4, 5], [5], 4) == [2, 1, 3, 4]


def test_a_review_that_the_reviewer_undid_is_not_offered_to_be_undone_again(web: Web) -> None:
    add = "INSERT INTO reviews (inspection_id, at, reviewer, verdict, note) VALUES (4, :at, 'Uwe', :verdict, :note)"
    web.sql(add, at=AT, verdict="pass", note=None)
    ((first,),) = web.sql("SELECT max(review_id) FROM reviews")
    last = "/review/last?since=2026-11-21T00:00:00Z"
    assert json.loads(web.get(last, Cookie="coserve_reviewer=Uwe").text) == {"id": 4, "newest": first}
    web.sql(add, at=AT, verdict="unknown", note=f"undecided again: undo of review {first} by Eva")
    assert json.loads(web.get(last, Cookie="coserve_reviewer=Uwe").text) == {}
    assert 4 in ids(web, "aaaaaaaaaaaaaaaa")
