"""What pruning asks for: the kept images of each verdict by age, closed boards by age, how many results went."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

KEPT = sa.text("image_path IS NOT NULL")
BIG = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.create_index(
        "ix_inspections_kept",
        "inspections",
        ["verdict", "completed_at", "image_bytes"],
        sqlite_where=KEPT,
        postgresql_where=KEPT,
    )
    op.create_index("ix_boards_completed_at", "boards", ["completed_at"])
    op.create_index("ix_generations_board_id", "generations", ["board_id"])
    op.add_column("stream_position", sa.Column("pruned", BIG, server_default="0", nullable=False))
