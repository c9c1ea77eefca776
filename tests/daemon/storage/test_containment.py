"""Containment of what breaks: poison images and clocks that jump."""

import io
import subprocess
import sys
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

from daemon.records import JournalKey, Pixels
from daemon.storage.suspect_images import MAX_DEATHS, DecodeMarks, Suspects, decode_apart, examine
from experts.errors import ImageHeaderError
from experts.vision.preprocess import decode
from experts.vision.structure import check_structure
from tests.daemon.storage.database import store_parts
from tests.daemon.storage.database.store_parts import Line, a_line, a_verdict, some_rules
from tests.experts import pictures
from tests.experts.pictures import a_chunk
from tests.lines import a_jpeg
from tests.poison import a_poisonous_library, a_tiff, poisoned

pytestmark = pytest.mark.not_fast("computes with torch")

DAY_S = 86_400.0
MAX_PIXELS = 64_000_000
ONE_MINUTE = """
boards: {b: {time_limit: 60s, components: {R0402: [U1, U2]}}}
classifiers: {"*": {expert: "{component}", pass: [ok]}}
"""
KEYS = [JournalKey(1, 16 + 100 * number, 84) for number in range(4)]


# Headers


def a_png(*, extra: bytes = b"", pixels: bytes | None = None) -> bytes:
    rows = zlib.compress(b"".join(b"\0" + bytes(300) for _ in range(100)))
    return pictures.a_png(100, 100, 2, extra, a_chunk(b"IDAT", rows if pixels is None else pixels))


def a_progressive_jpeg(more_scans: int) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (64, 64), (90, 120, 30)).save(buffer, "JPEG", progressive=True)
    data = buffer.getvalue()
    return data[:-2] + data[data.rindex(b"\xff\xda") : -2] * more_scans + data[-2:]


@pytest.mark.promise(
    "Containment",
    "A small file that would keep a decoder busy for minutes is refused from its header alone",
)
@pytest.mark.parametrize(
    ("bomb", "what"),
    [
        (a_progressive_jpeg(1000), "more than 50 scans"),
        (a_png(extra=a_chunk(b"zTXt", b"x\0\0" + zlib.compress(bytes(10**6))) * 100), "compressed chunks"),
        (a_png(extra=a_chunk(b"iCCP", b"x\0\0" + zlib.compress(bytes(10**6))) * 100), "compressed chunks"),
        (a_png(pixels=zlib.compress(bytes(10**6), 0)), "more image data than 100"),
    ],
    ids=["scans of a JPEG", "texts of a PNG", "profiles of a PNG", "pixels of a PNG"],
)
def test_a_small_file_that_keeps_a_decoder_busy_for_minutes_is_refused_by_its_header(bomb: bytes, what: str) -> None:
    with pytest.raises(ImageHeaderError, match=what) as caught:
        check_structure(bomb, 64_000_000)
    assert caught.value.code == "bad_image"


@pytest.mark.parametrize(
    "image", [a_progressive_jpeg(0), a_png(), a_png(extra=a_chunk(b"zTXt", b"x\0\0" + zlib.compress(b"Camera 7")) * 8)]
)
def test_what_cameras_really_send_is_taken(image: bytes) -> None:
    check_structure(image, 64_000_000)
    assert decode(image, "image").shape[2] == 3


def test_every_format_at_the_largest_size_is_decoded_within_the_memory_that_a_suspect_gets() -> None:
    for kind, options in (("PNG", {}), ("TIFF", {"compression": "tiff_lzw"})):
        buffer = io.BytesIO()
        Image.new("RGB", (8000, 8000), (1, 2, 3)).save(buffer, kind, **options)
        assert decode_apart(buffer.getvalue(), Pixels(), 120.0, MAX_PIXELS) is None


# Marks and the probe


def test_marks_outlive_the_process_and_a_clean_stop_clears_them(tmp_path: Path) -> None:
    path = tmp_path / "marks"
    code = (
        "import os, signal, sys; from pathlib import Path; from daemon.storage.suspect_images import DecodeMarks;"
        "from daemon.records import JournalKey; marks = DecodeMarks(Path(sys.argv[1]));"
        "first, second, third = marks.place(), marks.place(), marks.place();"
        "first(JournalKey(1, 16, 84)); second(JournalKey(7, 2**40, 9)); third(JournalKey(3, 3, 3)); third(None);"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(path)], check=False).returncode == -9
    marks = DecodeMarks(path)
    assert marks.suspects == {JournalKey(1, 16, 84): 1, JournalKey(7, 2**40, 9): 1}
    marks.close(clean=True)
    marks = DecodeMarks(path)
    assert marks.suspects == {}
    marks.close(clean=True)


def test_a_suspect_stays_one_until_its_verdict_and_its_deaths_are_counted(tmp_path: Path) -> None:
    def run(*marked: JournalKey, pending: set[JournalKey]) -> Suspects:
        marks = DecodeMarks(tmp_path / "marks")
        suspects = marks.keep(pending)
        for key in marked:
            marks.place()(key)
        marks.close(clean=False)
        return suspects

    first, second, *_ = KEYS
    assert run(first, second, pending=set(KEYS)) == {}
    assert run(first, pending={first}) == {first: 1}
    assert run(pending={first}) == {first: 2}, "the death before counts although this run marked nothing"
    assert run(pending={first}) == {first: 2}
    assert run(pending=set()) == {}
    assert run(pending={first}) == {}


