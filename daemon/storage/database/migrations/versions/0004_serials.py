"""Boards by serial: whole, or by its beginning in either case.

Alembic makes no note of an index on an expression: a later migration that makes `boards` anew has to make this one too.
"""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    if op.get_bind().dialect.name == "postgresql":
        # As SQLite has it: under another collation no index has a beginning's serials beside each other.
        op.alter_column("boards", "serial", type_=sa.Text(collation="C"), existing_nullable=False)
    op.create_index("ix_boards_serial", "boards", [sa.text("lower(serial)")])
