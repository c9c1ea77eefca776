"""The page Machine: the last minutes as a picture, queues, temperature, disks, versions, processes."""

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

from daemon.config.settings import Config, load_config
from daemon.dashboard.pages import machine
from daemon.dashboard.pages.drawings import NARROW, WIDE, work_chart
from daemon.host.temperature import Thermometer
from tests.daemon.dashboard.web import STATUS, Web, answering_control

HOSTILE = "<img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def web(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Web]:
    web = Web(tmp_path_factory.mktemp("machine") / "line")
    at = f"{datetime.now(UTC) - timedelta(hours=1):%Y-%m-%dT%H:%M:%S.000Z}"
    web.add_board(1)
    for number in range(1, 41):
        path = "p.jpg" if number % 4 == 0 else None
        web.add_image(number, 1, "fail", accepted_at=at, completed_at=at, image_path=path, image_bytes=1_000_000)
    web.sql("INSERT INTO pending VALUES (1, 'judge', 1, 0, 5000, 'image', NULL, NULL, NULL)")
    web.add_version(HOSTILE, first_used_at=at)
    web.sql("UPDATE stream_position SET last_seq = 40")
    with web.running():
        yield web


def an_executor(name: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "device": name.partition("/")[0], "pool": name, "resident": [], "busy_share": 0.5, **more}


def a_pool(name: str, executors: list[str], **more: Any) -> dict[str, Any]:
    pool = {"pool": name, "device": "cpu", "executors": executors, "experts": 3, "queued": 0}
    return {**pool, "used_bytes": 2_500_000_000, "budget_bytes": 10_000_000_000, **more}


def a_batch(expert: str, began_s: float, ended_s: float, executor: str = "cpu/0", images: int = 3) -> dict[str, Any]:
    batch = {"executor": executor, "device": "cpu", "expert": expert, "images": images, "load_ms": 0.0}
    return {**batch, "began_s": began_s, "ended_s": ended_s}


def some_work() -> dict[str, Any]:
    batches = [a_batch("R0402", 50.0, 40.0, images=8), a_batch(HOSTILE, 30.0, 10.0)]
    load = {"pool": "cpu", "device": "cpu", "expert": "R0402", "bytes": 44_000_000, "tier": "disk", "cause": "demand"}
    loads = [{**load, "began_s": 55.0, "ended_s": 51.0}]
    return {"at": "x", "seconds": 60.0, "batches": batches, "loads": loads, "more": False}


def plain(text: str) -> str:
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", text))


def test_a_whole_machine_is_on_one_page_and_nothing_of_it_is_believed(web: Web) -> None:
    out_of_service = an_executor("cuda:0", busy_share=0.0, out_of_service=f"CUDA error: {HOSTILE}")
    child = {"name": "plant", "state": "waiting", "pid": None, "restarts": 9, "last_end": f"status 1: {HOSTILE}"}
    consumer = {"name": "plant", "kind": "mqtt", "position": 1, "behind": 1234, "state": "refused"}
    status = {
        **STATUS,
        "executors": [an_executor("cpu/0"), an_executor("cpu/1"), out_of_service],
        "pools": [a_pool("cpu", ["cpu/0", "cpu/1"], queued=7), a_pool("ram", [])],
        "children": [child],
        "consumers": [{**consumer, "last_error": HOSTILE}],
    }
    queues = {"running": [{"executor": "cpu/0", "expert": HOSTILE}]}
    pruned = {"pruning": False, "last_at": "2026-11-21T09:28:11.123Z", "images": 5, "image_bytes": 5000, "boards": 2}
    with answering_control(web, status=status, queues=queues, timeline=some_work(), prune=pruned):
        page = web.get("/machine")
    assert page.status == 200
    assert "<img src=x" not in page.text
    text = plain(page.text)
    for shown in (
        *("out of service", "CUDA error", "refused", "status 1: ", "0123456789ab", "R0402 ×8", "loads into cpu"),
        "1 234",  # the thin space between thousands is a space here
        "5 images (5 kB) and 2 boards were deleted",
        "1 image to judge (5 kB)",
        "2 hours",  # up
        "ram copies for the GPUs 0 2.5",
    ):
        assert shown in text, shown
    assert text.count("cpu/0, cpu/1 7 2.5") == 1, "memory that two executors share is there once, with both"


def test_without_a_daemon_the_page_says_so_and_shows_the_rest(web: Web) -> None:
    time.sleep(1.0)  # until the answers of the test before are no longer cached
    text = plain(web.get("/machine").text)
    for shown in (
        *("The daemon shows no timeline", "No answer from the daemon", "0123456789ab", "journal, images, database"),
        *(reading.sensor for reading in Thermometer().read()),
    ):
        assert shown in text, shown
    assert ("This machine reports no temperature" in text) == (not Thermometer().read())
    assert "The daemon shows no queues" in text


