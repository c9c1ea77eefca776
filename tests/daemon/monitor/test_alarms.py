"""Alarms of the rules: every condition against a plain count of all messages, and the memory that it may take."""

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from daemon.monitor import alarms as module
from daemon.monitor.alarms import REPEATED, AlarmWatch, SentTwice
from daemon.units import utc_text, wall_seconds
from routing_rules.compile import compile_rules
from routing_rules.routes import AlarmRule

START_S = 1_790_000_000.0
DEFECTS = {"pass": [None], "fail": ["bridge", "void"], "review": ["bridge"], "unknown": [None]}


def a_rule(text: str) -> AlarmRule:
    """Return the rule of `text`, such as `count: 3, within: 20 boards`."""
    classifiers = 'classifiers: {"*": {expert: e, pass: [ok]}}'
    boards = "boards: {a: {extras: allow, components: {R: 1}}}"
    (rule,) = compile_rules(f"{boards}\n{classifiers}\nalarms: {{it: {{{text}}}}}\n").alarms
    return rule


@dataclass
class Stream:
    """Messages of the results stream as they are published, one a second."""

    messages: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])

    def image(self, serial: str, designator: str = "U1", verdict: str = "fail", **more: Any) -> dict[str, Any]:
        body = {"verdict": verdict, "defect": DEFECTS[verdict][0], "component": "R", "attempt": 1, "type": "a"} | more
        board = {"type": body.pop("type"), "serial": serial, "attempt": body.pop("attempt")}
        return self._add({"inspection_id": len(self.messages) + 1, "board": board, "designator": designator, **body})

    def review(self, image: dict[str, Any], verdict: str, defect: str | None = None) -> dict[str, Any]:
        same = {name: image[name] for name in ("inspection_id", "board", "component", "designator")}
        return self._add({**same, "review_id": 1, "verdict": verdict, "defect": defect})

    def _add(self, body: dict[str, Any]) -> dict[str, Any]:
        self.messages.append({"seq": len(self.messages) + 1, "at": utc_text(START_S + len(self.messages)), **body})
        return self.messages[-1]

    def texts(self, rule: AlarmRule, later_s: float = 0.0) -> list[str]:
        """Return the active alarms after all messages."""
        watch = AlarmWatch(rule)
        for message in self.messages:
            watch.see(message, message.get("guard"))
        watch.judge(START_S + len(self.messages) - 1 + later_s)
        return [row["text"] for row in watch.active.values()]


def plain_count(rule: AlarmRule, messages: list[dict[str, Any]], now_s: float) -> dict[tuple[Any, ...], int]:
    """Return how many images count for each alarm that should be active, from all messages at once."""
    (size, kind, _), prefix = rule.within, rule.component.rstrip("*") if rule.component else ""
    places: dict[tuple[str, ...], list[tuple[Any, list[int]]]] = {}
    images: dict[int, dict[str, Any]] = {}
    final: dict[int, tuple[str, str | None]] = {}
    for message in messages:
        if not message["component"].startswith(prefix):
            continue
        number = message["inspection_id"]
        final[number] = message["verdict"], message["defect"]
        if "review_id" not in message:
            images[number] = message
        board = message["board"]["type"], message["board"]["serial"]
        named = {"board_type": board[0], "component": message["component"], "designator": message["designator"]}
        same = {"board_type", *rule.same} if "designator" in rule.same else set(rule.same)
        entries = places.setdefault(tuple(sorted(f"{name}={named[name]}" for name in same - {"defect"})), [])
        unit = board if kind == "boards" else (*board, message["designator"])
        known = [ids for entry, ids in entries[-int(size) :] if entry == unit] if kind != "seconds" else []
        if known:  # a review counts, also one of an image from before the board left and came again
            known[0].extend({number}.difference(known[0]))
        elif "review_id" not in message:
            entries.append((unit, [number]))
    active: dict[tuple[Any, ...], int] = {}
    for place, entries in places.items():
        numbers = [number for _, ids in (entries if kind == "seconds" else entries[-int(size) :]) for number in ids]
        if kind == "seconds":  # what the line itself did not fail is not remembered for a time
            numbers = [
                number
                for number in numbers
                if images[number]["verdict"] == rule.verdict and wall_seconds(images[number]["at"]) >= now_s - size
            ]
        hits = [number for number in numbers if final[number][0] == rule.verdict]
        for defect in {final[number][1] if "defect" in rule.same else None for number in hits}:
            alike = [number for number in hits if "defect" not in rule.same or final[number][1] == defect]
            positions = {(*images[n]["board"].values(), images[n]["designator"]) for n in alike}
            count = len({(board_type, serial, designator) for board_type, serial, _, designator in positions})
            if count >= rule.count:
                active[place, defect] = count
    return active


SAME = st.lists(st.sampled_from(["board_type", "component", "designator", "defect"]), unique=True)
RULES = st.builds(
    lambda verdict, count, same, component, within: a_rule(
        f"verdict: {verdict}, count: {min(count, 2)}, same: [{', '.join(same)}], within: {within}"
        + (f', component: "{component}"' if component else "")
    ),
    st.sampled_from(["fail", "review", "unknown"]),
    st.integers(1, 4),
    SAME,
    st.sampled_from([None, "R*", "Q"]),
    st.sampled_from(["2 boards", "3 boards", "2 images", "4 images", "3s", "8s"]),
)


