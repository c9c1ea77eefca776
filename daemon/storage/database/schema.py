"""The tables and views of RESULTS.md, and the daemon's own tables and columns.

Columns that RESULTS.md does not name are the daemon's: `inspections.lot` and `.station` (as this image's publisher
sent them, so that a message can be rendered again), `boards.failed`, `.review`, `.unknown` and `.missing` (frozen at
closing), `reviews.board_verdict` (the attempt's final verdict with this row, as published),
`generations.max_new_tokens`, `.slo_ms`, `.deadline_ms` and `.stream` (as sent, for a restart), and the tables
`pending`, `recipes` and `stream_position`.

A new database is made from here. A change of a table comes with a step in migrate.py.
"""

from typing import Any

from sqlalchemy import (
    REAL,
    CheckConstraint,
    Column,
    ForeignKey,
    ForeignKeyConstraint,
    Index,
    Integer,
    MetaData,
    Table,
    Text,
    UniqueConstraint,
    column,
    func,
    table,
)

metadata = MetaData(
    naming_convention={
        "pk": "pk_%(table_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
    }
)

_VERDICTS = "('pass', 'fail', 'review', 'unknown')"


def _columns(kind: Any, *names: str, nullable: bool = False) -> list[Column[Any]]:
    return [Column(name, kind, nullable=nullable) for name in names]


rules_versions = Table(
    "rules_versions",
    metadata,
    Column("rules_version", Text, primary_key=True),
    *_columns(Text, "sha256", "loaded_at", "text"),
)

#: What an attempt is measured against, kept so that closing it needs no rules file: `positions` is a JSON list of
#: [component, quantity, designators or null] in the rules' order.
recipes = Table(
    "recipes",
    metadata,
    Column("rules_version", Text, ForeignKey("rules_versions.rules_version"), primary_key=True),
    Column("board_type", Text, primary_key=True),
    Column("time_limit_s", REAL),
    Column("positions", Text, nullable=False),
)

#: Editions in which attempts began; `ended_at`: it serves no more, not after a restart either.
editions = Table(
    "editions",
    metadata,
    Column("edition", Integer, primary_key=True),
    Column("parent", Integer),
    *_columns(Text, "created_at", "who", "why", "rules_version", "sha256"),
    *_columns(Text, "note", "ended_at", nullable=True),
)

boards = Table(
    "boards",
    metadata,
    Column("board_id", Integer, primary_key=True),
    Column("board_type", Text, nullable=False),
    Column("serial", Text, nullable=False),
    Column("attempt", Integer, nullable=False),
    *_columns(Text, "lot", "station", nullable=True),
    Column("first_seen_at", Text, nullable=False),
    Column("completed_at", Text, index=True),
    Column("expected", Integer, nullable=False),
    Column("inspected", Integer, nullable=False, server_default="0"),
    *_columns(Text, "verdict", "reason", nullable=True),
    Column("rules_version", Text, nullable=False),
    Column("seq", Integer, unique=True),
    *_columns(Text, "failed", "missing", "review", "unknown", "attributes", nullable=True),
    Column("edition", Integer, ForeignKey("editions.edition"), nullable=False),
    Column("run_id", Integer),
    UniqueConstraint("board_type", "serial", "attempt"),
    CheckConstraint(f"verdict IN {_VERDICTS}", name="verdict"),
    CheckConstraint("reason IN ('complete', 'time_limit')", name="reason"),
)

#: Boards by serial, in either case of A to Z.
Index("ix_boards_serial", func.lower(boards.c.serial))