def a_sample(ago_s: float, number: int, waiting: int, **busy: float) -> dict[str, Any]:
    return {"ago_s": ago_s, "under_way": number, "waiting": waiting, "unloaded": 0, "queued": {}, "busy": busy}


def test_charts_hold_a_value_until_the_next_and_are_never_longer_than_they_may_be(web: Web) -> None:
    samples = [a_sample(500.0 - number, number, number % 50, cpu=0.5) for number in range(400)]
    with answering_control(web, waits={"at": "x", "seconds": 600, "samples": samples}):
        text = web.get("/machine").text
    assert (
        "Images under way and requests that wait: under way 399 now, waiting 49 now, waiting for a load 0 now" in text
    )
    assert "Share of time that each executor was busy: cpu 0 % now" in text
    points = machine.steps(samples, 600, 600)
    assert (points[-1]["under_way"], points[-1]["ago_s"]) == (399, 0.0)
    assert points[-2]["ago_s"] > 90  # nothing has changed since
    assert [point["busy"]["cpu"] for point in points[-2:]] == [0.5, 0.0]
    points = machine.steps([a_sample(3600.0 - number, 0, number) for number in range(3600)], 3600, 600)
    assert len(points) <= 600
    assert points[-1]["waiting"] == 3599  # peaks are kept


SPANS = st.lists(
    st.tuples(st.sampled_from(["cpu/0", "cpu/1"]), st.sampled_from("ABC"), st.floats(0, 80), st.floats(0, 5)),
    max_size=300,
)


@given(SPANS, st.sampled_from([WIDE, NARROW]))
@settings(deadline=None, max_examples=150)
def test_bars_stay_in_the_picture_do_not_overlap_and_count_every_image(spans: list[Any], width: int) -> None:
    """One executor runs one batch at a time; merged batches are still counted."""
    batches: list[dict[str, Any]] = []
    ends: dict[str, float] = {"cpu/0": 60.0, "cpu/1": 60.0}
    for executor, expert, gap_s, length_s in spans:
        began_s = ends[executor] - gap_s / 40
        ends[executor] = began_s - length_s / 10
        if ends[executor] < 0:
            break
        batches.append(a_batch(expert, began_s, ends[executor], executor))
    picture = work_chart({"seconds": 60.0, "batches": batches, "loads": []}, ["cpu/0", "cpu/1"], width)
    for lane in picture.lanes:
        assert all(bar.x >= 0 and bar.x + bar.width <= width + 1.01 for bar in lane.bars)
        assert all(bar.y + picture.lane_height <= picture.height for bar in lane.bars)
        images = sum(int(re.search(r": (\d+) images", bar.title)[1]) for bar in lane.bars)  # type: ignore[index]
        assert images == 3 * sum(row["executor"] == lane.name for row in batches)
        assert len(lane.bars) <= width


def a_config(tmp_path: Path, **retention: Any) -> Config:
    settings = {"rules": "r", "catalog": "c", "devices": {"cpu": {"expert_memory": "1MB"}}, "retention": retention}
    (tmp_path / "c.yaml").write_text(json.dumps(settings))
    return load_config(tmp_path / "c.yaml", {})


def test_a_disk_says_when_it_is_full_at_todays_rate_unless_retention_keeps_up(tmp_path: Path) -> None:
    now = datetime.now(UTC).replace(microsecond=0)
    holdings_today = machine.DatabaseHoldings(
        images_today=1000, since=f"{now - timedelta(hours=1):%Y-%m-%dT%H:%M:%S.000Z}", kept_bytes_today=3600_000_000,
        kept_images=10, kept_bytes=10, oldest_image=None, oldest_result=None, results=2000,
        pending=[], rules=[], experts=[],
    )  # fmt: skip
    files = machine.FileSizes(database_bytes=2_000_000, wal_bytes=0, journal_bytes=0, quarantine_bytes=None)
    config = a_config(tmp_path)
    rates = machine.growth(config, files, holdings_today, now)
    assert rates == {"images": pytest.approx(1_000_000), "database": pytest.approx(1000 * 1000 / 3600)}
    (disk,) = machine.disk_uses(config, files, holdings_today, now)
    assert disk.full_in_s == pytest.approx(disk.free_bytes / sum(rates.values()), rel=0.2)
    assert set(disk.places) == {"journal", "images", "database"}
    limited = a_config(tmp_path, images_for="30d", results_for="1y")
    for settings_, holdings, because in (
        (limited, holdings_today, "nothing on it grows, or retention keeps up"),
        (config, replace(holdings_today, since=None), "no image came today"),
        (config, None, "no image came today"),
    ):
        (disk,) = machine.disk_uses(settings_, files, holdings, now)
        assert (disk.full_in_s, disk.because) == (None, because)
