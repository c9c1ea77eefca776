"""Keep a database of the newest schema, for the tests of all later versions:

    PYTHONPATH=. .venv/bin/python tests/daemon/storage/database/dump_schema.py

writes `schemas/NNNN.sql` (every table with rows: boards open and closed, images judged, pending and late, reviews,
text beyond ASCII, NULLs) and `schemas/NNNN.journal` (the bytes of the images that wait). Run it once when a migration
is added, and commit both files; what a release has written is never made again.
"""

import sqlite3
import tempfile
from contextlib import closing
from pathlib import Path

from daemon.line.rulebook import Rulebook
from daemon.records import Accepted, Arrival, ExpertSwitch, ExpertVersion, Pixels
from daemon.storage.database.store import open_store
from daemon.storage.journal import Journal
from tests.daemon.storage.database.store_parts import (
    Line,
    MovingClock,
    a_box,
    a_stage,
    an_arrival,
    an_outcome,
    some_rules,
)
from tests.lines import a_jpeg

SCHEMAS = Path(__file__).with_name("schemas")
#: 2025-01-15T08:00:00Z: in the past on every machine that runs the tests.
MADE_S = 1_736_928_000.0

#: Rules for the experts of `tests/lines.py`. Boards without a time limit wait for their images for ever.
RULES = """\
boards:
  mainboard-a:
    time_limit: 60s
    components: {R0402: 2, C0603: [C1, C2], QFP64: [U1]}
  patient:
    components: {R0402: 2, QFP64: [U1]}
  "Ünï/~ 板":
    components: {C0603: 1}
classifiers:
  "*": {expert: "{component}", pass: [ok, odd, bad], review_below: 0.0, then: solder}
detectors:
  solder: {expert: yolo-solder, fail_on: {bridge: 0.99}}
defects: {bridge: D207}
"""


def main() -> None:
    """Write the dump of the newest schema."""
    with tempfile.TemporaryDirectory() as folder:
        line = _a_line(Path(folder))
        _fill(line)
        line.store.close()
        line.journal.close()
        with closing(sqlite3.connect(Path(folder) / "inspection.db")) as database:
            ((schema,),) = database.execute("SELECT version_num FROM alembic_version").fetchall()
            text = "\n".join(database.iterdump()) + "\n"
        SCHEMAS.mkdir(exist_ok=True)
        (SCHEMAS / f"{schema}.sql").write_text(text, encoding="utf-8")
        (segment,) = (Path(folder) / "journal").glob("segment-*")
        (SCHEMAS / f"{schema}.journal").write_bytes(segment.read_bytes())
    print(f"wrote {SCHEMAS}/{schema}.sql and .journal")


class _Line(Line):
    """A store and a journal, driven as the writer drives them: bytes first, then their rows."""

    journal: Journal

    def take(self, *arrivals: Arrival) -> list[Accepted]:
        keys = self.journal.append([arrival.payload for arrival in arrivals])
        return self.store.accept(list(zip(arrivals, keys, strict=True)), self.rulebook.current)


def _a_line(folder: Path) -> _Line:
    clock = MovingClock(MADE_S)

    def version(expert: str, expert_version: str) -> ExpertVersion:
        return ExpertVersion(
            expert, expert_version, expert_version.ljust(64, "0"), "resnet18", ("ok", "Lötbrücke"), 4096, "float32", ""
        )

    store = open_store(f"sqlite:///{folder}/inspection.db", clock=clock.clock, expert_version=version)
    line = _Line(folder, clock, Rulebook(some_rules(RULES)), store)
    line.journal = Journal(folder / "journal")
    return line


def _fill(line: _Line) -> None:
    """One of everything that the schema can hold."""
    chain = (a_stage("R0402"), a_stage("yolo-solder", 2, detections=(a_box("bridge"), a_box("void", 0.5)), label=None))
    named = {"serial": "A-1", "lot": "Los 7", "station": "Straße 3"}
    closed = [
        ("R0402", "R1", an_outcome(1)),
        ("R0402", "R2", an_outcome(2, "fail", "D207", None, chain)),
        ("C0603", "C1", an_outcome(3, "review", None, None, [a_stage("C0603", 3, label="Lötbrücke", confidence=0.5)])),
        ("C0603", "C2", an_outcome(4, "unknown", None, "bad_image", [])),
        ("QFP64", "U1", an_outcome(5)),
    ]
    for number, (component, designator, outcome) in enumerate(closed):
        line.take(an_arrival(f"a/{number}", component, designator, payload=a_jpeg(number), **named))
        line.clock.pass_s(0.25)
        line.store.write([outcome], [_a_switch(component)])
    # Closed by its time limit, then a late image; the next image opens the second attempt and waits, with a deadline.
    line.take(an_arrival("late-1", "R0402", "R1", serial="A-2", payload=a_jpeg(10)))
    line.judge(an_outcome(6))
    line.clock.pass_s(61.0)
    line.judge()
    line.take(an_arrival("late-2", "R0402", "R2", serial="A-2", payload=a_jpeg(11)))
    line.judge(an_outcome(7, "fail", "tombstone"))
    line.take(an_arrival("waits-0", "R0402", "R1", serial="A-2", payload=a_jpeg(12), deadline_ms=60_000))
    # Waiting on boards that wait: JPEG, raw grey, raw colour.
    line.take(
        an_arrival("waits-1", "R0402", "R1", type="patient", serial="P-1", payload=a_jpeg(13)),
        an_arrival("waits-2", "R0402", "R2", type="patient", serial="P-1", payload=a_jpeg(14)),
        an_arrival("waits-3", "QFP64", "U1", type="patient", serial="P-1", **_raw(1)),
        an_arrival("waits-4", "C0603", "C9", type="Ünï/~ 板", serial="码-1", source="cam:2", **_raw(3)),
    )
    with closing(sqlite3.connect(line.folder / "inspection.db")) as database, database:
        reviews = [
            (2, "2025-01-15T09:00:00.000Z", "Žofie", "pass", None, "Kratzer, kein Fehler"),
            (2, "2025-01-15T09:05:00.000Z", "Žofie", "fail", "D207", None),
        ]
        database.executemany(
            'INSERT INTO reviews (inspection_id, "at", reviewer, verdict, defect, note) VALUES (?, ?, ?, ?, ?, ?)',
            reviews,
        )
        answer = (1, "mes", "g-1", "tiny", "Was ist „kalt“?", "accepted", "2025-01-15T09:00:00.000Z", 20, 900, 5000, 1)
        database.execute(
            "INSERT INTO generations (generation_id, source, request_id, model, prompt, status, accepted_at,"
            " max_new_tokens, slo_ms, deadline_ms, stream) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            answer,
        )


def _raw(channels: int) -> dict[str, object]:
    return {"payload": bytes(range(256))[: 64 * channels], "pixels": Pixels("raw", (8, 8, channels))}


def _a_switch(expert: str) -> ExpertSwitch:
    return ExpertSwitch(MADE_S, "cpu", "cpu", expert, ("QFP64",), 4096, 1.5, "disk", "demand")


if __name__ == "__main__":
    main()
