"""The tables of RESULTS.md."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


BIG = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
REAL = sa.Double().with_variant(sa.REAL(), "sqlite")


def upgrade() -> None:
    op.create_table(
        "boards",
        sa.Column("board_id", BIG, nullable=False),
        sa.Column("board_type", sa.Text(), nullable=False),
        sa.Column("serial", sa.Text(), nullable=False),
        sa.Column("attempt", BIG, nullable=False),
        sa.Column("lot", sa.Text(), nullable=True),
        sa.Column("station", sa.Text(), nullable=True),
        sa.Column("first_seen_at", sa.Text(), nullable=False),
        sa.Column("completed_at", sa.Text(), nullable=True),
        sa.Column("expected", BIG, nullable=False),
        sa.Column("inspected", BIG, server_default="0", nullable=False),
        sa.Column("verdict", sa.Text(), nullable=True),
        sa.Column("reason", sa.Text(), nullable=True),
        sa.Column("rules_version", sa.Text(), nullable=False),
        sa.Column("seq", BIG, nullable=True),
        sa.Column("failed", sa.Text(), nullable=True),
        sa.Column("missing", sa.Text(), nullable=True),
        sa.CheckConstraint("reason IN ('complete', 'time_limit')", name=op.f("ck_boards_reason")),
        sa.CheckConstraint("verdict IN ('pass', 'fail', 'review', 'unknown')", name=op.f("ck_boards_verdict")),
        sa.PrimaryKeyConstraint("board_id", name=op.f("pk_boards")),
        sa.UniqueConstraint("board_type", "serial", "attempt", name=op.f("uq_boards_board_type_serial_attempt")),
        sa.UniqueConstraint("seq", name=op.f("uq_boards_seq")),
    )
    op.create_table(
        "expert_switches",
        sa.Column("switch_id", BIG, nullable=False),
        sa.Column("at", sa.Text(), nullable=False),
        sa.Column("executor", sa.Text(), nullable=False),
        sa.Column("device", sa.Text(), nullable=False),
        sa.Column("loaded", sa.Text(), nullable=False),
        sa.Column("evicted", sa.Text(), nullable=False),
        sa.Column("bytes", BIG, nullable=False),
        sa.Column("load_ms", REAL, nullable=False),
        sa.Column("tier", sa.Text(), nullable=False),
        sa.Column("cause", sa.Text(), nullable=False),
        sa.CheckConstraint("cause IN ('demand', 'prefetch', 'startup', 'pin')", name=op.f("ck_expert_switches_cause")),
        sa.CheckConstraint("tier IN ('ram', 'disk')", name=op.f("ck_expert_switches_tier")),
        sa.PrimaryKeyConstraint("switch_id", name=op.f("pk_expert_switches")),
    )
    op.create_table(
        "expert_versions",
        sa.Column("expert", sa.Text(), nullable=False),
        sa.Column("expert_version", sa.Text(), nullable=False),
        sa.Column("sha256", sa.Text(), nullable=False),
        sa.Column("architecture", sa.Text(), nullable=False),
        sa.Column("classes", sa.Text(), nullable=False),
        sa.Column("bytes", BIG, nullable=False),
        sa.Column("dtype", sa.Text(), nullable=False),
        sa.Column("origin", sa.Text(), nullable=False),
        sa.Column("first_used_at", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("expert", "expert_version", name=op.f("pk_expert_versions")),
    )
    op.create_table(
        "rules_versions",
        sa.Column("rules_version", sa.Text(), nullable=False),
        sa.Column("sha256", sa.Text(), nullable=False),
        sa.Column("loaded_at", sa.Text(), nullable=False),
        sa.Column("text", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("rules_version", name=op.f("pk_rules_versions")),
    )
    op.create_table(
        "stream_position",
        sa.Column("position_id", sa.Integer(), nullable=False),
        sa.Column("last_seq", BIG, nullable=False),
        sa.Column("last_inspection_id", BIG, nullable=False),
        sa.Column("last_board_id", BIG, nullable=False),
        sa.CheckConstraint("position_id = 1", name=op.f("ck_stream_position_one_row")),
        sa.PrimaryKeyConstraint("position_id", name=op.f("pk_stream_position")),
    )
    op.create_table(
        "generations",
        sa.Column("generation_id", BIG, nullable=False),
        sa.Column("source", sa.Text(), nullable=False),
        sa.Column("request_id", sa.Text(), nullable=False),
        sa.Column("board_id", BIG, nullable=True),
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("mode", sa.Text(), nullable=True),
        sa.Column("task", sa.Text(), nullable=True),
        sa.Column("prompt", sa.Text(), nullable=False),
        sa.Column("text", sa.Text(), nullable=True),
        sa.Column("prompt_tokens", sa.Integer(), nullable=True),
        sa.Column("new_tokens", sa.Integer(), nullable=True),
        sa.Column("ttft_ms", REAL, nullable=True),
        sa.Column("tpot_ms", REAL, nullable=True),
        sa.Column("total_ms", REAL, nullable=True),
        sa.Column("expert_fetches", sa.Integer(), nullable=True),
        sa.Column("predictor_hit_rate", REAL, nullable=True),
        sa.Column("brownout_threshold", REAL, nullable=True),
        sa.Column("accepted_at", sa.Text(), nullable=False),
        sa.Column("completed_at", sa.Text(), nullable=True),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=True),
        sa.Column("seq", BIG, nullable=True),
        sa.CheckConstraint("status IN ('accepted', 'done', 'unknown')", name=op.f("ck_generations_status")),
        sa.ForeignKeyConstraint(["board_id"], ["boards.board_id"], name=op.f("fk_generations_board_id")),
        sa.PrimaryKeyConstraint("generation_id", name=op.f("pk_generations")),
        sa.UniqueConstraint("seq", name=op.f("uq_generations_seq")),
        sa.UniqueConstraint("source", "request_id", name=op.f("uq_generations_source_request_id")),
    )
    op.create_table(
        "inspections",
        sa.Column("inspection_id", BIG, nullable=False),
        sa.Column("source", sa.Text(), nullable=False),
        sa.Column("image_id", sa.Text(), nullable=False),
        sa.Column("board_id", BIG, nullable=False),
        sa.Column("component", sa.Text(), nullable=False),
        sa.Column("designator", sa.Text(), nullable=False),
        sa.Column("captured_at", sa.Text(), nullable=True),
        sa.Column("accepted_at", sa.Text(), nullable=False),
        sa.Column("completed_at", sa.Text(), nullable=True),
        sa.Column("deadline_ms", sa.Integer(), nullable=True),
        sa.Column("image_bytes", BIG, nullable=False),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("verdict", sa.Text(), nullable=True),
        sa.Column("defect", sa.Text(), nullable=True),
        sa.Column("reason", sa.Text(), nullable=True),
        sa.Column("late", sa.Integer(), server_default="0", nullable=False),
        sa.Column("rules_version", sa.Text(), nullable=False),
        sa.Column("image_sha256", sa.Text(), nullable=False),
        sa.Column("image_path", sa.Text(), nullable=True),
        sa.Column("latency_ms", REAL, nullable=True),
        sa.Column("seq", BIG, nullable=True),
        sa.Column("lot", sa.Text(), nullable=True),
        sa.Column("station", sa.Text(), nullable=True),
        sa.CheckConstraint("status IN ('accepted', 'done')", name=op.f("ck_inspections_status")),
        sa.CheckConstraint("verdict IN ('pass', 'fail', 'review', 'unknown')", name=op.f("ck_inspections_verdict")),
        sa.CheckConstraint("late IN (0, 1)", name=op.f("ck_inspections_late")),
        sa.ForeignKeyConstraint(["board_id"], ["boards.board_id"], name=op.f("fk_inspections_board_id")),
        sa.PrimaryKeyConstraint("inspection_id", name=op.f("pk_inspections")),
        sa.UniqueConstraint("seq", name=op.f("uq_inspections_seq")),
        sa.UniqueConstraint("source", "image_id", name=op.f("uq_inspections_source_image_id")),
    )
    with op.batch_alter_table("inspections", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_inspections_board_id"), ["board_id"], unique=False)

    op.create_table(
        "recipes",
        sa.Column("rules_version", sa.Text(), nullable=False),
        sa.Column("board_type", sa.Text(), nullable=False),
        sa.Column("time_limit_s", REAL, nullable=True),
        sa.Column("positions", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(
            ["rules_version"], ["rules_versions.rules_version"], name=op.f("fk_recipes_rules_version")
        ),
        sa.PrimaryKeyConstraint("rules_version", "board_type", name=op.f("pk_recipes")),
    )
    op.create_table(
        "pending",
        sa.Column("inspection_id", BIG, nullable=False),
        sa.Column("task", sa.Text(), nullable=False),
        sa.Column("segment", sa.Integer(), nullable=False),
        sa.Column("offset", BIG, nullable=False),
        sa.Column("length", BIG, nullable=False),
        sa.Column("encoding", sa.Text(), nullable=False),
        sa.Column("height", sa.Integer(), nullable=True),
        sa.Column("width", sa.Integer(), nullable=True),
        sa.Column("channels", sa.Integer(), nullable=True),
        sa.CheckConstraint("task IN ('judge', 'keep')", name=op.f("ck_pending_task")),
        sa.ForeignKeyConstraint(
            ["inspection_id"], ["inspections.inspection_id"], name=op.f("fk_pending_inspection_id")
        ),
        sa.PrimaryKeyConstraint("inspection_id", name=op.f("pk_pending")),
    )
    op.create_table(
        "reviews",
        sa.Column("review_id", BIG, nullable=False),
        sa.Column("inspection_id", BIG, nullable=False),
        sa.Column("at", sa.Text(), nullable=False),
        sa.Column("reviewer", sa.Text(), nullable=False),
        sa.Column("verdict", sa.Text(), nullable=False),
        sa.Column("defect", sa.Text(), nullable=True),
        sa.Column("note", sa.Text(), nullable=True),
        sa.CheckConstraint("verdict IN ('pass', 'fail', 'review', 'unknown')", name=op.f("ck_reviews_verdict")),
        sa.ForeignKeyConstraint(
            ["inspection_id"], ["inspections.inspection_id"], name=op.f("fk_reviews_inspection_id")
        ),
        sa.PrimaryKeyConstraint("review_id", name=op.f("pk_reviews")),
        sqlite_autoincrement=True,
    )
    with op.batch_alter_table("reviews", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_reviews_inspection_id"), ["inspection_id"], unique=False)

    op.create_table(
        "stages",
        sa.Column("inspection_id", BIG, nullable=False),
        sa.Column("step", sa.Integer(), nullable=False),
        sa.Column("expert", sa.Text(), nullable=False),
        sa.Column("expert_version", sa.Text(), nullable=False),
        sa.Column("label", sa.Text(), nullable=True),
        sa.Column("confidence", REAL, nullable=True),
        sa.Column("device", sa.Text(), nullable=False),
        sa.Column("executor", sa.Text(), nullable=False),
        sa.Column("batch_id", BIG, nullable=False),
        sa.Column("batch_size", sa.Integer(), nullable=False),
        sa.Column("queued_ms", REAL, nullable=False),
        sa.Column("load_ms", REAL, nullable=False),
        sa.Column("infer_ms", REAL, nullable=False),
        sa.ForeignKeyConstraint(["inspection_id"], ["inspections.inspection_id"], name=op.f("fk_stages_inspection_id")),
        sa.PrimaryKeyConstraint("inspection_id", "step", name=op.f("pk_stages")),
    )
    op.create_table(
        "detections",
        sa.Column("detection_id", BIG, nullable=False),
        sa.Column("inspection_id", BIG, nullable=False),
        sa.Column("step", sa.Integer(), nullable=False),
        sa.Column("label", sa.Text(), nullable=False),
        sa.Column("confidence", REAL, nullable=False),
        sa.Column("x1", REAL, nullable=False),
        sa.Column("y1", REAL, nullable=False),
        sa.Column("x2", REAL, nullable=False),
        sa.Column("y2", REAL, nullable=False),
        sa.ForeignKeyConstraint(
            ["inspection_id", "step"],
            ["stages.inspection_id", "stages.step"],
            name=op.f("fk_detections_inspection_id_step"),
        ),
        sa.PrimaryKeyConstraint("detection_id", name=op.f("pk_detections")),
    )
    with op.batch_alter_table("detections", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_detections_inspection_id_step"), ["inspection_id", "step"], unique=False)
