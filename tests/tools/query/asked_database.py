"""A results database to ask: a month of a line with two stations, two shifts of people, a change of experts and rules.

`python -m tests.tools.query.asked_database FILE BOARDS` makes a large one for measuring.
"""

import json
import random
import sqlite3
import sys
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from daemon.storage.database.store import open_store

BEGIN = datetime(2026, 10, 26, tzinfo=UTC)
#: Component types of a board with how many there are, and the detector behind the large ones.
PARTS = {"R0402": 18, "C0603": 14, "QFP64": 4, "SOT23": 6}
DETECTOR = "solder"
DEFECTS = {"R0402": ("tombstone", "missing"), "C0603": ("missing",), "QFP64": ("bridge",), "SOT23": ("rotated",)}
OLD, NEW = "aaaaaaaaaaaa", "bbbbbbbbbbbb"
RULES = ("111111111111", "222222222222")
REVIEWERS = ("anna", "bert")
DAYS = 28


def text(at: datetime) -> str:
    return f"{at:%Y-%m-%dT%H:%M:%S}.{at.microsecond // 1000:03d}Z"


class _Month:
    """Rows table by table; numbers are drawn from one seed."""

    def __init__(self, boards: int, seed: int) -> None:
        self.random = random.Random(seed)
        self.boards = boards
        self.rows: dict[str, list[tuple[Any, ...]]] = {}
        self.seq = self.images = self.batches = self.reviews = 0

    def add(self, table: str, *row: Any) -> None:
        self.rows.setdefault(table, []).append(row)

    def next_seq(self) -> int:
        self.seq += 1
        return self.seq

    def board(self, number: int) -> None:
        draw = self.random
        at = BEGIN + timedelta(days=DAYS) * ((number - 1) / self.boards) + timedelta(seconds=draw.random())
        # Every tenth board is the one before, again.
        attempt, of = (2, number - 1) if number % 10 == 0 else (1, number)
        rules = RULES[at >= BEGIN + timedelta(days=DAYS / 2)]
        lot, station = f"L{1 + 8 * (number - 1) // self.boards}", f"ST{1 + number % 2}"
        missing: dict[str, int] = {}
        verdicts: list[str] = []
        last = at
        hour_is_busy = at.hour == 14
        for component, quantity in PARTS.items():
            for place in range(1, quantity + 1):
                if draw.random() < 0.001:
                    missing[component] = missing.get(component, 0) + 1
                    continue
                at += timedelta(milliseconds=20)
                verdict, last = self.image(number, component, f"{component[0]}{place}", at, rules, lot, station,
                                           is_busy=hour_is_busy, is_again=attempt == 2)  # fmt: skip
                verdicts.append(verdict)
        worst = next(one for one in ("fail", "unknown", "review", "pass") if one in verdicts)
        worst = "unknown" if missing and worst != "fail" else worst
        listed = [{"component": component, "count": count} for component, count in missing.items()]
        closed = last + timedelta(seconds=20 if missing else 0.01)
        board_type = "controller" if of % 3 else "sensor-node"
        self.add("boards", number, board_type, f"S{of:07d}", attempt, lot, station, text(at), text(closed),
                 sum(PARTS.values()), len(verdicts), worst, "time_limit" if missing else "complete", rules,
                 self.next_seq(), "[]", json.dumps(listed))  # fmt: skip
        if missing and draw.random() < 0.5:  # what was missing came after all
            component = next(iter(missing))
            self.image(number, component, f"{component[0]}99", closed + timedelta(seconds=1), rules, lot, station,
                       is_late=True)  # fmt: skip

    def image(
        self, board: int, component: str, designator: str, at: datetime, rules: str, lot: str, station: str, *,
        is_busy: bool = False, is_again: bool = False, is_late: bool = False,
    ) -> tuple[str, datetime]:  # fmt: skip
        draw = self.random
        self.images += 1
        number = self.images
        chance = draw.random()
        version = NEW if at >= BEGIN + timedelta(days=DAYS / 2) else OLD
        worn = 2.0 if component == "R0402" and designator == "R7" else 1.0
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
        self.look(number, verdict, defect, done)
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
                 round(wait_ms, 3), load_ms, 30.0)  # fmt: skip
        if load_ms:
            self.add("expert_switches", None, text(at), "cpu", "cpu", component, '["SOT23"]', 45_000_000, load_ms,
                     "disk" if draw.random() < 0.2 else "ram", "demand")  # fmt: skip
        if component == "QFP64" and label == "ok":
            self.add("stages", number, 1, DETECTOR, OLD, defect, 0.8 if defect else None, "cpu", "cpu/0",
                     1_000_000_000 + self.batches, 4, 1.0, 0.0, 40.0)  # fmt: skip
            if defect:
                self.add("detections", None, number, 1, defect, 0.8, 1.0, 2.0, 30.0, 40.0)

    def look(self, number: int, verdict: str, defect: str | None, done: datetime) -> None:
        """What people say of it: most of what failed is looked at, some twice; some passes are found to be escapes."""
        draw = self.random
        if draw.random() >= {"fail": 0.8, "review": 0.7, "unknown": 0.3}.get(verdict, 0.0005):
            return
        said = {"fail": "pass" if draw.random() < 0.3 else "fail", "pass": "fail"}.get(verdict, "pass")
        at = done + timedelta(minutes=draw.expovariate(1 / 45.0))
        self.add(
            "reviews", None, number, text(at), draw.choice(REVIEWERS), said, defect if said == "fail" else None, None
        )
        if draw.random() < 0.2:
            other = said if draw.random() < 0.7 else ("fail" if said == "pass" else "pass")
            self.add(
                "reviews", None, number, text(at + timedelta(hours=1)), draw.choice(REVIEWERS), other, None, "again"
            )


