"""Known rows of three lines in a hub's database: the same as Python records, to count independently of SQL."""

import json
import random
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from sqlalchemy import Engine, create_engine, insert

from daemon.consumers.plant import tables
from daemon.consumers.plant.consumer import STORE
from daemon.plant.schema import make_schema
from tests.daemon.dashboard.browser import HOSTILE_SERIAL

LINES = ("line-1", "line-2", "line-3")
PARTS = {"R1": "R0402", "C1": "C0603", "U1": "QFP64"}
DEFECTS = {"R0402": "tombstone", "C0603": "missing", "QFP64": "bridge"}
#: Columns of `boards` that list images, and the verdict of these.
_FOUND = {"failed": "fail", "review": "review", "unknown": "unknown"}
WALKER = "W0001"
EPOCH = "0123456789ab"

Record = dict[str, Any]


@dataclass
class PlantRows:
    """Rows as dictionaries, by table; `now` is the moment up to which the lines have worked."""

    now: datetime
    rows: dict[str, list[Record]] = field(
        default_factory=lambda: {name: [] for name in ("inspections", "boards", "reviews", "pictures", "events")}
    )
    _seq: Counter[str] = field(default_factory=Counter)

    def board(self, line: str, serial: str, verdicts: Mapping[str, str], ago: timedelta, **more: Any) -> Record:
        """Add an attempt at a board: an image for each designator, then the board itself, all at one time."""
        at = self.now - ago
        common = {"line": line, "epoch": EPOCH, "at": at, "board_type": more.pop("board_type", "mainboard-a")}
        common |= {"board_serial": serial, "attempt": more.pop("attempt", 1), "lot": more.pop("lot", "L1")}
        common |= {"station": None, "rules_version": more.pop("rules_version", "aaaaaaaaaaaa")}
        images: list[Record] = []
        for designator, verdict in verdicts.items():
            component = PARTS[designator]
            version = more.get("version", "v1")
            answer = {"expert": component, "version": version, "label": "ok", "confidence": 0.9}
            image = common | {
                "expert": component, "expert_version": version, "label": "ok",
                "seq": self.next_seq(line), "image_id": f"{serial}/{designator}", "source": "camera-1",
                "component": component, "designator": designator, "verdict": verdict, "confidence": 0.9,
                "defect": DEFECTS[component] if verdict == "fail" else None, "late": False,
                "reason": "deadline" if verdict == "unknown" else None, "latency_ms": 40.0 + len(serial),
                "stages": [answer],
            }  # fmt: skip
            image["inspection_id"] = image["seq"]
            images.append(image)
        worst = next((one for one in ("fail", "unknown", "review") if one in verdicts.values()), "pass")
        board = common | {
            "seq": self.next_seq(line), "verdict": worst, "final_verdict": worst, "expected": len(verdicts),
            "inspected": len(verdicts), "reason": "complete", "missing": [],
            **{kind: [{"designator": one["designator"], "component": one["component"], "defect": one["defect"]}
                      for one in images if one["verdict"] == verdict] for kind, verdict in _FOUND.items()},
        }  # fmt: skip
        self.rows["inspections"] += images
        self.rows["boards"].append(board)
        return board

    def review(self, board: Record, designator: str, verdict: str, reviewer: str = "Eva", **more: Any) -> None:
        """Add a decision about one image, an hour after the board."""
        (image,) = (one for one in self.images_of(board) if one["designator"] == designator)
        names = ("line", "epoch", "board_type", "board_serial", "attempt", "inspection_id", "component", "designator")
        row = {name: image[name] for name in names} | {
            "seq": self.next_seq(board["line"]), "review_id": self._seq[board["line"]], "verdict": verdict,
            "at": board["at"] + timedelta(minutes=1), "reviewer": reviewer, "note": None, "undo_of": None,
            "defect": image["defect"] or "scratch" if verdict == "fail" else None, "verdict_by_line": image["verdict"],
            "expert": image["expert"], "expert_version": image["expert_version"],
        }  # fmt: skip
        self.rows["reviews"].append(row | more)
        verdicts = [self.final_verdict(one) for one in self.images_of(board)]
        board["final_verdict"] = next((one for one in ("fail", "unknown", "review") if one in verdicts), "pass")
        self.rows["reviews"][-1]["board_verdict"] = board["final_verdict"]

    def images_of(self, board: Record) -> list[Record]:
        key = ("line", "board_type", "board_serial", "attempt")
        return [one for one in self.rows["inspections"] if all(one[name] == board[name] for name in key)]

    def final_verdict(self, image: Record) -> str:
        """Return the verdict of the newest review, else the line's."""
        return next((row["verdict"] for row in reversed(self.reviews_of(image))), image["verdict"])

    def reviews_of(self, image: Record) -> list[Record]:
        key = (image["line"], image["inspection_id"])
        return [row for row in self.rows["reviews"] if (row["line"], row["inspection_id"]) == key]

    def next_seq(self, line: str) -> int:
        self._seq[line] += 1
        return self._seq[line]

    def store(self, engine: Engine, last_seen: Mapping[str, datetime | None]) -> None:
        """Make the schema, and store the rows; images and boards are counted as they are when a line sends them."""
        make_schema(engine)
        ends = {line: max(one["at"] for one in self.rows["boards"] if one["line"] == line) for line in last_seen}
        stored = [
            {
                "line": line, "epoch": EPOCH, "identity": f"pc of {line}", "host": f"{line}-pc", "last_at": ends[line],
                "last_seq": self._seq[line], "connected_at": seen, "last_seen": seen,
            }
            for line, seen in last_seen.items()
        ]  # fmt: skip
        with engine.begin() as connection:
            for name, rows in {"lines": stored, **self.rows}.items():
                if name in ("inspections", "boards"):
                    connection.exec_driver_sql(STORE[name][0], {"rows": json.dumps(rows, default=str)})
                elif rows:
                    connection.execute(insert(tables.metadata.tables[name]), rows)


