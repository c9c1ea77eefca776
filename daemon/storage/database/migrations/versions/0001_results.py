"""The first schema. New databases are made from schema.py; later revisions change databases that have this one."""

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Do nothing: no database is older than this revision."""
