"""Marks for ages (`age_marks`), images that changed nothing about their attempt (`inspections.surplus`), indexes."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add them. Rows from before count as images that matter: at worst, they are read as they were."""
    op.add_column("inspections", sa.Column("surplus", sa.Integer))
    big = sa.BigInteger().with_variant(sa.Integer, "sqlite")
    op.create_table(
        "age_marks",
        sa.Column("running_s", big, primary_key=True),
        sa.Column("wall_s", sa.Double().with_variant(sa.REAL, "sqlite"), nullable=False),
        sa.Column("seq", big, nullable=False),
    )
    kept = sa.text("image_path IS NOT NULL")
    columns = ["verdict", "inspection_id"]
    op.create_index("ix_inspections_kept_in_order", "inspections", columns, sqlite_where=kept, postgresql_where=kept)
    op.drop_index("ix_inspections_board_id", "inspections")
    op.create_index("ix_inspections_board_id_surplus", "inspections", ["board_id", "surplus"])