@pytest.mark.parametrize(
    ("action", "what"), [("segv", "SIGSEGV"), ("abort", "SIGABRT"), ("loop", "did not end within"), ("bomb", "SIGABRT")]
)
def test_a_child_says_how_its_decoder_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, action: str, what: str
) -> None:
    for name, value in poisoned(a_poisonous_library(tmp_path), action).items():
        monkeypatch.setenv(name, value)
    reason = decode_apart(a_tiff(), Pixels(), 2.0 if action == "loop" else 120.0, MAX_PIXELS)
    assert reason is not None
    assert what in reason
    assert decode_apart(a_jpeg(), Pixels(), 120.0, MAX_PIXELS) is None


@pytest.mark.parametrize(
    ("payload", "pixels"),
    [(a_jpeg(), Pixels()), (b"\xff\xd8\xff rubbish", Pixels()), (bytes(12), Pixels("raw", (2, 2, 3)))],
)
def test_images_that_decode_apart_or_are_merely_bad_go_the_ordinary_way(payload: bytes, pixels: Pixels) -> None:
    assert decode_apart(payload, pixels, 120.0, MAX_PIXELS) is None


def test_an_image_that_the_daemon_died_with_three_times_is_condemned_unread() -> None:
    image = replace(store_parts.an_image("1"), key=KEYS[0])
    reads: list[JournalKey] = []

    def read(key: JournalKey) -> bytes:
        reads.append(key)
        return a_jpeg()

    assert examine({image.key: 2}, [image], read, 60.0, MAX_PIXELS) == []
    ((condemned, reason),) = examine({image.key: MAX_DEATHS}, [image], read, 60.0, MAX_PIXELS)
    assert (condemned, reads) == (image, [image.key])
    assert "died 3 times" in reason


# Clocks


@pytest.fixture
def line(tmp_path: Path) -> Iterator[Line]:
    line = a_line(tmp_path, some_rules(ONE_MINUTE))
    yield line
    line.store.close()


@pytest.mark.promise("Containment", "Setting the clock closes no board early and falsifies no latency or deadline")
@pytest.mark.parametrize("jump_s", [DAY_S, -DAY_S, 3650 * DAY_S])
def test_a_wall_clock_that_is_set_closes_no_board_early_and_spoils_no_latency(line: Line, jump_s: float) -> None:
    (image,) = line.accept(store_parts.an_image("1", "R0402", "U1", type="b"))
    line.clock.pass_s(2.0)
    line.clock.set_s += jump_s
    first = line.judge(a_verdict(image))
    assert [message.topic for message in first] == ["inspection/b/S1/"], "the board is still open"
    assert first[0].body["latency_ms"] == 2000.0
    line.clock.pass_s(57.0)
    assert line.judge() == []
    line.clock.pass_s(1.5)
    (closed,) = line.judge()
    assert (closed.topic, closed.body["reason"]) == ("board/b/S1/", "time_limit")
    (late,) = line.accept(store_parts.an_image("2", "R0402", "U2", type="b"))
    line.clock.set_s -= jump_s
    messages = [*first, closed, *line.judge(a_verdict(late))]
    assert [message.seq for message in messages] == [1, 2, 3]


def test_a_clock_set_back_over_a_restart_gives_a_board_its_whole_time_and_no_more(line: Line) -> None:
    line.inspect("R0402", "U1", type="b")
    line.clock.set_s -= DAY_S
    line.reopen()
    assert line.store.wait_s() == pytest.approx(60.0, abs=0.1)


@pytest.mark.parametrize("jump_s", [DAY_S, -DAY_S])
def test_a_wall_clock_that_is_set_brings_no_deadline_forward_and_puts_none_off(line: Line, jump_s: float) -> None:
    asked = [store_parts.an_image(one, "R0402", one, type="b", deadline_ms=20_000) for one in ("U1", "U2")]
    in_time, late = line.accept(*asked)
    line.clock.set_s += jump_s
    line.clock.pass_s(19.0)
    assert line.judge(a_verdict(in_time))[0].body["reason"] is None
    line.clock.pass_s(2.0)
    assert line.judge(a_verdict(late))[0].body["reason"] == "deadline"


@pytest.mark.parametrize(("set_s", "waited_s"), [(0.0, 8.0), (-DAY_S, 0.0)])
def test_an_image_that_a_restart_found_has_waited_for_the_downtime_unless_the_clock_was_set_back(
    line: Line, set_s: float, waited_s: float
) -> None:
    line.accept(store_parts.an_image("1", "R0402", "U1", type="b"))
    line.clock.set_s += set_s
    line.reopen(down_s=8.0)
    (found,) = line.store.recover().pending
    assert line.clock.clock.monotonic_s() - found.accepted_s == pytest.approx(waited_s, abs=0.001)
