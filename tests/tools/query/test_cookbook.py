"""docs/results.md: every question answers, and some are counted again by other means."""

import re
from collections import Counter, defaultdict
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from daemon.storage.database.connections import open_for_reading
from daemon.storage.database.reviews import calls_by_version
from tests.tools.query.cookbook_questions import Question, ask, ask_the_shell, questions
from tests.tools.query.sample_results import make

QUESTIONS = questions()
Tables = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cookbook") / "inspection.db"
    make(path, boards=500)
    return path


@pytest.fixture(scope="module")
def tables(database: Path) -> Tables:
    """All rows, for counting by hand."""
    names = ("boards", "inspections", "stages", "reviews")
    return {name: ask(database, f"SELECT * FROM {name}") for name in names}  # noqa: S608


def answer(database: Path, number: int) -> list[dict[str, Any]]:
    """Return the answer without the LIMIT that keeps a person's screen short."""
    return ask(database, re.sub(r" LIMIT [0-9]+;$", ";", QUESTIONS[number - 1].sql))


def by_key(database: Path, number: int, *key: str) -> dict[tuple[Any, ...], dict[str, Any]]:
    return {tuple(row[name] for name in key): row for row in answer(database, number)}


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda question: f"{question.number}")
def test_every_question_has_an_answer_in_python_and_in_the_shell(database: Path, question: Question) -> None:
    rows = ask(database, question.sql)
    assert rows, question.title
    in_the_shell = ask_the_shell(database, question.sql)
    assert in_the_shell == [] or in_the_shell[0] == ",".join(rows[0])
    assert in_the_shell == [] or len(in_the_shell) == len(rows) + 1


def test_first_pass_yield_counts_first_attempts_that_are_closed(database: Path, tables: Tables) -> None:
    counted: defaultdict[tuple[str, str, str], Counter[str]] = defaultdict(Counter)
    for board in tables["boards"]:
        if board["attempt"] == 1 and board["verdict"]:
            counted[board["lot"], board["station"], board["completed_at"][:10]][board["verdict"]] += 1
    rows = by_key(database, 1, "lot", "station", "day")
    assert rows.keys() == counted.keys()
    for key, verdicts in counted.items():
        assert rows[key]["boards"] == verdicts.total()
        assert rows[key]["first_pass_yield"] == pytest.approx(verdicts["pass"] / verdicts.total(), abs=0.001)


def test_retests_compare_the_first_attempt_with_the_last(database: Path, tables: Tables) -> None:
    attempts: defaultdict[tuple[str, str], list[tuple[int, str]]] = defaultdict(list)
    for board in tables["boards"]:
        attempts[board["board_type"], board["serial"]].append((board["attempt"], board["verdict"]))
    for row in answer(database, 3):
        mine = [sorted(tries) for (board_type, _), tries in attempts.items() if board_type == row["board_type"]]
        assert row["boards"] == len(mine)
        assert row["retested"] == sum(len(tries) > 1 for tries in mine) > 0
        assert row["healed"] == sum(tries[0][1] != "pass" and tries[-1][1] == "pass" for tries in mine)
        assert row["worse"] == sum(tries[0][1] == "pass" and tries[-1][1] != "pass" for tries in mine)


def test_false_calls_and_escapes_are_those_of_the_commands_and_pages(database: Path) -> None:
    engine = open_for_reading(f"sqlite:///{database}")
    with engine.connect() as connection:
        counted = {(calls.expert, calls.expert_version): calls for calls in calls_by_version(connection)}
    engine.dispose()
    rows = by_key(database, 5, "expert", "expert_version")
    assert sum(row["false_calls"] for row in rows.values()) > 0
    for key, row in rows.items():
        calls = counted[key]
        assert (row["reviewed"], row["false_calls"], row["escapes"]) == (
            calls.reviewed,
            calls.false_calls,
            calls.escapes,
        )
    # The view counts images: each false call once, for whichever expert failed it; an escape has a whole chain.
    (of_view,) = ask(database, "SELECT sum(false_calls) AS false_calls, sum(escapes) AS escapes FROM false_calls")
    assert sum(calls.false_calls for calls in counted.values()) == of_view["false_calls"]
    assert sum(calls.escapes for calls in counted.values()) >= of_view["escapes"] > 0


def test_the_settings_of_a_lot_are_those_of_its_answers(database: Path, tables: Tables) -> None:
    lot = tables["boards"][-1]["lot"]
    of_lot = {board["board_id"] for board in tables["boards"] if board["lot"] == lot}
    images = {image["inspection_id"] for image in tables["inspections"] if image["board_id"] in of_lot}
    counts = Counter(
        (row["expert"], row["expert_version"], row["expert_settings"])
        for row in tables["stages"]
        if row["inspection_id"] in images
    )
    rows = by_key(database, 21, "expert", "expert_version", "expert_settings")
    assert {key: row["images"] for key, row in rows.items()} == counts
    assert {row["temperature"] for row in rows.values()} == {1.1, 1.3}


def test_defects_that_come_together_are_counted_by_board(database: Path, tables: Tables) -> None:
    on_board: defaultdict[int, set[str]] = defaultdict(set)
    for image in tables["inspections"]:
        if image["verdict"] == "fail" and image["defect"]:
            on_board[image["board_id"]].add(f"{image['component']} {image['defect']}")
    pairs = Counter(pair for defects in on_board.values() for pair in combinations(sorted(defects), 2))
    assert {(row["one"], row["other"]): row["boards"] for row in answer(database, 12)} == dict(pairs)


def test_reviews_that_are_open_are_failures_and_reviews_that_nobody_looked_at(database: Path, tables: Tables) -> None:
    looked_at = {review["inspection_id"] for review in tables["reviews"]}
    for row in answer(database, 20):
        images = [image for image in tables["inspections"] if image["verdict"] == row["verdict"]]
        assert row["images"] == len(images)
        assert row["open"] == sum(image["inspection_id"] not in looked_at for image in images)


def test_hot_places_fail_more_than_once_and_are_measured_against_their_kind(database: Path, tables: Tables) -> None:
    types = {board["board_id"]: board["board_type"] for board in tables["boards"]}
    places: defaultdict[tuple[str, str, str], Counter[bool]] = defaultdict(Counter)
    for image in tables["inspections"]:
        key = types[image["board_id"]], image["designator"], image["component"]
        places[key][image["verdict"] == "fail"] += 1
    rates = {key: counted[True] / counted.total() for key, counted in places.items()}
    rows = by_key(database, 13, "board_type", "designator", "component")
    assert rows.keys() == {key for key, counted in places.items() if counted[True] > 1}
    for key, row in rows.items():
        of_its_kind = [rate for (_, _, component), rate in rates.items() if component == key[2]]
        mean = sum(of_its_kind) / len(of_its_kind)
        assert row["times_the_mean_of_its_type"] == pytest.approx(rates[key] / mean, abs=0.051)
