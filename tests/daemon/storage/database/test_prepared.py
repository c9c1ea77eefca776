"""Prepared statements give what SQLAlchemy's own way gives, for any number and order of rows and columns."""

import pytest
from sqlalchemy import Column, Integer, MetaData, Table, Text, bindparam, create_engine, select, update
from sqlalchemy.engine import Engine
from sqlalchemy.exc import IntegrityError

from daemon.storage.database.transaction import (
    PreparedQuery,
    add_rows,
    among,
    run_for_each,
    run_prepared,
    update_rows,
)

PARTS = Table(
    "parts", MetaData(), Column("number", Integer, primary_key=True), Column("name", Text), Column("place", Text)
)


@pytest.fixture
def engine(tmp_path):
    engine = create_engine(f"sqlite:///{tmp_path}/parts.db")
    PARTS.metadata.create_all(engine)
    yield engine
    engine.dispose()


def a_part(number: int) -> dict[str, object]:
    return {"place": None if number % 2 else f"p{number}", "name": f"n{number}", "number": number}


@pytest.mark.parametrize("count", [1, 2, 63, 64, 65, 200])
def test_every_row_is_added_once_with_its_values_in_the_right_columns(engine: Engine, count: int):
    with engine.begin() as connection:
        add_rows(connection, PARTS, [a_part(number) for number in range(count)])
    with engine.connect() as connection:
        matches = [dict(row) for row in connection.execute(select(PARTS).order_by(PARTS.c.number)).mappings()]
    assert matches == [a_part(number) for number in range(count)]


def test_a_row_that_breaks_a_constraint_is_sqlalchemy_s_own_error(engine: Engine):
    with pytest.raises(IntegrityError), engine.begin() as connection:
        add_rows(connection, PARTS, [a_part(1), a_part(1)])


def test_questions_and_changes_take_their_values_by_name(engine: Engine):
    place_of = PreparedQuery(engine, select(PARTS.c.place).where(PARTS.c.name == bindparam("of"), PARTS.c.number < 100))
    move = update(PARTS).where(PARTS.c.number == bindparam("which")).values(place=bindparam("to"))
    with engine.begin() as connection:
        add_rows(connection, PARTS, [a_part(number) for number in range(10)])
        run_prepared(connection, move, to="moved", which=3)
    assert place_of.first(of="n3") == ("moved",)
    assert place_of.first(of="n4") == ("p4",)
    assert place_of.first(of="missing") is None


def test_many_are_asked_for_in_few_statements(engine: Engine):
    def named(count: int):
        return select(PARTS.c.number).where(among(PARTS.c.name, count))

    with engine.begin() as connection:
        add_rows(connection, PARTS, [a_part(number) for number in range(300)])
        names = [f"n{number}" for number in range(0, 300, 3)]
        cursors = run_for_each(connection, named, [*names, "missing"])
        matches = {number for cursor in cursors for (number,) in cursor}
    assert matches == set(range(0, 300, 3))


@pytest.mark.parametrize("count", [0, 1, 65])
def test_rows_change_in_the_named_columns_alone(engine: Engine, count: int):
    with engine.begin() as connection:
        add_rows(connection, PARTS, [a_part(number) for number in range(70)])
        changed = [{"number": number, "place": f"new {number}", "name": "not asked"} for number in range(count)]
        update_rows(connection, PARTS, ("place",), changed)
    with engine.connect() as connection:
        rows = [dict(row) for row in connection.execute(select(PARTS).order_by(PARTS.c.number)).mappings()]
    assert rows == [a_part(number) | ({"place": f"new {number}"} if number < count else {}) for number in range(70)]
