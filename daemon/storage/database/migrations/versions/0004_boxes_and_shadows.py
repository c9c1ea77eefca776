"""Boxes that people draw in Review, and answers of versions in shadow."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

_BIG = sa.BigInteger().with_variant(sa.Integer, "sqlite")
_REAL = sa.Double().with_variant(sa.REAL, "sqlite")


def upgrade() -> None:
    """Add both tables."""
    op.create_table(
        "drawn_boxes",
        sa.Column("box_id", _BIG, primary_key=True),
        sa.Column("review_id", _BIG, sa.ForeignKey("reviews.review_id"), nullable=False, index=True),
        sa.Column("label", sa.Text, nullable=False),
        *(sa.Column(name, _REAL, nullable=False) for name in ("x1", "y1", "x2", "y2")),
    )
    op.create_table(
        "shadow_answers",
        sa.Column("inspection_id", _BIG, sa.ForeignKey("inspections.inspection_id"), primary_key=True),
        *(sa.Column(name, sa.Text, primary_key=True) for name in ("expert", "expert_version")),
        sa.Column("step", sa.Integer, nullable=False),
        sa.Column("label", sa.Text),
        sa.Column("confidence", _REAL),
        *(sa.Column(name, sa.Text, nullable=False) for name in ("outcome", "outcome_in_service")),
        sa.Column("infer_ms", _REAL, nullable=False),
    )
    columns = ["expert", "expert_version", "inspection_id"]
    op.create_index(f"ix_shadow_answers_{'_'.join(columns)}", "shadow_answers", columns)
