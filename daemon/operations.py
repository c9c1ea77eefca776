"""Requests of operators to a running line, called by the control thread; the drive answers those for the scheduler."""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, TypeVar

import structlog
from sqlalchemy.exc import SQLAlchemyError

from daemon.config.settings import Config, StartSettings, stated_settings
from daemon.delivery.deliveries import Deliveries
from daemon.dispatch.drive import Drive
from daemon.errors import ConfigError
from daemon.host.children import Children
from daemon.host.temperature import Thermometer
from daemon.intake.admission import Admission
from daemon.intake.backlog import Backlog
from daemon.language.models import LanguageModels
from daemon.line.line import warn_of_weights
from daemon.line.making import make_edition, working_files
from daemon.line.served import Served, compile_stored
from daemon.line.serving import Serving, changed_experts
from daemon.line.working import WorkingFiles
from daemon.monitor.alarms import Alarms
from daemon.monitor.metrics import Metrics
from daemon.monitor.pipeline_probe import PipelineProbe
from daemon.monitor.timeline import MAX_WINDOW_S, Rejections, WorkTimeline
from daemon.shadow.shadows import Shadows
from daemon.storage.database.changes import PROGRAM, RULES, Change, ChangeNotes, State, expert_subject
from daemon.storage.database.reader import ResultsReader
from daemon.storage.decisions import Decision
from daemon.storage.retention import RetentionThread
from daemon.storage.writer import Writer
from daemon.units import MAX_BYTES, MAX_COUNT, utc_text, wall_seconds
from daemon.wire.control import ControlError, Handler
from daemon.wire.endpoints import Access
from daemon.wire.keys import KeyFileError, fingerprint, read_allow_list
from daemon.wire.messages import NAME, NAME_EXPECTED, shown
from experts.catalog import Catalog
from experts.editions.edition import EditionError
from experts.editions.folder import EditionFolder
from experts.editions.history import experts_of, past
from experts.people import current_user

#: A thread that has held the probe for this long hangs (pipeline_probe.py).
STUCK_AFTER_S = 10.0


@dataclass(frozen=True, slots=True)
class Vitals:
    """The state of the line that `health` reports.

    `held_by` is the thread that has the probe, and for how many seconds. `refuses` says why no image is taken,
    `unjudged` why none gets a verdict, `troubles` what else is wrong with a line that goes on.
    """

    state: str
    held_by: tuple[str, float] | None = None
    refuses: Sequence[str] = ()
    unjudged: Sequence[str] = ()
    troubles: Sequence[str] = ()


def health(vitals: Vitals) -> dict[str, Any]:
    """Return `alive` and `ready`, each with `ok` and `text`, for control's `health`.

    Alive: an image could pass through the threads; if not, a restart helps. Ready: images are taken and judged. A line
    that is degraded is ready as long as both go on.
    """
    stuck = vitals.held_by if vitals.held_by is not None and vitals.held_by[1] >= STUCK_AFTER_S else None
    if stuck is not None:
        text = f"stuck: the {stuck[0]} thread has not answered for {stuck[1]:.0f} s; the log says more"
        return {"alive": _part(False, text), "ready": _part(False, text)}
    return {"alive": _part(True, "alive"), "ready": _ready(vitals)}


def _ready(vitals: Vitals) -> dict[str, Any]:
    if vitals.state == "starting":
        return _part(False, "starting: the first experts are being loaded")
    if vitals.refuses:
        return _part(False, f"{vitals.state}: takes no images: {'; '.join(vitals.refuses)}")
    if vitals.state not in ("ready", "degraded"):
        return _part(False, vitals.state)
    if vitals.unjudged:
        return _part(False, f"{vitals.state}: images get no verdict: {'; '.join(vitals.unjudged)}")
    return _part(True, ": ".join([vitals.state, "; ".join(vitals.troubles)]) if vitals.troubles else vitals.state)


def _part(ok: bool, text: str) -> dict[str, Any]:
    return {"ok": ok, "text": text}


T = TypeVar("T")

