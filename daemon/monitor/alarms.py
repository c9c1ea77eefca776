"""Alarms of the rules (docs/rules.md), counted from the results stream by a thread that no verdict waits for.

Two more are built in: for a camera that repeats pictures, and for one that sends each board twice.
"""

import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import structlog

from daemon.line.serving import Serving
from daemon.records import Message
from daemon.storage.database.reader import ResultsReader
from daemon.units import count_text, utc_text, wall_seconds
from daemon.wire.messages import encode
from experts.durable import replace_durably
from routing_rules.routes import MAX_REMEMBERED, AlarmRule
from routing_rules.schema import Glob

#: A message of the results stream, or what is remembered of it.
Body = Mapping[str, Any]
_REMEMBERED = ("inspection_id", "at", "board", "component", "designator", "verdict", "defect")
#: Active alarms of one rule at most, for more have one cause; images that an alarm shows.
_MAX_ACTIVE, _SHOWN = 50, 10
_EVERY_S, _SELDOM_S = 0.5, 10.0
#: Messages: at most waiting; counted again at a start or for a new rule; read and judged at a time.
_WAITING, _HISTORY, _PAGE = 20_000, 10_000, 100
#: Counts images that repeated a picture, whatever their verdict.
REPEATED = AlarmRule("repeated-picture", "review", 3, ("source",), None, (600.0, "seconds", "10m"))
_FROZEN = "Is its camera frozen? Passes wait in Review; `guards.may_repeat` names sources that may."
#: Consecutive boards that were sent again after they had closed.
_TWICE = 3
_TRIGGERS_TWICE = "That counts as late. Does a camera trigger twice? Retests name their attempt (docs/cameras.md)."


class AlarmWatch:
    """One rule, the images that it remembers, and its `active` alarms by what their images have in common."""

    def __init__(self, rule: AlarmRule) -> None:
        self.rule = rule
        self.active: dict[tuple[Any, ...], dict[str, Any]] = {}
        # Boards of another type have other designators.
        same = dict.fromkeys(("board_type", *rule.same) if "designator" in rule.same else rule.same)
        self._same = tuple(name for name in same if name != "defect")
        self._glob = Glob.of(rule.component or "*")
        #: The newest boards or images of each place, oldest first, with the images that count or did before a review.
        self._places: OrderedDict[tuple[str, ...], OrderedDict[tuple[Any, ...], dict[int, Body]]] = OrderedDict()
        self._changed: dict[tuple[str, ...], None] = {}
        self._units = 0

    def see(self, body: Body, guard: str | None = None) -> None:
        """Count a finished image, or a review in place of the line's verdict; in the order of `seq`."""
        image_id, board, (size, kind, _) = body["inspection_id"], body["board"], self.rule.within
        if self.rule is REPEATED and "repeated_picture" not in (guard, body.get("reason")):
            return
        if image_id is None or not self._glob.matches(body["component"]):
            return
        where = tuple(board["type"] if name == "board_type" else body[name] for name in self._same)
        unit = (board["type"], board["serial"], {"boards": "", "images": body["designator"]}.get(kind, image_id))
        place, is_hit = self._places.get(where) or OrderedDict(), self._counts(body)
        if unit not in place:
            if "review_id" in body or (kind == "seconds" and not is_hit):
                return
            place[unit] = {}
            self._places[where] = place
            self._units += 1
        if is_hit or image_id in place[unit]:
            at = place[unit].get(image_id, body)["at"]
            place[unit][image_id] = {**{name: body[name] for name in _REMEMBERED}, "at": at}
        self._changed[where] = None
        self._places.move_to_end(where)
        if kind != "seconds" and len(place) > size:
            self._forget(where)
        if self._units > MAX_REMEMBERED:
            self._forget(next(iter(self._places)))

    def judge(self, now_s: float) -> None:
        if self.rule.within[1] == "seconds":
            since, until = (utc_text(now_s + far_s) for far_s in (-self.rule.within[0], self.rule.within[0]))
            for where, place in list(self._places.items()):
                # One far ahead is of a clock that was wrong.
                while place and not since <= next(iter(next(iter(place.values())).values()))["at"] <= until:
                    self._forget(where)
        for where in self._changed:
            place = self._places.get(where, {})
            hits: dict[str | None, dict[tuple[Any, ...], Body]] = {}
            for unit, images in place.items():
                for image in images.values():
                    if self._counts(image):
                        of_defect = hits.setdefault(image["defect"] if "defect" in self.rule.same else None, {})
                        of_defect[*unit[:2], image["designator"]] = image  # a board's position counts once
            before = {key: self.active.pop(key) for key in list(self.active) if key[0] == where}
            for defect, images in hits.items():
                if len(images) >= self.rule.count and len(self.active) < _MAX_ACTIVE:
                    reached = sorted(image["at"] for image in images.values())[self.rule.count - 1]
                    since = before.get((where, defect), {}).get("since", reached)
                    text = self._text(where, defect, len(images), len(place))
                    row = {"alarm": self.rule.name, "since": since, "text": text, "count": len(images)}
                    row |= {"remedy": _FROZEN} if self.rule is REPEATED else {}
                    self.active[where, defect] = row | {"images": list(images.values())[-_SHOWN:]}
        self._changed.clear()

    def _counts(self, image: Body) -> bool:
        return self.rule is REPEATED or image["verdict"] == self.rule.verdict

    def _text(self, where: tuple[str, ...], defect: str | None, count: int, units: int) -> str:
        _, kind, window = self.rule.within
        named = {"component": self.rule.component, **dict(zip(self._same, where, strict=True))}
        if self.rule is REPEATED:
            return f"{where[0]} sent the same picture for other positions or boards, {count} times in the last {window}"
        text = f"{named['board_type']}: " if "board_type" in named else ""
        text += defect or self.rule.verdict
        text += f" of {named['component']}" if named["component"] else ""
        text += f" at {named['designator']}" if "designator" in named else ""
        if kind == "seconds":
            return f"{text} on {count_text(count, 'image')} in the last {window}"
        of_units = kind == "images" or "designator" in named  # of which each counts once
        text += f" on {count if of_units else count_text(count, 'image')}"
        return f"{text} of the last {units} {kind}" if units > 1 else f"{text} of the last {kind[:-1]}"

    def _forget(self, where: tuple[str, ...]) -> None:
        self._places[where].popitem(last=False)
        self._units -= 1
        self._changed[where] = None
        if not self._places[where]:
            del self._places[where]


