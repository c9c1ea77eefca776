"""Pruning in the tables: rows that leave them in short steps, and rows that never do."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from daemon.config.settings import Retention
from daemon.records import ExpertSwitch
from daemon.storage.database.rows import ImageCopy
from daemon.storage.disk_space import DiskSpace
from daemon.storage.pruning import AGES_FILE, AgeClock, Pruner, trusting
from tests.daemon.storage.database.store_parts import Line, a_box, a_line, a_stage, an_arrival, an_outcome

DAY_S = 86400.0


@dataclass
class Kit:
    """A line with images on disk, and a pruner that works on it without threads."""

    line: Line

    def add(self, verdict="pass", *, serial: str, type_="tiny", review=None, keep=True) -> int:
        """One image, judged; its copy in `images/` as the keeper makes it."""
        self.line.images += 1
        arrival = an_arrival(f"image-{self.line.images}", "R0402", type=type_, serial=serial)
        (image,) = self.line.accept(arrival)
        stage = a_stage(detections=(a_box(), a_box("void")))
        self.line.judge(an_outcome(image.inspection_id, verdict, stages=(stage,)))
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
        self.line.store.write(copies=[ImageCopy(inspection_id, path.relative_to(self.line.folder).as_posix())])
        return path

    def prune(self, *, ages: AgeClock | None = None, **settings) -> Pruner:
        clock = self.line.clock.clock
        self.pruner = Pruner(
            *(self.line.url, self.images, Retention(**settings)),
            DiskSpace({"images": self.images}, 1),
            run_task=lambda task: task(self.line.store),
            rest=lambda _seconds: True,
            clock=clock,
            cutoff=ages.cutoff if ages else trusting(clock),
        )
        try:
            self.pruner.prune_images()
            self.pruner.prune_results()
            self.pruner.sweep()
        finally:
            self.pruner.close()
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


LIMITS = {"images_for": "9d", "results_for": "90d"}


class RunningLine:
    """A line that prunes every hour, with ages as the daemon counts them; `kill` ends it at any time."""

    def __init__(self, kit: Kit) -> None:
        self.kit, self.clock = kit, kit.line.clock
        self.boot()

    def boot(self) -> None:
        self.ages = AgeClock(self.clock.clock, self.kit.images / AGES_FILE, self.kit.line.store.last_seq)
        self.kit.prune(ages=self.ages, **LIMITS)

    def kill(self, down_s: float = 0.0) -> None:
        """Begin again as after a reboot: the monotonic clock starts anew."""
        self.clock.pass_s(down_s)
        self.clock.set_s, self.clock.now_s = self.clock.set_s + self.clock.now_s - 10.0, 10.0
        self.boot()

    def run(self, hours: float) -> None:
        while hours > 0:
            self.clock.pass_s(min(hours, 1.0) * 3600)
            hours -= 1.0
            self.kit.prune(ages=self.ages, **LIMITS)


@pytest.fixture
def running(kit):
    """A line that has run for two days, so that a proposal is in force."""
    line = RunningLine(kit)
    line.run(48)
    return line


@pytest.mark.parametrize("is_put_right", [True, False])
@pytest.mark.parametrize("ahead_s", [60 * DAY_S, 1000 * DAY_S])
def test_a_clock_that_is_ahead_at_a_boot_deletes_nothing_for_a_day_of_running_time(running, ahead_s, is_put_right):
    kit, clock = running.kit, running.clock
    evidence = kit.add("fail", serial="S1")
    clock.set_s += ahead_s
    running.kill(down_s=3600.0)
    new = kit.add(serial="S2")  # once an image is accepted, its time proves nothing
    running.kill()
    for _ in range(4):  # with a kill every six hours
        running.run(5.9)
        running.kill()
    assert kit.files == [evidence, new]
    if is_put_right:
        clock.set_s -= ahead_s
    running.run(30)
    assert kit.files == ([evidence, new] if is_put_right else [new])
    assert len(kit.column("SELECT seq FROM boards")) == (1 if ahead_s > 90 * DAY_S and not is_put_right else 2)


def test_a_clock_that_is_ahead_again_and_again_for_less_than_a_day_deletes_nothing(running):
    evidence = running.kit.add("fail", serial="S1")
    for _ in range(6):
        running.clock.set_s += 60 * DAY_S
        running.kill()
        running.run(8)
        running.clock.set_s -= 60 * DAY_S
        running.run(8)
    assert running.kit.files == [evidence]


def test_a_clock_that_is_set_forward_while_the_line_runs_deletes_nothing_for_a_day(running):
    evidence = running.kit.add("fail", serial="S1")
    running.clock.set_s += 1000 * DAY_S
    running.run(23.5)
    assert running.kit.files == [evidence]
    running.kill()
    assert running.kit.files == [evidence]
    running.run(3)
    assert running.kit.files == []


def test_images_that_were_written_under_a_clock_far_behind_stay_for_a_day_after_it_is_put_right(running):
    kit, clock = running.kit, running.clock
    now_s = clock.clock.wall_s()
    clock.set_s -= now_s - 86400.0  # a PC without a battery begins in 1970
    running.kill()
    images = [kit.add("fail", serial="S1"), kit.add(serial="S2")]
    running.run(1)
    clock.set_s += now_s - 86400.0
    running.run(22)
    running.kill()
    assert kit.files == images
    assert len(kit.column("SELECT seq FROM boards")) == 2


def test_a_pc_that_begins_each_day_in_1970_prunes_what_is_old(running):
    kit, clock = running.kit, running.clock
    kit.add("fail", serial="S1")
    for _ in range(16):
        now_s = clock.clock.wall_s()
        clock.set_s -= now_s
        running.kill()
        running.run(0.02)
        clock.set_s += now_s
        running.run(8)
        clock.pass_s(16 * 3600.0)
    assert kit.files == []


def test_a_damaged_file_of_ages_and_a_lost_one_prune_nothing_for_a_day(running):
    file = running.kit.images / AGES_FILE
    evidence = running.kit.add("fail", serial="S1")
    for content in ("{", "[]", '{"ran_s": 1e9, "proposals": [[0, 4e9]]}', None):
        running.clock.set_s += 60 * DAY_S
        file.unlink() if content is None else file.write_text(content)
        running.kill()
        running.run(22)
        assert running.kit.files == [evidence]


def test_beyond_the_bytes_that_images_may_have_passed_ones_go_first(kit):
    evidence = kit.add("fail", serial="S1"), kit.add("review", serial="S2"), kit.add(serial="S3", review="fail")
    passed = [kit.add(serial=f"S{n}") for n in range(4, 8)]
    size_bytes = kit.column("SELECT image_bytes FROM inspections")[0]
    kit.prune(images_bytes=4 * size_bytes)
    assert kit.files == [*evidence, passed[-1]]
    kit.prune(images_bytes=2 * size_bytes)
    assert kit.files == list(evidence[1:])


def test_a_folder_goes_with_its_last_image(kit):
    kit.add(serial="S1")
    kit.line.clock.pass_s(2 * DAY_S)
    new = kit.add(serial="S2")
    kit.prune(images_for="1d")
    assert [path.name for path in kit.images.iterdir()] == ["2026-11-23"]
    assert kit.files == [new]


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
    kit.line.store.forget_images([stray])
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
    kit.line.store.write(
        switches=[ExpertSwitch(kit.line.clock.clock.wall_s(), "cpu", "cpu", "r50", (), 1, 1.0, "disk", "demand")]
    )
    kit.line.clock.pass_s(10 * DAY_S)
    new = kit.add("fail", serial="new")
    pruner = kit.prune(results_for="9d")
    assert (pruner.counts.boards, pruner.counts.inspections) == (3, 3)
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


def test_an_open_board_stays_however_old_it_is(kit):
    (image,) = kit.line.accept(an_arrival("waits", "R0402", type="tiny", serial="S1"))
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


def test_a_pruned_image_can_be_accepted_again_also_on_its_board(kit):
    kit.add(serial="S1")
    kit.line.clock.pass_s(10 * DAY_S)
    kit.prune(results_for="1d")
    kit.line.images = 0
    again = kit.add(serial="S1")
    assert again == 2
    assert kit.line.rows("SELECT image_id, attempt FROM inspections JOIN boards USING (board_id)") == [("image-1", 1)]
