"""Evidence: settings of experts, changes, runs, decisions on whole boards, attributes, the epoch of the stream."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

_BIG = sa.BigInteger().with_variant(sa.Integer, "sqlite")
_NULLABLE = {
    "stages": ["expert_settings"],
    "boards": ["review", "unknown", "attributes"],
    "stream_position": ["epoch"],
}
_UNDO = ("undo of review ", "undecided again: undo of review ")


def upgrade() -> None:
    """Add them. What older rows did not record stays null."""
    for table, names in _NULLABLE.items():
        for name in names:
            op.add_column(table, sa.Column(name, sa.Text))
    op.add_column("inspections", sa.Column("run_id", _BIG))
    # An open attempt lists such images when it closes: no longer surplus.
    op.execute(
        "UPDATE inspections SET surplus = NULL WHERE surplus = 1 AND verdict IN ('review', 'unknown')"
        " AND board_id IN (SELECT board_id FROM boards WHERE completed_at IS NULL)"
    )
    op.create_table(
        "expert_settings",
        *(sa.Column(name, sa.Text, primary_key=True) for name in ("expert", "expert_settings")),
        *(sa.Column(name, sa.Text, nullable=False) for name in ("settings", "first_used_at")),
    )
    op.create_table(
        "changes",
        sa.Column("change_id", _BIG, primary_key=True),
        *(sa.Column(name, sa.Text, nullable=False) for name in ("at", "who", "what", "subject")),
        *(sa.Column(name, sa.Text) for name in ("old", "new", "note")),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "runs",
        sa.Column("run_id", _BIG, primary_key=True),
        sa.Column("started_at", sa.Text, nullable=False),
        sa.Column("ended_at", sa.Text),
        *(sa.Column(name, sa.Text, nullable=False) for name in ("version", "epoch")),
        sqlite_autoincrement=True,
    )
    _decisions_on_boards()


def _decisions_on_boards() -> None:
    database = op.get_bind()
    is_sqlite = database.dialect.name == "sqlite"
    last = None
    if is_sqlite:  # the highest number ever given, which a new table would not know
        last = database.scalar(sa.text("SELECT seq FROM sqlite_sequence WHERE name = 'reviews'"))
    with op.batch_alter_table("reviews", copy_from=_reviews_before(), recreate="auto") as reviews:
        reviews.alter_column("inspection_id", existing_type=_BIG, nullable=True)
        for name in ("board_id", "undo_of", "seq"):
            reviews.add_column(sa.Column(name, _BIG))
        reviews.add_column(sa.Column("board_verdict", sa.Text))
        reviews.create_foreign_key(op.f("fk_reviews_board_id"), "boards", ["board_id"], ["board_id"])
        reviews.create_unique_constraint(op.f("uq_reviews_seq"), ["seq"])
        reviews.create_check_constraint(op.f("ck_reviews_subject"), "inspection_id IS NOT NULL OR board_id IS NOT NULL")
    op.create_index("ix_reviews_board_id", "reviews", ["board_id"])
    if last is not None:
        database.execute(sa.text("UPDATE sqlite_sequence SET seq = :last WHERE name = 'reviews'"), {"last": last})
        if database.scalar(sa.text("SELECT count(*) FROM sqlite_sequence WHERE name = 'reviews'")) == 0:
            database.execute(sa.text("INSERT INTO sqlite_sequence VALUES ('reviews', :last)"), {"last": last})
    for start in _UNDO:
        rows = database.execute(
            sa.text("SELECT review_id, note FROM reviews WHERE note LIKE :like"), {"like": f"{start}% by %"}
        )
        for review_id, note in rows.all():
            number = note.removeprefix(start).split(" ")[0]
            if number.isascii() and number.isdigit():
                values = {"undo_of": int(number), "review_id": review_id}
                database.execute(sa.text("UPDATE reviews SET undo_of = :undo_of WHERE review_id = :review_id"), values)


def _reviews_before() -> sa.Table:
    """Return the table of revision 0002: SQLite cannot change a column, so it is made anew."""
    verdicts = "verdict IN ('pass', 'fail', 'review', 'unknown')"
    return sa.Table(
        "reviews",
        sa.MetaData(),
        sa.Column("review_id", _BIG, primary_key=True),
        sa.Column(
            "inspection_id",
            _BIG,
            sa.ForeignKey("inspections.inspection_id", name="fk_reviews_inspection_id"),
            nullable=False,
        ),
        *(sa.Column(name, sa.Text, nullable=False) for name in ("at", "reviewer", "verdict")),
        *(sa.Column(name, sa.Text) for name in ("defect", "note")),
        sa.CheckConstraint(verdicts, name="ck_reviews_verdict"),
        sa.Index("ix_reviews_inspection_id", "inspection_id"),
        sqlite_autoincrement=True,
    )
