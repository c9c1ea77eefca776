"""Decisions on a whole board over HTTP: the page sends them as a form, the daemon's own code stores or refuses them."""

import re
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import closing, contextmanager
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlencode

import pytest
import zmq

from daemon.storage.database.store import Store
from daemon.storage.decisions import Decision
from daemon.storage.writer import Writer
from daemon.wire.control import ControlServer
from tests.daemon.dashboard.web import EVIL, Web
from tests.waiting import until

EVA, BEN = "coserve_reviewer=Eva", "coserve_reviewer=Ben"


@contextmanager
def storing(web: Web) -> Iterator[None]:
    """Serve the control socket's `review` as the daemon does, without its writer's thread."""

    def review(fields: dict[str, Any]) -> dict[str, Any]:
        def run(task: Any) -> Future[Any]:
            done: Future[Any] = Future()
            try:
                with closing(Store(f"sqlite:///{web.database}")) as store:
                    done.set_result(task(store))
            except Exception as error:  # noqa: BLE001 - as the writer hands it on
                done.set_exception(error)
            return done

        writer: Any = SimpleNamespace(run=run, publish=list)
        return asdict(Writer.write_decision(writer, Decision.from_fields(fields)))

    (web.folder / "run").mkdir(exist_ok=True)
    context: zmq.Context[Any] = zmq.Context()
    server = ControlServer(context, f"ipc://{web.folder}/run/control.sock", {"review": review})
    server.start()
    try:
        yield
    finally:
        server.stop()
        context.destroy(linger=0)


@pytest.fixture
def web(tmp_path: Path) -> Iterator[Web]:
    """A board with a missing image, one that is open, and one that failed and was cleared image by image."""
    line = Web(tmp_path / "line")
    line.add_board(1, "A1", "unknown", expected=2, inspected=1)
    line.add_image(1, 1, "pass")
    line.add_board(2, "A2", None)
    line.add_board(3, "A3", "fail", expected=1, inspected=1)
    line.add_image(3, 3, "fail")
    line.add_review(3, "pass")
    with storing(line), line.running() as web:
        yield web


def decide(web: Web, board: int, verdict: str, cookie: str = EVA, **fields: object) -> Any:
    """Return the page's answer; one of a busy PC (503) is asked for again: a decision counts once."""
    body = urlencode({"verdict": verdict, **fields})

    def answered() -> Any:
        answer = web.post(f"/boards/{board}", body, Cookie=cookie, Origin=web.origin)
        return None if answer.status == 503 else answer

    return until(answered)


def header(web: Web, board: int) -> str:
    page = web.get(f"/boards/{board}", Cookie=EVA).text
    return page.partition('<div class="head">')[2].partition("<nav")[0]


def test_a_board_is_released_with_a_note_and_the_header_says_by_whom(web: Web) -> None:
    assert "after review" not in header(web, 1)
    answer = decide(web, 1, "pass", note=f" {EVIL[:100]} ")
    assert (answer.status, answer.headers["location"]) == (303, "/boards/1")
    assert "Passed after review by Eva, " in header(web, 1)
    assert "line: unknown" in header(web, 1)
    assert EVIL not in web.get("/boards/1", Cookie=EVA).text
    assert web.sql("SELECT board_id, verdict, reviewer FROM reviews WHERE board_id = 1") == [(1, "pass", "Eva")]
    assert decide(web, 1, "undo", newest=2).status == 303
    assert "after review" not in header(web, 1)
    assert decide(web, 1, "undo", newest=3).status == 409


def test_a_decision_on_a_page_that_is_old_is_refused_with_its_note_kept(web: Web) -> None:
    assert decide(web, 1, "pass").status == 303
    answer = decide(web, 1, "fail", BEN, note="cracked & bent")
    assert answer.status == 409
    assert "Eva decided pass at " in answer.text
    assert 'value="cracked &amp; bent"' in answer.text
    assert 'name="newest" value="2"' in answer.text
    assert decide(web, 1, "fail", BEN, newest=2).status == 303
    assert "Failed after review by Ben, " in header(web, 1)


def test_the_list_says_what_to_look_at_also_where_nothing_failed(web: Web) -> None:
    place = '[{"designator": "%s", "component": "QFP64"}]'
    web.add_board(4, "A4", "review", review=place % "U7")
    missing = '[{"component": "R0402", "count": 2, "designators": ["R1", "R2"]}, {"component": "C0603", "count": 3}]'
    web.add_board(5, "A5", "unknown", unknown=place % "U8", missing=missing)
    rows = " ".join(re.sub(r"<[^>]+>", "", web.get("/boards").text).split())
    assert "U7 QFP64 (review)" in rows
    assert "U8 QFP64 (not judged), R1, R2 R0402 (no image), 3 × C0603 (no image)" in rows


def test_lists_show_and_find_final_verdicts(web: Web) -> None:
    assert "A3" in web.get("/boards?verdict=pass").text
    assert "A3" not in web.get("/boards?verdict=fail").text
    assert "by Eva, line: fail" in web.get("/boards").text
    assert "A2" in web.get("/boards?verdict=open").text
    assert "by Eva, line: fail" in web.get("/").text
    web.add_image(4, 3, "fail")  # Eva passed one of two
    assert "Eva decided pass for " in web.get("/boards").text
    assert "Failed: Eva decided pass for " in header(web, 3)
    assert "by Eva" not in web.get("/").text + header(web, 3)