_COLUMNS = {
    "boards": "board_id board_type serial attempt lot station first_seen_at completed_at expected inspected verdict"
    " reason rules_version seq failed missing",
    "inspections": "inspection_id source image_id board_id component designator captured_at accepted_at completed_at"
    " deadline_ms image_bytes status verdict defect reason late rules_version image_sha256 image_path latency_ms seq"
    " lot station",
    "stages": "inspection_id step expert expert_version label confidence device executor batch_id batch_size queued_ms"
    " load_ms infer_ms",
    "detections": "detection_id inspection_id step label confidence x1 y1 x2 y2",
    "expert_switches": "switch_id at executor device loaded evicted bytes load_ms tier cause",
    "reviews": "review_id inspection_id at reviewer verdict defect note",
}


def make(path: Path, boards: int, seed: int = 7) -> None:
    """About 42 inspections a board."""
    open_store(f"sqlite:///{path}").close()
    month = _Month(boards, seed)
    with closing(sqlite3.connect(path)) as database:
        database.execute("PRAGMA synchronous = OFF")
        for version in RULES:
            database.execute(
                "INSERT INTO rules_versions (rules_version, sha256, loaded_at, text) VALUES (?, ?, ?, ?)",
                (version, version, text(BEGIN), "boards:"),
            )
        for expert in (*PARTS, DETECTOR):
            for version in (OLD, NEW) if expert != DETECTOR else (OLD,):
                database.execute(
                    "INSERT INTO expert_versions (expert, expert_version, sha256, architecture, classes, bytes, dtype,"
                    " origin, first_used_at) VALUES (?, ?, ?, 'resnet18', '[]', 45000000, 'float32', '', ?)",
                    (expert, version, version, text(BEGIN)),
                )
        for number in range(1, boards + 1):
            month.board(number)
            if number % 500 == 0 or number == boards:
                for table, names in _COLUMNS.items():
                    rows = month.rows.pop(table, [])
                    marks = ", ".join("?" * len(names.split()))
                    database.executemany(f"INSERT INTO {table} ({', '.join(names.split())}) VALUES ({marks})", rows)  # noqa: S608
        database.execute(
            "UPDATE stream_position SET last_seq = ?, last_inspection_id = ?, last_board_id = ?",
            (month.seq, month.images, boards),
        )
        database.commit()
        database.execute("ANALYZE")
        database.commit()


if __name__ == "__main__":
    make(Path(sys.argv[1]), int(sys.argv[2]))