_RATE_WINDOW_S = 10.0
#: An error of one image or one moment is reported for this long.
_SHOWN_FOR_S = 600.0
#: Ordinary corrections of a clock are smaller.
_SET_BACK_S = 5.0
#: A scrape waits this long for the scheduler's newest numbers; then it reports the previous ones.
_FRESH_WITHIN_S = 0.2
_ASKED_OF_THE_DRIVE = ("experts", "queues", "memory", "pin", "unpin", "unload")
#: The names of the backlog's limits on the wire and in the configuration, and in BacklogLimits.
_BACKLOG_LIMITS = {
    "backlog_images": "images",
    "backlog_bytes": "bytes",
    "source_images": "source_images",
    "source_bytes": "source_bytes",
}


@dataclass(kw_only=True, eq=False)
class Operations:
    """`handlers` is the control socket's table. `state` and `reload` may be asked from any thread."""

    config: Config
    drive: Drive
    language: LanguageModels
    writer: Writer
    reader: ResultsReader
    admission: Admission
    retention: RetentionThread
    backlog: Backlog
    serving: Serving
    metrics: Metrics
    access: Access
    timeline: WorkTimeline
    rejections: Rejections
    alarms: Alarms
    files: WorkingFiles
    probe: PipelineProbe
    children: Children
    deliveries: Deliveries
    shadows: Shadows
    settings: StartSettings
    #: `line` and `epoch`, which name the results of this line (PROTOCOL.md, Additions, 1.1).
    identity: dict[str, str]
    #: Brings new versions to other PCs before they are used.
    prefetch: Callable[[Catalog, Catalog], None]
    _thermometer: Thermometer = field(init=False, default_factory=Thermometer)
    _reloading: threading.Lock = field(init=False, default_factory=threading.Lock)
    _draining: bool = field(init=False, default=False)
    _started_s: float = field(init=False, default_factory=time.monotonic)
    _completions: deque[tuple[float, int]] = field(init=False)
    #: The trouble that lasts, by its place in `_last_error`, and since when.
    _trouble: tuple[int | None, float] = field(init=False, default=(None, 0.0))
    #: The latest time of a result or of the clock, and True while the clock is behind it.
    _latest_s: float = field(init=False, default=0.0)
    _is_set_back: bool = field(init=False, default=False)
    _log: Any = field(init=False, default_factory=lambda: structlog.get_logger("operations"))

    def __post_init__(self) -> None:
        self._completions = deque([(self._started_s, 0)])

    @property
    def state(self) -> str:
        """`starting` is the pools' first fill; `degraded`: an expert, the database or a disk is in trouble."""
        if self._draining:
            return "draining"
        if self.drive.is_filling:
            return "starting"
        is_failing = self.drive.is_failing or self.writer.is_failing or self.retention.problem is not None
        is_failing = is_failing or self.language.is_failing
        return "degraded" if is_failing or self.access.problem or self.admission.held else "ready"

    @property
    def is_begun(self) -> bool:
        """Return True once pools are filled and models open, or are known to have failed: the start is over."""
        return self.state != "starting" and not self.language.is_opening

    def watch_clock(self) -> str | None:
        """Return a warning while the clock is behind the newest result, else None; log the first."""
        newest, now_s = self._or_none(lambda: self.reader.at(self.reader.last_seq())), time.time()
        self._latest_s = max(self._latest_s, now_s, wall_seconds(newest) if newest else 0.0)
        was_set_back, self._is_set_back = self._is_set_back, self._latest_s > now_s + _SET_BACK_S
        if not self._is_set_back:
            return None
        latest, now = (self.config.plant.clock().text(utc_text(at_s)) for at_s in (self._latest_s, now_s))
        if not was_set_back:
            self._log.error("clock_set_back", latest=latest, now=now)
        return f"The clock was set back: it shows {now}, and there are results of {latest}."

    def heartbeat(self) -> tuple[str, int]:
        self._last_error()
        return self.state, self.backlog.images

    def sentence(self) -> str:
        """Return the line's state, its first trouble and its backlog, for a person."""
        vitals = self.vitals()
        state = vitals.state
        troubles = [f"takes no images: {reason}" for reason in vitals.refuses]
        troubles += dict.fromkeys((*vitals.unjudged, *vitals.troubles))
        more = f" (and {len(troubles) - 1} more: coserve status)" if len(troubles) > 1 else ""
        return f"{state}{f', {troubles[0]}{more}' if troubles else ''}; backlog {self.backlog.images} images"

    def vitals(self) -> Vitals:
        """Return the facts behind `/healthz` and `/readyz`. No thread is asked: it answers while one hangs."""
        executors = self.drive.last_status.get("executors", ())
        out = [
            f"executor {row['name']} is out of service: {row['out_of_service']}"
            for row in executors
            if "out_of_service" in row
        ]
        unjudged = [f"results cannot be written: {self.writer.last_error}"] if self.writer.is_failing else []
        unjudged += out if out and len(out) == len(executors) else []
        troubles = [
            f"expert {expert} cannot be loaded: {why.removeprefix(f'expert {expert}: ')}"
            for expert, why in self.drive.last_status.get("failed", {}).items()
        ]
        troubles += [*out, *(why for why in (self.access.problem, self.language.trouble()) if why)]
        troubles += self.children.troubles()
        state = self.state
        if state == "degraded" and not (troubles or unjudged or self.admission.held):
            troubles.append(str(self.drive.last_status.get("last_error") or "the log says why"))
        return Vitals(state, self.probe.held_by(), self.admission.held, unjudged, troubles)

    def health(self) -> dict[str, Any]:
        return {**health(self.vitals()), "rejected": self.rejections.rows()}

    def facts(self) -> dict[str, Any]:
        """Return the values of a scrape. Those of the scheduler may be seconds old while it is busy or hangs."""
        fresh = self.drive.ask_later("status", {})
        wait([fresh], _FRESH_WITHIN_S)
        vitals = self.vitals()
        return {
            **self._line_now(),
            "policy": self.config.policy,
            "is_ready": health(vitals)["ready"]["ok"],
            "held_s": vitals.held_by[1] if vitals.held_by else 0.0,
            "backlog_bytes": self.backlog.bytes,
            "wal_bytes": self.retention.wal_bytes,
            "disks": self.retention.disks,
            "scheduler": self.drive.last_status,
            "temperatures": self._thermometer.read(),
            "alarm_counts": self.alarms.counts,
        }

    def _line_now(self) -> dict[str, Any]:
        children, last_seq = self.children.status(), self._or_none(self.reader.last_seq)
        return {
            "version": version("coserve"),
            "state": self.state,
            "backlog": self.backlog.images,
            "rules_version": self.serving.current.routes.version,
            "edition": self.serving.current.number,
            **({"files": self.files.problem} if self.files.problem else {}),
            **({"clock": clock} if (clock := self.watch_clock()) else {}),
            "last_seq": last_seq,
            "children": children,
            "consumers": [] if last_seq is None else self.deliveries.status(last_seq, children),
            "models": self.language.status(),
            "shadows": self.shadows.status(),
        }

    def _or_none(self, read: Callable[[], T]) -> T | None:
        """Return what the database says, None while it does not answer: the rest goes on all the same."""
        try:
            return read()
        except SQLAlchemyError:
            return None

    def handlers(self) -> dict[str, Handler]:
        """Return the handlers by kind of request: its fields in, the answer's fields out. ControlError refuses one."""
        asked: dict[str, Handler] = {
            kind: lambda fields, kind=kind: self.drive.ask(kind, fields) for kind in _ASKED_OF_THE_DRIVE
        }
        asked |= {kind: self._noted(kind, asked[kind]) for kind in ("pin", "unpin", "unload")}
        return {
            **asked,
            "status": lambda _: self._status(),
            "limits": self._limits_noted,
            "reload": lambda fields: self.reload(*_author(fields), now=_flag(fields, "now", default=False)),
            "reload_refused": lambda fields: self._note_refusal(*_author(fields), str(fields.get("reason"))),
            "adopt": self._adopt,
            "keys": self._keys,
            "drain": self._noted("drain", self._drain),
            "prune": self._noted(
                "prune", lambda fields: self.retention.prune(begin=_flag(fields, "begin", default=True))
            ),
            "versions": lambda _: self._record_versions(),
            "review": self._review,
            "metrics": lambda _: {"text": self.metrics.exposition()},
            "health": lambda _: self.health(),
            "timeline": lambda fields: self.timeline.work(_seconds(fields)),
            "waits": lambda fields: self.timeline.waits(_seconds(fields)),
        }

    # What `changes` tells

    def started(self, path: Path, note: str | None) -> None:
        """Note this start with the configuration `path`: a run, what is in force, and what changed since the last."""
        at, who = utc_text(time.time()), current_user()
        start = Change(at, who, "start", PROGRAM, new=version("coserve"), note=note)
        settings = State(at, who, "settings", stated_settings(path), note)
        in_force = self._in_force("start", at, who, note)
        steps = (*self._version_steps(), *self._restores())
        states = (settings, *self._keys_allowed(at, who, note), in_force)
        self.writer.store_changes(ChangeNotes((start,), steps, states, version("coserve")))

    def _in_force(self, what: Literal["start", "reload"], at: str, who: str, note: str | None, **at_of: str) -> State:
        catalog = self.serving.current.catalog
        experts = {expert_subject(expert): spec.version for expert, spec in catalog.items()}
        experts |= {f"settings of {expert}": spec.settings_digest for expert, spec in catalog.items()}
        return State(at, who, what, {RULES: self.serving.current.routes.version, **experts}, note, at_of)

    def _version_steps(self) -> list[Change]:
        """Return what `coserve experts` did to versions, with or without a daemon: each is written once."""
        try:
            experts = experts_of(EditionFolder(self.config.catalog))
        except (EditionError, OSError) as error:
            self._log.warning("versions_unreadable", problem=str(error))
            return []
        return [
            Change(
                step.at,
                step.by,
                step.did,
                expert_subject(name),
                *((step.version, None) if step.did in ("prune", "unshadow") else (step.before, step.version)),
                step.note,
            )
            for name, expert in experts.items()
            for step in expert.steps
            if step.did != "found"
        ]

    def _restores(self) -> list[Change]:
        """Return each `coserve restore` that the editions tell of, as `ARCHIVE: NOTE`: each is written once."""
        restores: list[Change] = []
        for edition in past(EditionFolder(self.config.catalog), self.serving.current.number):
            if edition.why == "restore":
                at, (archive, _, note) = utc_text(edition.created_at.timestamp()), (edition.note or "").partition(": ")
                restores.append(Change(at, edition.who, "restore", "line", new=archive, note=note or None))
        return restores

    def _keys_allowed(self, at: str, who: str, note: str | None) -> tuple[State, ...]:
        """Return the fingerprint of each client that may come in."""
        folder = self.config.security.allowed_clients
        try:
            clients = {} if folder is None else read_allow_list(folder).clients
        except KeyFileError:
            return ()  # the start and `keys` say so
        return (State(at, who, "keys", {name: fingerprint(public) for public, name in clients.items()}, note),)

    def _keys(self, fields: dict[str, Any]) -> dict[str, Any]:
        who, note = _author(fields)
        answer = self.access.reload()
        self.writer.store_changes(ChangeNotes(states=self._keys_allowed(utc_text(time.time()), who, note)))
        return answer

    def _adopt(self, fields: dict[str, Any]) -> dict[str, Any]:
        """Judge by the edition that a command has put in force; with `only_check`, say whether that can be done."""
        number: Any = fields.get("edition")
        if type(number) is not int or number < 1:
            raise ControlError("bad_field", f"edition: expected its number, not {number!r}")
        folder = EditionFolder(self.config.catalog)
        try:
            if _flag(fields, "only_check", default=False):
                self.check(compile_stored(folder.read(number), folder))
                return {"edition": number}
            with self._reloading:
                if number != (current := folder.current()):
                    raise EditionError(f"edition {number} is not in force: {folder.pointer} names {current}")  # noqa: TRY301
                return {**self.adopt(number), **self._settings_changed()}
        except ConfigError as error:
            raise ControlError("bad_rules", str(error)) from None
        except EditionError as error:
            raise ControlError("bad_edition", str(error)) from None

    def _record_versions(self) -> dict[str, Any]:
        self.writer.store_changes(ChangeNotes(steps=tuple(self._version_steps())))
        self.shadows.read()
        return {}

    def _noted(self, what: str, handler: Handler) -> Handler:
        """Return `handler` with a row in `changes` for each request that it carries out."""

        def handle(fields: dict[str, Any]) -> Any:
            who, note = _author(fields)
            answer = handler(fields)
            if what == "prune" and not fields.get("begin", True):
                return answer
            new = {"pin": answer.get("device"), "drain": "off" if fields.get("off") else "on"}.get(what)
            old = None if what == "pin" else fields.get("device")
            subject = {"drain": "intake", "prune": "results"}.get(what) or expert_subject(fields["expert"])
            self.writer.store_changes(ChangeNotes((Change(utc_text(time.time()), who, what, subject, old, new, note),)))
            return answer

        return handle

    def _limits_noted(self, fields: dict[str, Any]) -> dict[str, Any]:
        who, note = _author(fields)
        if all(value is None for value in fields.values()):
            return self._limits(fields)
        before = _flat(self._limits({}))
        answer = self._limits(fields)
        at, now = utc_text(time.time()), _flat(answer)
        changed = [name for name in now if before.get(name) != now[name]]
        rows = [Change(at, who, "limits", name, before.get(name), now[name], note) for name in changed]
        self.writer.store_changes(ChangeNotes(tuple(rows)))
        return answer

    def _status(self) -> dict[str, Any]:
        known = self.drive.ask("status", {})
        self.files.poll()
        for inner in ("failed", "under_way", "queued", "retries"):
            del known[inner]
        completed = self.metrics.completed_count  # durable verdicts; the drive's count runs ahead of the disk
        now = {**self._line_now(), "alarms": self.alarms.rows}
        return {
            **known,
            **self.identity,
            "uptime_s": round(time.monotonic() - self._started_s, 3),
            "accepted": self.metrics.accepted_count,
            "completed": completed,
            "images_per_s": self._rate(completed),
            **self._last_error(),
            **{name: value for name, value in now.items() if value or not isinstance(value, list)},
        }

    def _last_error(self) -> dict[str, str | None]:
        """Return a trouble while it lasts and since when; else what failed in the last ten minutes, once."""
        drive_error, drive_at_s = self.drive.last_error
        lasting = (
            next(iter(self.admission.held), None),
            self.writer.last_error if self.writer.is_failing else None,
            drive_error if self.drive.is_failing else None,
            self.language.trouble(),
            next(iter(self.children.troubles()), None),
        )
        kind = next((kind for kind, reason in enumerate(lasting) if reason), None)
        if kind != self._trouble[0]:
            self._trouble = (kind, time.time())
        over_s = max(self._trouble[1], time.time() - _SHOWN_FOR_S)
        text, at_s = (None, 0.0) if kind is None else (lasting[kind], self._trouble[1])
        if kind is None:
            passed = ((drive_error, drive_at_s), (self.writer.last_error, self.writer.last_error_at_s))
            recent = [(reason, then_s) for reason, then_s in passed if reason and then_s > over_s]
            text, at_s = max(recent, key=lambda error: error[1], default=(None, 0.0))
        return {"last_error": text, "last_error_at": utc_text(at_s) if text else None}

    def _review(self, fields: dict[str, Any]) -> dict[str, Any]:
        written = self.writer.write_decision(Decision.from_fields(fields))
        self.metrics.reviewed(written.verdict)
        return asdict(written)

    def _rate(self, completed: int) -> float:
        now_s = time.monotonic()
        while len(self._completions) > 1 and self._completions[1][0] <= now_s - _RATE_WINDOW_S:
            self._completions.popleft()
        since_s, before = self._completions[0]
        self._completions.append((now_s, completed))
        return round((completed - before) / max(now_s - since_s, 1e-3), 2)

    def _limits(self, fields: dict[str, Any]) -> dict[str, Any]:
        """`expert_memory` by device goes to the drive, the others to backlog and quotas: all are changed, or none."""
        unknown = sorted(set(fields) - {*_BACKLOG_LIMITS, "expert_memory"})
        if unknown:
            known = ", ".join(("expert_memory", *_BACKLOG_LIMITS))
            raise ControlError("bad_field", f"{unknown[0]}: expected one of {known}")
        given = {name: fields[name] for name in _BACKLOG_LIMITS if fields.get(name) is not None}
        for name, value in given.items():
            most = MAX_BYTES if "bytes" in name else MAX_COUNT
            if type(value) is not int or not 1 <= value <= most:
                raise ControlError("bad_field", f"{name}: expected a whole number from 1 to {most}, not {value!r}")
        memory = self.language.limit(
            fields.get("expert_memory"), lambda wanted: self.drive.ask("limits", {"expert_memory": wanted})
        )
        changed = {_BACKLOG_LIMITS[name]: value for name, value in given.items()}
        self.backlog.limits = replace(self.backlog.limits, **changed)
        now = asdict(self.backlog.limits)
        return memory | {name: now[field] for name, field in _BACKLOG_LIMITS.items()}

    def reload(self, who: str = "unknown", note: str | None = None, *, now: bool = False) -> dict[str, Any]:
        """Make an edition of the files that people edit, and judge by it; ControlError with every mistake.

        Where this process may not write beside the catalog, adopt the edition that a command made. `now`: the editions
        before it end at once. A refusal is in the log and in `changes`.
        """
        try:
            return self._reload(who, note, now=now)
        except ControlError as error:
            self._note_refusal(who, note, error.reason)
            raise

    def _note_refusal(self, who: str, note: str | None, reason: str) -> dict[str, Any]:
        first, *others = problems = reason.splitlines() or [""]
        for problem in problems:
            self._log.error("reload_refused", problem=problem, who=who)
        text = ": ".join(filter(None, (note, f"{first} (and {len(others)} more: the log)" if others else first)))
        change = Change(utc_text(time.time()), who, "reload_refused", "files", note=text)
        self.writer.store_changes(ChangeNotes((change,)))
        return {}

    def _reload(self, who: str, note: str | None, *, now: bool) -> dict[str, Any]:
        folder = EditionFolder(self.config.catalog)
        with self._reloading:
            try:
                if folder.may_write():
                    made = make_edition(self.config, who, lambda _: working_files(self.config, note, now=now), self)
                    return {**(made.adopted or {}), **self._settings_changed()}
                answer = self.adopt(folder.current() or 0)
                self.files.poll()
            except ConfigError as error:
                raise ControlError("bad_rules", str(error)) from None
            except EditionError as error:
                raise ControlError("bad_edition", str(error)) from None
        if self.files.problem is not None:
            raise ControlError(
                "not_in_force", f"{self.files.problem} (as {folder.root.owner()}: this daemon may not write there)"
            )
        return {**answer, **self._settings_changed()}

    # The line as the maker of an edition sees it (making.py)

    def highest(self) -> int | None:
        return self._or_none(self.reader.highest_edition)

    def digest(self, number: int) -> str | None:
        return self._or_none(lambda: self.reader.edition_digest(number))

    def check(self, served: Served) -> None:
        """Raises ConfigError if an expert fits no device beside what is pinned now."""
        if problems := self.drive.misfits(served):
            raise ConfigError(problems)

    def adopt(self, number: int) -> dict[str, Any]:
        """Judge boards that begin from now on by an edition; return what is in force.

        Raises EditionError, ConfigError.
        """
        folder = EditionFolder(self.config.catalog)
        edition = folder.read(number)
        if self.digest(number) not in (None, edition.sha256):
            raise EditionError(
                f"{folder.file(number)} is another edition than the one that boards were judged by as number {number}:"
                " coserve reload makes one with a number of its own"
            )
        served, before = compile_stored(edition, folder), self.serving.current
        changed = changed_experts(before.catalog, served.catalog)
        self.prefetch(before.catalog, served.catalog)
        # The drive first: an image of the edition must not meet a drive without its experts.
        self.drive.take_editions(served)
        at = utc_text(self.serving.put_in_force(served, time.monotonic()))
        self.writer.store_rules(served.routes)
        if edition.ends_earlier:
            self.drive.end_editions([each.number for each in self.serving.all()[1:]])
        how = "rollback" if edition.why == "rollback" else None
        in_force = replace(
            self._in_force("reload", at, edition.who, ": ".join(filter(None, (how, edition.note))) or None),
            words_of={f"settings of {row['expert']}": row["what"] for row in changed},
        )
        states = (*self._keys_allowed(at, edition.who, edition.note), in_force)
        self.writer.store_changes(ChangeNotes(steps=tuple(self._version_steps()), states=states))
        self.access.reload()
        self.shadows.read()
        if not folder.is_rewriting:
            self.files.poll()
        self._log.info("reloaded", edition=number, rules_version=served.routes.version, experts=served.catalog.judges)
        for change in changed:
            self._log.info("expert_changed", **change)
        answer = {"edition": number, "rules_version": served.routes.version, "experts": served.catalog.judges}
        answer["changed_experts"] = changed
        unusable = [*warn_of_weights(served.catalog)]
        return answer | ({"without_weights": unusable} if unusable else {})

    def _settings_changed(self) -> dict[str, Any]:
        restart_for, problems = self.settings.changed()
        if restart_for:
            self._log.warning("restart_needed", changed=", ".join(restart_for))
        for problem in problems:
            self._log.warning("settings_unreadable", problem=problem)
        return {"restart_for": restart_for, **({"settings_problems": problems} if problems else {})}

    def reload_or_say_why(self) -> None:
        """Reload because of SIGHUP."""
        try:
            with suppress(ControlError):  # it is noted
                self.reload(current_user(), "by signal SIGHUP")
        except Exception:  # noqa: BLE001 - the old rules stay in force, or the new ones are: the line goes on
            self._log.exception("reload_failed")

    def drain_to_stop(self) -> None:
        """Drain because the daemon ends when its backlog is finished."""
        self._draining = True
        self.admission.hold("drain", "the daemon finishes its backlog and stops: send again once it has started anew")

    def _drain(self, fields: dict[str, Any]) -> dict[str, Any]:
        self._draining = not _flag(fields, "off", default=False)
        if self._draining:
            self.admission.hold("drain", "the line is draining: it takes images again after coserve drain --off")
        else:
            self.admission.resume("drain")
        return {"state": self.state, "backlog": self.backlog.images}


