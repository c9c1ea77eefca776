"""A board's attributes (PROTOCOL.md, `board.attributes`): the first image's stand."""

import json
from typing import Any

from structlog.testing import capture_logs

from tests.daemon.storage.database.store_parts import Line, an_image


def kept(line: Line, board_id: int = 1) -> Any:
    ((text,),) = line.rows("SELECT attributes FROM boards WHERE board_id = ?", board_id)
    return None if text is None else json.loads(text)


def with_attributes(number: int, **attributes: str) -> Any:
    return an_image(f"i{number}", attributes=attributes)


def test_the_first_images_attributes_stand_and_later_ones_add(line: Line) -> None:
    line.accept(with_attributes(1))
    assert kept(line) is None
    line.accept(with_attributes(2, panel="P-17"))
    line.accept(
        with_attributes(3, panel="P-99", order="Ä4711"),
        with_attributes(4, operator="Eva"),
        with_attributes(5, operator="Uwe"),
    )
    assert kept(line) == {"panel": "P-17", "order": "Ä4711", "operator": "Eva"}
    assert line.rows("SELECT attributes FROM boards") == [('{"operator":"Eva","order":"Ä4711","panel":"P-17"}',)]
    line.accept(
        an_image("j1", serial="S2", attributes={"panel": "P-18"}),
        an_image("j2", serial="S2", attributes={"a": "b"}),
    )
    assert kept(line, 2) == {"panel": "P-18", "a": "b"}


def test_attributes_survive_a_restart_and_go_on_from_there(line: Line) -> None:
    line.accept(with_attributes(1, panel="P-17"))
    line.reopen()
    line.accept(with_attributes(2, panel="P-99", order="4711"))
    assert kept(line) == {"panel": "P-17", "order": "4711"}


def test_attributes_beyond_the_bounds_are_left_out_and_logged_once_for_an_attempt(line: Line) -> None:
    many = {f"key-{number:02}": "x" for number in range(31)}
    line.accept(with_attributes(1, **many))
    with capture_logs() as events:
        line.accept(with_attributes(2, a="1", b="2"), with_attributes(3, c="3"))
        assert kept(line) == many | {"a": "1"}
        line.accept(an_image("j1", serial="S2", attributes={"long": "ü" * 256}))
        line.accept(*(an_image(f"k{n}", serial="S2", attributes={f"k{n}": "ü" * 256}) for n in range(9)))
    assert len(json.dumps(kept(line, 2), ensure_ascii=False, separators=(",", ":")).encode()) <= 4096
    assert len(kept(line, 2)) == 7
    assert [(event["serial"], event["names"]) for event in events if event["event"] == "attributes_ignored"] == [
        ("S1", ["b"]),
        ("S2", ["k6"]),
    ]


def test_a_late_image_adds_no_attributes_to_a_closed_attempt(line: Line) -> None:
    line.accept(an_image("i1", component="QFP64", designator="U1", attributes={"panel": "P-17"}))
    line.clock.pass_s(601.0)
    line.store.write_results()
    (late,) = line.accept(an_image("i2", attributes={"order": "4711"}))
    assert line.rows("SELECT late FROM inspections WHERE inspection_id = ?", late.inspection_id) == [(1,)]
    assert kept(line) == {"panel": "P-17"}


def test_an_accepted_image_knows_its_attempt(line: Line) -> None:
    assert [image.attempt for image in line.accept(with_attributes(1), an_image("i2", attempt=7))] == [1, 7]
    line.reopen()
    assert [image.attempt for image in line.store.recover().pending] == [1, 7]