inspections = Table(
    "inspections",
    metadata,
    Column("inspection_id", Integer, primary_key=True),
    *_columns(Text, "source", "image_id"),
    Column("board_id", Integer, ForeignKey("boards.board_id"), nullable=False),
    *_columns(Text, "component", "designator"),
    Column("captured_at", Text),
    Column("accepted_at", Text, nullable=False),
    Column("completed_at", Text),
    Column("deadline_ms", Integer),
    Column("image_bytes", Integer, nullable=False),
    Column("status", Text, nullable=False),
    *_columns(Text, "verdict", "defect", "reason", nullable=True),
    Column("late", Integer, nullable=False, server_default="0"),
    *_columns(Text, "rules_version", "image_sha256"),
    Column("image_path", Text),
    Column("latency_ms", REAL),
    Column("seq", Integer, unique=True),
    *_columns(Text, "lot", "station", nullable=True),
    Column("surplus", Integer),
    Column("run_id", Integer),
    Column("edition", Integer, nullable=False),
    UniqueConstraint("source", "image_id"),
    CheckConstraint("status IN ('accepted', 'done')", name="status"),
    CheckConstraint(f"verdict IN {_VERDICTS}", name="verdict"),
    CheckConstraint("late IN (0, 1)", name="late"),
)

#: By board, and of these the images that an attempt is rebuilt from (boards.py): those that changed something.
Index(None, inspections.c.board_id, inspections.c.surplus)

_is_kept = inspections.c.image_path.is_not(None)
#: The images that are there, oldest first within each verdict, with their bytes: what pruning asks for.
Index(
    "ix_inspections_kept",
    *(inspections.c.verdict, inspections.c.completed_at, inspections.c.image_bytes),
    sqlite_where=_is_kept,
)
#: The same in the order of acceptance, which no clock can spoil: what goes when space is needed.
Index("ix_inspections_kept_in_order", *(inspections.c.verdict, inspections.c.inspection_id), sqlite_where=_is_kept)

#: Bytes that still lie in the journal: `task` is `judge` until the verdict, then `keep` until the copy in `images/`
#: is durable. A segment that no row names can go.
pending = Table(
    "pending",
    metadata,
    Column("inspection_id", Integer, ForeignKey("inspections.inspection_id"), primary_key=True),
    Column("task", Text, nullable=False),
    *_columns(Integer, "segment", "offset", "length"),
    Column("encoding", Text, nullable=False),
    *_columns(Integer, "height", "width", "channels", nullable=True),
    CheckConstraint("task IN ('judge', 'keep')", name="task"),
)

stages = Table(
    "stages",
    metadata,
    Column("inspection_id", Integer, ForeignKey("inspections.inspection_id"), primary_key=True),
    Column("step", Integer, primary_key=True),
    *_columns(Text, "expert", "expert_version"),
    Column("label", Text),
    Column("confidence", REAL),
    *_columns(Text, "device", "executor"),
    *_columns(Integer, "batch_id", "batch_size"),
    *_columns(REAL, "queued_ms", "load_ms", "infer_ms"),
    Column("expert_settings", Text),
)

#: Everything beside the weights that an expert's answers depend on (ExpertSpec.settings), by its digest.
expert_settings = Table(
    "expert_settings",
    metadata,
    Column("expert", Text, primary_key=True),
    Column("expert_settings", Text, primary_key=True),
    *_columns(Text, "settings", "first_used_at"),
)

detections = Table(
    "detections",
    metadata,
    Column("detection_id", Integer, primary_key=True),
    *_columns(Integer, "inspection_id", "step"),
    Column("label", Text, nullable=False),
    *_columns(REAL, "confidence", "x1", "y1", "x2", "y2"),
    ForeignKeyConstraint(["inspection_id", "step"], ["stages.inspection_id", "stages.step"]),
    Index(None, "inspection_id", "step"),
)

expert_switches = Table(
    "expert_switches",
    metadata,
    Column("switch_id", Integer, primary_key=True),
    *_columns(Text, "at", "executor", "device", "loaded", "evicted"),
    Column("bytes", Integer, nullable=False),
    Column("load_ms", REAL, nullable=False),
    *_columns(Text, "tier", "cause"),
    CheckConstraint("tier IN ('ram', 'disk')", name="tier"),
    CheckConstraint("cause IN ('demand', 'prefetch', 'startup', 'pin')", name="cause"),
)

