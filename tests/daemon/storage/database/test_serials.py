"""Serials are found by an index: by their beginning in either case of A to Z, or to the letter."""

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from daemon.dashboard.pages.board import BoardSearch, find_boards
from daemon.dashboard.site.database import Database
from daemon.storage.database.boards import folded, serial_range
from tests.daemon.storage.database.store_parts import Line, a_line, an_image

#: Letters with another case only elsewhere, signs that other questions take for patterns, both ends of the alphabet.
WORDS = r"""
    A-1 a-1 A-10 b-1 AB Ab Äb äb Ä ÄB ß SS İ i I ı k1 K1 z Z zz 码-1
    % %1 _ a_ a% [a] [ @ @a { ' '' " \
"""
SERIALS = (
    *WORDS.split(),
    *("\u212a1", "a b", " a", "\ud7ff", "\ud7ffa", "\ue000", "\uffff"),
)
TEXTS = st.text(
    st.characters(exclude_categories=["Cs"], max_codepoint=0x10FFFE) | st.sampled_from("aAbBzZ\ud7ff"),
    min_size=1,
    max_size=5,
)


@pytest.fixture(scope="module")
def line(tmp_path_factory: pytest.TempPathFactory) -> Line:
    """A board of each serial among ten thousand others, which statistics know of."""
    line = a_line(tmp_path_factory.mktemp("serials"))
    for number, serial in enumerate(SERIALS):
        line.accept(an_image(f"i{number}", serial=serial, designator="U1"))
    line.store.close()
    line.rows(
        "WITH RECURSIVE n(i) AS (SELECT 1000 UNION ALL SELECT i + 1 FROM n WHERE i < 11000) INSERT INTO boards"
        " (board_id, board_type, serial, attempt, lot, first_seen_at, expected, verdict, rules_version, edition)"
        " SELECT i, 'type-' || (i % 5), printf('SN-%07d', i), 1, 'L' || (i % 7), '2026', 1,"
        " CASE WHEN i % 50 = 0 THEN 'fail' ELSE 'pass' END, '0', 1 FROM n"
    )
    line.rows("ANALYZE")
    return line


@pytest.fixture
def database(line: Line) -> Iterator[Database]:
    opened = Database(line.url)
    yield opened
    opened.close()


class Planning(Database):
    """Answers with SQLite's plan of each question in place of its rows."""

    def rows(self, statement: Any, parameters: Any = None, **_: Any) -> Any:
        return super().rows(f"EXPLAIN QUERY PLAN {statement}", parameters, limit=100)


@given(TEXTS, TEXTS)
def test_a_beginning_is_a_range_of_folded_serials(serial: str, text: str):
    first, behind = serial_range(text)
    for whole in (serial, text + serial, text.upper() + serial):
        assert (first <= folded(whole) < behind) == folded(whole).startswith(folded(text))


def test_sqlite_folds_and_orders_texts_as_we_do(line: Line):
    matches = line.rows("SELECT lower(serial) FROM boards WHERE board_id < 1000 ORDER BY lower(serial), board_id")
    assert [serial for (serial,) in matches] == sorted(map(folded, SERIALS))


@pytest.mark.parametrize("text", [*SERIALS, "a", "Sn-00010", "SN-0001000", "sn", "missing"])
def test_a_search_finds_what_begins_so_in_either_case(line: Line, database: Database, text: str):
    """The search finds the boards that a walk through all of them finds, for every text."""
    expected = line.rows(
        "SELECT board_id FROM boards WHERE lower(substr(serial, 1, ?)) = lower(?) ORDER BY board_id DESC LIMIT 51",
        *(len(text), text),
    )
    assert [(board.board_id,) for board in find_boards(database, BoardSearch(serial=text))] == expected


@pytest.mark.parametrize(
    "search",
    [
        BoardSearch("SN-0005"),
        BoardSearch("sn-00050", before=5050),
        BoardSearch("SN-0005", "fail", "type-1", "L3", 9000),
    ],
)
def test_a_search_for_few_is_answered_by_the_index(line: Line, search: BoardSearch):
    planning = Planning(line.url)
    plan = [row.detail for row in find_boards(planning, search)]
    planning.close()
    assert plan[0] == "SEARCH boards USING INDEX ix_boards_serial (<expr>>? AND <expr><?)", plan
