"""The composition root: every driver is made, wired, started and stopped here, and nowhere else.

`serve` is `coserve run`: start, one line when ready, wait for a signal, stop in order.
"""

import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import structlog
import torch
import zmq
from prometheus_client import start_http_server

from daemon.admission import Admission, IntakeLimits
from daemon.backlog import Backlog, BacklogLimits
from daemon.config import Config
from daemon.control import ControlError, ControlServer
from daemon.drive import Drive
from daemon.endpoints import Gate, check_endpoints
from daemon.errors import ConfigError, StartError
from daemon.executors import ExecutorThread
from daemon.guard import foreign_owners
from daemon.intake import Intake
from daemon.journal import Journal
from daemon.line import Line, compile_kept_rules, curve_keys, load_line, load_rules_and_catalog
from daemon.loader import LoaderThread
from daemon.lock import Lock
from daemon.metrics import Metrics
from daemon.policy.presets import PRESETS, Tuning
from daemon.policy.request import ExecutorFacts, ExecutorId, PoolFacts, PoolId
from daemon.publish import ResultsStream
from daemon.quarantine import BadImages, Quarantine
from daemon.records import Accepted, ExpertSwitch, ExpertVersion, Outcome, Published
from daemon.rulebook import Rulebook
from daemon.store.database import StoreError, sqlite_path
from daemon.store.reader import Reader
from daemon.store.store import open_store
from daemon.writer import Writer
from experts.slot import LayoutShelf, SlotPool
from experts.spec import ExpertId

#: Stopping must end within 20 s of SIGTERM (PROTOCOL.md): what runs gets this long, the rest stays in the journal.
_RUNNING_BATCHES_S = 12.0
_BAD_IMAGES_S = 1.0
_RATE_WINDOW_S = 10.0
_STARTING_POLL_S = 0.02
_READY_WITHIN_S = 10.0


def serve(config: Path) -> int:
    """Run the daemon of `config` until SIGTERM or SIGINT; 0, or 2 and one line on stderr where it could not start."""
    _log_to_stderr()
    stop, reload = threading.Event(), threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    signal.signal(signal.SIGHUP, lambda *_: reload.set())
    try:
        _refuse_foreign_packages()
        app = App(load_line(config), config)
        app.start()
    except ConfigError as error:
        more = len(error.problems) - 1
        rest = f" (and {more} more: coserve check {config})" if more else ""
        first = error.problems[0].replace("\n", " ")
        print(f"coserve: cannot start: {first}{rest}", file=sys.stderr)
        return 2
    # Images are served at once, so a fill that takes long holds nobody up.
    ready_by_s = time.monotonic() + _READY_WITHIN_S
    while app.state == "starting" and time.monotonic() < ready_by_s and not stop.wait(_STARTING_POLL_S):
        pass
    if not stop.is_set():
        print(f"coserve ready: {app.describe()}", flush=True)
    while not stop.wait(0.2):
        if reload.is_set():
            reload.clear()
            app.reload_or_say_why()
    app.stop()
    return 0