def _author(fields: dict[str, Any]) -> tuple[str, str | None]:
    """Take `who` and `note` out of a request; clients before 1.1 name neither."""
    who, note = (fields.pop(name, None) for name in ("who", "note"))
    for name, value in (("who", who), ("note", note)):
        if value is not None and not (isinstance(value, str) and NAME.fullmatch(value)):
            raise ControlError("bad_field", f"{name}: expected {NAME_EXPECTED}, got {shown(value)}")
    return who or "unknown", note


def _flag(fields: dict[str, Any], name: str, *, default: bool) -> bool:
    flag = fields.get(name, default)
    if not isinstance(flag, bool):
        raise ControlError("bad_field", f"{name}: expected true or false, not {flag!r}")
    return flag


def _flat(limits: dict[str, Any]) -> dict[str, str | None]:
    """Return limits as texts, memory by device; None is no limit."""
    memory = {f"expert_memory {device}": size for device, size in limits["expert_memory"].items()}
    named = {name: value for name, value in limits.items() if name != "expert_memory"} | memory
    return {name: None if value is None else str(value) for name, value in named.items()}


def _seconds(fields: dict[str, Any]) -> float:
    seconds = fields.get("seconds", 120)
    if type(seconds) not in (int, float) or not 0 < seconds <= MAX_WINDOW_S:
        raise ControlError("bad_field", f"seconds: expected a number above 0, at most {MAX_WINDOW_S:.0f}")
    return seconds
