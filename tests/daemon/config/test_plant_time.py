import itertools
from datetime import date, time, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from daemon.config.plant_time import PlantTime, Span
from daemon.units import utc_text, wall_seconds

SHIFTS = {"late": "14:00", "night": "22:00", "early": "06:00"}
FORWARD, BACK, PLAIN = date(2026, 3, 29), date(2026, 10, 25), date(2026, 11, 21)


def a_plant(timezone: str = "Europe/Berlin", **starts: str) -> PlantTime:
    return PlantTime(timezone, tuple((name, time.fromisoformat(at)) for name, at in (starts or SHIFTS).items()))


def at(text: str) -> float:
    return wall_seconds(f"{text}:00.000Z")


def short(span: Span) -> str:
    return f"{span.since[5:16]} {span.until[5:16]}"


@pytest.mark.parametrize(("day", "hours"), [(FORWARD, 23), (BACK, 25), (PLAIN, 24)])
def test_a_day_has_23_or_25_hours_where_the_clock_is_changed(day: date, hours: int) -> None:
    plant = a_plant()
    parts = plant.hours(plant.days(day))
    assert len(parts) == hours
    assert (parts[0].since, parts[-1].until) == (plant.days(day).since, plant.days(day).until)
    assert all(one.until == following.since for one, following in itertools.pairwise(parts))


def test_a_shift_crosses_midnight_and_belongs_to_the_day_on_which_it_began() -> None:
    plant = a_plant()
    assert plant.shift_names == ("early", "late", "night")
    night = plant.shift("night", PLAIN)
    assert short(night) == "11-21T21:00 11-22T05:00"
    assert plant.shift_at(at("2026-11-22T01:30")) == night
    following = plant.shift_at(at("2026-11-22T05:00"))
    assert following is not None
    assert (following.name, following.day) == ("early", date(2026, 11, 22))
    assert [one.name for one in plant.shifts(plant.days(PLAIN))] == ["night", "early", "late", "night"]


def test_shifts_that_begin_at_a_skipped_time_begin_at_the_jump() -> None:
    plant = a_plant(first="02:15", second="02:45", day="14:00")
    assert short(plant.shift("first", FORWARD)) == "03-29T01:00 03-29T01:00"
    assert short(plant.shift("second", FORWARD)) == "03-29T01:00 03-29T12:00"
    begun = plant.shift_at(at("2026-03-29T01:00"))
    assert begun is not None
    assert begun.name == "second"


def test_a_shift_that_begins_at_a_time_that_comes_twice_begins_the_first_time() -> None:
    plant = a_plant(first="02:15", second="02:45", day="14:00")
    assert short(plant.shift("first", BACK)) == "10-25T00:15 10-25T00:45"
    again = plant.shift_at(at("2026-10-25T01:15"))  # the clock shows 02:15 for the second time
    assert again is not None
    assert again.name == "second"


def test_a_time_is_shown_by_the_plants_clock_with_its_zone() -> None:
    plant = a_plant()
    assert plant.text("2026-11-21T09:28:11.123Z") == "2026-11-21 10:28:11 CET"
    assert plant.text("2026-10-25T00:30:00.000Z") == "2026-10-25 02:30:00 CEST"
    assert plant.text("2026-10-25T01:30:00.000Z") == "2026-10-25 02:30:00 CET"


@pytest.mark.promise(
    "Nothing accepted is lost",
    "Each moment belongs to exactly one day and one shift of the plant, also where the clock is put forward or back",
)
@given(
    timezone=st.sampled_from(
        ["Europe/Berlin", "America/New_York", "Asia/Kolkata", "Australia/Lord_Howe", "Africa/Cairo", "Asia/Beirut"]
    ),
    minutes=st.sets(st.integers(0, 1439), min_size=1, max_size=6),
    moment=st.integers(int(at("2024-01-01T00:00")), int(at("2027-01-01T00:00"))),
)
def test_each_moment_belongs_to_exactly_one_shift(timezone: str, minutes: set[int], moment: int) -> None:
    plant = PlantTime(timezone, tuple((f"s{start}", time(*divmod(start, 60))) for start in minutes))
    text = utc_text(moment)
    day = plant.today(moment)
    around = plant.shifts(Span(plant.days(day - timedelta(days=1)).since, plant.days(day + timedelta(days=1)).until))
    assert [one for one in around if one.since <= text < one.until] == [plant.shift_at(moment)]
    assert all(one.until == following.since for one, following in itertools.pairwise(around))
    assert plant.days(day).since <= text < plant.days(day).until