class App:
    """One line, running. The constructor claims locks and opens files, `start` binds sockets; `stop` undoes both."""

    def __init__(self, line: Line, path: Path) -> None:
        self._path = path
        self._config = config = line.config
        self._catalog = line.catalog
        self._log: Any = structlog.get_logger("app")
        self._started_s = time.monotonic()
        self._reloading = threading.Lock()
        self._draining = False
        self._completions: deque[tuple[float, int]] = deque([(self._started_s, 0)])
        if config.policy not in PRESETS:
            raise ConfigError([f"{path}: policy {config.policy!r} is unknown: expected one of {', '.join(PRESETS)}"])
        problems = check_endpoints(
            config.endpoints.intake, config.endpoints.results, config.endpoints.control, curve_keys(config.security)
        )
        problems += [problem for name in config.devices for problem in _device_problems(name)]
        if problems:
            raise ConfigError([f"{path}: {problem}" for problem in problems])
        self._locks = _claim(config)
        self._metrics = Metrics()
        self._context: zmq.Context[Any] = zmq.Context()
        self._rulebook = Rulebook(line.routes)
        self._journal = _made(Journal, config.journal, config.retention.segment)
        self._store = _open_store(config, self._expert_version)
        self._reader = Reader(config.database)
        self._backlog = Backlog(_backlog_limits(config))
        self._quarantine = Quarantine(config.quarantine, config.retention.quarantine)
        self._bad_images = BadImages(self._quarantine, self._journal.read)
        self._writer = Writer(
            self._store,
            self._journal,
            self._rulebook,
            config.images,
            on_accepted=self._accepted,
            on_published=self._published,
            on_done=self._done,
        )
        self._recovery = self._writer.recover()
        for text in self._recovery.rules_texts.values():
            kept = compile_kept_rules(text, line.catalog)
            if kept is not None:
                self._rulebook.keep(kept)
        self._drive = self._make_drive(config)
        self._results = ResultsStream(
            self._context,
            config.endpoints.results,
            self._recovery.last_seq,
            lambda: (self.state, self._backlog.images),
            self._gate.keys if self._gate else None,
        )
        self._admission = Admission(
            IntakeLimits(config.limits.credit, config.limits.max_payload_bytes, config.limits.max_pixels),
            self._rulebook,
            self._reader,
            self._writer,
            self._backlog,
            self._quarantine,
            server=f"coserve {version('coserve')}",
        )
        self._intake = Intake(
            self._context,
            config.endpoints.intake,
            self._admission,
            self._reader.results_since,
            self._gate.keys if self._gate else None,
            self._metrics.answered,
        )
        self._control = ControlServer(self._context, config.endpoints.control, self._handlers())

    def _make_drive(self, config: Config) -> Drive:
        keys = curve_keys(config.security)
        self._gate = Gate(self._context, keys) if keys else None
        shelf = LayoutShelf()
        pools: list[PoolFacts] = []
        executors: list[ExecutorThread] = []
        loaders: list[LoaderThread] = []
        for name, device in config.devices.items():
            pool_id = PoolId(name)
            pool = _made(SlotPool, name, device.expert_memory, shelf)
            pools.append(PoolFacts(pool_id, "cpu" if name == "cpu" else "gpu", device.expert_memory, device.max_batch))
            loaders.append(LoaderThread(pool_id, pool))
            executors += [
                ExecutorThread(
                    ExecutorFacts(ExecutorId(f"{name}/{number}"), pool_id),
                    pool.slot,
                    self._journal.read,
                    device.threads,
                )
                for number in range(device.executors)
            ]
        return Drive(
            rulebook=self._rulebook,
            catalog=self._catalog,
            pools=pools,
            executors=executors,
            loaders=loaders,
            policy=config.policy,
            on_outcome=self._finished,
            on_switch=self._switched,
            on_bad_image=self._bad_images.keep,
            tuning=Tuning(max_wait_s=config.limits.max_wait),
            record=config.record,
            last_batch_id=self._recovery.last_batch_id,
        )

    # Life

    def start(self) -> None:
        """Recover, bind, then run: results before intake, so that no verdict is given unheard.

        Work begins last: a port that is in use ends the start before anything is loaded or said.
        """
        for image in self._recovery.pending:
            self._backlog.restore(image.source, image.key.length)
        try:
            if self._gate:
                self._gate.start()
            self._results.start()
            self._control.start()
            self._writer.start()
            self._writer.rules_in_force(self._rulebook.current)
            self._bad_images.start()
            self._accepted(self._recovery.pending, again=True)
            if self._config.endpoints.http:
                self._serve_metrics(self._config.endpoints.http)
            self._intake.start()
        except StartError as error:
            self._close()
            raise StartError(f"{self._path}: {error}") from None
        self._drive.start()
        self._log.info("started", pending=len(self._recovery.pending), policy=self._config.policy)

    def stop(self) -> None:
        """In this order, since each step feeds the next.

        1. intake takes nothing more, and answers what the writer still has of it;
        2. running batches finish, waiting images stay in the journal, bad ones are copied out of it;
        3. the writer stores their verdicts; 4. the stream publishes these; 5. control answers to the last.
        """
        self._close()
        self._log.info("stopped")

    def _close(self) -> None:
        self._intake.stop()
        self._drive.stop(_RUNNING_BATCHES_S)
        self._bad_images.stop(_BAD_IMAGES_S)
        self._writer.stop()
        self._results.stop()
        self._control.stop()
        if self._gate:
            self._gate.stop()
        self._reader.close()
        self._store.close()
        self._journal.close()
        self._context.destroy(linger=0)
        for lock in self._locks:
            lock.release()

    def describe(self) -> str:
        """What the ready line says."""
        config = self._config
        return (
            f"{len(self._rulebook.current.recipes)} board types, {len(self._catalog)} experts, policy {config.policy},"
            f" intake {', '.join(config.endpoints.intake)}, results {config.endpoints.results},"
            f" {len(self._recovery.pending)} images recovered"
        )

    # What drivers report

    def _accepted(self, images: list[Accepted], *, again: bool = False) -> None:
        if not again:
            self._metrics.accepted(images)
        self._drive.accept(images)

    def _published(self, messages: list[Published]) -> None:
        self._results.publish(messages)

    def _finished(self, outcome: Outcome) -> None:
        self._metrics.finished(outcome)
        self._writer.finish(outcome)

    def _switched(self, switch: ExpertSwitch) -> None:
        self._metrics.switched(switch)
        self._writer.switch(switch)

    def _done(self, images: list[tuple[str, int]]) -> None:
        for source, size_bytes in images:
            self._backlog.leave(source, size_bytes)
        self._metrics.completed(len(images), self._backlog.images)

    def _expert_version(self, expert: str, expert_version: str) -> ExpertVersion | None:
        """Describe weights at their first verdict, for the table `expert_versions`."""
        spec = self._catalog.get(ExpertId(expert))
        if spec is None or spec.version != expert_version:
            return None
        header = self._catalog.headers.get(spec.expert)
        said: Mapping[str, str] = header.metadata if header else {}
        return ExpertVersion(
            expert=expert,
            expert_version=expert_version,
            sha256=spec.sha256,
            architecture=spec.architecture,
            classes=spec.classes,
            bytes=spec.weights_bytes,
            dtype=said.get("dtype", "float32"),
            origin=said.get("origin", ""),
        )

    # What operators ask

    @property
    def state(self) -> str:
        """`starting` is the pools' first fill; `degraded`: an expert cannot be loaded, or results not be written."""
        if self._draining:
            return "draining"
        if self._drive.is_filling:
            return "starting"
        return "degraded" if self._drive.is_failing or self._writer.is_failing else "ready"

    def _handlers(self) -> dict[str, Any]:
        asked = {
            kind: lambda fields, kind=kind: self._drive.ask(kind, fields)
            for kind in ("experts", "queues", "pin", "unpin", "unload")
        }
        return {
            **asked,
            "status": lambda _: self._status(),
            "limits": self._limits,
            "reload": lambda _: self.reload(),
            "drain": self._drain,
            "metrics": lambda _: {"text": self._metrics.exposition()},
        }

    def _status(self) -> dict[str, Any]:
        known = self._drive.ask("status", {})
        for inner in ("failed", "under_way"):
            del known[inner]
        completed = self._metrics.completed_count  # durable verdicts; the drive's count runs ahead of the disk
        return {
            **known,
            "version": version("coserve"),
            "uptime_s": round(time.monotonic() - self._started_s, 3),
            "state": self.state,
            "accepted": self._metrics.accepted_count,
            "completed": completed,
            "backlog": self._backlog.images,
            "images_per_s": self._rate(completed),
            "rules_version": self._rulebook.current.version,
            "last_seq": self._reader.last_seq(),
            "last_error": self._writer.last_error or known["last_error"],
        }

    def _rate(self, completed: int) -> float:
        """Verdicts per second between this question and the one about ten seconds before it."""
        now_s = time.monotonic()
        while len(self._completions) > 1 and self._completions[1][0] <= now_s - _RATE_WINDOW_S:
            self._completions.popleft()
        since_s, before = self._completions[0]
        self._completions.append((now_s, completed))
        return round((completed - before) / max(now_s - since_s, 1e-3), 2)

    def _limits(self, fields: dict[str, Any]) -> dict[str, Any]:
        """`expert_memory` by device goes to the drive, the others to the backlog: all are changed, or none."""
        names = ("backlog_images", "backlog_bytes", "source_images", "source_bytes")
        unknown = sorted(set(fields) - {*names, "expert_memory"})
        if unknown:
            raise ControlError("bad_field", f"{unknown[0]}: expected one of expert_memory, {', '.join(names)}")
        given = {name: fields[name] for name in names if fields.get(name) is not None}
        for name, value in given.items():
            if type(value) is not int or value < 1:
                raise ControlError("bad_field", f"{name}: expected a whole number above 0, not {value!r}")
        memory = self._drive.ask("limits", {"expert_memory": fields.get("expert_memory")})
        now = self._backlog.limits
        self._backlog.change_limits(
            BacklogLimits(
                images=given.get("backlog_images", now.images),
                bytes=given.get("backlog_bytes", now.bytes),
                source_images=given.get("source_images", now.source_images),
                source_bytes=given.get("source_bytes", now.source_bytes),
            )
        )
        now = self._backlog.limits
        return memory | {
            "backlog_images": now.images,
            "backlog_bytes": now.bytes,
            "source_images": now.source_images,
            "source_bytes": now.source_bytes,
        }

    def reload(self) -> dict[str, Any]:
        """Rules and catalog again; ControlError with every mistake, and then the old ones stay in force."""
        with self._reloading:
            try:
                routes, catalog = load_rules_and_catalog(self._config)
            except ConfigError as error:
                raise ControlError("bad_rules", str(error)) from None
            # The catalog first: an image under new rules must not meet a catalog without their experts.
            self._drive.reload(catalog, routes)
            self._catalog = catalog
            self._rulebook.replace(routes)
            self._writer.rules_in_force(routes)
            if self._gate:
                self._gate.reload()
        self._log.info("reloaded", rules_version=routes.version, experts=len(catalog))
        return {"rules_version": routes.version, "experts": len(catalog)}

    def reload_or_say_why(self) -> None:
        """SIGHUP: as `reload`; a mistake goes to the log, one event each."""
        try:
            self.reload()
        except ControlError as error:
            for problem in error.reason.splitlines():
                self._log.error("reload_refused", problem=problem)

    def _drain(self, fields: dict[str, Any]) -> dict[str, Any]:
        off = fields.get("off", False)
        if not isinstance(off, bool):
            raise ControlError("bad_field", f"off: expected true or false, not {off!r}")
        self._draining = not off
        if self._draining:
            self._admission.hold("drain", "the line is draining: it takes images again after coserve drain --off")
        else:
            self._admission.resume("drain")
        return {"state": self.state, "backlog": self._backlog.images}

    def _serve_metrics(self, endpoint: str) -> None:
        host, port = endpoint.removeprefix("http://").rsplit(":", 1)
        try:
            start_http_server(int(port), host.strip("[]"), self._metrics.registry)
        except OSError as error:
            raise StartError(f"endpoints.http {endpoint}: {error.strerror}") from None