reviews = Table(
    "reviews",
    metadata,
    Column("review_id", Integer, primary_key=True),
    Column("inspection_id", Integer, ForeignKey("inspections.inspection_id"), index=True),
    *_columns(Text, "at", "reviewer", "verdict"),
    *_columns(Text, "defect", "note", nullable=True),
    Column("board_id", Integer, ForeignKey("boards.board_id"), index=True),
    Column("undo_of", Integer),
    Column("seq", Integer, unique=True),
    Column("board_verdict", Text),
    Column("epoch", Text),
    CheckConstraint(f"verdict IN {_VERDICTS}", name="verdict"),
    CheckConstraint("inspection_id IS NOT NULL OR board_id IS NOT NULL", name="subject"),
    # Append-only: a deleted newest review must not give its number away.
    sqlite_autoincrement=True,
)

#: Defects that people marked on an image in Review, in its pixels; they belong to the decision that they came with.
drawn_boxes = Table(
    "drawn_boxes",
    metadata,
    Column("box_id", Integer, primary_key=True),
    Column("review_id", Integer, ForeignKey("reviews.review_id"), nullable=False, index=True),
    Column("label", Text, nullable=False),
    *_columns(REAL, "x1", "y1", "x2", "y2"),
)

#: Answers of versions in shadow. `outcome` is what the rules make of it at that step, `outcome_in_service` what they
#: made of the answer of the version in service: pass, fail CODE, review, next STEP, or review, next STEP.
shadow_answers = Table(
    "shadow_answers",
    metadata,
    Column("inspection_id", Integer, ForeignKey("inspections.inspection_id"), primary_key=True),
    *(Column(name, Text, primary_key=True) for name in ("expert", "expert_version")),
    Column("step", Integer, nullable=False),
    Column("label", Text),
    Column("confidence", REAL),
    *_columns(Text, "outcome", "outcome_in_service"),
    Column("infer_ms", REAL, nullable=False),
    Index(None, "expert", "expert_version", "inspection_id"),
)

generations = Table(
    "generations",
    metadata,
    Column("generation_id", Integer, primary_key=True),
    *_columns(Text, "source", "request_id"),
    Column("board_id", Integer, ForeignKey("boards.board_id"), index=True),
    Column("model", Text, nullable=False),
    *_columns(Text, "mode", "task", nullable=True),
    Column("prompt", Text, nullable=False),
    Column("text", Text),
    *_columns(Integer, "prompt_tokens", "new_tokens", nullable=True),
    *_columns(REAL, "ttft_ms", "tpot_ms", "total_ms", nullable=True),
    Column("expert_fetches", Integer),
    *_columns(REAL, "predictor_hit_rate", "brownout_threshold", nullable=True),
    Column("accepted_at", Text, nullable=False),
    Column("completed_at", Text),
    Column("status", Text, nullable=False),
    Column("reason", Text),
    Column("seq", Integer, unique=True),
    *_columns(Integer, "max_new_tokens", "deadline_ms", "stream", nullable=True),
    Column("slo_ms", REAL),
    UniqueConstraint("source", "request_id"),
    CheckConstraint("status IN ('accepted', 'done', 'unknown')", name="status"),
)

expert_versions = Table(
    "expert_versions",
    metadata,
    Column("expert", Text, primary_key=True),
    Column("expert_version", Text, primary_key=True),
    *_columns(Text, "sha256", "architecture", "classes"),
    Column("bytes", Integer, nullable=False),
    *_columns(Text, "dtype", "origin", "first_used_at"),
)

#: What people and the daemon changed about the line: append-only.
changes = Table(
    "changes",
    metadata,
    Column("change_id", Integer, primary_key=True),
    *_columns(Text, "at", "who", "what", "subject"),
    *_columns(Text, "old", "new", "note", nullable=True),
    sqlite_autoincrement=True,
)

