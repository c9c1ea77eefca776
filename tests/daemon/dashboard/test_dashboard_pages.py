"""The pages Boards and Board, and refusals of every page: over HTTP, on a database with hostile rows."""

import html
import itertools
import os
import re
import shutil
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from urllib.parse import quote

import fastapi
import pytest

from tests.daemon.dashboard.web import EVIL, SQL, Stream, Web, a_picture
from tests.small_disk import small_disk
from tests.waiting import PATIENCE_S


@pytest.fixture(scope="module")
def web(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Web]:
    with Web(tmp_path_factory.mktemp("pages") / "line").running() as web:
        yield web


def test_a_board_shows_its_images_with_boxes_stages_and_reviews(web: Web) -> None:
    web.add_board(
        1, "B-1", failed='[{"designator": "R1", "component": "R0402", "defect": "D207"}]', attributes='{"panel":"P-17"}'
    )
    web.add_image(1, 1, "fail", defect="D207", designator="R1", image_path="images/2026-11-21/000000/1.png")
    web.add_image(2, 1, "pass", designator="R2")
    web.add_stage(1)
    web.add_stage(1, 1, expert="solder", label="bridge", confidence=0.61)
    web.add_box(1, 1, "bridge", 0.61, 10.5, 20, 30, 44)
    web.add_review(1, "pass", "Anna", note="only dust")
    web.add_picture("images/2026-11-21/000000/1.png", a_picture())
    page = web.get("/boards/1")
    assert page.status == 200
    for text in ("B-1", "D207", "solder", "abcdefabcdef", "bridge", "61 %", "Anna", "only dust", "3.0 ms", "P-17"):
        assert text in page.text, text
    assert '<svg viewBox="0 0 160 120"' in page.text
    assert '<rect x="10.5" y="20.0" width="19.5" height="24.0"' in page.text
    picture = web.get("/pictures/1", Accept="image/*")
    assert (picture.status, picture.headers["content-type"]) == (200, "image/png")


def test_a_serial_is_found_by_its_beginning_and_a_whole_one_leads_to_its_board(web: Web) -> None:
    web.add_board(10, "SN-100")
    web.add_board(11, "SN-100", attempt=2, verdict="pass")
    web.add_board(12, "SN-1001")
    assert web.get("/boards?serial=SN-100").text.count('href="/boards/1') == 3
    assert web.get("/boards?serial=sn-1001").status == 200
    scanned = web.get("/boards?serial=SN-1001")
    assert (scanned.status, scanned.headers["location"]) == (303, "/boards/12")
    assert "attempt 2: pass" in web.get("/boards/10").text
    assert web.get("/boards?serial=%25").text.count('href="/boards/1') == 0


@pytest.mark.promise(
    "HTTP",
    "`../` in a picture's name, a row or a link that leads elsewhere | pictures are requested by number, and "
    "opened below the images folder without following links",
)
@pytest.mark.parametrize(
    "path",
    [
        *("/pictures/../coserve.yaml", "/pictures/..%2f..%2fcoserve.yaml", "/pictures/%2e%2e/%2e%2e/etc/passwd"),
        *("/pictures/1/../../coserve.yaml", "/pictures/1.png", "/pictures/-1", "/pictures/%00", "/pictures/"),
        *("/pictures//etc/passwd", "/pictures/1%00.png", "/pictures/0x1", "/pictures/..\\..\\coserve.yaml"),
        *("/static/../app.py", "/static/%2e%2e/app.py", "/static/..%2fapp.py", "/static//etc/passwd"),
        *("/pictures/" + "9" * 40, "/../../../../etc/passwd", "//etc/passwd"),
    ],
)
def test_no_name_from_outside_leads_to_a_file(web: Web, path: str) -> None:
    answer = web.get(path)
    assert answer.status in (400, 404, 422), (path, answer.status)
    assert not re.search("root:|endpoints:|import ", answer.text)


@pytest.mark.promise("Access, pages and reviews", "No name, row or link leads a picture out of the images folder")
def test_a_row_that_points_out_of_the_images_folder_shows_nothing(web: Web) -> None:
    folder = web.folder
    (folder / "secret.png").write_bytes(a_picture())
    images = folder / "images"
    (images / "link").symlink_to(folder)
    (images / "day").mkdir()
    (images / "day" / "5.png").symlink_to(folder / "secret.png")
    os.mkfifo(images / "day" / "6.png")
    os.link(folder / "secret.png", images / "day" / "7.bin")
    (images / "day" / "8.png").mkdir()
    web.add_board(20)
    paths = [
        *("../secret.png", "secret.png", str(folder / "secret.png"), "images/../secret.png", "/etc/passwd"),
        *("images/link/secret.png", "images/day/5.png", "images/day/6.png", "images/day/7.bin", "images/day/8.png"),
        *("images", "", "images/", ".", "images/day/\x00.png", "images/" + "x" * 5000, "other/day/1.png"),
        *("images/./../secret.png", "images//etc/passwd", "images/day/gone.png"),
    ]
    for number, path in enumerate(paths, 200):
        web.add_image(number, 20, image_path=path)
        answer = web.get(f"/pictures/{number}")
        assert (answer.status, "image" in answer.headers["content-type"]) == (404, False), path
    assert "was pruned" in web.get(f"/pictures/{199 + len(paths)}", Accept="*/*").text
    assert web.get("/boards/20").status == 200


