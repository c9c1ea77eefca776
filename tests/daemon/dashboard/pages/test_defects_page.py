"""The page Defects over HTTP: what counts, the images behind every number, files, and filters that are only values."""

import csv
import io
import re
from collections.abc import Iterator
from html import unescape
from urllib.parse import quote

import pytest

from tests.daemon.dashboard.web import EVIL, Web

FORMULA = "=cmd|' /C calc'!A0"
ALL = {"range": "own", "from": "2026-11-01", "to": "2026-11-30"}


def day(number: int) -> str:
    return f"2026-11-{number:02d}T12:00:00.000Z"


@pytest.fixture(scope="module")
def web(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Web]:
    """Three days, two lots, a board without a station; false calls, an escape, a decision taken back, an open board."""
    line = Web(tmp_path_factory.mktemp("defects") / "line")
    line.add_board(1, "A1", completed_at=day(10))
    line.add_board(2, "A2", completed_at=day(11), lot="L2", station=None)
    line.add_board(3, EVIL, completed_at=day(12), board_type="sensor")
    line.add_board(4, "open", None)
    images = [
        (1, 1, "fail", "D1", "R0402"),
        (2, 1, "fail", "D1", "R0402"),
        (3, 1, "pass", None, "R0402"),
        (4, 1, "pass", None, "C0603"),
        (5, 2, "fail", "D2", "R0402"),
        (6, 2, "review", None, "C0603"),
        (7, 2, "unknown", None, "C0603"),
        (8, 2, "fail", FORMULA, EVIL),
        (9, 3, "pass", None, "C0603"),
        (10, 3, "fail", "D1", "C0603"),
        (11, 3, None, None, "C0603"),
        (12, 4, "fail", "D9", "R0402"),
    ]
    for number, board, verdict, defect, component in images:
        line.add_image(number, board, verdict, defect=defect, component=component)
    line.add_review(2, "pass", note="a shadow")  # a false call
    line.add_review(3, "fail", defect="D3")  # an escape
    line.add_review(5, "pass")
    # Taken back: the line's verdict counts.
    line.add_review(5, "fail", "daemon", defect="D2", note="undecided again: undo of review 3 by Eva")
    line.add_review(6, "fail", defect="D1")
    line.add_review(9, "unknown")
    with line.running() as running:
        yield running


def get(web: Web, path: str, **fields: object) -> str:
    answer = web.get(path, query=ALL | fields)
    assert answer.status == 200, answer.text
    return answer.text


def linked(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"/review\?image=(\d+)", text)]


def listed(web: Web, **fields: object) -> list[int]:
    return linked(get(web, "/defects/images", **fields))


def table(web: Web, path: str, **fields: object) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(get(web, path, **fields))))


def test_the_verdict_that_counts_is_a_persons_and_every_number_leads_to_its_images(web: Web) -> None:
    page = get(web, "/defects")
    tiles = re.findall(r'class="name">([^<]+)</div><div class="value[^"]*">(?:<a href="([^"]+)">)?(\d+)', page)
    assert {name: int(count) for name, _, count in tiles} == {
        "Images judged": 10, "Final pass": 2, "Final fail": 6, "Final review": 0, "Final unknown": 2,
        "False calls": 1, "Escapes": 1, "Reviewed": 4,
    }  # fmt: skip
    for name, link, count in tiles:
        assert len(linked(web.get(unescape(link)).text) if link else []) == int(count), name
    assert "1 not judged yet" in page


def test_the_pareto_has_shares_up_to_one_and_links_to_its_images(web: Web) -> None:
    rows = table(web, "/defects/pareto.csv", by="both")
    assert [(row["component"], row["defect"], row["count"]) for row in rows[:2]] == [
        ("C0603", "D1", "2"),
        (EVIL, "'" + FORMULA, "1"),
    ]
    assert float(rows[-1]["cumulative"]) == 1
    assert sum(int(row["count"]) for row in rows) == 6
    by_defect = table(web, "/defects/pareto.csv", by="defect")
    assert (by_defect[0]["defect"], by_defect[0]["count"]) == ("D1", "3")
    assert listed(web, final="fail", defect="D1") == [10, 6, 1]
    links = re.findall(r'data-row href="([^"]+)"', get(web, "/defects", by="defect"))
    assert [len(linked(web.get(unescape(link)).text)) for link in links] == [3, 1, 1, 1]


@pytest.mark.parametrize(
    ("trend", "fails"),
    [
        ("day", {"2026-11-10": 2, "2026-11-11": 3, "2026-11-12": 1}),
        ("lot", {"L1": 3, "L2": 3}),
        ("station", {"AOI-1": 3, "": 3}),
        ("component", {"R0402": 3, "C0603": 2, EVIL: 1}),
    ],
)
def test_the_trend_is_told_by_day_lot_station_and_component(web: Web, trend: str, fails: dict[str, int]) -> None:
    rows = table(web, "/defects/trend.csv", trend=trend)
    assert {row[trend]: int(row["fail"]) for row in rows} == fails
    page = get(web, "/defects", trend=trend)
    assert page.count('class="tone-fail"') >= len(fails), "a bar for each"
    assert ("2026-11-10: 50.00 % of the images failed" in page) == (trend == "day")
    for name, count in fails.items():
        assert len(listed(web, **{trend: name or "-"}, final="fail")) == count


def test_filters_choose_boards_and_time(web: Web) -> None:
    assert listed(web, lot="L2") == listed(web, station="-") == [8, 7, 6, 5]
    assert listed(web, type="sensor") == [10, 9]
    assert listed(web, kind="false_call") == [2]
    assert listed(web, kind="escape") == [3]
    assert listed(web, kind="reviewed", component="C0603") == [9, 6]
    assert listed(web, **{"from": "2026-11-12", "to": "2026-11-12"}) == [10, 9]
    assert listed(web, day="2026-11-10", before="4") == [3, 2, 1]
    for name in ("today", "7d", "30d"):
        assert web.get(f"/defects?range={name}").status == 200


def test_no_cell_is_a_formula(web: Web) -> None:
    for line in get(web, "/defects/images.csv").splitlines():
        assert not re.search(r"(^|,)\"?[=@]", line), line
    assert table(web, "/defects/images.csv", component=EVIL)[0]["defect"] == "'" + FORMULA
    assert quote("<script>") not in web.get("/defects/pareto.csv").headers["content-disposition"]