@st.composite
def streams(draw: st.DrawFn) -> Stream:
    stream = Stream()
    images: list[dict[str, Any]] = []
    for _ in range(draw(st.integers(1, 25))):
        verdict = draw(st.sampled_from(["pass", "fail", "fail", "review", "unknown"]))
        defect = draw(st.sampled_from(DEFECTS[verdict]))
        if images and draw(st.integers(0, 3)) == 0:
            stream.review(draw(st.sampled_from(images)), verdict, defect)
            continue
        of = {"type": draw(st.sampled_from("ab")), "attempt": draw(st.integers(1, 2))}
        of |= {"component": draw(st.sampled_from(["R1", "Q"])), "defect": defect}
        image = stream.image(f"S{draw(st.integers(1, 4))}", f"U{draw(st.integers(1, 2))}", verdict, **of)
        images.append(image)
    return stream


@given(RULES, streams())
def test_alarms_are_up_exactly_while_a_plain_count_of_all_messages_says_so(rule: AlarmRule, stream: Stream) -> None:
    watch = AlarmWatch(rule)
    for number, message in enumerate(stream.messages, 1):
        watch.see(message)
        now_s = wall_seconds(message["at"])
        watch.judge(now_s)
        expected = plain_count(rule, stream.messages[:number], now_s)
        assert sorted(row["count"] for row in watch.active.values()) == sorted(expected.values())
        assert {defect for _, defect in watch.active} == {defect for _, defect in expected}


def test_the_same_defect_at_the_same_designator_of_one_board_type_is_said_in_words() -> None:
    rule = a_rule("count: 3, same: [defect, designator], within: 20 boards")
    stream = Stream()
    for number in range(20):
        stream.image(f"A{number}", verdict="fail" if number % 7 == 0 else "pass")
        stream.image(f"B{number}", type="b", verdict="pass")
    assert stream.texts(rule) == ["a: bridge at U1 on 3 of the last 20 boards"]
    stream.image("A20", verdict="pass")
    assert stream.texts(rule) == []
    stream.image("A21", defect="void")
    assert stream.texts(rule) == []


def test_an_image_that_a_wrong_clock_stamped_years_ahead_keeps_no_alarm_up() -> None:
    rule, stream = a_rule("count: 2, within: 10s"), Stream()
    ahead = [stream.image(serial, at=utc_text(START_S + 1e8)) for serial in ("S1", "S2")]
    watch = AlarmWatch(rule)
    for message in ahead:
        watch.see(message)
    watch.judge(START_S + 1e8)
    assert len(watch.active) == 1
    watch.judge(START_S)
    assert not watch.active


def test_since_is_when_the_last_image_that_was_needed_was_judged() -> None:
    watch, stream = AlarmWatch(a_rule("count: 2, same: [designator], within: 9 boards")), Stream()
    for number in range(5):
        watch.see(stream.image(f"A{number}"))
    watch.judge(START_S + 100.0)
    watch.see(stream.image("A5"))
    watch.judge(START_S + 200.0)
    (row,) = watch.active.values()
    assert (row["since"], row["count"]) == (stream.messages[1]["at"], 6)
    assert [image["board"]["serial"] for image in row["images"]] == [f"A{number}" for number in range(6)]


def test_memory_and_the_number_of_alarms_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_REMEMBERED", 100)
    watch, stream = AlarmWatch(a_rule("count: 1, same: [designator], within: 1h")), Stream()
    for number in range(1000):
        watch.see(stream.image("A1", f"U{number}"))
    watch.judge(START_S + 1000.0)
    assert len(watch.active) == 50
    held = sum(len(place) for place in watch._places.values())
    assert held == watch._units == 100
    watch.judge(START_S + 1e6)
    assert (watch.active, watch._units, len(watch._places)) == ({}, 0, 0)


@pytest.mark.promise("Containment", "A source that repeats three pictures within ten minutes is an alarm")
def test_three_repeated_pictures_of_one_source_within_ten_minutes_are_an_alarm():
    stream, repeated = Stream(), {"verdict": "review", "reason": "repeated_picture"}
    failed = {"verdict": "fail", "reason": None, "guard": "repeated_picture"}
    for designator in ("U1", "U2"):
        stream.image("S1", designator, source="cam", **repeated)
        stream.image("S1", designator, source="cam2", **failed)
        stream.image("S1", designator, source="cam", verdict="review", reason=None)
    assert stream.texts(REPEATED) == []
    last = stream.image("S2", source="cam", **failed)
    text = "cam sent the same picture for other positions or boards, 3 times in the last 10m"
    assert stream.texts(REPEATED) == [text]
    stream.review(last, "pass")
    assert stream.texts(REPEATED, later_s=590.0) == [text]
    assert stream.texts(REPEATED, later_s=598.0) == []


def test_three_boards_in_a_row_that_come_once_more_are_an_alarm_until_one_does_not():
    watch, images = SentTwice(), Stream()

    def board(serial: str, *, again: bool, missing: tuple[str, ...] = (), component: str = "R") -> list[str]:
        named = {"type": "a", "serial": serial, "attempt": 1}
        watch.see("board/a/", {"board": named, "missing": [{"component": name, "count": 1} for name in missing]})
        if again:
            watch.see("inspection/a/", images.image(serial, source="cam", late=True, component=component))
        return [row["text"] for row in watch.active.values()]

    assert [board(f"S{number}", again=number != 2) for number in range(5)] == [[]] * 5
    assert board("S5", again=True) == ["cam sent pictures of 3 boards in a row that had closed"]
    assert len(board("S6", again=False)) == 1  # it may yet come
    assert board("S7", again=False) == []
    for number in range(8, 12):  # what fills a gap was not sent twice
        assert board(f"S{number}", again=True, missing=("R",)) == []
    assert len(watch._closed) == 4
