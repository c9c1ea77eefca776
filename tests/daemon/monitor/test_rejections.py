"""What was rejected in the last hour, for people at the line: by source, with the newest reason, never without end."""

from daemon.monitor.timeline import Rejections


class Clock:
    now_s = 1_000_000.0

    def __call__(self) -> float:
        return self.now_s


def test_the_last_hour_is_counted_by_source_and_code_with_the_newest_reason() -> None:
    clock = Clock()
    rejections = Rejections(clock)
    rejections.note("cam-1", "bad_image", "its end is missing")
    clock.now_s += 1800
    for _ in range(3):
        rejections.note("cam-1", "unknown_component", "no component 'R0603'")
    rejections.note(None, "bad_frames", "two frames")
    rows = {(row["source"], row["code"]): row for row in rejections.rows()}
    assert {key: row["images"] for key, row in rows.items()} == {
        ("cam-1", "bad_image"): 1,
        ("cam-1", "unknown_component"): 3,
        ("", "bad_frames"): 1,
    }
    assert rows["cam-1", "unknown_component"]["reason"] == "no component 'R0603'"
    assert rejections.rows()[0]["code"] == "bad_frames", "the newest first"
    clock.now_s += 1861
    assert [row["code"] for row in rejections.rows()] == ["bad_frames", "unknown_component"]
    clock.now_s += 3600
    assert rejections.rows() == []


def test_a_flood_of_made_up_sources_takes_no_memory_and_the_newest_are_shown() -> None:
    clock = Clock()
    rejections = Rejections(clock)
    for number in range(5000):
        clock.now_s += 1
        rejections.note(f"made-up-{number}", "bad_field", "x")
    rows = rejections.rows()
    assert len(rows) == 100
    assert rows[0]["source"] == "made-up-4999"