def some_weeks(now: datetime, boards: int = 120) -> PlantRows:
    """Return ten days of three lines: mostly good boards, decisions of people, a board that walks over all lines."""
    plant, dice = PlantRows(now), random.Random(17)
    for number in range(boards):
        for place, line in enumerate(LINES):
            odds = [20 - 4 * place, 2 + place, 1, 1]
            verdicts = {one: dice.choices(("pass", "fail", "review", "unknown"), odds)[0] for one in PARTS}
            ago = timedelta(minutes=2 + number * 10 * 24 * 60 / boards + place)
            lot, version = f"L{number % 4}", "v2" if number < boards // 2 else "v1"
            board = plant.board(line, f"{line[-1]}{number:05}", verdicts, ago, lot=lot, version=version)
            for designator, verdict in verdicts.items():
                if verdict != "pass" and dice.random() < 0.5:
                    plant.review(board, designator, dice.choice(("pass", "fail")), dice.choice(("Eva", "Ali")))
                elif verdict == "pass" and dice.random() < 0.05:
                    plant.review(board, designator, dice.choice(("pass", "fail")))
            if verdicts["U1"] == "fail" and dice.random() < 0.5:
                again = dict.fromkeys(PARTS, "pass")
                plant.board(line, board["board_serial"], again, ago - timedelta(minutes=1), attempt=2, lot=lot)
    first = plant.board("line-1", WALKER, {"R1": "pass", "U1": "fail"}, timedelta(hours=50))
    plant.review(first, "U1", "pass", note="a shadow")
    plant.board("line-2", WALKER, {"C1": "review"}, timedelta(hours=26))
    plant.board("line-3", WALKER, {"R1": "pass", "C1": "pass"}, timedelta(minutes=3))
    plant.review(plant.board("line-1", "TWO", {"R1": "fail", "U1": "fail"}, timedelta(minutes=6)), "R1", "pass")
    plant.board("line-2", HOSTILE_SERIAL, {"R1": "fail"}, timedelta(minutes=4))
    return plant


@contextmanager
def filled(url: str, plant: PlantRows, last_seen: Mapping[str, datetime | None]) -> Iterator[Engine]:
    """Store the rows at `url` and yield an engine of it."""
    engine = create_engine(url)
    try:
        plant.store(engine, last_seen)
        yield engine
    finally:
        engine.dispose()


def a_plant_file(folder: Path, url: str, http: str, **more: Any) -> Path:
    """Write a plant.yaml."""
    file = folder / "plant.yaml"
    settings = {"database": url, "http": http, "pictures": {"folder": "pictures"}} | more
    file.write_text(json.dumps(settings), encoding="utf-8")
    return file


def utc_now() -> datetime:
    return datetime.now(UTC).replace(microsecond=0)