@pytest.mark.promise(
    "HTTP",
    "a serial, lot or label that is HTML or script | it is shown as text everywhere; only scripts that ship "
    "with CoServe run (`Content-Security-Policy`)",
)
def test_a_serial_full_of_html_is_text_wherever_it_is_shown(web: Web) -> None:
    more = {"board_type": EVIL, "lot": EVIL, "station": EVIL, "missing": '[{"component": "<b>x", "count": 1}]'}
    web.add_board(500, EVIL, failed=f'[{{"designator": "<b>", "component": "<b>", "defect": "<b>{EVIL[:5]}"}}]', **more)
    web.add_board(501, EVIL, attempt=2, **more)
    evil = {"component": EVIL, "designator": EVIL, "defect": EVIL, "reason": EVIL, "image_path": "images/f/500.png"}
    web.add_image(500, 500, source=EVIL, image_id=EVIL, **evil)
    web.add_picture("images/f/500.png", a_picture())
    web.add_stage(500, expert=EVIL, expert_version=EVIL, label=EVIL)
    web.add_box(500, 0, EVIL, 0.5, 1, 1, 9, 9)
    web.add_review(500, "pass", EVIL, defect=EVIL, note=EVIL)
    stream = Stream(web.host, "topic=boards&topic=line")
    texts = [
        *(web.get(f"/boards/{board}").text for board in ("500", "501", "500?inspection=500")),
        web.get("/boards", query={"lot": EVIL, "serial": EVIL[:20], "board_type": EVIL}).text,
        web.get("/").text,
        next(event["data"] for event in iter(stream.event, None) if event["event"] == "boards"),
        *(web.get("/boards", query={name: EVIL}).text for name in ("serial", "lot", "board_type")),
    ]
    stream.close()
    for text in texts:
        assert "<script>alert" not in text
        assert not {"\u202e", "\xa0", "\u3164"} & {*text}
        assert "onerror=alert(2)>" not in text
        assert "&gt;49" not in text
        assert "<b>" not in text
    assert html.escape(EVIL, quote=False)[:40] in texts[0].replace("&#34;", '"').replace("&#39;", "'")
    for path in (f"/{quote(EVIL)}", f"/boards/{quote(EVIL)}", f"/events?topic={quote(EVIL)}"):
        for accept in ("text/html", "*/*"):
            answer = web.get(path, Accept=accept)
            assert answer.status in (404, 422)
            assert "<script>" not in answer.text or answer.headers["content-type"].startswith("text/plain")


@pytest.mark.promise("HTTP", "SQL in a filter | every page binds values as parameters")
def test_sql_in_any_parameter_of_any_page_is_a_value_or_refused(web: Web) -> None:
    from daemon.config.settings import load_config
    from daemon.dashboard.app import PAGES
    from daemon.dashboard.site.site import Site

    def parameters(dependant: fastapi.dependencies.models.Dependant) -> list[str]:
        inner = [name for dependency in dependant.dependencies for name in parameters(dependency)]
        return [*(field.alias for field in dependant.query_params), *inner]

    site = Site(load_config(web.config))
    routes = [
        (route.path, parameters(route.dependant))
        for page in PAGES
        for route in page.router(site).routes
        if isinstance(route, fastapi.routing.APIRoute) and "GET" in route.methods
    ]
    site.database.close()
    before = web.sql("SELECT count(*) FROM boards")
    assert len(routes) >= 8
    assert {"lot", "from", "kind", "serial", "held", "q", "seconds"} <= {name for _, names in routes for name in names}
    for path, names in routes:
        for value in SQL:
            targets = [re.sub(r"{[^}]+}", quote(value, safe=""), path)] if "{" in path else []
            targets += [f"{re.sub(r'{[^}]+}', '1', path)}?{name}={quote(value)}" for name in names]
            for target in targets:
                answer = web.get(target)
                assert answer.status < 500 or "no daemon" in answer.text, (target, answer.text[:2000])
                assert "sqlite" not in answer.text.lower().replace("sqlite_master", ""), target
    assert web.sql("SELECT count(*) FROM boards") == before


@pytest.mark.parametrize(
    ("address", "name"),
    [
        *(("/experts?sort=name;--", "sort"), ("/experts?page=1e9", "page"), (f"/experts?q={'x' * 129}", "q")),
        *(("/machine?seconds=%27%20OR%201=1", "seconds"), ("/pictures/1?width=481", "width")),
        (f"/review?image={'9' * 30}", "image"),
    ],
)
def test_an_address_with_a_wrong_value_is_refused_by_name(web: Web, address: str, name: str) -> None:
    answer = web.get(address, Cookie="coserve_reviewer=Eva")
    assert (answer.status, f"{name}: " in answer.text) == (422, True)


