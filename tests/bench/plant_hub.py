"""`python -m tests.bench.plant_hub`: rows a second of one line into a hub, and the week's yield over twelve lines.

Both on a PostgreSQL of this command's own, without syncs. The rows of the week go through the product's own statements
(daemon/consumers/plant/rows.py), hour by hour over two connections, until there are `--rows` or `--seconds` are over.
"""

import argparse
import asyncio
import math
import re
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import psycopg

from daemon.consumers.plant.rows import STORE, new_rows
from daemon.dashboard.site.database import Database
from daemon.plant.page.questions import find_boards
from daemon.storage.database.reader import ResultsReader
from tests import ROOT
from tests.daemon.consumers.plant.hub_database import HubDatabase, sending
from tests.daemon.delivery.results_database import ResultsDatabase
from tests.daemon.storage.database.postgresql_server import Server, a_server

LINES, HOURS = 12, 7 * 24

_IMAGES = """
    INSERT INTO new_inspections (line, epoch, seq, at, inspection_id, image_id, source, board_type, board_serial,
        attempt, lot, station, component, designator, verdict, defect, reason, late, expert, expert_version, label,
        confidence, stages, latency_ms, rules_version)
    SELECT 'line-' || line, 'e', n, %(hour)s + n %% %(each)s::bigint * interval '1 hour' / %(each)s, n, n::text,
           'camera-1', 'board-a',
           'S' || n / 100, 1, NULL, NULL, 'R0402', 'R' || n %% 100, CASE n %% 500 WHEN 0 THEN 'fail' ELSE 'pass' END,
           CASE n %% 500 WHEN 0 THEN 'D101' END, NULL, false, 'R0402', '0123456789ab', 'ok', 0.99,
           '[{"expert": "R0402", "version": "0123456789ab", "label": "ok", "confidence": 0.99}]', 5.0, '0123456789ab'
    FROM generate_series(%(first_line)s::int, %(last_line)s::int) AS line,
         generate_series(%(first)s::bigint + 1, %(first)s::bigint + %(each)s) AS n
"""
_BOARDS = """
    INSERT INTO new_boards (line, epoch, seq, at, board_type, board_serial, attempt, lot, station, verdict,
        final_verdict, expected, inspected, failed, review, unknown, missing, reason, rules_version)
    SELECT 'line-' || line, 'e', 1000000000 + n, %(hour)s + interval '30 minutes', 'board-a', 'S' || n, 1, NULL, NULL,
           CASE n %% 50 WHEN 0 THEN 'fail' ELSE 'pass' END, CASE n %% 100 WHEN 0 THEN 'fail' ELSE 'pass' END, 100, 100,
           '[]', '[]', '[]', '[]', 'complete', '0123456789ab'
    FROM generate_series(%(first_line)s::int, %(last_line)s::int) AS line,
         generate_series(%(first)s::bigint / 100 + 1, (%(first)s::bigint + %(each)s) / 100) AS n
"""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.plant_hub", description=__doc__)
    parser.add_argument("--boards", type=int, default=20_000, help="boards of three messages that one line sends")
    parser.add_argument("--rows", type=int, default=10**7, help="inspections of the week")
    parser.add_argument("--seconds", type=float, default=3600.0, help="the longest that making them may take")
    options = parser.parse_args()
    with a_server("shared_buffers=512MB", "full_page_writes=off", "max_wal_size=2GB", "jit=off") as server:
        with tempfile.TemporaryDirectory() as folder:
            asyncio.run(_send(server, HubDatabase(server, "rate"), Path(folder), options.boards))
        _week(HubDatabase(server, "week"), options.rows, options.seconds)


def _processor_s(server: Server) -> float:
    """Return the processor time of PostgreSQL's processes that run."""
    assert server._process is not None
    times = [process.cpu_times() for process in psutil.Process(server._process.pid).children()]
    return sum(one.user + one.system for one in times)


