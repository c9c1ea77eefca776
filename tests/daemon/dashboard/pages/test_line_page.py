"""The figures and alarms of the page Line: counted once each, by the plant's clock, with a silence that is no break."""

import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from daemon.config.plant_time import PlantTime, Span
from daemon.config.settings import load_config
from daemon.dashboard.pages import line as page
from daemon.dashboard.pages.line import (
    VerdictCounter,
    alarms,
    fails_now,
    last_board,
    passed_by_review,
    router,
    silence,
    verdict_age,
    yield_charts,
)
from daemon.dashboard.site.site import Site
from daemon.units import utc_text, wall_seconds
from tests.daemon.dashboard.web import STATUS, Web, answering_control

NOW = "2026-11-25T09:40:20.000Z"
NOW_S = wall_seconds(NOW)
RULES = "boards: {mainboard-a: {components: {R0402: 2}}}\ndefects: {bridge: D207}"


@pytest.fixture
def web(tmp_path: Path) -> Web:
    line = Web(tmp_path / "line")
    line.sql("INSERT INTO rules_versions VALUES ('ffffffffffff', 'ff', '2026-11-22T00:00:00.000Z', :text)", text=RULES)
    return line


@pytest.fixture
def site(web: Web) -> Iterator[Site]:
    made = Site(load_config(web.config))
    yield made
    made.database.close()


def close(web: Web, board_id: int, ago_s: float, verdict: str = "pass", **fields: Any) -> None:
    at = utc_text(NOW_S - ago_s)
    given = {"verdict": verdict, "reason": "complete", "seq": board_id, "first_seen_at": at, "completed_at": at}
    web.add_board(board_id, f"S{board_id}", **given | fields)


def test_the_yield_after_review_counts_what_people_passed_and_failed_today(web: Web, site: Site) -> None:
    today = Span("2026-11-25T00:00:00.000Z", "2026-11-26T00:00:00.000Z")
    for board, verdict in enumerate(("pass", "fail", "fail", "pass", "unknown", "fail"), 1):
        close(web, board, 3600 * board, verdict, expected=1, inspected=1, attempt=2 if board == 6 else 1)
        web.add_image(board, board, verdict)
    assert passed_by_review(site.database, today) is None, "nobody has reviewed"
    for image, verdict, at in (
        *((2, "pass", NOW), (3, "fail", NOW), (6, "pass", NOW), (5, "pass", NOW)),
        (5, "review", "2026-11-25T09:40:21.000Z"),
    ):
        web.add_review(image, verdict, at=at)
    assert passed_by_review(site.database, today) == 1
    web.add_review(2, "fail", at=NOW)
    assert passed_by_review(site.database, today) == 0, "shown: somebody has reviewed"
    web.add_review(2, "pass", at=NOW)
    web.add_review(1, "fail", at=NOW)
    web.add_review(4, "fail", at=NOW)
    assert passed_by_review(site.database, today) == -1
    assert passed_by_review(site.database, Span("2026-11-26T00:00:00.000Z", "2026-11-27T00:00:00.000Z")) is None


def test_every_board_is_counted_once_and_in_the_minute_that_runs(web: Web, site: Site) -> None:
    close(web, 1, 49 * 3600)
    close(web, 2, 3600)
    counter = VerdictCounter(site.database)
    counter.look(NOW_S)
    close(web, 3, 5, "fail")
    close(web, 4, 1, attempt=2)
    for _ in range(3):
        counter.look(NOW_S)
    assert counter.is_whole
    assert counter.verdicts("boards", Span("2026-11-25T09:00:00.000Z", NOW)) == Counter(fail=1)
    assert counter.verdicts("boards", Span("2026-11-23T09:40:00.000Z", NOW)) == Counter({"pass": 1, "fail": 1})
    assert counter.verdicts("boards", Span("2026-11-25T08:00:00.000Z", "2026-11-25T09:00:00.000Z")) == {"pass": 1}


def test_yield_is_by_the_plants_hours_and_shifts_and_told_against_its_goal(web: Web, site: Site) -> None:
    for number in range(1, 5):
        close(web, number, 60 * number, "fail" if number == 1 else "pass")
    counter = VerdictCounter(site.database)
    counter.look(NOW_S)
    plant = load_config(web.config).plant.model_copy(
        update={"timezone": "Asia/Kolkata", "shifts": {"early": "06:00", "late": "14:00"}}
    )
    charts = dict(yield_charts(counter, plant.clock(), 0.8, NOW_S))
    hours = charts["Yield by hour"]
    assert [bar.name for bar in hours.bars][-1] == "15", "half past five from UTC"
    assert hours.bars[-1].text == "▼75"
    assert (hours.bars[-1].tone, hours.bars[-2].title) == ("fail", "14: no boards closed")
    assert (hours.bars[-1].value, hours.goal) == (0.75, 0.8)
    assert charts["Yield by shift"].bars[-1].title == "late: 75.0 % of 4 boards passed"
    without = dict(yield_charts(counter, PlantTime(), None, NOW_S))
    assert list(without) == ["Yield by hour"]
    assert without["Yield by hour"].bars[-1].tone == "accent"


