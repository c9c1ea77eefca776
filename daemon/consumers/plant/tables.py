"""The tables of the hub's PostgreSQL database: results of all lines, keyed by line, epoch and `seq`.

`epoch` names one history of a line: a line that was restored from a backup counts again and has another one.
"""

from datetime import date
from typing import Any

from sqlalchemy import (
    TEXT,
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    Date,
    DateTime,
    Double,
    Identity,
    Index,
    Integer,
    MetaData,
    Table,
    column,
    table,
    text,
)
from sqlalchemy.dialects.postgresql import JSONB

from daemon.consumers.plant.settings import LINE_NAME

metadata = MetaData()
_Time = DateTime(timezone=True)
#: Texts compare by their bytes, as on a line, so that an index of serials also finds beginnings of serials.
Text = TEXT(collation="C")


def _texts(*names: str, nullable: bool = False) -> list[Column[str]]:
    return [Column(name, Text, nullable=nullable) for name in names]


def _counts(*names: str) -> list[Column[int]]:
    return [Column(name, BigInteger, nullable=False, server_default="0") for name in names]


def _key() -> list[Column[Any]]:
    return [
        *(Column(name, Text, primary_key=True) for name in ("line", "epoch")),
        Column("seq", BigInteger, primary_key=True),
    ]


#: One row for each line. `last_seq` of `epoch` is its durable position: everything up to it is here. `last_seen` moves
#: every few seconds while the line is connected. `identity` names the PC and the folders that write; `accepts` is set
#: by `coserve plant accept`: the next identity or epoch that is not known may take over. `defects` names the codes of
#: its rules.
lines = Table(
    "lines",
    metadata,
    Column("line", Text, primary_key=True),
    *_texts("epoch", "identity", "host"),
    Column("last_seq", BigInteger, nullable=False),
    *(Column(name, _Time) for name in ("last_at", "connected_at", "last_seen")),
    *_texts("software", nullable=True),
    Column("pictures_seq", BigInteger, nullable=False, server_default="0"),
    Column("accepts", Boolean, nullable=False, server_default="false"),
    Column("defects", JSONB),
    CheckConstraint(f"line ~ '{LINE_NAME}'", name="line_name"),
)

#: A partition for each day of `at` (UTC), `inspections_20261126`; `inspections_other` has times that are far off.
#: `label`, `expert`, `expert_version` and `confidence` are those of the last stage; `stages` has all of them as
#: `[{expert, version, label, confidence}]`.
inspections = Table(
    "inspections",
    metadata,
    *_key(),
    Column("at", _Time, primary_key=True),
    *(Column(name, BigInteger, nullable=False) for name in ("inspection_id", "attempt")),
    *_texts("image_id", "source", "board_type", "board_serial", "component", "verdict", "rules_version"),
    *_texts("lot", "station", "designator", "defect", "reason", nullable=True),
    *_texts("expert", "expert_version", "label", nullable=True),
    *(Column(name, Double) for name in ("confidence", "latency_ms")),
    Column("late", Boolean, nullable=False),
    Column("stages", JSONB, nullable=False),
    Index("inspections_by_id", "line", "inspection_id"),
    Index("inspections_by_serial", "board_serial", "board_type"),
    Index("inspections_not_passed", "line", "at", postgresql_where=text("verdict <> 'pass'")),
    postgresql_partition_by="RANGE (at)",
)

#: `final_verdict` is the line's own at first, then `board_verdict` of the newest review.
boards = Table(
    "boards",
    metadata,
    *_key(),
    Column("at", _Time, nullable=False),
    *_texts("board_type", "board_serial", "verdict", "final_verdict"),
    Column("attempt", BigInteger, nullable=False),
    *_texts("lot", "station", "reason", "rules_version", nullable=True),
    *(Column(name, Integer, nullable=False) for name in ("expected", "inspected")),
    *(Column(name, JSONB, nullable=False) for name in ("failed", "review", "unknown", "missing")),
    Index("boards_by_serial", "board_serial", "board_type"),
    Index("boards_by_time", "line", "at"),
)

#: `verdict_by_line`, `expert` and `expert_version` are those of the image when the decision came in; null if the
#: decision is about a whole board, or its image is not at the hub any more. `epoch` and `seq` number the decision;
#: `of_epoch` is that of its image or attempt, null from lines before 1.2: then they are the same.
reviews = Table(
    "reviews",
    metadata,
    *_key(),
    Column("at", _Time, nullable=False),
    *(Column(name, BigInteger, nullable=False) for name in ("review_id", "attempt")),
    *(Column(name, BigInteger) for name in ("inspection_id", "undo_of")),
    *_texts("board_type", "board_serial", "verdict", "reviewer"),
    *_texts("component", "designator", "defect", "note", nullable=True),
    *_texts("board_verdict", "verdict_by_line", "expert", "expert_version", "of_epoch", nullable=True),
    Index("reviews_by_image", "line", "inspection_id"),
    Index("reviews_by_serial", "board_serial", "board_type"),
    Index("reviews_by_time", "line", "at"),
)

#: Counted in the transaction that brings the rows, by the hour of `at`: images by the line's verdict; attempts of
#: boards by the line's verdict; first attempts, those that the line passed, and those that pass after reviews.
yields_by_hour = Table(
    "yields_by_hour",
    metadata,
    Column("hour", _Time, primary_key=True),
    *(Column(name, Text, primary_key=True) for name in ("line", "board_type")),
    *_counts("inspected", "passed", "failed", "review", "unknown"),
    *_counts("boards", "boards_passed", "boards_failed", "boards_review", "boards_unknown"),
    *_counts("first_boards", "first_passed", "first_final_passed"),
)

