"""The page Machine: the last minutes as a picture, queues, heat that is there or is not, disks, versions, children."""

import json
import re
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("fastapi", reason="needs the extra dashboard")

from daemon.config.settings import Config, load_config
from daemon.dashboard.pages import machine
from daemon.dashboard.pages.drawings import NARROW, WIDE, work_chart
from daemon.host.temperature import Thermometer
from daemon.monitor.timeline import WorkTimeline
from daemon.records import BatchDone, ExpertSwitch, QueueSample
from tests.daemon.dashboard.telling import STATUS, telling
from tests.daemon.dashboard.web import Web

HOSTILE = "<img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def web(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Web]:
    web = Web(tmp_path_factory.mktemp("machine") / "line")
    now = f"{datetime.now(UTC) - timedelta(hours=1):%Y-%m-%dT%H:%M:%S.000Z}"
    web.add_board(1)
    for number in range(1, 41):
        kept = "p.jpg" if number % 4 == 0 else None
        web.add_image(number, 1, "fail", accepted_at=now, completed_at=now, image_path=kept, image_bytes=1_000_000)
    web.sql("INSERT INTO pending VALUES (1, 'judge', 1, 0, 5000, 'image', NULL, NULL, NULL)")
    web.sql(
        "INSERT INTO expert_versions VALUES (:name, 'abcdefabcdef', 'a', 'r', '[]', 1, 'f', '', :at)",
        name=HOSTILE,
        at=now,
    )
    web.sql("UPDATE stream_position SET last_seq = 40")
    with web.running():
        yield web


def an_executor(name: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "device": name.partition("/")[0], "pool": name, "resident": [], "busy_share": 0.5, **more}


def a_pool(name: str, executors: list[str], **more: Any) -> dict[str, Any]:
    known = {"pool": name, "device": "cpu", "executors": executors, "experts": 3, "queued": 0}
    return {**known, "used_bytes": 2_500_000_000, "budget_bytes": 10_000_000_000, **more}


def some_work(seconds: float = 60.0) -> dict[str, Any]:
    batches = [
        {
            "executor": "cpu/0",
            "device": "cpu",
            "expert": "R0402",
            "images": 8,
            "began_s": 50.0,
            "ended_s": 40.0,
            "load_ms": 0.0,
        },
        {
            "executor": "cpu/0",
            "device": "cpu",
            "expert": HOSTILE,
            "images": 2,
            "began_s": 30.0,
            "ended_s": 10.0,
            "load_ms": 5.0,
        },
    ]
    load = {"pool": "cpu", "device": "cpu", "expert": "R0402", "bytes": 44_000_000, "tier": "disk", "cause": "demand"}
    loads = [{**load, "began_s": 55.0, "ended_s": 51.0}]
    return {"at": "x", "seconds": seconds, "batches": batches, "loads": loads, "more": False}


def plain(text: str) -> str:
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", text))


def test_a_whole_machine_is_on_one_page_and_nothing_of_it_is_believed(web: Web) -> None:
    executors = [
        an_executor("cpu/0"),
        an_executor("cpu/1"),
        an_executor("cuda:0", busy_share=0.0, out_of_service=f"CUDA error: {HOSTILE}"),
    ]
    children = [
        {"name": "dashboard", "state": "running", "pid": 4711, "restarts": 0, "last_end": None},
        {"name": "plant", "state": "waiting", "pid": None, "restarts": 9, "last_end": f"status 1: {HOSTILE}"},
    ]
    consumer = {
        "name": "plant",
        "kind": "mqtt",
        "position": 1,
        "behind": 1234,
        "state": "refused",
        "last_error": HOSTILE,
    }
    pools = [a_pool("cpu", ["cpu/0", "cpu/1"], queued=7), a_pool("ram", [])]
    status = {**STATUS, "executors": executors, "pools": pools, "children": children, "consumers": [consumer]}
    running = [{"executor": "cpu/0", "expert": HOSTILE}]
    pruned = {"pruning": False, "last_at": "2026-11-21T09:28:11.123Z", "images": 5, "image_bytes": 5000, "boards": 2}
    with telling(web, status=status, queues={"running": running}, timeline=some_work(), prune=pruned):
        found = web.get("/machine")
    assert found.status == 200
    assert "<img src=x" not in found.text
    said = plain(found.text)
    assert "out of service" in said
    assert "CUDA error" in said
    assert "1 234" in said  # the thin space between thousands is a space here
    assert "refused" in said
    assert "status 1: " in said
    assert "5 pictures (5 kB) and 2 boards went" in said
    assert "1 images to judge (5 kB)" in said
    assert "0123456789ab" in said
    assert "2 hours" in said  # up
    assert said.count("cpu/0, cpu/1 7 2.5") == 1, "memory that two executors share is there once, with both"
    assert "ram copies for the GPUs 0 2.5" in said
    assert "R0402 ×8" in said
    assert "loads into cpu" in said


