"""The page Teach: decided pictures by the label that they teach, and the report of the last `coserve learn`."""

import html
import json
import re
from collections.abc import Iterator

import pytest
import yaml

from daemon.dashboard.pages.experts import teach_href as href
from daemon.storage.decided_pictures import learned_files
from tests.daemon.dashboard.pages.test_experts_page import HOSTILE, write_catalog
from tests.daemon.dashboard.web import AT, EVIL, STATUS, Web, a_picture, answering_control

RULES = {
    "boards": {"mainboard-a": {"components": {"R0402": 8}}},
    "classifiers": {"R0402": {"expert": "R0402", "pass": ["ok"]}, "*": {"expert": "C0603", "pass": ["ok"]}},
}
LEARNED = {
    "version": "cccccccccccc",
    "in_service": "abcdefabcdef",
    "at": AT,
    "pictures": {"ok": 21, "bad": 17},
    "compared": {
        "in_service": {"escapes": "3 of 17", "false_calls": "2 of 21"},
        "learned": {"escapes": "1 of 17", "false_calls": "0 of 21"},
        "says": EVIL,
    },
    "rejudged": {
        "rejudged": 900,
        "changed": 11,
        "reviewed": 40,
        "effects": {"false_calls_gone": 7, "escapes_caught": 2, "new_false_calls": 1, "new_escapes": 0},
    },
    "notes": ["there are no pictures of odd"],
}


@pytest.fixture(scope="module")
def web(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Web]:
    """Six images of R0402: decided pass, pass, fail bad, fail of another's defect, undone, and not kept."""
    web = Web(tmp_path_factory.mktemp("teach") / "line")
    web.sql("UPDATE rules_versions SET text = :text", text=yaml.safe_dump(RULES, sort_keys=False))
    web.add_board(1, serial=EVIL)
    for number in range(1, 7):
        path = f"images/{number}.png"
        web.add_image(number, 1, image_path=None if number == 6 else path)
        web.add_picture(path, a_picture())
        web.add_stage(number, label="bad" if number < 3 else "ok")
    for number, verdict, defect in ((2, "pass", None), (1, "pass", None), (3, "fail", "bad"), (6, "pass", None)):
        web.add_review(number, verdict, defect=defect)
    web.add_review(4, "unknown")
    web.add_review(5, "pass")
    web.add_review(5, "fail", reviewer="daemon", note="undecided again: undo of review 6 by Eva")
    write_catalog(web)
    with web.running():
        yield web


def page(web: Web, name: str = "R0402") -> str:
    with answering_control(web, status=STATUS):
        answer = web.get(href(name))
    assert answer.status == 200, answer.text
    return answer.text


def test_decided_pictures_are_shown_by_their_label_with_what_the_expert_said(web: Web) -> None:
    text = page(web)
    assert re.findall(r"<strong>(\d+)</strong> (\w+)", text) == [("1", "bad"), ("2", "ok")]
    assert re.findall(r'href="/review\?image=(\d)"', text) == ["3", "1", "2"]
    assert text.count('class="verdict fail">it said bad') == 2
    assert "1 picture left out: decided unknown" in text
    assert "coserve learn R0402 --with FOLDER" in text
    assert EVIL not in text


def test_the_last_run_is_shown_with_its_pictures_and_a_damaged_report_is_named(web: Web) -> None:
    document, worst, _ = learned_files(web.folder / "experts" / "catalog.yaml", "R0402")
    document.parent.mkdir()
    document.write_text(json.dumps(LEARNED), encoding="utf-8")
    worst.write_bytes(a_picture())
    text = html.unescape(page(web))
    for part in (
        *("experts promote R0402 cccccccccccc", "3 of 17", "0 of 21", "900 stored images, 11 would get another"),
        *("7 false calls would go, 2 escapes would be caught", "there are no pictures of odd"),
    ):
        assert part in text
    assert "<script>alert" not in page(web)
    shown = web.get("/teach/picture?which=worst&expert=R0402")
    assert (shown.status, shown.headers["content-type"]) == (200, "image/png")
    for wrong in ("which=confusion&expert=R0402", "which=worst&expert=..%2F..%2Fx", "which=../x&expert=R0402"):
        assert web.get(f"/teach/picture?{wrong}").status in (404, 422)
    document.write_text("{", encoding="utf-8")
    assert "R0402-learned.json" in page(web)
    document.unlink()


def test_an_expert_with_a_hostile_name_or_none_at_all_is_no_trouble(web: Web) -> None:
    text = page(web, HOSTILE)
    assert "Nobody has decided" in text
    assert "<img src=x" not in text
    assert web.get(href("nobody")).status == 404
