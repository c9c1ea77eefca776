"""The plant's pages: counts against the rows, silent lines, hostile names, access, a database that is away."""

import hashlib
import html
import http.client
import re
import signal
import urllib.error
import urllib.request
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from sqlalchemy import insert, text

from daemon.consumers.plant import tables
from daemon.plant.page.app import line_state
from tests.daemon.dashboard.browser import HOSTILE_SERIAL, Pages
from tests.daemon.dashboard.web import EVIL, SQL, a_picture
from tests.daemon.plant.page.conftest import ShownHub, a_hub
from tests.daemon.plant.page.plant_rows import LINES, WALKER, Record
from tests.daemon.storage.database.postgresql_server import Server
from tests.waiting import PATIENCE_S, until


def rows_of(page: str) -> dict[str, list[str]]:
    """Return the cells of the first table by the text of the row's head."""
    body = page[page.index("<tbody") : page.index("</tbody>")]
    rows: dict[str, list[str]] = {}
    for row in re.findall(r"<tr.*?</tr>", body, re.DOTALL):
        cells = [
            html.unescape(re.sub(r"<[^>]+>", "", cell)).strip()
            for cell in re.findall(r"<t[hd].*?</t[hd]>", row, re.DOTALL)
        ]
        rows[cells[0]] = cells
    return rows


def today(hub: ShownHub, name: str, line: str) -> list[Record]:
    began = hub.plant.now.replace(hour=0, minute=0, second=0)
    return [row for row in hub.plant.rows[name] if row["line"] == line and row["at"] >= began]


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def passed(boards: list[Record]) -> float:
    first = [one for one in boards if one["attempt"] == 1]
    return sum(one["verdict"] == "pass" for one in first) / len(first)


def test_lines_stand_side_by_side_with_what_the_rows_say(hub: ShownHub) -> None:
    rows = rows_of(hub.get("/"))
    assert set(rows) == set(LINES)
    week = hub.plant.now.replace(hour=0, minute=0, second=0) - timedelta(days=6)
    for line in LINES:
        images, boards = today(hub, "inspections", line), today(hub, "boards", line)
        of_week = [one for one in hub.plant.rows["boards"] if one["line"] == line and one["at"] >= week]
        counted = [str(sum(one["verdict"] == verdict for one in images)) for verdict in ("fail", "review", "unknown")]
        first = [one for one in boards if one["attempt"] == 1]
        assert rows[line][4:] == [
            *(str(len(images)), *counted, str(len(first))),
            *(percent(passed(boards)), percent(passed(of_week))),
        ]


def test_a_silent_line_is_first_and_said_in_words(hub: ShownHub) -> None:
    page = hub.get("/")
    assert list(rows_of(page)) == ["line-2", "line-3", "line-1"]
    states = {line: cells[1] for line, cells in rows_of(page).items()}
    assert states == {"line-1": "✓ connected", "line-2": "✕ silent for 3 hours", "line-3": "✕ never connected"}
    assert page.count('class="alarm trouble"') == 2


def test_a_connected_line_is_silent_after_five_of_its_usual_pauses() -> None:
    now = datetime(2026, 11, 26, 12).astimezone()
    now_s = now.timestamp()
    ends = [now_s - 600 - 60 * number for number in range(20)]

    def state(ago_s: float, seen_s: float = 1.0) -> tuple[str, str]:
        seen, last = now - timedelta(seconds=seen_s), now - timedelta(seconds=ago_s)
        answer = line_state(seen, last, ends, 60.0, now_s)
        return answer.text, answer.look

    assert state(299) == ("connected", "pass")
    assert state(600) == ("connected, no image for 10 minutes", "review")
    assert state(9 * 3600) == ("connected", "pass"), "switched off"
    assert state(600, seen_s=61) == ("silent for 61 seconds", "fail")


def test_the_worst_defects_count_all_lines(hub: ShownHub) -> None:
    failed = [one for line in LINES for one in today(hub, "inspections", line) if one["verdict"] == "fail"]
    rows = rows_of(hub.get("/defects", range="today"))
    for defect, cells in rows.items():
        by_line = {line: sum(one["defect"] == defect and one["line"] == line for one in failed) for line in LINES}
        assert cells[3] == str(sum(by_line.values()))
        assert set(cells[4].split(", ")) == {f"{line} {count}" for line, count in by_line.items() if count}
    assert sum(int(cells[3]) for cells in rows.values()) == len(failed)


def test_a_serial_that_is_typed_or_scanned_opens_its_way_through_all_lines(hub: ShownHub) -> None:
    page = hub.get("/boards", serial=WALKER)
    assert re.findall(r"<h2>.*?</span> (line-\d)", page, re.DOTALL) == ["line-1", "line-2", "line-3"]
    assert "a shadow" in page
    assert "3 attempts on 3 lines" in page
    assert page == hub.get(f"/serial/mainboard-a/{WALKER}")
    assert len(rows_of(hub.get("/boards", serial="10000"))) > 1, "a beginning lists what matches"
    assert "Eva decided pass for R1" in hub.get("/boards", line="line-1")
    assert {cells[3] for cells in rows_of(hub.get("/boards", line="line-2")).values()} == {"line-2"}


def test_hostile_texts_are_shown_as_texts(hub: ShownHub) -> None:
    with hub.engine.begin() as connection:
        for kind in ("restored", "name_taken"):
            event = {"line": "line-1", "kind": kind, "text": EVIL.replace("\0", "")}
            connection.execute(insert(tables.events), event)
    until(lambda: "name taken" in hub.get("/"))
    for page in (hub.get("/"), hub.get("/boards", serial=HOSTILE_SERIAL), hub.get("/boards", line=EVIL)):
        assert "<script>alert" not in page
        assert "<b onload" not in page
    assert html.escape(HOSTILE_SERIAL, quote=False)[:20] in hub.get("/boards", serial=HOSTILE_SERIAL)


