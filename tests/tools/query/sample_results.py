"""A results database: a month of a line with two stations, reviewers, a change of experts and of rules.

`python -m tests.tools.query.sample_results FILE BOARDS` makes a large one for measuring.
"""

import json
import random
import sqlite3
import sys
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from daemon.storage.database.schema import metadata
from daemon.storage.database.store import Store
from experts.spec import digest_of

CONFIG = """\
endpoints: {intake: ["ipc://run/i.sock"], results: "ipc://run/r.sock", control: "ipc://run/c.sock"}
rules: rules.yaml
catalog: catalog.yaml
devices: {cpu: {expert_memory: 100MB}}
"""
BEGIN = datetime(2026, 10, 26, tzinfo=UTC)
MONTH = timedelta(days=28)
#: Component types of a board with their quantities; the large ones have a detector behind them.
PARTS = {"R0402": 18, "C0603": 14, "QFP64": 4, "SOT23": 6}
DETECTOR = "solder"
DEFECTS = {"R0402": ("tombstone", "missing"), "C0603": ("missing",), "QFP64": ("bridge",), "SOT23": ("rotated",)}
OLD, NEW = "aaaaaaaaaaaa", "bbbbbbbbbbbb"
SETTINGS = {version: f'{{"temperature":{temperature}}}' for version, temperature in ((OLD, 1.3), (NEW, 1.1))}
RULES = ("111111111111", "222222222222")
REVIEWERS = ("anna", "bert")


def text(at: datetime) -> str:
    return f"{at:%Y-%m-%dT%H:%M:%S}.{at.microsecond // 1000:03d}Z"


