"""Pages count days and show times by the clock of the plant (coserve.yaml, `plant.timezone`)."""

import csv
import io
import time
from collections.abc import Iterator

import pytest

from daemon.config.plant_time import PlantTime
from daemon.units import utc_text, wall_seconds
from tests.daemon.dashboard.web import Web

PLANT = PlantTime("Asia/Tokyo")
MONTH = {"range": "own", "from": "2026-10-01", "to": "2026-10-31"}


@pytest.fixture(scope="module")
def web(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Web]:
    """A board on each side of the plant's midnight, in October and last night."""
    line = Web(tmp_path_factory.mktemp("plant") / "line")
    began = wall_seconds(PLANT.days(PLANT.today(time.time())).since)
    closed = ["2026-10-10T14:59:59.999Z", "2026-10-10T15:00:00.000Z", utc_text(began - 1), utc_text(began + 0.001)]
    for number, at in enumerate(closed, 1):
        line.add_board(number, f"S{number}", completed_at=at, attempt=1)
        line.add_image(number, number, "fail", defect="D1", completed_at=at)
    with line.running(COSERVE_PLANT_TIMEZONE="Asia/Tokyo") as running:
        yield running


def test_a_board_belongs_to_the_plants_day(web: Web) -> None:
    text = web.get("/defects/trend.csv", query=MONTH).text
    days = {row["day"]: row["images"] for row in csv.DictReader(io.StringIO(text))}
    assert days == {"2026-10-10": "1", "2026-10-11": "1"}
    images = csv.DictReader(io.StringIO(web.get("/defects/images.csv", query=MONTH | {"day": "2026-10-11"}).text))
    assert [row["serial"] for row in images] == ["S2"]
    page = web.get("/defects", query=MONTH).text
    assert "2026-10-01 to 2026-10-31 (Asia/Tokyo)" in page


def test_today_is_the_plants_day_on_every_page(web: Web) -> None:
    today = csv.DictReader(io.StringIO(web.get("/defects/images.csv", query={"range": "today"}).text))
    assert [row["serial"] for row in today] == ["S4"]
    page = web.get("/").text
    assert "Today is the plant's day" in page
    assert "0 of 1 board" in page


def test_more_days_than_a_question_can_name_are_refused(web: Web) -> None:
    answer = web.get("/defects", query={"range": "own", "from": "1990-01-01", "to": "2026-11-30"})
    assert (answer.status, "choose at most 3,660 days" in answer.text) == (422, True)
    assert web.get("/defects", query={"range": "own", "from": "2020-01-01", "to": "2026-11-30"}).status == 200
