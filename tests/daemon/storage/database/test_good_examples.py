"""The newest passes of each component, kept to compare with: enough, never more, and kept longer than others."""

import hashlib
from pathlib import Path

import pytest

from daemon.storage.database.prune import oldest_kept
from daemon.storage.database.rows import ImageCopy
from daemon.storage.database.store import Store
from tests.daemon.storage.database.store_parts import Line, a_line, a_verdict, an_image


def kept(line: Line) -> list[int]:
    query = "SELECT inspection_id FROM inspections WHERE image_path IS NOT NULL ORDER BY 1"
    return [one for (one,) in line.rows(query)]


def passes(line: Line, number: int, *, every_s: float = 61.0, verdict: str = "pass", component: str = "R0402") -> None:
    """Judge images one after the other, and copy those that are to be kept, as the archiver does."""
    for _ in range(number):
        line.images += 1
        (image,) = line.accept(an_image(f"image-{line.images}", component, type="loose"))
        written = line.store.write_results([a_verdict(image, verdict)])  # type: ignore[arg-type]
        copies = [ImageCopy(one.inspection_id, f"images/{one.inspection_id}.png") for one, _ in written.to_copy]
        line.store.write_results(copies)
        line.clock.pass_s(every_s)
        line.store.write_results()  # boards whose time is over close before the next image


@pytest.mark.promise(
    "A full disk, and years of results",
    "Of each component the newest passes are kept to compare with, never more, and go last where space is needed",
)
def test_the_newest_passes_stay_and_older_ones_go_without_touching_failures(tmp_path: Path) -> None:
    line = a_line(tmp_path, good_examples=3)
    passes(line, 1, verdict="fail")
    passes(line, 5)
    assert line.store.drop_examples() == ["images/2.png", "images/3.png"]
    assert kept(line) == [1, 4, 5, 6]
    assert line.store.drop_examples() == []


def test_a_fast_line_renews_its_examples_once_a_minute(tmp_path: Path) -> None:
    line = a_line(tmp_path, good_examples=3)
    passes(line, 75, every_s=4.0)
    line.store.drop_examples()
    assert len(kept(line)) == 3
    assert max(kept(line)) > 60, "the newest is at most a minute old"


def test_each_component_has_its_own_and_a_restart_forgets_none(tmp_path: Path) -> None:
    line = a_line(tmp_path, good_examples=2)
    passes(line, 3)
    passes(line, 2, component="C0603")
    line.store.drop_examples()
    assert kept(line) == [2, 3, 4, 5]
    line.reopen()
    passes(line, 1)
    assert line.store.drop_examples() == ["images/2.png"]
    assert kept(line) == [3, 4, 5, 6]


def test_an_example_that_a_person_failed_stays_as_evidence(tmp_path: Path) -> None:
    line = a_line(tmp_path, good_examples=1)
    passes(line, 1)
    line.review(1, "fail")
    passes(line, 2)
    assert line.store.drop_examples() == ["images/2.png"]
    assert kept(line) == [1, 3]


def test_a_copy_under_way_is_dropped_later_and_none_is_kept_where_none_is_wanted(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    line = a_line(tmp_path / "a", good_examples=1)
    (image,) = line.accept(an_image("slow", "R0402", "R1"))
    line.store.write_results([a_verdict(image, "pass")])
    line.clock.pass_s(61.0)
    passes(line, 1)
    assert line.store.drop_examples() == []
    line.store.write_results([ImageCopy(image.inspection_id, "images/slow.png")])
    assert line.store.drop_examples() == ["images/slow.png"]
    (tmp_path / "b").mkdir()
    without = a_line(tmp_path / "b")
    passes(without, 3)
    assert kept(without) == []


def test_where_space_is_needed_the_newest_examples_go_after_other_passes_and_before_evidence(tmp_path: Path) -> None:
    line = a_line(tmp_path, keep=("pass", "fail"), good_examples=2)
    passes(line, 4)
    passes(line, 1, verdict="fail")
    with line.store.engine.connect() as connection:
        order = oldest_kept(connection, 100, None, 2)
    assert [image.inspection_id for image in order] == [1, 2, 3, 4, 5]


def test_passed_images_go_first_then_unknown_then_evidence_the_oldest_first_within_each(tmp_path: Path) -> None:
    line = a_line(tmp_path, keep=("pass", "fail", "review", "unknown"))
    for verdict in ("review", "pass", "fail", "unknown", "pass", "pass"):
        passes(line, 1, verdict=verdict)
    line.review(6, "pass")
    with line.store.engine.connect() as connection:
        assert [image.inspection_id for image in oldest_kept(connection, 100, None)] == [2, 5, 4, 1, 3, 6]
        assert [image.inspection_id for image in oldest_kept(connection, 4, None)] == [2, 5, 4, 1]


@pytest.mark.promise(
    "A full disk, and years of results",
    "A share of passes is kept to train with, the same pictures on every line, and goes before evidence",
)
def test_a_share_of_all_passes_is_kept_by_the_bytes_of_the_image_and_outlives_the_examples(tmp_path: Path) -> None:
    line = a_line(tmp_path, good_examples=2, sample=0.2)
    sampled: set[int] = set()
    for number in range(100):
        payload = b"\xff\xd8\xffimage %d" % number
        (image,) = line.accept(an_image(f"i{number}", designator=f"R{number}", payload=payload))
        is_failed = number % 10 == 0
        written = line.store.write_results([a_verdict(image, "fail" if is_failed else "pass")])
        line.store.write_results([ImageCopy(each.inspection_id, "images/1.jpg") for each, _ in written.to_copy])
        if not is_failed and int(hashlib.sha256(payload).hexdigest(), 16) < 0.2 * 2**256:
            sampled.add(image.inspection_id)
    line.store.drop_examples()
    assert 10 <= len(sampled) <= 30
    fails = set(range(1, 100, 10))
    assert sampled | fails < set(kept(line))
    assert len(set(kept(line)) - sampled - fails) == 2, "the examples"
    # After a restart some of them are among the newest, and no newer example drives them out.
    line.store.close()
    line.store = Store(line.url, clock=line.clock.clock, good_examples=5, sample=0.2)
    line.clock.pass_s(61.0)
    passes(line, 6)
    assert line.store.drop_examples() != []
    assert sampled | fails < set(kept(line))
    with line.store.engine.connect() as connection:
        order = oldest_kept(connection, 1000, None, 5)
    assert [image.inspection_id for image in order[-10:]] == sorted(fails)
