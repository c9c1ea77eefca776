"""The runner over a real database: messages that a consumer gets, moves of its position, and its errors."""

import asyncio
import resource
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing
from datetime import timedelta
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from daemon.consumers.protocol import ConsumerSettings, DeliveryError, Message
from daemon.delivery import runner as runner_module
from daemon.delivery.deliveries import SharedStatusPage
from daemon.delivery.position import PositionFile
from daemon.storage.database.reader import ResultsReader
from tests.daemon.delivery.results_database import BEGIN, ResultsDatabase, running
from tests.small_disk import small_disk
from tests.waiting import in_a_loop, soon


class Diary:
    """A consumer that writes down its messages and raises the errors in `trouble`."""

    def __init__(self) -> None:
        self.seqs: list[int] = []
        self.opened: list[int] = []
        self.batches: list[int] = []
        self.messages: list[Message] = []
        self.trouble: list[Exception] = []
        self.takes: int | None = None
        self.closed = 0

    async def open(self, position: int) -> None:
        self.opened.append(position)
        if self.trouble:
            raise self.trouble.pop()

    async def deliver(self, messages: Sequence[Message]) -> int:
        if not messages:
            return 0
        if self.trouble:
            raise self.trouble.pop()
        taken = messages[: self.takes]
        self.messages += taken
        self.seqs += [message["seq"] for message in taken]
        self.batches.append(len(messages))
        return taken[-1]["seq"]

    async def close(self) -> None:
        self.closed += 1


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_module, "_POLL_S", 0.005)
    monkeypatch.setattr(runner_module, "_FIRST_BACK_OFF_S", 0.01)
    monkeypatch.setattr(runner_module, "_LONGEST_BACK_OFF_S", 0.04)
    monkeypatch.setattr(runner_module, "_SAVE_EVERY_S", 0.01)
    # What is over after seconds is never over here, however long this process stands still.
    monkeypatch.setattr(runner_module, "_DELIVER_AGAIN_S", 600.0)
    monkeypatch.setattr(runner_module, "_LAST_MESSAGES_S", 600.0)


@pytest.fixture
def database(tmp_path: Path) -> ResultsDatabase:
    return ResultsDatabase(tmp_path / "inspection.db")


@pytest.fixture
def status_page() -> Iterator[SharedStatusPage]:
    status_page = SharedStatusPage.make("test")
    yield status_page
    status_page.close()


def saved(database: ResultsDatabase) -> int:
    position = PositionFile(database.file.parent / "consumers", "plant").load()
    assert position is not None
    return position.seq


@in_a_loop
async def test_messages_come_in_order_as_published_and_the_position_outlives_the_process(
    database: ResultsDatabase,
) -> None:
    database.grow(2)
    diary = Diary()
    async with running(database, diary):
        await soon(lambda: len(diary.seqs) == 6)
        database.grow(1)
        await soon(lambda: len(diary.seqs) == 9)
    with closing(ResultsReader(database.url)) as reader:
        assert diary.messages == reader.results_since(0)["items"]
    assert diary.messages[2]["topic"] == "board/pair/S1/"
    assert diary.opened == [0]
    assert saved(database) == 9
    diary = Diary()
    async with running(database, diary):
        database.grow(1)
        await soon(lambda: len(diary.seqs) == 3)
    assert (diary.opened, diary.seqs) == ([9], [10, 11, 12])
    assert saved(database) == 12


@in_a_loop
async def test_a_new_consumer_begins_with_the_oldest_kept_or_behind_the_newest(
    database: ResultsDatabase, tmp_path: Path
) -> None:
    database.grow(4)
    database.prune(2)
    oldest, newest = Diary(), Diary()
    async with running(database, oldest, tmp_path / "a"), running(database, newest, tmp_path / "b", newest=12):
        await soon(lambda: len(oldest.seqs) == 6)
        database.grow(1)
        await soon(lambda: len(oldest.seqs) == 9 and len(newest.seqs) == 3)
    assert oldest.seqs == list(range(7, 16))
    assert newest.seqs == [13, 14, 15]
    assert oldest.messages[0]["seq"] == 7


@in_a_loop
async def test_what_was_pruned_before_it_could_be_delivered_is_counted_and_said(
    database: ResultsDatabase, status_page: SharedStatusPage
) -> None:
    database.grow(2)
    diary = Diary()
    async with running(database, diary, status_page=status_page):
        await soon(lambda: len(diary.seqs) == 6)
    database.grow(5)
    database.prune(4)
    with capture_logs() as logs:
        async with running(database, diary, status_page=status_page) as runner:
            await soon(lambda: runner.position == 21)
            database.grow(2)
            database.prune(100)  # all that is left, and what was never seen
            await soon(lambda: runner.position == 27)
    missed = [log for log in logs if log["event"] == "results_missed"]
    assert (missed[0]["count"], missed[0]["after_seq"], missed[0]["up_to_seq"]) == (6, 6, 21)
    assert sum(log["count"] for log in missed) == status_page.read()["missed"]
    assert len(diary.seqs) + status_page.read()["missed"] == 27


async def deliver_all(database: ResultsDatabase, diary: Diary, folder: Path | None = None) -> None:
    async with running(database, diary, folder) as runner:
        await soon(lambda: diary.seqs and runner.position == database.last_seq)