def test_the_last_board_has_its_worst_finding_and_what_fails_now_has_names(web: Web, site: Site) -> None:
    assert last_board(site.database) is None
    failed = '[{"designator": "U1", "component": "R0402", "defect": "D207"}]'
    close(web, 1, 7200, "fail", failed=failed)
    close(web, 2, 60, "fail", failed=failed, missing='[{"component": "R0402", "count": 1}]')
    web.add_image(1, 2, "review")
    web.add_image(2, 2, "fail", defect="D207", image_path="images/2026-11-25/000000/2.png")
    last = last_board(site.database)
    assert last is not None
    assert (last["board"].serial, last["verdict"], last["shown"].inspection_id) == ("S2", "fail", 2)
    assert [row.inspection_id for row in last["findings"]] == [2, 1]
    router(site)
    assert "<li>no image: 1 × R0402</li>" in site.live.text("andon")
    defects, positions = fails_now(site.database, site.rules, utc_text(NOW_S - 3600))
    assert (defects, positions) == ([("bridge (D207)", 1)], [("U1 on mainboard-a", 1)])


@pytest.mark.parametrize(
    ("silent_s", "every_s", "is_told"),
    [(200, 30, False), (299, 30, False), (301, 30, True), (590, 120, False), (610, 120, True), (8.1 * 3600, 30, False)],
)
def test_no_image_for_much_longer_than_usual_is_told_and_a_line_that_is_off_is_not(
    web: Web, site: Site, silent_s: float, every_s: float, is_told: bool
) -> None:
    for number in range(1, 31):
        pause = 5 * 3600 if number < 5 else 0  # a night before: no pause of the line
        close(web, number, silent_s + (30 - number) * every_s + pause)
    web.add_image(1, 30, "pass", accepted_at=utc_text(NOW_S - silent_s))
    silent = silence(site.database, NOW_S)
    assert (silent is not None) == is_told
    raised = alarms({**STATUS, "silent": silent})
    assert [("No image for" in alarm.title, alarm.level) for alarm in raised] == [(True, "notice")] * is_told


def test_a_verdict_is_an_old_one_after_ten_usual_intervals_and_at_once_if_the_line_is_not_ready() -> None:
    closed = [NOW_S - 60 * number for number in range(20)] + [NOW_S - 90_000]  # a night between the first two
    assert verdict_age(closed, NOW_S + 590, is_ready=True) is None
    assert verdict_age(closed, NOW_S + 610, is_ready=True) == 610
    assert verdict_age(closed, NOW_S + 5, is_ready=False) == 5
    assert verdict_age(closed, NOW_S - 60, is_ready=True) == -60, "the clock was set back"
    assert verdict_age([], NOW_S, is_ready=False) is None


@pytest.mark.promise("Access, pages and reviews", "A verdict has an age: an old one is grey, and says how old it is")
def test_the_last_board_is_grey_with_its_age_when_it_says_nothing_of_the_line_now(
    web: Web, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page, "_WATCH_S", 0.0)  # what control answered is kept for so long
    router(site)
    three_days_ago = time.time() - 3 * 86400
    for board in range(1, 4):
        at = utc_text(three_days_ago + 60 * board)
        close(web, board, 0, completed_at=at, first_seen_at=at)
    with answering_control(web, health={"ready": {"ok": True, "text": "ready"}}):
        shown = site.live.text("andon")
        assert 'class="andon pass old"' in shown
        assert "last board 3 days ago" in shown
        now = utc_text(time.time())
        close(web, 4, 0, completed_at=now, first_seen_at=now)
        assert 'class="andon pass"' in site.live.text("andon")
        close(web, 5, 0, completed_at=utc_text(time.time() + 86400))
        assert "last board at an unknown time" in site.live.text("andon")
    assert 'class="andon pass old"' in site.live.text("andon"), "no daemon answers"


def test_what_is_wrong_with_the_line_itself_is_told_troubles_first() -> None:
    row = {"source": "cam-2", "code": "bad_image", "images": 12, "reason": "its end is missing", "at": NOW}
    status = {
        **STATUS,
        "state": "degraded",
        "clock": "The clock was set back: it shows 09:40, and there are results of 11:40.",
        "ready": "degraded: takes no images: the disk is full; expert R0402 cannot be loaded: no such file; mend it",
        "rejected": [row],
        "unusable": ["R0402 cannot be loaded: no such file; mend it", "C0603 cannot be loaded: no such file"],
    }
    titles = [(alarm.level, alarm.title) for alarm in alarms(status)]
    assert titles == [
        ("trouble", "takes no images: the disk is full"),
        ("trouble", "The clock was set back: it shows 09:40, and there are results of 11:40."),
        ("trouble", "R0402 cannot be loaded: no such file; mend it (and 1 more: see Experts)"),
        ("notice", "cam-2: 12 images rejected in the last hour (bad image)."),
    ]
    assert "its end is missing" in alarms(status)[-1].remedy
    one_cause = {"ready": "degraded: expert R0402 cannot be loaded: no such file; mend it"}
    assert [alarm.title for alarm in alarms({**status, **one_cause})] == [title for _, title in titles[1:]]