class SentTwice:
    """Raises an alarm, in `active`, when consecutive boards are sent again after they have closed."""

    def __init__(self) -> None:
        self.active: dict[tuple[Any, ...], dict[str, Any]] = {}
        #: The boards that closed last: the components that each lacked, and its newest image that filled no gap. One
        #: more than a row, as the newest may yet get its own.
        self._closed: OrderedDict[tuple[Any, ...], tuple[set[str], Body | None]] = OrderedDict()

    def see(self, topic: str, body: Body) -> None:
        is_late = topic.startswith("inspection/") and body["late"]
        if not (is_late or topic.startswith("board/")):
            return
        key = tuple(body["board"][name] for name in ("type", "serial", "attempt"))
        if not is_late:
            self._closed[key] = {each["component"] for each in body["missing"]}, None
            while len(self._closed) > _TWICE + 1:
                self._closed.popitem(last=False)
        elif key in self._closed:
            missing, _ = self._closed[key]
            if body["component"] not in missing:
                self._closed[key] = missing, {name: body[name] for name in (*_REMEMBERED, "source")}
        copies = [image for _, image in self._closed.values()]
        row = [image for image in (copies[:-1] if copies[-1:] == [None] else copies)[-_TWICE:] if image]
        before, self.active = self.active, {}
        if len(row) == _TWICE:
            since = before.get(("boards-sent-twice",), row[-1])
            text = f"{row[-1]['source']} sent pictures of {_TWICE} boards in a row that had closed"
            alarm = {"alarm": "boards-sent-twice", "since": since.get("since", row[-1]["at"]), "text": text}
            self.active["boards-sent-twice",] = alarm | {"count": _TWICE, "remedy": _TRIGGERS_TWICE, "images": row}