#: One row for each start of the daemon; `ended_at` stays null where it was killed.
runs = Table(
    "runs",
    metadata,
    Column("run_id", Integer, primary_key=True),
    Column("started_at", Text, nullable=False),
    Column("ended_at", Text),
    *_columns(Text, "version", "epoch"),
    sqlite_autoincrement=True,
)

#: One row (`position_id` 1): the last numbers given, which outlive the rows that pruning takes, and how many of those
#: with a `seq` it took; `epoch` says which database gave them.
stream_position = Table(
    "stream_position",
    metadata,
    Column("position_id", Integer, primary_key=True),
    *_columns(Integer, "last_seq", "last_inspection_id", "last_board_id"),
    Column("pruned", Integer, nullable=False, server_default="0"),
    Column("epoch", Text),
    CheckConstraint("position_id = 1", name="one_row"),
)

#: The newest review of each image.
_NEWEST = """(
            SELECT inspection_id, max(review_id) AS review_id FROM reviews
            WHERE inspection_id IS NOT NULL GROUP BY inspection_id
        ) AS newest"""
#: Of the image in `inspections`; an aggregate, for which no database reads all reviews.
_NEWEST_REVIEW = """(
                            SELECT max(later.review_id) FROM reviews AS later
                            WHERE later.inspection_id = inspections.inspection_id
                        )"""


def _newest_decision(name: str) -> str:
    return f"""(
                        SELECT reviews.{name} FROM inspections JOIN reviews ON reviews.review_id = {_NEWEST_REVIEW}
                        WHERE inspections.board_id = boards.board_id AND reviews.reviewer <> 'daemon'
                        ORDER BY reviews.review_id DESC LIMIT 1
                    )"""  # noqa: S608 - our own column names


