"""The tables and views of RESULTS.md, and the daemon's own tables and columns.

Columns that RESULTS.md does not name are the daemon's: `inspections.lot` and `.station` (as this image's publisher
sent them, so that a message can be rendered again), `boards.failed` and `.missing` (frozen at closing),
`generations.max_new_tokens`, `.slo_ms`, `.deadline_ms` and `.stream` (as sent, for a restart), and the tables
`pending`, `recipes` and `stream_position`.

A new database is made from here. A change of a table or a view comes with a migration (migrate.py).
"""

from sqlalchemy import (
    REAL,
    BigInteger,
    CheckConstraint,
    Column,
    Double,
    ForeignKey,
    ForeignKeyConstraint,
    Index,
    Integer,
    MetaData,
    Table,
    Text,
    UniqueConstraint,
    func,
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

#: Numbers that outgrow 32 bits, also those of messages; SQLite gives row numbers only to a column called INTEGER.
_Big = BigInteger().with_variant(Integer(), "sqlite")
#: 64 bits everywhere: what PostgreSQL calls REAL has 32.
_Real = Double().with_variant(REAL(), "sqlite")
#: In the order of its bytes, with a case for A to Z alone: as SQLite has every text (serials.py).
_Serial = Text().with_variant(Text(collation="C"), "postgresql")
_VERDICTS = "('pass', 'fail', 'review', 'unknown')"

rules_versions = Table(
    "rules_versions",
    metadata,
    Column("rules_version", Text, primary_key=True),
    Column("sha256", Text, nullable=False),
    Column("loaded_at", Text, nullable=False),
    Column("text", Text, nullable=False),
)

#: What an attempt is measured against, kept so that closing it needs no rules file: `positions` is a JSON list of
#: [component, quantity, designators or null] in the rules' order.
recipes = Table(
    "recipes",
    metadata,
    Column("rules_version", Text, ForeignKey("rules_versions.rules_version"), primary_key=True),
    Column("board_type", Text, primary_key=True),
    Column("time_limit_s", _Real),
    Column("positions", Text, nullable=False),
)

boards = Table(
    "boards",
    metadata,
    Column("board_id", _Big, primary_key=True),
    Column("board_type", Text, nullable=False),
    Column("serial", _Serial, nullable=False),
    Column("attempt", _Big, nullable=False),
    Column("lot", Text),
    Column("station", Text),
    Column("first_seen_at", Text, nullable=False),
    Column("completed_at", Text, index=True),
    Column("expected", _Big, nullable=False),
    Column("inspected", _Big, nullable=False, server_default="0"),
    Column("verdict", Text),
    Column("reason", Text),
    Column("rules_version", Text, nullable=False),
    Column("seq", _Big, unique=True),
    Column("failed", Text),
    Column("missing", Text),
    UniqueConstraint("board_type", "serial", "attempt"),
    CheckConstraint(f"verdict IN {_VERDICTS}", name="verdict"),
    CheckConstraint("reason IN ('complete', 'time_limit')", name="reason"),
)

#: Boards by serial, in either case of A to Z.
Index("ix_boards_serial", func.lower(boards.c.serial))

inspections = Table(
    "inspections",
    metadata,
    Column("inspection_id", _Big, primary_key=True),
    Column("source", Text, nullable=False),
    Column("image_id", Text, nullable=False),
    Column("board_id", _Big, ForeignKey("boards.board_id"), nullable=False, index=True),
    Column("component", Text, nullable=False),
    Column("designator", Text, nullable=False),
    Column("captured_at", Text),
    Column("accepted_at", Text, nullable=False),
    Column("completed_at", Text),
    Column("deadline_ms", Integer),
    Column("image_bytes", _Big, nullable=False),
    Column("status", Text, nullable=False),
    Column("verdict", Text),
    Column("defect", Text),
    Column("reason", Text),
    Column("late", Integer, nullable=False, server_default="0"),
    Column("rules_version", Text, nullable=False),
    Column("image_sha256", Text, nullable=False),
    Column("image_path", Text),
    Column("latency_ms", _Real),
    Column("seq", _Big, unique=True),
    Column("lot", Text),
    Column("station", Text),
    UniqueConstraint("source", "image_id"),
    CheckConstraint("status IN ('accepted', 'done')", name="status"),
    CheckConstraint(f"verdict IN {_VERDICTS}", name="verdict"),
    CheckConstraint("late IN (0, 1)", name="late"),
)

_is_kept = inspections.c.image_path.is_not(None)
#: The images that are there, oldest first within each verdict, with their bytes: what pruning asks for.
Index(
    "ix_inspections_kept",
    *(inspections.c.verdict, inspections.c.completed_at, inspections.c.image_bytes),
    sqlite_where=_is_kept,
    postgresql_where=_is_kept,
)

#: Bytes that still lie in the journal: `task` is `judge` until the verdict, then `keep` until the copy in `images/`
#: is durable. A segment that no row names can go.
pending = Table(
    "pending",
    metadata,
    Column("inspection_id", _Big, ForeignKey("inspections.inspection_id"), primary_key=True),
    Column("task", Text, nullable=False),
    Column("segment", Integer, nullable=False),
    Column("offset", _Big, nullable=False),
    Column("length", _Big, nullable=False),
    Column("encoding", Text, nullable=False),
    Column("height", Integer),
    Column("width", Integer),
    Column("channels", Integer),
    CheckConstraint("task IN ('judge', 'keep')", name="task"),
)

stages = Table(
    "stages",
    metadata,
    Column("inspection_id", _Big, ForeignKey("inspections.inspection_id"), primary_key=True),
    Column("step", Integer, primary_key=True),
    Column("expert", Text, nullable=False),
    Column("expert_version", Text, nullable=False),
    Column("label", Text),
    Column("confidence", _Real),
    Column("device", Text, nullable=False),
    Column("executor", Text, nullable=False),
    Column("batch_id", _Big, nullable=False),
    Column("batch_size", Integer, nullable=False),
    Column("queued_ms", _Real, nullable=False),
    Column("load_ms", _Real, nullable=False),
    Column("infer_ms", _Real, nullable=False),
)

detections = Table(
    "detections",
    metadata,
    Column("detection_id", _Big, primary_key=True),
    Column("inspection_id", _Big, nullable=False),
    Column("step", Integer, nullable=False),
    Column("label", Text, nullable=False),
    Column("confidence", _Real, nullable=False),
    Column("x1", _Real, nullable=False),
    Column("y1", _Real, nullable=False),
    Column("x2", _Real, nullable=False),
    Column("y2", _Real, nullable=False),
    ForeignKeyConstraint(["inspection_id", "step"], ["stages.inspection_id", "stages.step"]),
    Index(None, "inspection_id", "step"),
)

expert_switches = Table(
    "expert_switches",
    metadata,
    Column("switch_id", _Big, primary_key=True),
    Column("at", Text, nullable=False),
    Column("executor", Text, nullable=False),
    Column("device", Text, nullable=False),
    Column("loaded", Text, nullable=False),
    Column("evicted", Text, nullable=False),
    Column("bytes", _Big, nullable=False),
    Column("load_ms", _Real, nullable=False),
    Column("tier", Text, nullable=False),
    Column("cause", Text, nullable=False),
    CheckConstraint("tier IN ('ram', 'disk')", name="tier"),
    CheckConstraint("cause IN ('demand', 'prefetch', 'startup', 'pin')", name="cause"),
)

reviews = Table(
    "reviews",
    metadata,
    Column("review_id", _Big, primary_key=True),
    Column("inspection_id", _Big, ForeignKey("inspections.inspection_id"), nullable=False, index=True),
    Column("at", Text, nullable=False),
    Column("reviewer", Text, nullable=False),
    Column("verdict", Text, nullable=False),
    Column("defect", Text),
    Column("note", Text),
    CheckConstraint(f"verdict IN {_VERDICTS}", name="verdict"),
    # Append-only: a deleted newest review must not give its number away.
    sqlite_autoincrement=True,
)

generations = Table(
    "generations",
    metadata,
    Column("generation_id", _Big, primary_key=True),
    Column("source", Text, nullable=False),
    Column("request_id", Text, nullable=False),
    Column("board_id", _Big, ForeignKey("boards.board_id"), index=True),
    Column("model", Text, nullable=False),
    Column("mode", Text),
    Column("task", Text),
    Column("prompt", Text, nullable=False),
    Column("text", Text),
    Column("prompt_tokens", Integer),
    Column("new_tokens", Integer),
    Column("ttft_ms", _Real),
    Column("tpot_ms", _Real),
    Column("total_ms", _Real),
    Column("expert_fetches", Integer),
    Column("predictor_hit_rate", _Real),
    Column("brownout_threshold", _Real),
    Column("accepted_at", Text, nullable=False),
    Column("completed_at", Text),
    Column("status", Text, nullable=False),
    Column("reason", Text),
    Column("seq", _Big, unique=True),
    Column("max_new_tokens", _Big),
    Column("deadline_ms", Integer),
    Column("stream", Integer),
    Column("slo_ms", _Real),
    UniqueConstraint("source", "request_id"),
    CheckConstraint("status IN ('accepted', 'done', 'unknown')", name="status"),
)

expert_versions = Table(
    "expert_versions",
    metadata,
    Column("expert", Text, primary_key=True),
    Column("expert_version", Text, primary_key=True),
    Column("sha256", Text, nullable=False),
    Column("architecture", Text, nullable=False),
    Column("classes", Text, nullable=False),
    Column("bytes", _Big, nullable=False),
    Column("dtype", Text, nullable=False),
    Column("origin", Text, nullable=False),
    Column("first_used_at", Text, nullable=False),
)

#: One row (`position_id` 1): the last numbers given, which outlive the rows that pruning takes, and how many of those
#: with a `seq` it took.
stream_position = Table(
    "stream_position",
    metadata,
    Column("position_id", Integer, primary_key=True),
    Column("last_seq", _Big, nullable=False),
    Column("last_inspection_id", _Big, nullable=False),
    Column("last_board_id", _Big, nullable=False),
    Column("pruned", _Big, nullable=False, server_default="0"),
    CheckConstraint("position_id = 1", name="one_row"),
)


#: Name and SELECT, in the order in which they are made.
VIEWS: dict[str, str] = {
    "stream": """
        SELECT seq, 'inspection' AS kind, inspection_id AS key FROM inspections WHERE seq IS NOT NULL
        UNION ALL
        SELECT seq, 'board' AS kind, board_id AS key FROM boards WHERE seq IS NOT NULL
        UNION ALL
        SELECT seq, 'generation' AS kind, generation_id AS key FROM generations WHERE seq IS NOT NULL
    """,
    "board_yield": """
        SELECT board_type, lot, substr(completed_at, 1, 10) AS day,
               count(*) AS boards,
               sum(CASE WHEN verdict = 'pass' THEN 1 ELSE 0 END) AS passed,
               sum(CASE WHEN verdict = 'fail' THEN 1 ELSE 0 END) AS failed,
               sum(CASE WHEN verdict = 'review' THEN 1 ELSE 0 END) AS review,
               sum(CASE WHEN verdict = 'unknown' THEN 1 ELSE 0 END) AS unknown,
               1.0 * sum(CASE WHEN verdict = 'pass' THEN 1 ELSE 0 END) / count(*) AS first_pass_yield
        FROM boards
        WHERE verdict IS NOT NULL AND attempt = 1
        GROUP BY board_type, lot, substr(completed_at, 1, 10)
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
    "component_health": """
        SELECT inspections.component,
               count(*) AS inspected,
               1.0 * sum(CASE WHEN inspections.verdict = 'fail' THEN 1 ELSE 0 END) / count(*) AS fail_rate,
               1.0 * sum(CASE WHEN inspections.verdict = 'review' THEN 1 ELSE 0 END) / count(*) AS review_rate,
               1.0 * sum(CASE WHEN inspections.verdict = 'unknown' THEN 1 ELSE 0 END) / count(*) AS unknown_rate,
               avg(stages.confidence) AS mean_confidence,
               sum(CASE WHEN reviews.verdict <> inspections.verdict THEN 1 ELSE 0 END) AS overridden
        FROM inspections
        LEFT JOIN stages ON stages.inspection_id = inspections.inspection_id AND stages.step = 0
        LEFT JOIN (SELECT inspection_id, max(review_id) AS review_id FROM reviews GROUP BY inspection_id) AS newest
               ON newest.inspection_id = inspections.inspection_id
        LEFT JOIN reviews ON reviews.review_id = newest.review_id
        WHERE inspections.status = 'done'
        GROUP BY inspections.component
    """,
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
    "expert_usage": """
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
                SELECT expert, executor, batch_id, count(*) AS images, max(batch_size) AS batch_size,
                       max(load_ms) AS load_ms, max(infer_ms) AS infer_ms
                FROM stages
                GROUP BY expert, executor, batch_id
            ) AS batch
            GROUP BY expert
        ) AS used ON used.expert = names.expert
        LEFT JOIN (
            SELECT loaded AS expert, count(*) AS loads, sum(load_ms) AS load_ms FROM expert_switches GROUP BY loaded
        ) AS loaded ON loaded.expert = names.expert
    """,
    "false_calls": """
        SELECT inspections.component,
               sum(CASE WHEN inspections.verdict = 'fail' AND reviews.verdict = 'pass' THEN 1 ELSE 0 END)
                   AS false_calls,
               sum(CASE WHEN inspections.verdict = 'pass' AND reviews.verdict = 'fail' THEN 1 ELSE 0 END) AS escapes,
               count(*) AS reviewed
        FROM (SELECT inspection_id, max(review_id) AS review_id FROM reviews GROUP BY inspection_id) AS newest
        JOIN reviews ON reviews.review_id = newest.review_id
        JOIN inspections ON inspections.inspection_id = newest.inspection_id
        WHERE inspections.status = 'done'
        GROUP BY inspections.component
    """,
    "final_verdicts": """
        SELECT inspections.inspection_id,
               CASE WHEN reviews.review_id IS NULL THEN inspections.verdict ELSE reviews.verdict END AS verdict,
               CASE WHEN reviews.review_id IS NULL THEN inspections.defect ELSE reviews.defect END AS defect,
               coalesce(reviews.reviewer, 'daemon') AS decided_by
        FROM inspections
        LEFT JOIN (SELECT inspection_id, max(review_id) AS review_id FROM reviews GROUP BY inspection_id) AS newest
               ON newest.inspection_id = inspections.inspection_id
        LEFT JOIN reviews ON reviews.review_id = newest.review_id
        WHERE inspections.status = 'done'
    """,
}
