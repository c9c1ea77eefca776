"""Reviews of a running line: heard at once, heard after a kill, refused by name; real daemon, sockets and clients."""

from pathlib import Path

from coserve_client import Results
from tests.contract.client import Line
from tests.tools.run_commands import coserve

POSITIONS = (("P1", "P"), ("F1", "F"), ("P2", "P"))


def test_a_review_is_heard_at_once_and_one_that_was_stored_but_not_sent_after_the_restart(
    tmp_path: Path, experts_folder: Path
) -> None:
    line = Line(tmp_path / "line", experts_folder)
    service = line.service()
    service.start()
    for designator, component in POSITIONS:
        line.send(board={"type": "named", "serial": "D1-003"}, designator=designator, component=component)
    (closed,) = line.boards("D1-003")
    assert closed["verdict"] == "fail"
    ((board, image),) = line.rows("SELECT board_id, inspection_id FROM inspections WHERE designator = 'F1'")
    with line.listener("review/", "heartbeat/") as listener:
        listener.until_heartbeat()
        answer = line.review(inspection_id=image, verdict="pass", reviewer="Eva", note="a shadow")
        assert (answer["type"], answer["seq"], answer["board_verdict"]) == ("ok", closed["seq"] + 1, "pass")
        topic, heard = next(message for message in iter(listener.take, None) if message[0] != "heartbeat/")
        assert (topic, heard["review_id"], heard["designator"]) == ("review/named/D1-003/", answer["review_id"], "F1")
    for code, fields in (
        ("bad_field", {"inspection_id": image, "board_id": board}),
        ("bad_field", {}),
        ("bad_field", {"board_id": board, "reviewer": " Daemon "}),
        ("bad_field", {"board_id": "1"}),
        ("unknown_board", {"board_id": board + 99}),
        ("conflict", {"inspection_id": image, "verdict": "fail"}),
    ):
        refused = line.review(**{"verdict": "pass", "reviewer": "Ben"} | fields)
        assert (refused["type"], refused["code"]) == ("error", code), refused
    before = line.stream()
    assert before[-1] == {"topic": topic, **heard}
    service.kill()
    # Stored while no daemon runs, so nobody was told: as after a kill between commit and publishing.
    coserve("review", board, "fail", "--board", "--reviewer", "Ben", "--config", line.config)
    with line.service(), Results(line.results, line.intake, since=heard["seq"]) as results:
        scrapped = results.take(60.0)
        assert scrapped is not None
        assert scrapped["kind"] == "review"
        assert (scrapped["seq"], scrapped["reviewer"]) == (heard["seq"] + 1, "Ben")
        assert (scrapped["inspection_id"], scrapped["board_verdict"]) == (None, "fail")
        assert line.stream()[:-1] == before
        assert [message["seq"] for message in line.stream()] == list(range(1, scrapped["seq"] + 1))
        assert line.status()["last_seq"] == scrapped["seq"]
