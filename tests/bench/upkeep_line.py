"""A line for the upkeep benchmark: a database with years of results, and a camera whose waits are measured."""

import hashlib
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from daemon.config.settings import Retention
from daemon.line.rulebook import Rulebook
from daemon.records import Accepted, Arrival, BoardRef, Outcome, Pixels, Stage
from daemon.storage.database.store import open_store
from daemon.storage.disk_space import DiskSpace
from daemon.storage.journal import Journal
from daemon.storage.retention import RetentionThread
from daemon.storage.writer import Writer
from routing_rules.compile import compile_rules

_RULES = """\
boards:
  bench: {extras: allow, components: {R0402: 100}}
classifiers:
  "*": {expert: "{component}", pass: [ok]}
"""
_ROWS_PER_BOARD = 100
_YEARS_S = 4 * 365 * 86400
_SERIES = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < ?) "
_AT = "strftime('%Y-%m-%dT%H:%M:%fZ', ? + {i} * ?, 'unixepoch')"


def make_database(folder: Path, rows: int, files: int) -> None:
    """Make `rows` inspections of four years, 100 to a board, a box for each fifth; the newest `files` have an image."""
    url = f"sqlite:///{folder}/inspection.db"
    open_store(url).close()
    boards = rows // _ROWS_PER_BOARD
    rows = boards * _ROWS_PER_BOARD
    begin_s, each_s = time.time() - _YEARS_S, _YEARS_S / rows
    images, closing_at = _AT.format(i="i"), _AT.format(i=f"i * {_ROWS_PER_BOARD}")
    day = "substr(strftime('%Y-%m-%d', ? + i * ?, 'unixepoch'), 1, 10)"
    with closing(sqlite3.connect(folder / "inspection.db", isolation_level=None)) as database:
        for pragma in ("synchronous = OFF", "foreign_keys = OFF", "cache_size = -200000"):
            database.execute(f"PRAGMA {pragma}")
        database.execute("BEGIN")
        database.execute(
            f"{_SERIES} INSERT INTO boards (board_id, board_type, serial, attempt, first_seen_at, completed_at,"  # noqa: S608 - our own text
            " expected, inspected, verdict, reason, rules_version, seq, failed, missing)"
            f" SELECT i, 'bench', 'old-' || i, 1, {closing_at}, {closing_at}, 100, 100, 'pass', 'complete', '0',"
            f" i * {_ROWS_PER_BOARD + 1}, '[]', '[]' FROM n",
            (boards, *(begin_s, each_s) * 2),
        )
        database.execute(
            f"{_SERIES} INSERT INTO inspections (inspection_id, source, image_id, board_id, component, designator,"  # noqa: S608
            " accepted_at, completed_at, image_bytes, status, verdict, late, rules_version, image_sha256, image_path,"
            f" latency_ms, seq) SELECT i, 'camera', 'old-' || i, (i - 1) / {_ROWS_PER_BOARD} + 1, 'R0402', 'R' || i,"
            f" {images}, {images}, 1000, 'done', CASE WHEN i % 20 = 0 THEN 'fail' ELSE 'pass' END, 0, '0',"
            f" '{hashlib.sha256().hexdigest()}', CASE WHEN i > ? THEN 'images/' || {day} || '/' ||"
            f" printf('%06d', i / 1000) || '/' || i || '.jpg' END, 12.5, i + (i - 1) / {_ROWS_PER_BOARD} FROM n",
            (rows, *(begin_s, each_s) * 2, rows - files, begin_s, each_s),
        )
        database.execute(
            f"{_SERIES} INSERT INTO stages SELECT i, 0, 'R0402', '0123456789ab', 'ok', 0.97, 'cpu', 'cpu-0', i / 8, 8,"  # noqa: S608
            " 1.5, 0.0, 30.0, '0123456789ab' FROM n",
            (rows,),
        )
        database.execute(
            f"{_SERIES} INSERT INTO detections SELECT i, i * 5, 0, 'bridge', 0.5, 1, 2, 3, 4 FROM n",  # noqa: S608
            (rows // 5,),
        )
        database.execute(
            "UPDATE stream_position SET last_seq = ?, last_inspection_id = ?, last_board_id = ?",
            (boards * (_ROWS_PER_BOARD + 1), rows, boards),
        )
        # As after a day of running: only then is anything old.
        marks = [(0, time.time(), 2**62), (90_000, time.time(), 2**62)]
        database.executemany("INSERT INTO age_marks VALUES (?, ?, ?)", marks)
        database.execute("COMMIT")
        paths = database.execute("SELECT image_path FROM inspections WHERE image_path IS NOT NULL").fetchall()
    for (path,) in paths:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(bytes(1000))


class BenchLine:
    """A real writer with its journal, a retention thread, and a camera that sends at a rate without waiting."""

    def __init__(self, folder: Path, rate: float, image_bytes: int) -> None:
        self.url = f"sqlite:///{folder}/inspection.db"
        self.folder = folder
        self._rate = rate
        self._payload = b"\xff\xd8\xff" + bytes(image_bytes - 3)
        self._sha256 = hashlib.sha256(self._payload).hexdigest()
        self._store = open_store(self.url, keep=())
        self._journal = Journal(folder / "journal")
        self._disk_space = DiskSpace({"journal": folder}, 2**20)
        self._writer = Writer(
            *(self._store, self._journal, Rulebook(compile_rules(_RULES, "bench", None)), folder / "images"),
        )
        self._waits_ms: list[float] = []
        self._stopping = threading.Event()
        self._camera = threading.Thread(target=self._send, name="camera")

    def start(self) -> None:
        self._writer.recover()
        ignore = lambda _reported: None  # noqa: E731
        self._writer.start(cast("Any", SimpleNamespace(accepted=self._judge, published=ignore, done=ignore)))
        self._camera.start()

    def stop(self) -> None:
        self._stopping.set()
        self._camera.join()
        self._writer.stop()
        self._store.close()
        self._journal.close()

    @contextmanager
    def retention(self, **settings: object) -> Iterator[RetentionThread]:
        """Run the thread with these settings. Its disk is never full, and what it holds up shows as a wait."""
        thread = RetentionThread(
            *(self.url, self.folder / "images", Retention.model_validate(settings), self._disk_space),
            writer=self._writer,
            hold=lambda *_: None,
            resume=lambda *_: None,
            on_pruned=lambda *_: None,
        )
        thread.start()
        try:
            yield thread
        finally:
            thread.stop()

    def take_waits_ms(self) -> list[float]:
        """Return the milliseconds that each image answered since the last call waited for its reply."""
        waits_ms, self._waits_ms = self._waits_ms, []
        return waits_ms

    def log_bytes(self) -> int:
        """Return the size of the write-ahead log's file."""
        return (self.folder / "inspection.db-wal").stat().st_size

    def _send(self) -> None:
        run = f"{time.time_ns():x}"
        began_s, number = time.monotonic(), 0
        while not self._stopping.wait(max(0.0, began_s + number / self._rate - time.monotonic())):
            number += 1
            board = BoardRef("bench", f"{run}-{number // _ROWS_PER_BOARD}", None, None, None)
            names = f"{run}-{number}", board, "R0402", f"R{number}"
            sent_s = time.monotonic()
            self._writer.write(
                Arrival("camera", *names, None, None, Pixels(), self._payload, self._sha256, b"1"),
                lambda _reply, sent_s=sent_s: self._waits_ms.append(1000 * (time.monotonic() - sent_s)),
            )

    def _judge(self, images: list[Accepted]) -> None:
        stage = Stage("R0402", "0123456789ab", "ok", 0.97, (), "cpu", "cpu-0", 1, 8, 1.5, 0.0, 30.0, "s", "{}")
        for image in images:
            self._writer.finish(Outcome(image.inspection_id, "pass", None, None, (stage,)))
