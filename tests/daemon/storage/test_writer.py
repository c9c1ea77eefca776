"""The writer thread with a real journal and a real database: each image once, in groups, through every failure."""

import os
import sqlite3
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from daemon.records import Duplicate, Generation, Image, Message, Pixels, Verdict, WriteFailed
from daemon.storage import image_archive
from daemon.storage.database.store import Store
from daemon.storage.journal import GROUP_IMAGES, Journal
from daemon.storage.writer import Writer
from routing_rules.routes import Routes
from tests.daemon.storage.database.store_parts import a_stage, a_verdict, sent, some_rules
from tests.editions import a_serving, next_edition
from tests.waiting import until

pytestmark = pytest.mark.not_fast("starts processes")

JPEG = b"\xff\xd8\xff jpeg"
PNG = b"\x89PNG\r\n\x1a\n png"


@dataclass
class Running:
    """A writer with what it called back; `restart` is what a new process does after a kill."""

    folder: Path
    options: dict[str, Any] = field(default_factory=dict)
    store_options: dict[str, Any] = field(default_factory=dict)
    segment_bytes: int = 2**20
    accepted: list[Image] = field(default_factory=list)
    published: list[Message] = field(default_factory=list)
    done: list[tuple[str, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.store: Store = Store(f"sqlite:///{self.folder}/inspection.db", **self.store_options)
        self.journal: Journal = Journal(self.folder / "journal", self.segment_bytes)
        self.serving = a_serving(some_rules())
        self.writer = Writer(self.store, self.journal, self.serving, self.folder / "images", **self.options)
        self.recovery = self.writer.recover()
        of_images = {"accepted": self.accepted.extend, "published": self.published.extend, "done": self.done.extend}
        of_texts = {"texts_accepted": lambda _: None, "texts_done": self.done.extend}
        self.writer.start(SimpleNamespace(**of_images, **of_texts))

    def send(self, *images) -> list[Any]:
        """Write all at once and wait for every answer."""
        answers: list[Any] = [None] * len(images)
        answered = threading.Semaphore(0)
        for n, one in enumerate(images):
            self.writer.store_image(*one, lambda answer, n=n: (answers.__setitem__(n, answer), answered.release()))
        for _ in images:
            assert answered.acquire(timeout=60)
        return answers

    def stop(self) -> None:
        self.writer.stop()
        self.store.close()
        self.journal.close()

    def restart(self) -> None:
        self.stop()
        self.__post_init__()

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        with closing(sqlite3.connect(self.folder / "inspection.db")) as connection:
            return connection.execute(query).fetchall()


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Starts writers in `tmp_path`, which copy images soon; a failed test leaves no thread behind."""
    monkeypatch.setattr(image_archive, "_GROUP_S", 0.05)
    monkeypatch.setattr(image_archive, "_RETRY_S", 0.05)
    started: list[Running] = []

    def begin(**fields: Any) -> Running:
        started.append(Running(tmp_path, **fields))
        return started[-1]

    yield begin
    for line in started:
        if line.writer.is_alive:
            line.stop()


@pytest.fixture
def running(start):
    return start()


def test_an_accepted_image_is_in_the_journal_and_in_its_row_when_the_reply_comes(running):
    replies: list[Any] = []

    def reply(answer):
        replies.append((running.journal.read(answer.key), running.rows("SELECT image_id, status FROM inspections")))

    running.writer.store_image(*sent("a", payload=JPEG), reply)
    until(lambda: replies)
    assert replies == [(JPEG, [("a", "accepted")])]
    assert [image.image_id for image in running.accepted] == ["a"]


def test_the_same_image_many_times_in_flight_becomes_one_row(running):
    copies = [sent("a", payload=JPEG if n % 2 else PNG) for n in range(50)]
    answers = running.send(*copies)
    assert [type(answer) for answer in answers] == [Image, *[Duplicate] * 49]
    assert {answer.content for answer in answers[1:]} == {copies[0][0].sha256}
    assert running.rows("SELECT image_id, image_sha256 FROM inspections") == [("a", copies[0][0].sha256)]
    assert running.send(sent("a")) == [Duplicate(copies[0][0].sha256)]
    running.restart()
    assert running.send(sent("a")) == [Duplicate(copies[0][0].sha256)]


def test_threads_that_write_and_finish_at_once_end_with_one_result_for_each(running):
    def publish(source: str) -> None:
        for n in range(0, 60, 5):
            images = [sent(f"i{m}", source=source, serial=f"S{m}") for m in range(n, n + 5)]
            for answer in running.send(*images, images[0]):
                if isinstance(answer, Image):
                    running.writer.store_verdicts([a_verdict(answer)])

    threads = [threading.Thread(target=publish, args=(f"cam{n}",)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    running.stop()
    inspections = [message for message in running.published if message.topic.startswith("inspection")]
    assert Counter((m.body["source"], m.body["id"]) for m in inspections) == {
        (f"cam{c}", f"i{n}"): 1 for c in range(4) for n in range(60)
    }
    assert [message.seq for message in running.published] == list(range(1, len(running.published) + 1))
    assert Counter(source for source, _ in running.done) == {f"cam{c}": 60 for c in range(4)}
    assert running.rows("SELECT count(*), count(DISTINCT seq) FROM stream") == [(len(running.published),) * 2]


@contextmanager
def locked(line: Running) -> Iterator[None]:
    """Hold the write lock in another program."""
    with closing(sqlite3.connect(line.folder / "inspection.db")) as shell:
        shell.execute("BEGIN IMMEDIATE")
        yield
        shell.rollback()


@pytest.mark.promise("Containment", "A lock held on the database by another program delays results and loses none")
def test_a_lock_by_another_program_fails_the_group_and_delays_results_but_loses_none(start):
    line = start(store_options={"busy_timeout_ms": 50})
    (image,) = line.send(sent("a"))
    with locked(line):
        line.writer.store_verdicts([a_verdict(image, "fail", "D1")])
        assert line.send(sent("b")) == [WriteFailed("database is locked")]
        assert line.published == []
        assert line.writer.last_error == "database is locked"
        assert line.writer.is_failing
    until(lambda: line.published)
    assert not line.writer.is_failing
    assert line.published[0].body["verdict"] == "fail"
    assert isinstance(line.send(sent("b"))[0], Image)


def test_an_image_that_no_row_can_hold_costs_nobody_else(running):
    poison = sent("\ud800")
    answers = running.send(sent("a"), poison, sent("b"))
    assert [type(answer) for answer in answers] == [Image, WriteFailed, Image]


def test_an_outcome_that_no_row_can_hold_becomes_unknown_and_costs_nobody_else(running):
    images = running.send(*(sent(f"i{n}") for n in range(3)))
    poison = Verdict(images[1], "pass", stages=(a_stage(label={"not": "text"}),))
    running.writer.store_verdicts([a_verdict(images[0]), poison, a_verdict(images[2])])
    until(lambda: len(running.published) == 3)
    verdicts = {message.body["id"]: (message.body["verdict"], message.body["reason"]) for message in running.published}
    assert verdicts == {"i0": ("pass", None), "i1": ("unknown", "internal_error"), "i2": ("pass", None)}
    assert [message.seq for message in running.published] == [1, 2, 3]


def test_a_text_is_accepted_once_and_ends_once_even_if_no_row_can_hold_it(running):
    request, replies = Generation("mes", "g1", "m", "why?"), []
    for one in (request, replace(request, prompt="who?")):
        running.writer.store_generation(one, replies.append)
    until(lambda: len(replies) == 2)
    assert replies[1] == Duplicate(request.content)
    for _ in range(2):
        running.writer.finish_generation(replace(replies[0], text="\ud800"))
    running.stop()
    assert running.rows("SELECT status, reason, text FROM generations") == [("unknown", "internal_error", None)]
    assert [message.seq for message in running.published] == [1]
    assert running.done == [("mes", 4)]


def quick_rules(time_limit: str) -> Routes:
    boards = f"boards: {{quick: {{time_limit: {time_limit}, components: {{R0402: 2}}}}}}"
    return some_rules(f"{boards}\nclassifiers: {{'*': {{expert: e, pass: [ok]}}}}\n")


def test_a_board_closes_by_itself_when_its_time_is_up(start):
    line = start()
    next_edition(line.serving, quick_rules("150ms"))
    (image,) = line.send(sent("a", type="quick"))
    until(lambda: line.published)
    assert line.published[0].body["reason"] == "time_limit"
    assert line.published[0].body["missing"] == [{"component": "R0402", "count": 2}]
    line.writer.store_verdicts([a_verdict(image)])
    until(lambda: len(line.published) == 2)
    assert line.published[1].body["late"] is True


def test_images_that_stay_are_copied_and_their_segments_go(tmp_path, start):
    line = start(store_options={"keep": ("fail", "unknown")})
    raw = sent("raw", payload=b"123456", pixels=Pixels("raw", (2, 1, 3)))
    images = line.send(sent("f", payload=JPEG), sent("p", payload=PNG), sent("u", payload=PNG), raw)
    for image, verdict in zip(images, ("fail", "pass", "unknown", "fail"), strict=True):
        line.writer.store_verdicts([a_verdict(image, verdict)])
    until(lambda: line.rows("SELECT count(image_path) FROM inspections") == [(3,)])
    paths = dict(line.rows("SELECT image_id, image_path FROM inspections"))
    assert paths["p"] is None
    assert (tmp_path / paths["f"]).read_bytes() == JPEG
    assert (tmp_path / paths["u"]).read_bytes() == PNG
    assert (tmp_path / paths["raw"]).read_bytes() == b"P6\n1 2\n255\n123456"
    assert [Path(paths[name]).suffix for name in ("f", "u", "raw")] == [".jpg", ".png", ".ppm"]
    assert paths["f"].startswith("images/2")
    assert (tmp_path / paths["f"]).stat().st_mode & 0o777 == 0o640
    assert (tmp_path / paths["f"]).parent.stat().st_mode & 0o777 == 0o750
    line.restart()
    assert line.journal.segments == ()


def test_copies_that_a_restart_interrupted_are_made_after_it(start, monkeypatch):
    line = start()
    with monkeypatch.context() as patched:
        patched.setattr(image_archive, "_GROUP_S", 600.0)
        line.restart()
        (image,) = line.send(sent("f", payload=JPEG))
        line.writer.store_verdicts([a_verdict(image, "fail")])
        line.restart()  # sooner than the archiver's next round
        assert line.rows("SELECT status, image_path FROM inspections") == [("done", None)]
    line.restart()
    until(lambda: line.rows("SELECT count(image_path) FROM inspections") == [(1,)])


def test_a_segment_whose_rows_are_still_to_come_stays_when_others_go(start):
    """Bytes are ahead of their rows by up to two groups: a verdict between must not take their segment for unneeded."""
    line = start(store_options={"keep": ()}, segment_bytes=64)
    (first,) = line.send(sent("first", payload=JPEG * 10))
    going = threading.Event()
    line.writer.run(lambda _store: going.wait(60))
    answers: list[Any] = []
    for n in range(2):
        line.writer.store_image(*sent(f"i{n}", payload=PNG * 10), answers.append)
        until(lambda n=n: line.journal.frontier == first.key.segment + 1 + n)
    line.writer.store_verdicts([a_verdict(first)])
    going.set()
    until(lambda: len(answers) == 2 and line.published)
    assert [line.journal.read(answer.key) for answer in answers] == [PNG * 10] * 2
    until(lambda: first.key.segment not in line.journal.segments)


def in_groups(line: Running, monkeypatch, *images, fails=()) -> tuple[threading.Event, list[Any]]:
    """Write each of `images` in a group of its own; the writer waits for the event, two groups at most are ahead.

    The syncs of those whose number is in `fails` fail.
    """
    going = threading.Event()
    answers: list[Any] = [None] * len(images)
    synced: list[int] = []
    real = os.fdatasync

    def fdatasync(fd: int) -> None:
        synced.append(fd)
        if len(synced) - 1 in fails:
            raise OSError(5, "Input/output error")
        real(fd)

    line.writer.run(lambda _store: going.wait(60))
    with monkeypatch.context() as patch:
        patch.setattr("os.fdatasync", fdatasync)
        for n, one in enumerate(images):
            line.writer.store_image(*one, lambda answer, n=n: answers.__setitem__(n, answer))
            until(lambda n=n: len(synced) > n)
    return going, answers


@pytest.mark.parametrize(("failed_groups", "answer_types"), [((), [Image, Duplicate]), ({0}, [WriteFailed, Image])])
def test_an_image_that_comes_again_in_the_next_group_is_a_duplicate_unless_the_first_group_failed(
    start, monkeypatch, failed_groups, answer_types
):
    line = start(segment_bytes=1)
    line.send(sent("before"))
    copies = [sent("a", payload=payload) for payload in (JPEG, PNG)]
    going, answers = in_groups(line, monkeypatch, *copies, fails=failed_groups)
    going.set()
    until(lambda: all(answers))
    assert [type(answer) for answer in answers] == answer_types
    accepted = answer_types.index(Image)
    assert line.journal.read(answers[accepted].key) == copies[accepted][1]
    if not failed_groups:
        assert answers[1] == Duplicate(copies[0][0].sha256)


def test_a_stop_answers_every_group_that_is_on_its_way(start, monkeypatch):
    line = start(segment_bytes=1)
    line.send(sent("before"))
    going, answers = in_groups(line, monkeypatch, *(sent(f"i{n}") for n in range(2)))
    more: list[Any] = []
    for n in range(2 * GROUP_IMAGES):
        line.writer.store_image(*sent(f"more{n}"), more.append)
    stopping = threading.Thread(target=line.writer.stop)
    stopping.start()
    going.set()
    stopping.join(60)
    assert not line.writer.is_alive
    assert {type(answer) for answer in answers + more} == {Image}
    assert line.rows("SELECT count(*) FROM inspections") == [(3 + 2 * GROUP_IMAGES,)]


def test_after_commits_that_failed_an_idle_line_recovers_by_itself_and_lets_their_segments_go(start):
    """Otherwise a disk that the failed groups had filled would take no image that could free it."""
    line = start(store_options={"busy_timeout_ms": 20}, segment_bytes=1)
    with locked(line):
        for n in range(3):
            assert line.send(sent(f"i{n}")) == [WriteFailed("database is locked")]
        assert line.journal.segments == (1, 2, 3)
        assert line.writer.is_failing
    until(lambda: not line.writer.is_failing)
    assert line.journal.segments == (3,)


def test_an_image_whose_bytes_are_damaged_keeps_its_verdict_and_lets_the_segment_go(tmp_path, start):
    line = start()
    (image,) = line.send(sent("f", payload=JPEG))
    segment = tmp_path / "journal" / "segment-00000001.journal"
    segment.write_bytes(segment.read_bytes()[:-1] + b"?")
    line.writer.store_verdicts([a_verdict(image, "fail")])
    until(lambda: line.rows("SELECT count(*) FROM pending") == [(0,)])
    assert line.rows("SELECT verdict, image_path FROM inspections") == [("fail", None)]


def test_upkeep_runs_between_groups_and_its_failure_is_its_own(running):
    thread = running.writer.run(lambda store: (threading.current_thread().name, store.segments_in_use))
    assert thread.result(60) == ("writer", set())
    assert isinstance(running.writer.run(lambda _: 1 / 0).exception(60), ZeroDivisionError)
    (image,) = running.send(sent("a"))
    assert isinstance(image, Image)