@pytest.mark.promise(
    "Delivery to the plant",
    "A database restored from a backup is recognised, and its new results are not mistaken for old ones",
)
@pytest.mark.parametrize("judged_since", [0, 1, 30])
@in_a_loop
async def test_a_database_from_a_backup_is_noticed_and_what_it_holds_since_is_delivered(
    database: ResultsDatabase, judged_since: int
) -> None:
    """Numbers that it gives a second time are other messages: none of them may be taken for delivered."""
    database.grow(40)
    backup = database.file.read_bytes()
    database.grow(10)
    await deliver_all(database, Diary())
    database.file.write_bytes(backup)
    restored = ResultsDatabase(database.file, BEGIN + timedelta(days=1))
    restored.begin_epoch()
    restored.grow(judged_since)
    diary = Diary()
    with capture_logs() as logs:
        async with running(restored, diary) as runner:
            await soon(lambda: runner.position == restored.last_seq)
            restored.grow(3)
            await soon(lambda: runner.position == restored.last_seq)
    assert set(range(121, restored.last_seq + 1)) <= set(diary.seqs)
    assert diary.seqs[0] <= 121
    notice = next(log for log in logs if log["event"] == "position_not_of_this_database")
    assert notice["position"] == 150


@in_a_loop
async def test_trouble_is_told_by_name_and_tried_again_and_nothing_is_lost(
    database: ResultsDatabase, status_page: SharedStatusPage
) -> None:
    database.grow(1)
    diary = Diary()
    diary.trouble = [OSError("a defect"), DeliveryError("it says no", "refused"), DeliveryError("not there")]
    with capture_logs() as logs:
        async with running(database, diary, status_page=status_page) as runner:
            await soon(lambda: runner.position == 3)
            await soon(lambda: status_page.read()["position"] == 3)
            assert status_page.read()["state"] == "connected"
    events = [(log["event"], log.get("why")) for log in logs if log["event"].startswith("consumer_")]
    assert events[:2] == [("consumer_waiting", "not there"), ("consumer_refused", "it says no")]
    assert events[2] == ("consumer_failed", None)
    assert diary.seqs == [1, 2, 3]
    assert diary.closed == 4


@in_a_loop
async def test_what_was_delivered_in_part_goes_on_behind_that(
    database: ResultsDatabase, status_page: SharedStatusPage
) -> None:
    database.grow(4)
    diary = Diary()
    diary.takes = 5
    async with running(database, diary) as runner:
        await soon(lambda: runner.position == 12)
    assert diary.seqs == list(range(1, 13))
    assert diary.batches == [12, 7, 2]
    database.grow(4)
    with closing(sqlite3.connect(database.file)) as rows, rows:
        rows.execute("DELETE FROM inspections WHERE board_id IN (6, 7)")
    async with running(database, diary, status_page=status_page) as runner:
        await soon(lambda: runner.position == 24)
    assert status_page.read()["missed"] == 4


@in_a_loop
async def test_after_a_lost_connection_the_last_of_it_is_delivered_once_more_but_only_once(
    database: ResultsDatabase,
) -> None:
    database.grow(2)
    diary = Diary()
    async with running(database, diary) as runner:
        await soon(lambda: runner.position == 6)
        diary.trouble = [DeliveryError("gone")]
        database.grow(1)
        await soon(lambda: runner.position == 9 and len(diary.seqs) == 15)
        assert diary.seqs == [1, 2, 3, 4, 5, 6, 1, 2, 3, 4, 5, 6, 7, 8, 9]
        diary.seqs.clear()
        diary.trouble = [DeliveryError("gone again")]
        database.grow(1)
        await soon(lambda: runner.position == 12)
    assert diary.seqs == [7, 8, 9, 10, 11, 12]


@pytest.mark.promise(
    "Delivery to the plant",
    "A full disk costs no delivery; results pruned before delivery are counted",
)
@in_a_loop
async def test_a_full_disk_keeps_the_position_in_memory_and_says_so(
    database: ResultsDatabase, tmp_path: Path, status_page: SharedStatusPage
) -> None:
    database.grow(1)
    with small_disk(tmp_path / "small", "64k") as disk:
        positions = PositionFile(disk, "plant")
        diary = Diary()
        async with running(database, diary, disk, status_page=status_page):
            await soon(lambda: (position := positions.load()) and position.seq == 3)
            filler = disk / "filler"
            with filler.open("wb", buffering=0) as file:
                try:
                    while True:
                        file.write(bytes(4096))
                except OSError:
                    pass
            database.grow(2)
            await soon(lambda: "No space left" in (status_page.read()["last_error"] or ""))
            await soon(lambda: len(diary.seqs) == 9)
            assert status_page.read()["state"] == "connected"
            filler.unlink()
            await soon(lambda: status_page.read()["last_error"] is None)
        position = positions.load()
        assert position is not None
        assert position.seq == 9


@pytest.mark.promise(
    "Delivery to the plant",
    "A consumer that is a hundred thousand results behind catches up in bounded memory",
)
@pytest.mark.test_all
@in_a_loop
async def test_a_hundred_thousand_messages_behind_need_no_more_memory_than_a_few(database: ResultsDatabase) -> None:
    database.grow(34_000)

    class Counter(Diary):
        count = 0

        async def deliver(self, messages: Sequence[Message]) -> int:
            assert len(messages) <= ConsumerSettings.batch
            self.count += len(messages)
            return messages[-1]["seq"] if messages else 0

    counter = Counter()
    async with running(database, counter) as runner:
        await soon(lambda: runner.position > 6_000)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        async with asyncio.timeout(120):
            while runner.position < 102_000:
                await asyncio.sleep(0.05)
        after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert counter.count == 102_000
    assert after - before < 32 * 1024


@in_a_loop
async def test_stopping_delivers_what_the_line_has_just_finished(database: ResultsDatabase) -> None:
    database.grow(1)
    diary = Diary()
    async with running(database, diary) as runner:
        await soon(lambda: runner.position == 3)
        database.grow(200)
    assert diary.seqs == list(range(1, 604))
    assert saved(database) == 603