class _Month:
    """Rows by table, in the order of its columns; numbers are drawn from one seed."""

    def __init__(self, boards: int, seed: int) -> None:
        self.random = random.Random(seed)
        self.boards = boards
        self.rows: dict[str, list[tuple[Any, ...]]] = {}
        self.seq = self.images = self.batches = 0
        for version in RULES:
            self.add("rules_versions", version, version, text(BEGIN), "boards:")
        for expert, version in [*((expert, version) for expert in PARTS for version in (OLD, NEW)), (DETECTOR, OLD)]:
            self.add("expert_versions", expert, version, version, "resnet18", "[]", 45_000_000, "float32", "",
                     text(BEGIN))  # fmt: skip
            self.add("expert_settings", expert, digest_of(SETTINGS[version]), SETTINGS[version], text(BEGIN))

    def add(self, table: str, *row: Any) -> None:
        self.rows.setdefault(table, []).append(row)

    def next_seq(self) -> int:
        self.seq += 1
        return self.seq

    def board(self, number: int) -> None:
        draw = self.random
        at = BEGIN + MONTH * ((number - 1) / self.boards) + timedelta(seconds=draw.random())
        # Every tenth board is the one before, again.
        attempt, first = (2, number - 1) if number % 10 == 0 else (1, number)
        place = (RULES[at >= BEGIN + MONTH / 2], f"L{1 + 8 * (number - 1) // self.boards}", f"ST{1 + number % 2}")
        rules, lot, station = place
        first_seen = last = at
        missing: dict[str, int] = {}
        verdicts: list[str] = []
        for component, quantity in PARTS.items():
            for position in range(1, quantity + 1):
                if draw.random() < 0.001:
                    missing[component] = missing.get(component, 0) + 1
                    continue
                at += timedelta(milliseconds=20)
                designator = f"{component[0]}{position}"
                verdict, last = self.image(number, component, designator, at, *place, is_again=attempt == 2)
                verdicts.append(verdict)
        worst = next(verdict for verdict in ("fail", "unknown", "review", "pass") if verdict in verdicts)
        worst = "unknown" if missing and worst != "fail" else worst
        closed = last + timedelta(seconds=20 if missing else 0.01)
        board_type = "controller" if first % 3 else "sensor-node"
        self.add("boards", number, board_type, f"S{first:07d}", attempt, lot, station, text(first_seen), text(closed),
                 sum(PARTS.values()), len(verdicts), worst, "time_limit" if missing else "complete", rules,
                 self.next_seq(), "[]",
                 json.dumps([{"component": name, "count": count} for name, count in missing.items()]))  # fmt: skip
        if missing and draw.random() < 0.5:  # a missing image comes late
            component = next(iter(missing))
            self.image(number, component, f"{component[0]}99", closed + timedelta(seconds=1), *place, is_late=True)

    def image(
        self, board: int, component: str, designator: str, at: datetime, rules: str, lot: str, station: str, *,
        is_again: bool = False, is_late: bool = False,
    ) -> tuple[str, datetime]:  # fmt: skip
        draw = self.random
        self.images += 1
        number, chance, is_busy = self.images, draw.random(), at.hour == 14
        version = NEW if at >= BEGIN + MONTH / 2 else OLD
        worn = 2.0 if (component, designator) == ("R0402", "R7") else 1.0
        defect_rate = 0.004 * worn * (0.3 if is_again else 1.0)
        verdict, defect, reason = "pass", None, None
        if chance < defect_rate:
            verdict, defect = "fail", draw.choice(DEFECTS[component])
        elif chance < defect_rate + (0.004 if version == OLD else 0.002):
            verdict = "review"
        elif chance < defect_rate + 0.006:
            verdict, reason = "unknown", draw.choice(("deadline", "deadline", "expert_failed", "bad_image"))
        wait_ms = draw.expovariate(1 / (900.0 if is_busy else 60.0))
        load_ms = 45.0 if draw.random() < (0.2 if is_busy else 0.02) else 0.0
        latency_ms = round(wait_ms + load_ms + 30.0, 3)
        done = at + timedelta(milliseconds=latency_ms)
        self.add("inspections", number, f"cam-{station}", f"i{number}", board, component, designator, text(at),
                 text(at), text(done), 500 if reason == "deadline" else None, 20_000, "done", verdict, defect, reason,
                 int(is_late), rules, "0" * 64, None, latency_ms, self.next_seq(), lot, station)  # fmt: skip
        if reason is None:
            self.stages(number, component, verdict, defect, version, at, load_ms, wait_ms)
        self.reviews(number, verdict, defect, done)
        return verdict, done

    def stages(
        self, number: int, component: str, verdict: str, defect: str | None, version: str, at: datetime,
        load_ms: float, wait_ms: float,
    ) -> None:  # fmt: skip
        draw = self.random
        self.batches += number % 4 == 0
        week = (at - BEGIN).days // 7
        confidence = 0.6 if verdict == "review" else min(0.999, draw.gauss(0.97 - 0.01 * week, 0.01))
        label = defect if defect and component != "QFP64" else "ok"
        self.add("stages", number, 0, component, version, label, confidence, "cpu", "cpu/0", self.batches, 4,
                 round(wait_ms, 3), load_ms, 30.0, digest_of(SETTINGS[version]))  # fmt: skip
        if load_ms:
            self.add("expert_switches", None, text(at), "cpu", "cpu", component, '["SOT23"]', 45_000_000, load_ms,
                     "disk" if draw.random() < 0.2 else "ram", "demand")  # fmt: skip
        if component == "QFP64" and label == "ok":
            self.add("stages", number, 1, DETECTOR, OLD, defect, 0.8 if defect else None, "cpu", "cpu/0",
                     1_000_000_000 + self.batches, 4, 1.0, 0.0, 40.0, digest_of(SETTINGS[OLD]))  # fmt: skip
            if defect:
                self.add("detections", None, number, 1, defect, 0.8, 1.0, 2.0, 30.0, 40.0)

    def reviews(self, number: int, verdict: str, defect: str | None, done: datetime) -> None:
        """Most images that failed are reviewed, some twice; some that passed are found to be escapes."""
        draw = self.random
        if draw.random() >= {"fail": 0.8, "review": 0.7, "unknown": 0.3}.get(verdict, 0.0005):
            return
        first = {"fail": "pass" if draw.random() < 0.3 else "fail", "pass": "fail"}.get(verdict, "pass")
        at = done + timedelta(minutes=draw.expovariate(1 / 45.0))
        defect = defect if first == "fail" else None
        self.add("reviews", None, number, text(at), draw.choice(REVIEWERS), first, defect, None)
        if draw.random() < 0.2:
            second = first if draw.random() < 0.7 else ("fail" if first == "pass" else "pass")
            again = text(at + timedelta(hours=1))
            self.add("reviews", None, number, again, draw.choice(REVIEWERS), second, None, "again")

    def write(self, database: sqlite3.Connection) -> None:
        for table, rows in self.rows.items():
            names = list(metadata.tables[table].columns.keys())[: len(rows[0])]
            if "edition" in metadata.tables[table].columns:
                names, rows = [*names, "edition"], [(*row, 1) for row in rows]  # noqa: PLW2901
            marks = ", ".join("?" * len(names))
            database.executemany(f"INSERT INTO {table} ({', '.join(names)}) VALUES ({marks})", rows)  # noqa: S608
        self.rows.clear()


def make(path: Path, boards: int, seed: int = 7) -> None:
    """Make a database with about 42 inspections a board."""
    Store(f"sqlite:///{path}").close()
    month = _Month(boards, seed)
    with closing(sqlite3.connect(path)) as database:
        database.execute("PRAGMA synchronous = OFF")
        for number in range(1, boards + 1):
            month.board(number)
            if number % 500 == 0 or number == boards:
                month.write(database)
        numbers = (month.seq, month.images, boards)
        database.execute("UPDATE stream_position SET last_seq = ?, last_inspection_id = ?, last_board_id = ?", numbers)
        database.commit()
        database.execute("ANALYZE")
        database.commit()


if __name__ == "__main__":
    make(Path(sys.argv[1]), int(sys.argv[2]))