def test_sql_in_any_address_is_a_value_or_refused(hub: ShownHub) -> None:
    with hub.engine.connect() as connection:
        before = connection.execute(text("SELECT count(*) FROM boards")).scalar()
        for value in SQL:
            once = quote(value, safe="")
            for path in (
                f"/boards?serial={once}",
                f"/boards?line={once}",
                f"/defects?range={once}",
                f"/serial/{once}/{once}",
            ):
                status, _, answer = ask(hub, path)
                assert status < 500, (path, answer)
                assert b"psycopg" not in answer
        assert connection.execute(text("SELECT count(*) FROM boards")).scalar() == before


def test_a_stored_picture_of_a_finding_is_shown(hub: ShownHub) -> None:
    picture = a_picture()
    digest = hashlib.sha256(picture).hexdigest()
    (image,) = (one for one in hub.plant.rows["inspections"] if one["image_id"] == f"{WALKER}/U1")
    row = {name: image[name] for name in ("line", "epoch", "seq", "inspection_id")}
    with hub.engine.begin() as connection:
        connection.execute(insert(tables.pictures), row | {"sha256": digest, "bytes": len(picture), "state": "stored"})
    file = hub.folder / "pictures" / digest[:2] / digest
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(picture)
    assert f'src="/images/{digest}"' in hub.get("/boards", serial=WALKER)
    with urllib.request.urlopen(hub.url(f"/images/{digest}"), timeout=PATIENCE_S) as answer:  # noqa: S310
        assert answer.read() == picture
        assert answer.headers["Content-Type"] == "image/png"
        assert "default-src 'self'" in answer.headers["Content-Security-Policy"]


def ask(hub: ShownHub, path: str, **headers: str) -> tuple[int, str | None, bytes]:
    """Return an answer's status, where it leads, and its text."""
    connection = http.client.HTTPConnection(hub.http.removeprefix("http://"), timeout=PATIENCE_S)
    try:
        connection.request("GET", path, headers={"Accept": "text/html"} | headers)
        answer = connection.getresponse()
        return answer.status, answer.headers["Location"], answer.read()
    finally:
        connection.close()


def test_without_a_token_only_names_of_this_pc_are_answered_and_releases_of_no_web_page(hub: ShownHub) -> None:
    assert ask(hub, "/healthz")[2] == b"ok"
    for path, origin, status in (("/", {}, 200), ("/releases", {}, 200), ("/releases", {"Origin": "http://a"}, 421)):
        assert ask(hub, path, **origin)[0] == status
        for refused in (path, f"/pictures/{'0' * 64}", f"/images/{'0' * 64}"):
            assert ask(hub, refused, Host="plant.example")[0] == 421


def test_with_a_token_browsers_log_in_and_lines_bring_pictures_as_before(postgresql: Server, tmp_path: Path) -> None:
    folder = tmp_path / "closed"
    (folder / "keys").mkdir(parents=True)
    for name in ("token", "line"):
        (folder / "keys" / name).touch(0o600)
        (folder / "keys" / name).write_text(f"{name:x>40}\n")
    settings: dict[str, Any] = {"http_token": "keys/token", "lines": {"line-1": {"key": "keys/line"}}}
    with a_hub(folder, postgresql, **settings) as hub:
        assert ask(hub, "/boards")[:2] == (303, "/login?next=/boards")
        assert ask(hub, "/", Authorization=f"Bearer {'token':x>40}")[0] == 200
        assert ask(hub, "/", Authorization=f"Bearer {'line':x>40}")[0] == 401, "a line's key opens no page"
        picture = a_picture(size=(400, 300)) + bytes(200_000)  # more than a form may have
        digest = hashlib.sha256(picture).hexdigest()
        headers = {"Authorization": f"Bearer {'line':x>40}"}
        request = urllib.request.Request(hub.url(f"/pictures/{digest}"), picture, headers, method="PUT")  # noqa: S310
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as stored:  # noqa: S310
            assert stored.status == 201


def test_the_page_shows_by_itself_what_happens(hub: ShownHub, open_page: Pages) -> None:
    page = open_page(hub.url())
    page.locator("#live-state[data-state=on]").wait_for()
    with hub.engine.begin() as connection:
        connection.execute(text("UPDATE lines SET last_seen = now() - interval '2 days' WHERE line = 'line-1'"))
    page.get_by_text("silent for 2 days").first.wait_for()
    with hub.engine.begin() as connection:
        connection.execute(text("UPDATE lines SET last_seen = now() + interval '1 hour' WHERE line = 'line-1'"))
    page.get_by_text("✓ connected").wait_for()


def test_a_database_that_is_away_is_said_and_found_again(hub: ShownHub) -> None:
    hub.server.stop(signal.SIGINT)
    try:
        until(lambda: "cannot be read now; the lines go on" in hub.get("/"), lambda: hub.get("/"))
        page = hub.get("/")
        assert "Traceback" not in page
        assert "secret" not in page
        with pytest.raises(urllib.error.HTTPError) as raised:
            hub.get("/boards")
        assert raised.value.code == 503
        assert "The lines go on; try again" in raised.value.read().decode()
    finally:
        hub.server.start()
    until(lambda: "line-2" in hub.get("/"), lambda: hub.get("/"))