#: Heads by their settings, and the backbone that is loaded for them, by name and version: `line@50e527a8f71d`.
_HEADS = """
(SELECT settings.expert, settings.expert_settings, max(loaded) AS backbone
 FROM expert_settings AS settings JOIN (SELECT DISTINCT loaded FROM expert_switches) AS switches
 ON substr(loaded, -13) = '@' || substr(json_extract(settings.settings, '$.backbone'), 1, 12)
 GROUP BY settings.expert, settings.expert_settings) AS heads
"""
#: Name and SELECT, in the order in which they are made.
VIEWS: dict[str, str] = {
    "stream": """
        SELECT seq, 'inspection' AS kind, inspection_id AS key FROM inspections WHERE seq IS NOT NULL
        UNION ALL
        SELECT seq, 'board' AS kind, board_id AS key FROM boards WHERE seq IS NOT NULL
        UNION ALL
        SELECT seq, 'generation' AS kind, generation_id AS key FROM generations WHERE seq IS NOT NULL
        UNION ALL
        SELECT seq, 'review' AS kind, review_id AS key FROM reviews WHERE seq IS NOT NULL
    """,
    "final_boards": f"""
        SELECT boards.board_id, boards.board_type, boards.serial, boards.attempt, boards.lot,
               CASE WHEN whole.reviewer <> 'daemon' THEN whole.verdict
                    ELSE CASE (
                        SELECT max(CASE WHEN coalesce(reviews.verdict, inspections.verdict) = 'fail' THEN 3
                                   WHEN boards.inspected < boards.expected THEN 2
                                   WHEN coalesce(reviews.verdict, inspections.verdict) = 'review' THEN 1
                                   WHEN coalesce(reviews.verdict, inspections.verdict) = 'pass' THEN 0 ELSE 2 END)
                        FROM inspections
                        LEFT JOIN reviews ON reviews.review_id = {_NEWEST_REVIEW}
                        WHERE inspections.board_id = boards.board_id
                    ) WHEN 3 THEN 'fail' WHEN 2 THEN 'unknown' WHEN 1 THEN 'review' WHEN 0 THEN 'pass'
                    ELSE boards.verdict END
               END AS verdict,
               CASE WHEN whole.reviewer <> 'daemon' THEN whole.reviewer
                    ELSE coalesce({_newest_decision("reviewer")}, 'daemon') END AS decided_by,
               CASE WHEN whole.reviewer <> 'daemon' THEN whole.at
                    ELSE coalesce({_newest_decision("at")}, boards.completed_at) END AS decided_at,
               boards.verdict AS verdict_by_line
        FROM boards
        LEFT JOIN reviews AS whole ON whole.review_id = (
            SELECT max(reviews.review_id) FROM reviews WHERE reviews.board_id = boards.board_id
        )
        WHERE boards.verdict IS NOT NULL
    """,  # noqa: S608 - our own column names
    "board_yield": """
        SELECT board_type, lot, day, boards, passed, failed, review, unknown, 1.0 * passed / boards AS first_pass_yield,
               final_passed, 1.0 * final_passed / boards AS final_yield
        FROM (
            SELECT boards.board_type, boards.lot, substr(boards.completed_at, 1, 10) AS day,
                   count(*) AS boards,
                   sum(CASE WHEN boards.verdict = 'pass' THEN 1 ELSE 0 END) AS passed,
                   sum(CASE WHEN boards.verdict = 'fail' THEN 1 ELSE 0 END) AS failed,
                   sum(CASE WHEN boards.verdict = 'review' THEN 1 ELSE 0 END) AS review,
                   sum(CASE WHEN boards.verdict = 'unknown' THEN 1 ELSE 0 END) AS unknown,
                   sum(CASE WHEN final_boards.verdict = 'pass' THEN 1 ELSE 0 END) AS final_passed
            FROM boards
            JOIN final_boards ON final_boards.board_id = boards.board_id
            WHERE boards.attempt = 1
            GROUP BY boards.board_type, boards.lot, substr(boards.completed_at, 1, 10)
        ) AS counted
    """,
    "defect_pareto": """
        SELECT board_type, component, defect, count,
               1.0 * count / sum(count) OVER (PARTITION BY board_type) AS share,
               1.0 * sum(count) OVER (
                   PARTITION BY board_type ORDER BY count DESC, component, defect ROWS UNBOUNDED PRECEDING
               ) / sum(count) OVER (PARTITION BY board_type) AS cumulative_share
        FROM (
            SELECT boards.board_type, inspections.component, inspections.defect, count(*) AS count
            FROM inspections JOIN boards ON boards.board_id = inspections.board_id
            WHERE inspections.verdict = 'fail'
            GROUP BY boards.board_type, inspections.component, inspections.defect
        ) AS counted
    """,
    "component_health": f"""
        SELECT inspections.component,
               count(*) AS inspected,
               1.0 * sum(CASE WHEN inspections.verdict = 'fail' THEN 1 ELSE 0 END) / count(*) AS fail_rate,
               1.0 * sum(CASE WHEN inspections.verdict = 'review' THEN 1 ELSE 0 END) / count(*) AS review_rate,
               1.0 * sum(CASE WHEN inspections.verdict = 'unknown' THEN 1 ELSE 0 END) / count(*) AS unknown_rate,
               avg(stages.confidence) AS mean_confidence,
               sum(CASE WHEN reviews.verdict <> inspections.verdict THEN 1 ELSE 0 END) AS overridden
        FROM inspections
        LEFT JOIN stages ON stages.inspection_id = inspections.inspection_id AND stages.step = 0
        LEFT JOIN {_NEWEST} ON newest.inspection_id = inspections.inspection_id
        LEFT JOIN reviews ON reviews.review_id = newest.review_id
        WHERE inspections.status = 'done'
        GROUP BY inspections.component
    """,  # noqa: S608 - our own text
    "latency_by_hour": """
        SELECT hour, count(*) AS inspections,
               min(CASE WHEN 100 * place >= 50 * total THEN latency_ms END) AS p50_ms,
               min(CASE WHEN 100 * place >= 95 * total THEN latency_ms END) AS p95_ms,
               max(latency_ms) AS max_ms
        FROM (
            SELECT substr(completed_at, 1, 13) AS hour, latency_ms,
                   row_number() OVER (PARTITION BY substr(completed_at, 1, 13) ORDER BY latency_ms) AS place,
                   count(*) OVER (PARTITION BY substr(completed_at, 1, 13)) AS total
            FROM inspections
            WHERE status = 'done' AND latency_ms IS NOT NULL
        ) AS ranked
        GROUP BY hour
    """,
    "expert_usage": f"""
        SELECT names.expert,
               coalesce(used.images, 0) AS images,
               coalesce(used.batches, 0) AS batches,
               used.mean_batch,
               coalesce(loaded.loads, 0) AS loads,
               coalesce(loaded.load_ms, 0.0) AS load_ms,
               used.load_share
        FROM (SELECT expert FROM stages UNION SELECT loaded AS expert FROM expert_switches) AS names
        LEFT JOIN (
            SELECT expert, sum(images) AS images, count(*) AS batches, avg(1.0 * batch_size) AS mean_batch,
                   sum(load_ms) / nullif(sum(load_ms) + sum(infer_ms), 0.0) AS load_share
            FROM (
                SELECT expert, executor, batch_id, count(*) AS images, max(load_ms) AS load_ms,
                       max(infer_ms) AS infer_ms,
                       CASE WHEN max(is_head) THEN count(*) ELSE max(batch_size) END AS batch_size
                FROM (
                    SELECT expert, executor, batch_id, load_ms, infer_ms, batch_size, backbone IS NOT NULL AS is_head
                    FROM stages LEFT JOIN {_HEADS} USING (expert, expert_settings)
                    UNION ALL
                    SELECT backbone, executor, batch_id, load_ms, infer_ms, batch_size, 0
                    FROM stages JOIN {_HEADS} USING (expert, expert_settings)
                ) AS used_by
                GROUP BY expert, executor, batch_id
            ) AS batch
            GROUP BY expert
        ) AS used ON used.expert = names.expert
        LEFT JOIN (
            SELECT loaded AS expert, count(*) AS loads, sum(load_ms) AS load_ms FROM expert_switches GROUP BY loaded
        ) AS loaded ON loaded.expert = names.expert
    """,  # noqa: S608 - our own text
    "false_calls": f"""
        SELECT inspections.component,
               sum(CASE WHEN inspections.verdict = 'fail' AND reviews.verdict = 'pass' THEN 1 ELSE 0 END)
                   AS false_calls,
               sum(CASE WHEN inspections.verdict = 'pass' AND reviews.verdict = 'fail' THEN 1 ELSE 0 END) AS escapes,
               count(*) AS reviewed
        FROM {_NEWEST}
        JOIN reviews ON reviews.review_id = newest.review_id
        JOIN inspections ON inspections.inspection_id = newest.inspection_id
        WHERE inspections.status = 'done'
        GROUP BY inspections.component
    """,  # noqa: S608 - our own text
    "final_verdicts": f"""
        SELECT inspections.inspection_id,
               CASE WHEN reviews.review_id IS NULL THEN inspections.verdict ELSE reviews.verdict END AS verdict,
               CASE WHEN reviews.review_id IS NULL THEN inspections.defect ELSE reviews.defect END AS defect,
               coalesce(reviews.reviewer, 'daemon') AS decided_by
        FROM inspections
        LEFT JOIN {_NEWEST} ON newest.inspection_id = inspections.inspection_id
        LEFT JOIN reviews ON reviews.review_id = newest.review_id
        WHERE inspections.status = 'done'
    """,  # noqa: S608 - our own text
}

#: That view, for queries.
FINAL_BOARDS = table(
    "final_boards",
    column("board_id", Integer),
    *(column(name, Text) for name in ("verdict", "decided_by", "decided_at", "verdict_by_line")),
)

#: The clock and `last_seq` every few minutes of the last day in which a daemon ran (retention.py, RunningAges).
_age_columns = Column("running_s", Integer, primary_key=True), *_columns(REAL, "wall_s"), *_columns(Integer, "seq")
age_marks = Table("age_marks", metadata, *_age_columns)
