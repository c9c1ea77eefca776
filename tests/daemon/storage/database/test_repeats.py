"""Pictures that come again: of a board that is closed, and of other places (PROTOCOL.md, additions 1.2)."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from daemon.config.settings import Guards
from daemon.records import Image, Pixels, Refused
from daemon.storage.database import boards
from daemon.storage.database.boards import RepeatedPictures
from tests.daemon.storage.database.store_parts import Line, a_line, an_image


@pytest.fixture
def line(tmp_path: Path) -> Iterator[Line]:
    line = a_line(tmp_path, guards=Guards())
    yield line
    line.store.close()


def put(line: Line, payload: bytes, *, after_s: float = 0.0, verdict="pass", **fields) -> tuple[int, bool]:
    """Accept and judge a picture of a board of one part; return its attempt and whether it is late."""
    line.clock.pass_s(after_s)
    fields = {"component": "R0402", "designator": "R1", "type": "tiny"} | fields
    body = line.inspect(verdict=verdict, payload=payload, **fields)[0].body
    return body["board"]["attempt"], body["late"]


@pytest.mark.promise(
    "Cameras", "A second picture of a closed board, by a double trigger or from a spool, never makes an attempt of it"
)
def test_a_second_picture_half_a_second_after_the_board_closed_belongs_to_it(line: Line):
    assert put(line, b"one", verdict="fail") == (1, False)
    assert put(line, b"two", after_s=0.5) == (1, True)
    assert put(line, b"three", after_s=1.9) == (1, True)  # so does one that follows such a picture
    assert line.rows("SELECT attempt, verdict FROM boards") == [(1, "fail")]
    assert put(line, b"four", after_s=2.1) == (2, False)


def test_after_a_restart_a_second_picture_still_comes_too_soon_for_a_retest(line: Line):
    put(line, b"one")
    line.reopen(0.5)
    assert put(line, b"two", after_s=0.5) == (1, True)
    line.clock.set_s -= 3600  # a clock that was set back makes nothing too soon
    assert put(line, b"three") == (2, False)


def test_the_same_picture_belongs_to_the_closed_attempt_at_any_time(line: Line):
    put(line, b"one", verdict="fail")
    line.reopen(7200.0)
    assert put(line, b"one") == (1, True)
    assert put(line, b"one", after_s=3.0, designator="another id") == (1, True)  # a counted component has any place
    assert put(line, b"two", after_s=3.0) == (2, False)
    assert put(line, b"one", after_s=3.0) == (3, False)  # of the attempt before the newest


def test_a_retest_of_several_parts_is_never_split(line: Line):
    places = [("R0402", "R1"), ("R0402", "R2"), ("QFP64", "U1"), ("QFP64", "U2")]
    for number in (1, 2):
        taken = [
            put(line, f"{number} {at}".encode(), type="mainboard-a", component=c, designator=at) for c, at in places
        ]
        assert taken == [(number, False)] * 4
        line.clock.pass_s(2.5)


def test_an_extra_that_the_closed_attempt_has_is_a_repeat_and_another_is_none(line: Line):
    line.accept(an_image("x1", "LED", "D1", type="loose", payload=b"led"))
    put(line, b"one", type="loose")
    line.clock.pass_s(6.0)
    line.store.write_results()
    late = {"type": "loose", "component": "LED"}
    assert put(line, b"led 2", designator="D1", after_s=1.0, **late) == (1, True)
    assert put(line, b"led 3", designator="D2", **late) == (2, False)


def test_retests_at_once_are_possible_without_a_wait_and_the_same_picture_by_sources_that_may(tmp_path: Path):
    line = a_line(tmp_path, guards=Guards(retest_after=0, may_repeat=["golden"]))
    assert [put(line, b"one"), put(line, b"two"), put(line, b"two")] == [(1, False), (2, False), (2, True)]
    assert put(line, b"two", source="golden") == (3, False)
    line.store.close()


def test_a_closed_attempt_that_is_named_takes_repeats_or_refuses(line: Line):
    put(line, b"one", attempt=5)
    again = {"type": "tiny", "serial": "S1"}
    assert put(line, b"two", attempt=5) == (5, True)
    assert put(line, b"one", attempt=5, after_s=9.0) == (5, True)
    line.clock.pass_s(9.0)
    (refused,) = line.ask(an_image("late", "R0402", "R1", attempt=5, payload=b"three", **again))
    assert isinstance(refused, Refused)
    assert refused.code == "attempt_closed"
    assert "attempt 5 of 'S1' is closed" in refused.reason
    assert put(line, b"three", attempt=6) == (6, False)  # a new one opens at once


def test_repeats_change_nothing_about_their_attempt_and_a_restart_reads_none(line: Line):
    put(line, b"one")
    for number in range(3):
        put(line, b"again %d" % number)
    assert line.rows("SELECT count(*), sum(late), sum(surplus) FROM inspections") == [(4, 3, 3)]
    (pending,) = line.accept(an_image("p", "R0402", "R1", type="tiny", payload=b"one"))
    line.reopen()
    assert line.store.recover().pending == [pending]


@pytest.mark.promise(
    "Containment",
    "A picture that a source has just sent for another position or board is never a pass: a frozen camera",
)
def test_the_same_picture_for_another_position_or_board_is_a_repeated_one(line: Line):
    def guards(*images: Image) -> list[str | None]:
        return [image.guard for image in line.accept(*images)]

    first = an_image("1", "R0402", "R1")
    assert guards(first) == [None]
    assert guards(an_image("2", "R0402", "R1")) == [None]  # a second picture of one position
    again = [an_image("3", "R0402", "R2"), an_image("4", "R0402", "R1", serial="S2"), an_image("5", "R0402", "R1")]
    assert guards(*again) == ["repeated_picture"] * 3
    assert guards(an_image("6", "R0402", "R1", source="cam2")) == [None]
    assert guards(an_image("7", "QFP64", "U1", payload=b"another")) == [None]
    line.reopen()  # the guard of an image without a verdict is stored; pictures of earlier runs are not
    assert [image.guard for image in line.store.recover().pending] == [
        None,
        None,
        *["repeated_picture"] * 3,
        None,
        None,
    ]
    assert guards(an_image("8", "R0402", "R2")) == [None]


def test_another_attempt_is_the_same_board(line: Line):
    images = [an_image(str(n), "R0402", "R1", type="tiny", attempt=n) for n in (1, 2)]
    assert [image.guard for image in line.accept(*images)] == [None, None]


def test_of_a_source_the_last_pictures_count_and_of_raw_ones_the_shape_too():
    pictures = RepeatedPictures(Guards(repeated_picture=3))

    def note(payload: bytes, designator: str, **fields) -> bool:
        return pictures.note(an_image(designator, "R0402", designator, payload=payload, **fields))

    assert [note(b"a", "R1"), note(b"b", "R2"), note(b"c", "R3"), note(b"a", "R4")] == [False, False, False, True]
    assert [note(b"d", "R5"), note(b"e", "R6"), note(b"a", "R4")] == [False, False, False]  # R1's is the 4th before
    assert [note(b"f", "R7"), note(b"g", "R8"), note(b"h", "R9"), note(b"a", "R1")] == [False] * 4
    raw = [
        note(b"r", f"R1{n}", pixels=Pixels("raw", shape)) for n, shape in enumerate([(2, 3, 1), (3, 2, 1), (2, 3, 1)])
    ]
    assert raw == [False, False, True]


def test_sources_that_may_repeat_and_a_guard_that_is_off_repeat_nothing():
    for guards in (Guards(may_repeat=["cam1"]), Guards(may_repeat=["*"]), Guards(repeated_picture=0)):
        pictures = RepeatedPictures(guards)
        assert [pictures.note(an_image(str(n), "R0402", f"R{n}")) for n in (1, 2)] == [False, False]


def test_pictures_of_many_sources_stay_within_bounds(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(boards, "_MAX_PICTURES", 20)
    pictures = RepeatedPictures(Guards(repeated_picture=10))
    for source in ("cam1", "cam2", "cam3"):
        for number in range(15):
            pictures.note(an_image(str(number), "R0402", source=source, payload=b"%d" % number))
    assert {name: len(kept) for name, kept in pictures._sources.items()} == {"cam2": 10, "cam3": 10}