def _claim(config: Config) -> list[Lock]:
    """One daemon per database and per journal."""
    locks: list[Lock] = []
    database = sqlite_path(config.database)
    if database is not None:
        locks.append(_made(Lock, database.with_name(database.name + ".lock"), f"the database {database}"))
    try:
        locks.append(_made(Lock, config.journal / "lock", f"the journal {config.journal}"))
    except StartError:
        for lock in locks:
            lock.release()
        raise
    return locks


def _device_problems(name: str) -> list[str]:
    """Why this machine cannot serve the device `name`, if it cannot."""
    there = torch.cuda.device_count()
    if name == "cpu" or int(name.removeprefix("cuda:")) < there:
        return []
    return [f"devices.{name}: torch sees {there} such GPUs here: name another device, or install torch for CUDA"]


def _made(make: Any, *arguments: Any) -> Any:
    """What `make` gives; an operating system's refusal becomes one sentence for the user."""
    try:
        return make(*arguments)
    except OSError as error:
        raise StartError(f"{error.filename or arguments[0]}: {error.strerror or error}") from None


def _open_store(config: Config, expert_version: Any) -> Any:
    try:
        return open_store(config.database, keep=config.retention.keep, expert_version=expert_version)
    except StoreError as error:
        raise StartError(str(error)) from None


def _backlog_limits(config: Config) -> BacklogLimits:
    limits = config.limits
    return BacklogLimits(limits.backlog_images, limits.backlog_bytes, limits.source_images, limits.source_bytes)


def _refuse_foreign_packages() -> None:
    found = foreign_owners()
    if found:
        names = "; ".join(f"{name} is also provided by {', '.join(owners)}" for name, owners in found.items())
        raise StartError(f"{names}: CoServe needs an environment of its own (make demo makes one)")


def _log_to_stderr() -> None:
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.processors.LogfmtRenderer(key_order=["timestamp", "level", "event"], bool_as_flag=False),
        ],
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
