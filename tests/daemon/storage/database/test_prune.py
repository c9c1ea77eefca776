"""Pruning in the tables: rows that leave them in short steps, and rows that never do."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from daemon.config.settings import Retention
from daemon.records import ExpertSwitch
from daemon.storage.database.connections import open_for_reading
from daemon.storage.database.prune import AgeLimit, forget_images
from daemon.storage.database.rows import ImageCopy
from daemon.storage.disk_space import DiskSpace
from daemon.storage.retention import Ages, Pruner, RunningAges
from daemon.units import utc_text
from tests.daemon.storage.database.store_parts import (
    RULES,
    Line,
    a_box,
    a_line,
    a_stage,
    a_verdict,
    an_image,
    some_rules,
)
from tests.editions import next_edition

DAY_S = 86400.0


@dataclass
class Kit:
    """A line with images on disk, and a pruner that works on it without threads."""

    line: Line

    def add(self, verdict="pass", *, serial: str, type_="tiny", review=None, keep=True) -> int:
        """One image, judged; its copy in `images/` as the keeper makes it."""
        self.line.images += 1
        image = an_image(f"image-{self.line.images}", "R0402", type=type_, serial=serial)
        (image,) = self.line.accept(image)
        stage = a_stage(detections=(a_box(), a_box("void")))
        self.line.judge(a_verdict(image, verdict, stages=(stage,)))
        if keep:
            self.copy(image.inspection_id)
        if review:
            self.line.review(image.inspection_id, review)
        return image.inspection_id

    def copy(self, inspection_id: int) -> Path:
        ((at,),) = self.line.rows("SELECT completed_at FROM inspections WHERE inspection_id = ?", inspection_id)
        path = self.images / at[:10] / "000000" / f"{inspection_id}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(1000))
        self.line.store.write_results([ImageCopy(inspection_id, path.relative_to(self.line.folder).as_posix())])
        return path

    def prune(self, *, ages: Ages | None = None, **settings) -> Pruner:
        clock, engine = self.line.clock.clock, open_for_reading(self.line.url)
        self.pruner = Pruner(
            *(engine, self.images, Retention(**settings)),
            DiskSpace({"images": self.images}, reserve_bytes=1),
            run_task=lambda task: task(self.line.store),
            rest=lambda _seconds: True,
            ages=ages or (lambda age_s: AgeLimit(utc_text(clock.wall_s() - age_s))),
        )
        try:
            self.pruner.prune_images()
            self.pruner.prune_results()
            self.pruner.sweep()
        finally:
            engine.dispose()
        return self.pruner

    @property
    def images(self) -> Path:
        return self.line.folder / "images"

    @property
    def files(self) -> list[int]:
        return sorted(int(path.stem) for path in self.images.rglob("*.jpg"))

    def column(self, query: str):
        return [value for (value,) in self.line.rows(query)]


@pytest.fixture
def kit(tmp_path):
    line = a_line(tmp_path, keep=("pass", "fail", "review", "unknown"))
    yield Kit(line)
    line.store.close()


def test_without_a_limit_nothing_is_pruned(kit):
    images = [kit.add(serial="S1"), kit.add("fail", serial="S2")]
    kit.line.clock.pass_s(1000 * DAY_S)
    kit.prune()
    assert kit.files == images


def test_images_that_are_too_old_go_and_their_rows_stay(kit):
    old = kit.add("fail", serial="S1")
    kit.line.clock.pass_s(10 * DAY_S)
    new = kit.add(serial="S2")
    kit.prune(images_for="9d")
    assert kit.files == [new]
    assert kit.line.rows("SELECT inspection_id, verdict, image_path IS NULL FROM inspections") == [
        (old, "fail", 1),
        (new, "pass", 0),
    ]


@dataclass
class RunningLine:
    """A line whose daemon runs for hours and prunes, as RetentionThread does it; `prune` tells how much is left."""

    kit: Kit

    def __post_init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        self.ages = RunningAges(
            open_for_reading(self.kit.line.url), self.kit.line.clock.clock, lambda task: task(self.kit.line.store)
        )

    def run(self, hours: float) -> None:
        for _ in range(int(hours * 2)):
            self.kit.line.clock.pass_s(1800)
            self.ages.note()

    def prune(self) -> tuple[int, int]:
        self.kit.prune(ages=self.ages, images_for="9d", results_for="90d")
        return len(self.kit.files), self.kit.column("SELECT count(*) FROM boards")[0]

    def set_clock(self, days: float, *, at_start: bool) -> None:
        self.kit.line.clock.set_s += days * DAY_S
        if at_start:
            self.restart()


@pytest.mark.promise(
    "A full disk, and years of results",
    "A wrong clock, ahead or behind, at a start or later, has 24 hours of running time to be put right before "
    "anything is deleted by age",
)
@pytest.mark.parametrize("at_start", [True, False], ids=["at a start", "while it runs"])
def test_a_clock_that_goes_ahead_deletes_nothing_within_a_day(kit, at_start):
    line = RunningLine(kit)
    line.run(30)
    kit.add("fail", serial="S1")
    line.set_clock(1000, at_start=at_start)
    kit.add("fail", serial="S2")  # accepted with the wrong time
    line.restart()
    for _ in range(23):
        line.run(1)
        assert line.prune() == (2, 2)
    line.set_clock(-1000, at_start=at_start)
    line.run(30)
    assert line.prune() == (2, 2)


@pytest.mark.parametrize("at_start", [True, False], ids=["at a start", "while it runs"])
def test_what_was_accepted_while_the_clock_was_behind_is_not_old_when_it_is_put_right(kit, at_start):
    line = RunningLine(kit)
    line.run(30)
    line.set_clock(-1000, at_start=at_start)
    kit.add("fail", serial="S1")
    line.run(5)
    line.set_clock(1000, at_start=at_start)
    for _ in range(23):
        line.run(1)
        assert line.prune() == (1, 1)


def test_beyond_the_bytes_that_images_may_have_passed_ones_go_first(kit):
    evidence = kit.add("fail", serial="S1"), kit.add("review", serial="S2"), kit.add(serial="S3", review="fail")
    passed = [kit.add(serial=f"S{n}") for n in range(4, 8)]
    size_bytes = kit.column("SELECT image_bytes FROM inspections")[0]
    kit.prune(images_bytes=4 * size_bytes)
    assert kit.files == [*evidence, passed[-1]]
    kit.prune(images_bytes=2 * size_bytes)
    assert kit.files == list(evidence[1:])


def test_an_image_whose_copy_is_not_durable_is_not_pruned(kit):
    waiting = kit.add("fail", serial="S1", keep=False)
    kit.line.clock.pass_s(10 * DAY_S)
    kit.prune(images_for="1d", results_for="1d")
    assert kit.line.rows("SELECT inspection_id, task FROM pending") == [(waiting, "keep")]
    assert kit.column("SELECT count(*) FROM boards") == [1]


def test_files_of_an_interrupted_pruning_are_swept_and_foreign_ones_stay(kit):
    stray = kit.add(serial="S1")
    named = kit.add(serial="S2")
    waiting = kit.add("fail", serial="S3", keep=False)
    folder = kit.images / "2026-11-21" / "000000"
    (folder / f"{waiting}.jpg").write_bytes(b"written, not yet noted")
    (folder / "4711.jpg").write_bytes(b"of another database")
    (folder / "notes.txt").write_text("a technician's")
    kit.line.store.transact(forget_images, [stray])
    pruner = kit.prune()
    assert kit.files == [named, waiting, 4711]
    assert (folder / "notes.txt").exists()
    assert pruner.counts.stray_files == 1


def test_a_path_that_somebody_wrote_by_hand_deletes_nothing_elsewhere(kit):
    outside = kit.line.folder / "outside.jpg"
    outside.write_bytes(b"mine")
    image_id = kit.add(serial="S1")
    kit.line.rows("UPDATE inspections SET image_path = 'images/../outside.jpg' WHERE inspection_id = ?", image_id)
    kit.line.clock.pass_s(10 * DAY_S)
    kit.prune(images_for="1d")
    assert outside.exists()


def test_an_image_that_cannot_be_deleted_keeps_its_path(kit):
    image_id = kit.add(serial="S1")
    path = kit.images / "2026-11-21" / "000000" / f"{image_id}.jpg"
    path.unlink()
    path.mkdir()  # what no process may unlink as a file, root included
    kit.line.clock.pass_s(10 * DAY_S)
    kit.prune(images_for="1d")
    assert kit.column("SELECT image_path FROM inspections") == [f"images/2026-11-21/000000/{image_id}.jpg"]
    assert kit.pruner.counts.images == 0


def test_old_boards_go_with_all_their_rows_and_their_files(kit):
    for n in range(3):
        kit.add("fail", serial=f"old-{n}")
    kit.line.store.write_results(
        [ExpertSwitch(kit.line.clock.clock.wall_s(), "cpu", "cpu", "r50", (), 1, 1.0, "disk", "demand")]
    )
    kit.line.clock.pass_s(10 * DAY_S)
    new = kit.add("fail", serial="new")
    pruner = kit.prune(results_for="9d")
    assert (pruner.counts.boards, pruner.counts.inspections) == (3, 3)
    assert pruner.counts.image_bytes == 1000 * pruner.counts.images > 0
    assert kit.files == [new]
    for count in ("SELECT count(*) FROM inspections", "SELECT count(*) FROM boards", "SELECT count(*) FROM stages"):
        assert kit.column(count) == [1]
    assert kit.column("SELECT count(*) FROM detections") == [2]
    assert kit.column("SELECT count(*) FROM expert_switches") == [0]
    assert kit.line.rows("PRAGMA foreign_key_check") == []


def test_a_board_that_an_operator_reviewed_stays_and_so_does_one_with_a_younger_image(kit):
    reviewed = kit.add("fail", serial="reviewed", review="pass")
    late = kit.add("fail", serial="S1", type_="mainboard-a")
    kit.line.clock.pass_s(30)
    kit.line.judge()  # the time limit closes it
    kit.line.clock.pass_s(10 * DAY_S)
    kit.add(serial="S1", type_="mainboard-a")  # fills a gap of the closed attempt
    kit.prune(results_for="9d")
    assert kit.column("SELECT serial FROM boards ORDER BY board_id") == ["reviewed", "S1"]
    assert {reviewed, late} <= set(kit.files)


@pytest.mark.promise(
    "A full disk, and years of results",
    "Pruning never deletes images without a verdict or boards that an operator reviewed",
)
def test_an_open_board_stays_however_old_it_is(kit):
    (image,) = kit.line.accept(an_image("waits", "R0402", type="tiny", serial="S1"))
    kit.line.clock.pass_s(1000 * DAY_S)
    kit.prune(results_for="1d", images_for="1d")
    assert kit.line.rows("SELECT inspection_id, status FROM inspections") == [(image.inspection_id, "accepted")]


def test_seq_goes_on_behind_what_was_pruned_and_the_stream_says_where_it_begins(kit):
    for n in range(3):
        kit.add(serial=f"S{n}")
    reader = kit.line.reader()
    last_seq = reader.last_seq()
    kit.line.clock.pass_s(10 * DAY_S)
    kit.prune(results_for="1d")
    assert reader.results_since(0)["oldest_seq"] is None
    kit.line.reopen()
    kit.add(serial="S9")
    answer = reader.results_since(0)
    reader.close()
    assert answer["oldest_seq"] == last_seq + 1
    assert [item["seq"] for item in answer["items"]] == [last_seq + 1, last_seq + 2]
    assert kit.column("SELECT pruned FROM stream_position") == [last_seq]


def test_rules_of_which_no_result_is_left_go_with_the_results(kit):
    def reload(number):
        rules = some_rules(RULES.replace("20s", f"{20 + number}s"))
        next_edition(kit.line.serving, rules)
        kit.line.store.keep_rules(rules)
        return rules.version

    known = "SELECT rules_version FROM rules_versions ORDER BY loaded_at"
    pruned = kit.line.serving.current.routes.version
    kit.add(serial="OLD")
    unused = reload(1)
    still_open = reload(2)
    kit.line.accept(an_image("w", "QFP64", "U1", serial="OPEN"))
    kit.line.clock.pass_s(1.0)
    in_force = reload(3)
    kit.line.clock.pass_s(10 * DAY_S)
    assert {*kit.column(known)} == {pruned, unused, still_open, in_force}
    kit.prune(results_for="9d")
    assert kit.column(known) == [still_open, in_force]
    assert kit.column("SELECT DISTINCT rules_version FROM recipes") == [still_open]
    # Rules that went come back as new ones do.
    assert reload(1) == unused
    kit.add(serial="NEW")
    assert kit.column(known) == [still_open, in_force, unused]
