"""Catching up: every page of `results_since` is what was published, for any limit."""

import pytest
from sqlalchemy import insert

from daemon.records import Message
from daemon.storage.database.rows import topic
from daemon.storage.database.schema import generations
from tests.daemon.storage.database.store_parts import Line, a_verdict, an_image


@pytest.fixture
def published(line: Line) -> list[Message]:
    """Messages of five boards, four images each, that the line has published."""
    messages: list[Message] = []
    for serial in range(5):
        for n, verdict in enumerate(("pass", "review", "fail", "unknown")):
            component, designator = ("R0402", f"R{n}") if n < 2 else ("QFP64", f"U{n - 1}")
            lot = "Łódź" if n else None
            messages += line.inspect(component, designator, verdict, serial=f"S/{serial}", lot=lot)
    return messages


@pytest.mark.parametrize("limit", [1, 2, 3, 5, 24, 25, 26, 1000])
def test_pages_of_any_size_give_every_message_once_and_in_order(reader, published, limit):
    items, seq, pages = [], 0, 0
    while True:
        page = reader.results_since(seq, limit)
        assert set(page) == {"items", "last_seq", "more", "oldest_seq"}
        assert len(page["items"]) <= limit
        assert page["oldest_seq"] == 1
        items += page["items"]
        seq = page["last_seq"]
        pages += 1
        if not page["more"]:
            break
    assert items == [{"topic": message.topic, **message.body} for message in published]
    assert pages == -(-len(published) // limit)
    assert reader.results_since(seq, limit) == {"items": [], "last_seq": 25, "more": False, "oldest_seq": 1}
    assert reader.results_since(2**62, limit)["last_seq"] == 2**62


def test_an_empty_database_has_no_oldest_seq(reader):
    assert reader.results_since(0) == {"items": [], "last_seq": 0, "more": False, "oldest_seq": None}
    assert (reader.last_seq(), reader.find("cam1", "x")) == (0, None)


def test_an_image_is_found_by_source_and_id_as_soon_as_it_is_accepted(line, reader):
    image = an_image("a", source="cam:1/x")
    line.accept(image)
    assert reader.find("cam:1/x", "a") == image.sha256
    assert reader.find("cam:1/x", "A") is None
    assert reader.find("cam1", "a") is None


def test_generations_share_the_stream(line, reader, published):
    shared = {
        "source": "mes 1",
        "model": "m",
        "mode": "duoserve",
        "text": "because",
        "status": "done",
        "prompt_tokens": 3,
        "new_tokens": 1,
        "ttft_ms": 10.0,
        "tpot_ms": 2.0,
        "total_ms": 12.0,
    }
    accepted_at, completed_at = "2026-11-21T09:28:11.000Z", "2026-11-21T09:28:11.123Z"
    row = shared | {"generation_id": 1, "request_id": "g1", "prompt": "why?", "seq": len(published) + 1}
    with line.store.engine.begin() as connection:
        connection.execute(insert(generations), [row | {"accepted_at": accepted_at, "completed_at": completed_at}])
    message = shared | {"topic": "generation/mes%201/", "seq": 26, "at": completed_at, "id": "g1"}
    assert reader.results_since(25)["items"] == [message | {"task": None, "reason": None}]


@pytest.mark.parametrize(
    ("serial", "encoded"),
    [
        ("S1", "S1"),
        ("A.b_c:d-9", "A.b_c:d-9"),
        ("a/b", "a%2Fb"),
        ("50% ~ Łódź", "50%25%20%7E%20%C5%81%C3%B3d%C5%BA"),
        ("*+#'", "%2A%2B%23%27"),
    ],
)
def test_topics_are_percent_encoded_and_end_with_a_slash(serial, encoded):
    assert topic("board", "main board", serial) == f"board/main%20board/{encoded}/"


def test_the_rules_of_a_boards_newest_attempt_are_known_while_it_is_open(line, reader):
    assert reader.open_edition("tiny", "S", None) is None
    (image,) = line.accept(an_image("a", type="tiny", serial="S"))
    assert [reader.open_edition("tiny", "S", attempt) for attempt in (None, 1, 2)] == [1, 1, None]
    line.judge(a_verdict(image))
    assert [reader.open_edition("tiny", "S", attempt) for attempt in (None, 1)] == [None, None]