def test_without_a_daemon_the_page_says_so_and_shows_the_rest(web: Web) -> None:
    time.sleep(1.0)  # what the daemon of the test before has said is kept for so long
    found = plain(web.get("/machine").text)
    assert "The daemon shows no timeline" in found
    assert "No answer from the daemon" in found
    assert "0123456789ab" in found
    assert "journal, images, database" in found
    assert "No chart" not in found
    assert web.get("/machine-charts/waits.json", Accept="application/json").status == 503


@pytest.mark.parametrize(
    "path", ["/machine?seconds=61", "/machine?seconds=' OR 1=1", "/machine-charts/waits.json?seconds=9"]
)
def test_an_address_that_nobody_offers_is_refused_by_name(web: Web, path: str) -> None:
    found = web.get(path.replace(" ", "%20").replace("'", "%27"))
    assert found.status == 422
    assert "seconds: " in found.text


def test_charts_hold_a_value_until_the_next_and_are_never_longer_than_they_may_be(web: Web) -> None:
    samples = [
        {
            "ago_s": 500.0 - number,
            "under_way": number,
            "waiting": number % 50,
            "unloaded": 0,
            "queued": {},
            "busy": {"cpu/0": 0.5},
        }
        for number in range(400)
    ]
    with telling(web, waits={"at": "x", "seconds": 600, "samples": samples}):
        chart = json.loads(web.get("/machine-charts/waits.json?seconds=600").text)
        busy = json.loads(web.get("/machine-charts/busy.json?seconds=600").text)
    assert [one["label"] for one in chart["series"]] == ["under way", "waiting", "waiting for a load"]
    assert all(len(one["values"]) == len(chart["x"]) for one in chart["series"])
    assert chart["series"][0]["values"][-1] == 399
    assert chart["x"][-1] - chart["x"][-2] > 90  # nothing has changed since
    assert chart["to"] - chart["from"] == pytest.approx(600), "as long as its title says"
    assert busy["series"][0]["values"][-2:] == [50.0, 0.0]
    many = [
        {"ago_s": 3600.0 - number, "waiting": number, "under_way": 0, "unloaded": 0, "busy": {}}
        for number in range(3600)
    ]
    points = machine.steps(many, 1e9, 3600, 600)
    assert len(points) <= 600
    assert points[-1]["waiting"] == 3599  # peaks are kept


def test_the_daemon_remembers_what_ran_what_was_loaded_and_what_waited() -> None:
    now = 1000.0
    timeline = WorkTimeline(lambda: now)
    for number in range(1500):
        ended_s = 800.0 + number * 0.1
        timeline.batch(BatchDone("cpu/0", "cpu", "A", "r", 0, 4, ended_s - 0.05, ended_s, 0.0, 40.0))
    timeline.load(ExpertSwitch(990.0, "cpu", "cpu", "A", (), 100, 2000.0, "disk", "demand"))
    for at_s in (900.0, 995.0):
        timeline.sample(QueueSample(at_s, 5, 3, 1, {"cpu": 2}, {"cpu/0": 1.0}))
    work = timeline.work(60.0)
    assert (len(work["batches"]), work["more"]) == (100, False)  # those that ended after 940
    assert work["batches"][-1]["ended_s"] == pytest.approx(50.1, abs=0.2)
    assert (work["loads"][0]["began_s"], work["loads"][0]["ended_s"]) == (12.0, 10.0)
    assert (len(timeline.work(3600.0)["batches"]), timeline.work(3600.0)["more"]) == (1000, True)
    assert [one["ago_s"] for one in timeline.waits(60.0)["samples"]] == [100.0, 5.0]  # what held before is told too


SPANS = st.lists(
    st.tuples(st.sampled_from(["cpu/0", "cpu/1"]), st.sampled_from("ABC"), st.floats(0, 80), st.floats(0, 5)),
    max_size=300,
)