class Alarms:
    """The thread. `rows` are the active alarms and `counts` how many of each rule, replaced as a whole."""

    def __init__(
        self, serving: Serving, reader: ResultsReader, file: Path | None, every_10_s: Callable[[], None] = lambda: None
    ) -> None:
        """`file` gets the active alarms, for consumers. The thread also calls `every_10_s`."""
        self._serving = serving
        self._reader = reader
        self._file = file
        self._every_10_s, self._called_s = every_10_s, time.monotonic()
        self._seq, self._written = 0, b""
        self._watches = {REPEATED: AlarmWatch(REPEATED)}
        self._messages: deque[Message] = deque(maxlen=_WAITING)
        self._sent_twice = SentTwice()
        #: The alarm for releases that late images withdrew; read again after each decision.
        self._withdrawn: dict[tuple[Any, ...], dict[str, Any]] | None = None
        self._stopping = threading.Event()
        self._log: Any = structlog.get_logger("alarms")
        self._thread = threading.Thread(target=self._run, name="alarms")
        self._active: dict[tuple[Any, ...], dict[str, Any]] = {}
        self.rows: list[dict[str, Any]] = []
        self.counts: dict[str, int] = {}

    def start(self, last_seq: int) -> None:
        """Start with stored messages up to `last_seq`; later ones come by `published`."""
        self._seq = last_seq
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join()

    def published(self, messages: Sequence[Message]) -> None:
        """Take durable messages, in the order of `seq`. Any thread."""
        self._messages.extend(messages)

    def _run(self) -> None:
        has_failed = False
        while not self._stopping.wait(_EVERY_S):
            try:
                self._poll()
                has_failed = False
            except Exception:  # noqa: BLE001 - the line goes on, and the next poll may succeed
                if not has_failed:
                    self._log.exception("alarms_failed")
                has_failed = True

    def _poll(self) -> None:
        if time.monotonic() - self._called_s >= _SELDOM_S:
            self._every_10_s()
            self._called_s = time.monotonic()
        before, self._watches = self._watches, {}  # after a poll that fails, the next one counts everything again
        rules = (*self._serving.current.routes.alarms, REPEATED)
        watches = {rule: before.get(rule) or AlarmWatch(rule) for rule in rules}
        new, after = [watch for rule, watch in watches.items() if rule not in before], self._seq - _HISTORY
        while new and after < self._seq and not self._stopping.is_set():
            items = self._reader.results_since(max(0, after), _PAGE)["items"]
            page = [item for item in items if item["seq"] <= self._seq]  # what came since waits to be seen
            _see(new, (Message(item["seq"], item["topic"], item) for item in page))
            for watch in new if page else ():
                watch.judge(wall_seconds(page[-1]["at"]))
            after = page[-1]["seq"] if page else self._seq
        waiting = [self._messages.popleft() for _ in range(len(self._messages))]
        self._seq = waiting[-1].seq if waiting else self._seq
        _see(list(watches.values()), waiting)
        for message in waiting:
            self._sent_twice.see(message.topic, message.body)
        for watch in watches.values():
            watch.judge(time.time())
        self._watches = watches
        if any(message.topic.startswith("review/") for message in waiting):
            self._withdrawn = None
        if self._withdrawn is None:
            self._withdrawn = _withdrawn_alarm(self._reader.withdrawn_releases(_MAX_ACTIVE))
        of_rules = {(rule, *key): row for rule, watch in watches.items() for key, row in watch.active.items()}
        self._report(of_rules | self._sent_twice.active | self._withdrawn)

    def _report(self, active: dict[tuple[Any, ...], dict[str, Any]]) -> None:
        for event, rows, others in (("alarm_began", active, self._active), ("alarm_ended", self._active, active)):
            for row in (row for key, row in rows.items() if key not in others):
                self._log.warning(event, alarm=row["alarm"], text=row["text"], since=row["since"])
        self._active, self.rows = active, sorted(active.values(), key=lambda row: row["since"])
        names = (rule.name for rule in self._watches if rule is not REPEATED)
        self.counts = {**dict.fromkeys(names, 0), **Counter(row["alarm"] for row in self.rows)}
        written = encode({"alarms": self.rows})
        if self._file is not None and written != self._written and (self.counts or self._file.exists()):
            self._file.parent.mkdir(exist_ok=True)
            replace_durably(self._file, written)
            self._written = written


def _withdrawn_alarm(rows: Sequence[Mapping[str, Any]]) -> dict[tuple[Any, ...], dict[str, Any]]:
    """Return one alarm for all late images that withdrew a release."""
    if not rows:
        return {}
    first = rows[0]
    text = f"{first['board_type']} {first['serial']} was released and waits again: {first['note']}"
    text += f" (and {len(rows) - 1} more)" if len(rows) > 1 else ""
    row: dict[str, Any] = {"alarm": "release-withdrawn", "since": first["at"], "text": text, "count": len(rows)}
    row |= {"remedy": "Decide on the board once more: its release counts no more."}
    row |= {"images": [{name: image[name] for name in _REMEMBERED} for image in rows[-_SHOWN:]]}
    return {(row["alarm"],): row}


def _see(watches: Sequence[AlarmWatch], messages: Iterable[Message]) -> None:
    for message in messages:
        if message.topic.startswith(("inspection/", "review/")):
            for watch in watches:
                watch.see(message.body, message.guard)
