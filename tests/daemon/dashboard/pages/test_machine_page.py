"""The page Machine: the last minutes as a picture, queues, temperature, disks, versions, processes."""

import json
import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from daemon.config.settings import Config, load_config
from daemon.dashboard.pages import machine
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


def a_config(tmp_path: Path, **retention: Any) -> Config:
    settings = {"rules": "r", "catalog": "c", "devices": {"cpu": {"expert_memory": "1MB"}}, "retention": retention}
    (tmp_path / "c.yaml").write_text(json.dumps(settings))
    return load_config(tmp_path / "c.yaml", {})


def test_a_disk_says_when_it_is_full_at_todays_rate_unless_retention_keeps_up(tmp_path: Path) -> None:
    now = datetime.now(UTC).replace(microsecond=0)
    since = f"{now - timedelta(hours=1):%Y-%m-%dT%H:%M:%S.000Z}"
    holdings_today = {"images_today": 1000, "since": since, "kept_bytes_today": 3600_000_000, "results": 2000}
    files = {"database_bytes": 2_000_000}
    config = a_config(tmp_path)
    rates = machine.growth(config, files, holdings_today, now)
    assert rates == {"images": pytest.approx(1_000_000), "database": pytest.approx(1000 * 1000 / 3600)}
    (disk,) = machine.disk_uses(config, files, holdings_today, now)
    assert disk.full_in_s == pytest.approx(disk.free_bytes / sum(rates.values()), rel=0.2)
    assert set(disk.places) == {"journal", "images", "database"}
    limited = a_config(tmp_path, images_for="30d", results_for="1y")
    for settings_, holdings, because in (
        (limited, holdings_today, "nothing on it grows, or retention keeps up"),
        (config, holdings_today | {"since": None}, "no image came today"),
        (config, None, "no image came today"),
    ):
        (disk,) = machine.disk_uses(settings_, files, holdings, now)
        assert (disk.full_in_s, disk.because) == (None, because)