async def _send(server: Server, hub: HubDatabase, folder: Path, boards: int) -> None:
    database = ResultsDatabase(folder / "inspection.db")
    database.begin_epoch()
    last = database.grow(boards)
    reader = ResultsReader(database.url)
    began_s, began_cpu_s, seq = time.perf_counter(), time.process_time(), 0
    while items := reader.results_since(seq, 1000)["items"]:
        seq = items[-1]["seq"]
    reading_s, reading_cpu_s = time.perf_counter() - began_s, time.process_time() - began_cpu_s
    reader.close()
    began_s, began_cpu_s, servers_s = time.perf_counter(), time.process_time(), _processor_s(server)
    async with sending(hub, database) as runner:
        while runner.position < last:
            await asyncio.sleep(0.01)
        wall_s, cpu_s = time.perf_counter() - began_s, time.process_time() - began_cpu_s
        servers_s = _processor_s(server) - servers_s
    print(
        f"one line: {last} rows in {wall_s:.1f} s: {last / wall_s:.0f} rows/s; the consumer's own processor time"
        f" {cpu_s:.1f} s: {last / cpu_s:.0f} rows/s,"
        f" PostgreSQL's {servers_s:.1f} s (reading the line's database alone: {reading_s:.1f} s,"
        f" {reading_cpu_s:.1f} s of processor)"
    )


def _fill(hub: HubDatabase, lines: range, each: int, until_s: float) -> int:
    """Make the week of some lines, an hour in each transaction; return how many images."""
    count = 0
    with psycopg.connect(hub.conninfo, autocommit=True) as connection:
        connection.execute("SET timezone = 'UTC'")
        for name in ("inspections", "boards"):
            connection.execute(f"CREATE TEMPORARY TABLE new_{name} (LIKE {name}) ON COMMIT DELETE ROWS")  # type: ignore[call-overload]
        for number in range(HOURS):
            hour = f"date_trunc('hour', now()) - interval '{HOURS - number} hours'"
            values: dict[str, Any] = {"first_line": lines[0], "last_line": lines[-1], "each": each}
            values |= {"first": number * each}
            values["hour"] = (connection.execute(f"SELECT {hour}").fetchone() or (None,))[0]  # type: ignore[arg-type]
            connection.execute("SELECT ensure_day(%s::date)", (values["hour"],))
            with connection.transaction():
                connection.execute(_IMAGES, values)
                connection.execute(_BOARDS, values)
                for name in ("inspections", "boards"):
                    for statement in STORE[name]:
                        connection.execute(statement.replace(new_rows(name), f"new_{name}"))  # type: ignore[call-overload]
            count += len(lines) * each
            if time.perf_counter() > until_s:
                break
    return count


def _week(hub: HubDatabase, rows: int, seconds: float) -> None:
    each = 100 * math.ceil(rows / (LINES * HOURS * 100))
    began_s = time.perf_counter()
    halves = (range(1, LINES // 2 + 1), range(LINES // 2 + 1, LINES + 1))
    with ThreadPoolExecutor(len(halves)) as threads:
        count = sum(threads.map(lambda lines: _fill(hub, lines, each, began_s + seconds), halves))
    with psycopg.connect(hub.conninfo, autocommit=True) as connection:
        made_s = time.perf_counter() - began_s
        connection.execute("ANALYZE")
        page = (ROOT / "docs/plant-hub.md").read_text()
        question = next(text for text in re.findall(r"```sql\n(.*?)```", page, re.DOTALL))
        times_ms: list[float] = []
        answer: list[Any] = []
        for _ in range(5):
            began_s = time.perf_counter()
            answer = connection.execute(question).fetchall()  # type: ignore[call-overload]
            times_ms.append((time.perf_counter() - began_s) * 1000)
        database = Database(hub.url)
        _search(database, "none")  # connects
        searches = [_search(database, serial) for serial in ("S1234", "S123", "S")]
        database.close()
        began_s = time.perf_counter()
        connection.execute("SELECT line, count(*) FILTER (WHERE verdict = 'pass') FROM inspections GROUP BY line")
        counting_s = time.perf_counter() - began_s
        size = connection.execute("SELECT pg_size_pretty(pg_database_size(current_database()))").fetchone()
    print(
        f"week: {count} inspections of {len(answer)} lines in {made_s:.0f} s ({count / made_s:.0f} rows/s through the"
        f" hub's own statements), {(size or ('',))[0]}; yield of the week per line: {max(times_ms):.1f} ms at the most"
        f" of 5; counting the inspections instead: {counting_s:.1f} s; a serial among {count // 100} boards, one that"
        f" many begin with, and one that all begin with: {', '.join(f'{ms:.1f}' for ms in searches)} ms; memory of this"
        f" process: {psutil.Process().memory_info().rss >> 20} MiB"
    )


def _search(database: Database, serial: str) -> float:
    """Return how many ms the page's search of a serial, or of a beginning, takes."""
    began_s = time.perf_counter()
    find_boards(database, serial, "")
    return (time.perf_counter() - began_s) * 1000


if __name__ == "__main__":
    main()
