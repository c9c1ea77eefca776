"""A small disk under a real daemon: `busy` before anything fails, pruning, and recovery without a restart."""

import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from coserve_client import Publisher
from tests.contract.client import Line
from tests.lines import RULES, a_jpeg
from tests.small_disk import small_disk
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.not_fast("starts processes")

#: Bytes behind a JPEG's end marker are ignored, so images are as large as a test likes.
IMAGE_BYTES = 1_000_000
FREE = 'coserve_disk_free_bytes{place="journal"}'
KEEP_ALL = ["pass", "fail", "review", "unknown"]


#: Images that had a copy and have none any more.
PRUNED = """
    SELECT count(*) FROM inspections LEFT JOIN pending USING (inspection_id)
    WHERE status = 'done' AND image_path IS NULL AND task IS NULL
"""


class DiskLine(Line):
    """A daemon whose journal, database and images lie on a disk of 64 MB, and a camera."""

    def __init__(self, folder: Path, experts: Path, disk: Path, **retention: Any) -> None:
        places = {
            "database": f"sqlite:///{disk}/inspection.db",
            "journal": f"{disk}/journal",
            "images": f"{disk}/images",
        }
        super().__init__(folder, experts, RULES, **places, retention={"keep": KEEP_ALL, **retention})
        self.disk = disk
        self.daemon = self.service()

    def publish(self, publisher: Publisher, count: int) -> None:
        for _ in range(count):
            self.count += 1
            payload = a_jpeg(self.count % 7).ljust(IMAGE_BYTES, b"\0")
            board = {"type": "open-board", "serial": f"S{self.count}"}
            publisher.send(f"i{self.count}", payload, board=board, component="R0402")

    def publisher(self) -> Publisher:
        return Publisher(self.intake, "camera", silence_s=30.0)

    def rows(self, sql: str, *values: Any) -> list[Any]:
        with closing(sqlite3.connect(self.disk / "inspection.db", isolation_level=None, timeout=60)) as database:
            return database.execute(sql, values).fetchall()

    def number(self, query: str) -> int:
        return self.rows(query)[0][0]

    def wait_for(self, condition: Callable[[], bool], event: str, camera: Publisher | None = None) -> None:
        until_s = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < until_s, f"{event}: it did not come\n{self.daemon.tail()}"
            camera.pump(0.1) if camera else time.sleep(0.1)

    def free_bytes(self) -> float:
        """Return the free bytes at the daemon's last look."""
        (line,) = (line for line in self.control("metrics")["text"].splitlines() if line.startswith(FREE))
        return float(line.split()[-1])

    def is_quiet(self) -> bool:
        """Return True if every accepted image has its verdict, and its copy where it stays."""
        return self.number("SELECT count(*) FROM pending") == 0

    @property
    def files(self) -> set[str]:
        """Copies as `image_path` names them."""
        folder = self.disk / "images"
        return {str(path.relative_to(self.disk)) for path in folder.rglob("[0-9]*") if path.is_file()}

    @property
    def paths(self) -> set[str]:
        return {path for (path,) in self.rows("SELECT image_path FROM inspections WHERE image_path IS NOT NULL")}


@pytest.fixture
def start(tmp_path: Path, experts_folder: Path) -> Iterator[Callable[..., DiskLine]]:
    """Starts a line on a small disk; `retention` as in coserve.yaml."""
    with small_disk(tmp_path / "disk") as disk, ExitStack() as stack:

        def begin(**retention: Any) -> DiskLine:
            line = DiskLine(tmp_path / "line", experts_folder, disk, **retention)
            stack.enter_context(line.daemon)
            return line

        yield begin


@pytest.mark.promise(
    "A full disk, and years of results",
    "Publishers get `busy` before anything fails, and `busy` ends by itself when there is space",
)
def test_a_full_disk_is_busy_before_anything_fails_and_recovers_when_there_is_room_again(start) -> None:
    line = start()
    ballast = line.disk / "of-another-program"
    ballast.write_bytes(bytes(30 * 10**6))
    line.wait_for(lambda: line.free_bytes() < 40 * 10**6, "a look at the disk")
    with line.publisher() as publisher:
        line.publish(publisher, 40)
        account = publisher.account

        def is_full() -> bool:
            """And everything that was accepted has its verdict and its copy."""
            status = line.status()
            return (
                account.busy > 0
                and (status["state"], status["accepted"]) == ("degraded", account.accepted)
                and "MB free" in status["last_error"]
                and line.number("SELECT count(seq) FROM inspections") == account.accepted
                and line.files == line.paths
                and len(line.files) == account.accepted
            )

        line.wait_for(is_full, "a full disk", publisher)
        assert 0 < account.accepted < 40
        assert line.number("SELECT count(*) FROM inspections WHERE verdict = 'unknown'") == 0
        assert "disk_free" in line.control("metrics")["text"]
        assert "results_wait" not in line.log()  # nothing ever failed to be written

        ballast.unlink()
        publisher.finish(120.0)
        assert account.accepted == 40
    line.wait_for(line.is_quiet, "the other verdicts")
    line.wait_for(lambda: line.status()["state"] == "ready", "ready again")
    assert line.rows("PRAGMA integrity_check") == [("ok",)]


@pytest.mark.promise(
    "A full disk, and years of results",
    "With a free-space floor set, the line continues by pruning: passed images first, failed and reviewed images last",
)
def test_with_a_floor_of_free_space_the_line_goes_on_and_evidence_goes_last(start) -> None:
    line = start(free="24MB")
    with line.publisher() as publisher:
        line.publish(publisher, 5)
        publisher.finish(120.0)
        line.wait_for(line.is_quiet, "the first verdicts")
        for number in range(1, 4):
            line.rows(
                "INSERT INTO reviews (inspection_id, at, reviewer, verdict) VALUES (?, '2026-11-21', 'Eva', 'fail')",
                number,
            )
        for _ in range(6):  # images that wait in the journal fill the disk, too: with all 60 there, evidence would go
            line.publish(publisher, 10)
            account = publisher.finish(120.0)
            line.wait_for(line.is_quiet, "ten more verdicts")
        assert account.accepted == 65
    line.wait_for(line.is_quiet, "all verdicts")
    line.wait_for(lambda: line.files == line.paths, "files and rows agree")
    images_left = {
        image_id for (image_id,) in line.rows("SELECT inspection_id FROM inspections WHERE image_path IS NOT NULL")
    }
    assert {1, 2, 3} <= images_left
    assert not {4, 5} & images_left
    assert line.number("SELECT count(*) FROM inspections WHERE verdict IS NOT NULL") == 65


@pytest.mark.promise(
    "A full disk, and years of results",
    "A kill during pruning leaves no path without a file and no file without a row",
)
def test_a_kill_amid_pruning_leaves_no_path_without_a_file_and_no_file_without_a_row(start) -> None:
    line = start(free="24MB", images_bytes="10MB")
    with line.publisher() as publisher:
        line.publish(publisher, 30)
        line.wait_for(lambda: line.number(PRUNED) > 0, "the first pruning")
        line.daemon.kill()
        line.daemon.start()
        publisher.finish(120.0)
    line.wait_for(line.is_quiet, "all verdicts")
    line.wait_for(lambda: line.files == line.paths and len(line.files) <= 10, "files and rows agree")
    assert line.number("SELECT count(DISTINCT seq) FROM stream") == line.number("SELECT max(seq) FROM stream")
