"""What a language-model request asked for, so that one that was accepted is generated again after a restart."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


BIG = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
REAL = sa.Double().with_variant(sa.REAL(), "sqlite")


def upgrade() -> None:
    op.add_column("generations", sa.Column("max_new_tokens", BIG))
    for name in ("deadline_ms", "stream"):
        op.add_column("generations", sa.Column(name, sa.Integer()))
    op.add_column("generations", sa.Column("slo_ms", REAL))