@given(SPANS, st.sampled_from([WIDE, NARROW]))
@settings(deadline=None, max_examples=150)
def test_bars_stay_in_the_picture_do_not_overlap_and_count_every_image(spans: list[Any], width: int) -> None:
    """One executor runs one batch at a time; what is drawn together is still counted."""
    batches: list[dict[str, Any]] = []
    ends: dict[str, float] = {"cpu/0": 60.0, "cpu/1": 60.0}
    for executor, expert, gap_s, length_s in spans:
        began = ends[executor] - gap_s / 40
        ends[executor] = began - length_s / 10
        row = {
            "executor": executor,
            "device": "cpu",
            "expert": expert,
            "images": 3,
            "began_s": began,
            "ended_s": ends[executor],
        }
        if ends[executor] < 0:
            break
        batches.append(row)
    seen = {"seconds": 60.0, "batches": batches, "loads": []}
    picture = work_chart(seen, ["cpu/0", "cpu/1"], width)
    for lane in picture.lanes:
        assert all(bar.x >= 0 and bar.x + bar.width <= width + 1.01 for bar in lane.bars)
        assert all(bar.y + picture.lane_height <= picture.height for bar in lane.bars)
        images = sum(int(re.search(r": (\d+) images", bar.title)[1]) for bar in lane.bars)  # type: ignore[index]
        assert images == 3 * sum(row["executor"] == lane.name for row in batches)
        assert len(lane.bars) <= width


def a_config(tmp_path: Path, **retention: Any) -> Config:
    (tmp_path / "c.yaml").write_text(
        json.dumps({"rules": "r", "catalog": "c", "devices": {"cpu": {"expert_memory": "1MB"}}, "retention": retention})
    )
    return load_config(tmp_path / "c.yaml", {})


def held(since: datetime, **more: Any) -> machine.DatabaseHoldings:
    known: dict[str, Any] = {
        "images_today": 1000, "since": f"{since:%Y-%m-%dT%H:%M:%S.000Z}", "kept_bytes_today": 3600_000_000,
        "kept_images": 10, "kept_bytes": 10, "oldest_image": None, "oldest_result": None, "results": 2000,
        "pending": [], "rules": [], "experts": [],
    }  # fmt: skip
    return machine.DatabaseHoldings(**{**known, **more})


def test_a_disk_says_when_it_is_full_at_todays_rate_unless_retention_keeps_up(tmp_path: Path) -> None:
    now = datetime.now(UTC).replace(microsecond=0)
    since = now - timedelta(hours=1)
    known = machine.FileSizes(database_bytes=2_000_000, wal_bytes=0, journal_bytes=0, quarantine_bytes=None)
    config = a_config(tmp_path)
    rates = machine.growth(config, known, held(since), now)
    assert rates["images"] == pytest.approx(1_000_000)
    assert rates["database"] == pytest.approx(1000 * 1000 / 3600)
    (disk,) = machine.disk_uses(config, known, held(since), now)
    assert disk.full_in_s == pytest.approx(disk.free_bytes / sum(rates.values()), rel=0.2)
    assert set(disk.places) == {"journal", "images", "database"}
    (bounded,) = machine.disk_uses(a_config(tmp_path, images_for="30d", results_for="1y"), known, held(since), now)
    assert (bounded.full_in_s, bounded.because) == (None, "nothing on it grows, or retention keeps up")
    (quiet,) = machine.disk_uses(config, known, replace(held(since), since=None), now)
    assert (quiet.full_in_s, quiet.because) == (None, "no image came today")
    (unknown,) = machine.disk_uses(config, known, None, now)
    assert unknown.full_in_s is None


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (None, "–"),
        (5, "5 seconds"),
        (150, "2 minutes"),
        (7300, "2 hours"),
        (86400 * 3, "3 days"),
        (1e12, "more than 10 years"),
    ],
)
def test_durations_are_for_people(seconds: float | None, said: str) -> None:
    assert machine.duration(seconds) == said


def test_a_machine_that_tells_no_temperature_is_said_so_and_one_that_does_is_shown(web: Web) -> None:
    found = plain(web.get("/machine").text)
    readings = Thermometer().read()
    if readings:
        assert all(reading.sensor in found for reading in readings)
    else:
        assert "This machine tells no temperature" in found