#: Images that the line failed, by the hour of `at`; `defect` is '' where there is none.
defects_by_hour = Table(
    "defects_by_hour",
    metadata,
    Column("hour", _Time, primary_key=True),
    *(Column(name, Text, primary_key=True) for name in ("line", "board_type", "component", "defect")),
    *_counts("count"),
)

#: Events of lines: `joined`, `moved`, `restored`, `replaced`, `name_taken`, `older_copy`, `pictures_wait`.
events = Table(
    "events",
    metadata,
    Column("event_id", BigInteger, Identity(), primary_key=True),
    Column("line", Text),
    Column("at", _Time, nullable=False, server_default=text("now()")),
    *_texts("kind", "text"),
    Index("events_by_time", "line", "at"),
)

#: Decisions that were made at the hub, for the line to take over: `asked`, then `accepted` or `refused` with the line's
#: `answer`. `newest` is the newest `review_id` of the image that the reviewer saw, null for none: as on a line, a
#: decision on something else is a conflict.
review_requests = Table(
    "review_requests",
    metadata,
    Column("request_id", BigInteger, Identity(), primary_key=True),
    *_texts("line", "epoch"),
    Column("inspection_id", BigInteger, nullable=False),
    *_texts("verdict", "reviewer"),
    *_texts("defect", "note", nullable=True),
    Column("newest", BigInteger),
    Column("at", _Time, nullable=False, server_default=text("now()")),
    Column("state", Text, nullable=False, server_default="asked"),
    Column("answer", Text),
    Column("answered_at", _Time),
    CheckConstraint("state IN ('asked', 'accepted', 'refused')", name="state"),
    Index("review_requests_asked", "line", postgresql_where=text("state = 'asked'")),
)

#: Pictures of images: `stored` under their sha256 in the hub's folder or bucket, `gone` at the line, `too_large` for
#: the hub, or `pruned`.
pictures = Table(
    "pictures",
    metadata,
    *_key(),
    Column("inspection_id", BigInteger, nullable=False),
    Column("sha256", Text),
    Column("bytes", BigInteger, nullable=False, server_default="0"),
    Column("at", _Time, nullable=False, server_default=text("now()")),
    Column("state", Text, nullable=False),
    CheckConstraint("state IN ('stored', 'gone', 'too_large', 'pruned')", name="state"),
    Index("pictures_by_sha256", "sha256"),
    Index("pictures_by_time", "line", "at"),
)

#: Pictures that a line has sent, until a row of `pictures` names them or they are swept.
uploads = Table(
    "uploads",
    metadata,
    *(Column(name, Text, primary_key=True) for name in ("line", "sha256")),
    Column("bytes", BigInteger, nullable=False),
    Column("at", _Time, nullable=False, server_default=text("now()")),
)

#: SELECTs of the views: the one place that matches decisions with images and boards. A decision after a restore may be
#: about an image of an earlier epoch, and one before it about an image whose number now belongs to another.
VIEWS = {
    "final_images": """
        SELECT image.*, CASE WHEN newest.seq IS NULL THEN image.verdict ELSE newest.verdict END AS final_verdict,
               CASE WHEN newest.seq IS NULL THEN image.defect ELSE newest.defect END AS final_defect,
               coalesce(newest.reviewer, 'daemon') AS decided_by, newest.at AS decided_at, newest.note
        FROM inspections AS image LEFT JOIN LATERAL (
            SELECT * FROM reviews WHERE reviews.line = image.line AND reviews.inspection_id = image.inspection_id
              AND coalesce(reviews.of_epoch, reviews.epoch) = image.epoch
            ORDER BY reviews.at DESC, reviews.seq DESC LIMIT 1
        ) AS newest ON true
    """,
    "board_decisions": """
        SELECT board.epoch AS board_epoch, decision.* FROM boards AS board JOIN reviews AS decision
            ON decision.line = board.line AND decision.board_type = board.board_type
           AND decision.board_serial = board.board_serial AND decision.attempt = board.attempt
           AND board.epoch IN (decision.epoch, decision.of_epoch)
    """,
    "final_boards": """
        SELECT board.*, coalesce(newest.reviewer, 'daemon') AS decided_by, coalesce(newest.at, board.at) AS decided_at
        FROM boards AS board LEFT JOIN LATERAL (
            SELECT reviewer, at FROM board_decisions AS decision
            WHERE decision.line = board.line AND decision.board_type = board.board_type
              AND decision.board_serial = board.board_serial AND decision.attempt = board.attempt
              AND decision.board_epoch = board.epoch
            ORDER BY at DESC, seq DESC LIMIT 1
        ) AS newest ON true
    """,
}


def _view(of: Table, name: str, **more: Any) -> Any:
    columns = {c.name: c.type for c in of.c} | more | {"decided_by": Text, "decided_at": _Time}
    return table(name, *(column(name, kind) for name, kind in columns.items()))


#: The views, for queries.
final_images = _view(inspections, "final_images", final_verdict=Text, final_defect=Text, note=Text)
final_boards = _view(boards, "final_boards")

partitions = Table("partitions", metadata, Column("day", Date, primary_key=True))


def partition_name(day: date) -> str:
    return f"inspections_{day:%Y%m%d}"