@pytest.mark.promise(
    "HTTP",
    "endless queries, boards of 200,000 images | queries stop after 5 s and at a maximum number of rows",
)
def test_a_board_of_very_many_images_is_shown_in_parts(tmp_path: Path) -> None:
    line = Web(tmp_path / "line")
    line.add_board(1, expected=200_000)
    line.add_image(1, 1, "pass", completed_at=time.strftime("%Y-%m-%dT00:00:01.000Z", time.gmtime()))
    line.sql(
        """
        WITH RECURSIVE n(i) AS (SELECT 2 UNION ALL SELECT i + 1 FROM n WHERE i < 200000)
        INSERT INTO inspections (inspection_id, source, image_id, board_id, component, designator, accepted_at,
            completed_at, image_bytes, status, verdict, late, rules_version, image_sha256, latency_ms, seq, edition)
        SELECT i, source, 'i' || i, 1, component, 'R' || i, accepted_at, completed_at, 100, 'done',
            CASE WHEN i = 199999 THEN 'fail' ELSE 'pass' END, 0, rules_version, '00', 12.5, i, 1 FROM n, inspections
        """
    )

    def get(path: str) -> str:
        """Return a page; on a busy machine its questions may take more than their five seconds."""
        while (answer := web.get(path)).status == 503:
            assert "Too much to count" in answer.text
        assert answer.status == 200
        return answer.text

    with line.running() as web:
        first = get("/boards/1")
        assert first.count("data-row ") == 100
        assert "more than 20\u202f000" in first
        assert len(first) < 200_000
        follow = re.search(r'href="(/boards/1\?[^"]*after=100)"', first)
        assert follow
        assert "R101" in get(html.unescape(follow[1]))
        assert "R199999" in get("/boards/1?verdict=fail")
        stream = Stream(web.host, "topic=line")
        while "200\u202f000" not in (event := stream.event())["data"]:
            assert event["event"] == "line"
        stream.close()
        get("/")


def test_a_board_that_is_pruned_meanwhile_is_said_to_be_gone(web: Web) -> None:
    web.add_board(600, verdict=None)
    web.add_image(600, 600, "fail", image_path="images/f/600.png")
    assert web.get("/boards/600").status == 200
    web.sql("DELETE FROM inspections WHERE board_id = 600")
    assert web.get("/boards/600").status == 200
    web.sql("DELETE FROM boards WHERE board_id = 600")
    answer = web.get("/boards/600")
    assert (answer.status, "was pruned" in answer.text) == (404, True)
    assert (web.get("/pictures/600").status, web.get("/boards/1?inspection=600").status) == (404, 404)


def test_pages_work_while_the_daemon_is_away_and_say_so(web: Web) -> None:
    page = web.get("/")
    assert page.status == 200
    assert "The daemon does not answer" in page.text
    assert web.get("/healthz").status == web.get("/readyz").status == web.get("/metrics").status == 503


def test_a_reader_that_does_not_read_is_cut_while_another_gets_what_is_new(web: Web) -> None:
    stream = Stream(web.host, "topic=boards")
    slow = Stream(web.host, "topic=boards")
    is_cut, until_s = False, time.monotonic() + PATIENCE_S
    for number in itertools.count(1000):
        # The kernel buffers some lists of this size for a connection, then it is full.
        web.add_board(number, f"{'S' * 100}{number}", lot="L" * 10_000)
        event = stream.event()
        while f"S{number}" not in event["data"]:  # the list before, where the server had forgotten it
            event = stream.event()
        if is_cut:
            break
        is_cut = not slow.is_held()
        assert time.monotonic() < until_s, "a client that reads nothing is held for ever"
    stream.close()
    assert slow.is_ended()
    slow.close()
    assert "topic_failed" not in web.log()
    web.sql("DELETE FROM boards WHERE board_id >= 1000")


@pytest.mark.promise(
    "Access, pages and reviews",
    "Pages stay readable on a full disk, and say when the daemon is not running",
)
def test_a_full_disk_leaves_the_pages_readable(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "24m") as disk:
        line = Web(disk / "line")
        line.add_board(1)
        line.add_image(1, 1)
        with (
            closing(sqlite3.connect(line.database)) as daemons,  # it holds the database open, and with it its log
            line.running(TMPDIR=str(disk)) as web,
            (disk / "filler").open("wb", buffering=0) as filler,
        ):
            daemons.execute("SELECT count(*) FROM boards").fetchall()
            with suppress(OSError):
                while filler.write(b"x" * 65536):
                    pass
            assert shutil.disk_usage(disk).free == 0
            for path in ("/", "/boards", "/boards?serial=A", "/boards/1", "/static/app.css"):
                assert web.get(path).status == 200, path
            assert web.process
            assert web.process.poll() is None
