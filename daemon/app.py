"""The composition root: every driver is made, wired, started and stopped here, and nowhere else."""

import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog
import zmq
from sqlalchemy.exc import SQLAlchemyError

from daemon.cluster.remote_devices import ClusterDevices
from daemon.config.settings import Config, Model, StartSettings, at_their_keys
from daemon.delivery.deliveries import Deliveries
from daemon.dispatch.chains import Judged
from daemon.dispatch.drive import Drive, facts_of
from daemon.dispatch.pool import Devices
from daemon.dispatch.trace import Makeup
from daemon.errors import ConfigError, StartError
from daemon.host.children import Children, ChildSpec
from daemon.host.machine import handle_shares, raise_handle_limit, reachable
from daemon.host.worker import Worker
from daemon.intake.admission import Admission
from daemon.intake.backlog import Backlog, backlog_limits
from daemon.intake.intake import Intake
from daemon.language.models import LanguageModels
from daemon.line.devices import Measurements, pools_and_executors
from daemon.line.line import Line, curve_keys, settings_problems, start_problems, warn_of_weights
from daemon.line.making import Draft, draft_of, make_edition, working_files
from daemon.line.served import Served, compile_stored
from daemon.line.serving import Serving
from daemon.line.shared_devices import images_config
from daemon.line.working import WorkingFiles
from daemon.monitor.alarms import Alarms
from daemon.monitor.metrics import Gauges, Metrics
from daemon.monitor.pipeline_probe import PipelineProbe, Station
from daemon.monitor.timeline import Rejections, WorkTimeline
from daemon.operations import Operations
from daemon.policy.paper.assign import partition
from daemon.policy.presets import Tuning, preset
from daemon.records import (
    BatchDone,
    ExpertSwitch,
    ExpertVersion,
    Generation,
    Image,
    Message,
    QueueSample,
    Verdict,
)
from daemon.shadow.shadows import Shadows
from daemon.storage.claims import claim
from daemon.storage.database.connections import StoreError, sqlite_path
from daemon.storage.database.generations import unfinished_generations
from daemon.storage.database.reader import ResultsReader
from daemon.storage.database.store import EpochRecord, Store
from daemon.storage.database_watch import DatabaseFiles
from daemon.storage.disk_space import DiskSpace, SpaceClaims, places, segment_bytes
from daemon.storage.journal import Journal
from daemon.storage.quarantine import Quarantine
from daemon.storage.results_stream import ResultsStream
from daemon.storage.retention import RetentionThread
from daemon.storage.suspect_images import DecodeMarks, examine
from daemon.storage.writer import Writer
from daemon.units import count_text
from daemon.wire.control import ControlServer
from daemon.wire.endpoints import Access, Gate
from daemon.wire.keys import CredentialError, read_token
from daemon.wire.messages import Answer
from daemon.wire.sockets import bind_http, end_context, url_of
from experts.editions.edition import Edition, EditionError
from experts.editions.folder import EditionFolder
from experts.editions.history import past
from experts.people import current_user

if TYPE_CHECKING:
    from daemon.language.served_model import ServedModel

PAGES = "dashboard"
#: Longest pause before a restart: a page that kills the process must not silence `/metrics` and `/healthz` for long.
_PAGES_BACK_OFF_S = 2.0
_BAD_IMAGES_S = 1.0
#: Interval at which a stop checks whether the backlog is finished, and the time for the last batches after it.
_DRAIN_POLL_S = 0.05
_LAST_BATCHES_S = 2.0


@contextmanager
def _start_errors() -> Iterator[None]:
    """Raise StartError if the operating system or the database refuses."""
    try:
        yield
    except StoreError as error:
        raise StartError(str(error)) from None
    except OSError as error:
        raise StartError(f"{error.filename}: {error.strerror}" if error.filename else str(error)) from None


@dataclass(frozen=True, slots=True)
class _AtStart:
    """A line that makes its first edition while it starts: no daemon has to agree."""

    reader: ResultsReader

    def highest(self) -> int:
        return self.reader.highest_edition()

    def digest(self, number: int) -> str | None:
        return self.reader.edition_digest(number)

    def check(self, served: Served) -> None:
        pass

    def adopt(self, number: int) -> None:
        pass


class App:
    """One running line. The constructor takes locks and opens files, `start` binds sockets, `stop` undoes both."""

    @_start_errors()
    def __init__(
        self,
        line: Line,
        path: Path,
        tell: Callable[[str], None] = lambda _: None,
        *,
        devices: Devices | None = None,
        note: str | None = None,
    ) -> None:
        """`tell` gets the progress of a schema change; `note` is why it starts; `devices` are this PC's by default."""
        self._path = path
        self._note = note
        self._config = config = line.config
        self._log: Any = structlog.get_logger("app")
        _raise_problems(path, settings_problems(config))
        devices = devices or _torch_devices(line.config)  # imports torch, so after the mistakes that need no device
        self._cluster = ClusterDevices(path, config, devices) if config.cluster.address else None
        devices = self._cluster or devices
        _raise_problems(path, start_problems(line, devices.gpu_count()))
        for warning in line.warnings:
            self._log.warning("profile_incomplete", problem=warning)
        self._locks = claim(path, config)
        self._timeline = WorkTimeline(time.time)
        self._rejections = Rejections(time.time)
        self._context: zmq.Context[Any] = zmq.Context()
        self._handles = handle_shares(raise_handle_limit())
        keys = curve_keys(config.security)
        self._gate = Gate(self._context, keys) if keys else None
        self._backlog = Backlog(backlog_limits(config.limits))
        self._open_storage(config, line.served, tell)
        self._metrics = Metrics()
        self._recover()
        self._shadows = Shadows(config.catalog, path, self._writer)
        self._drive = self._make_drive(images_config(config), line.measured, devices)
        self._language = LanguageModels(config, self._drive, self._pools, _served_model)
        self._admission = Admission(
            config.limits,
            self._serving,
            self._reader,
            self._writer,
            self._backlog,
            self._quarantine,
            server=f"coserve {version('coserve')}",
            disk_space=self._disk_space,
            models=self._language.prompts,
            on_stored=self._metrics.acceptance.observe,
            identity=self._identity,
        )
        self._retention = RetentionThread(
            *(config.database, config.images, config.retention, self._disk_space, self._database_files),
            writer=self._writer,
            hold=self._admission.hold,
            resume=self._admission.resume,
            on_pruned=self._metrics.pruned,
        )
        self._children = Children()
        self._deliveries = Deliveries(config, self._path)
        self._files = WorkingFiles(config, self._serving)
        file = config.alarms if config.consumers else None
        self._alarms = Alarms(self._serving, self._reader, file, self._poll_seldom)
        self._make_sockets(config)
        self._make_operations(config)
        self._metrics.registry.register(Gauges(self.operations.facts))

    def _poll_seldom(self) -> None:
        self._files.poll()
        self.operations.watch_clock()

    def _open_storage(self, config: Config, served: Served | None, tell: Callable[[str], None]) -> None:
        self._disk_space = DiskSpace(places(config), self._claims)
        file_bytes = segment_bytes(config.journal, config.limits.backlog_bytes)
        self._journal = Journal(config.journal, file_bytes)
        self._database_files = DatabaseFiles(sqlite_path(config.database))
        self._database_files.put_foreign_log_aside()
        self._store = Store(
            config.database,
            keep=config.retention.keep,
            good_examples=config.retention.good_examples,
            sample=config.retention.sample,
            expert_version=self._expert_version,
            tell=tell,
            record=EpochRecord(config.journal),
            guards=config.guards,
        )
        self._identity = {"line": config.line, "epoch": self._store.epoch}
        self._reader = ResultsReader(config.database)
        self._serving = Serving(self._edition_in_force(config, served))
        self._quarantine = Quarantine(config.quarantine, file_bytes)
        # Copies accepted images that could not be decoded out of the journal, on a thread of its own.
        self._bad_images: Worker[tuple[Image, str]] = Worker(
            "quarantine", lambda bad: self._quarantine.copy(*bad, self._journal.read)
        )
        self._writer = Writer(self._store, self._journal, self._serving, config.images, disk_space=self._disk_space)

    def _claims(self) -> SpaceClaims:
        kept = self._config.retention
        may_stay_bytes = self._backlog.bytes if kept.keep or kept.good_examples or kept.sample else 0
        arriving_bytes = self._admission.memory.bytes
        return SpaceClaims(self._backlog.images, may_stay_bytes, self._writer.to_copy_bytes, arriving_bytes)

    def _recover(self) -> None:
        self._recovery = self._writer.recover()
        self._database_files.note(self._store.engine)
        self._texts_to_make = self._store.transact(unfinished_generations)
        in_force = self._serving.current.number
        ended = [each.number for each in past(EditionFolder(self._config.catalog), in_force) if each.ends_earlier]
        for number, sha256 in self._recovery.editions.items():
            if number >= max(ended, default=0):
                self._serve_on(number, sha256)
        self._decode_marks = DecodeMarks(self._config.journal / "decoding.marks")
        pending = self._recovery.pending
        suspects = self._decode_marks.keep({image.key for image in pending})
        limits = self._config.limits
        self._poison = examine(suspects, pending, self._journal.read, limits.hang_after, limits.max_pixels)

    def _expert_version(self, expert: str, expert_version: str) -> ExpertVersion | None:
        return self._serving.version(expert, expert_version)

    def _edition_in_force(self, config: Config, served: Served | None) -> Served:
        """Make an edition of the files where there is none, or a new number where rows mean another one by this one's.

        Raises StartError where this user may not.
        """
        folder, line = EditionFolder(config.catalog), _AtStart(self._reader)
        digest = line.digest(served.number) if served is not None else None
        if served is not None and digest in (None, served.edition.sha256):
            return served
        if not folder.may_write():
            file = folder.file(served.number) if served is not None else None
            why = f"{file} is another than this line's" if file else "no edition is in force yet"
            raise StartError(f"{why}, and only {folder.root.owner()} may make one: coserve reload as that user")

        def build(before: Edition | None) -> Draft:
            if before is None:
                return working_files(config, self._note)
            note = f"was {before.number} of another line, or of an older folder"
            return replace(draft_of(before, folder, "reload", note), keeps_files=True)

        try:
            return compile_stored(make_edition(config, current_user(), build, line).edition, folder)
        except EditionError as error:
            raise StartError(str(error)) from None

    def _serve_on(self, number: int, sha256: str) -> None:
        """Let an earlier edition go on judging what began in it; where it cannot, that is `unknown`."""
        if number in self._serving.served:
            return
        folder = EditionFolder(self._config.catalog)
        try:
            edition = folder.read(number)
            if edition.sha256 == sha256:
                self._serving.add(compile_stored(edition, folder), time.monotonic())
                return
            problem = f"{folder.file(number)} is another edition than the one that boards began in"
        except (EditionError, ConfigError, OSError) as error:
            problem = str(error)
        self._log.warning("edition_gone", edition=number, problem=problem)

    def _make_drive(self, config: Config, measured: Measurements, devices: Devices) -> Drive:
        """Divide the devices as the policy needs: one pool per device, or one per executor."""
        facts, executors = partition(*pools_and_executors(config), preset(config.policy))
        self._pools = devices.pools(
            facts, executors, self._journal.read, self._decode_marks.place, config.limits.max_pixels
        )
        makeup = Makeup(
            experts=facts_of(self._serving.all(), measured.usage),
            pools=facts,
            executors=executors,
            policy=config.policy,
            tuning=Tuning(max_wait_s=config.limits.max_wait),
            matrix=measured.matrix,
        )
        return Drive(
            makeup,
            self._serving,
            self._pools,
            usage=measured.usage,
            record=config.record,
            last_batch_id=self._recovery.last_batch_id,
            hang_after_s=config.limits.hang_after,
            guards=config.guards.switched_on,
        )

    def _make_sockets(self, config: Config) -> None:
        keys = self._gate.keys if self._gate else None
        self._results = ResultsStream(
            self._context,
            config.endpoints.results,
            self._recovery.last_seq,
            keys,
            self._handles["results"],
            self._identity,
        )
        self._intake = Intake(
            self._context,
            config.endpoints.intake,
            self._admission,
            self._reader.results_since,
            keys,
            self._answered,
            self._gate.is_allowed if self._gate else None,
            self._handles["intake"],
        )
        #: Bound here, served by a child process: while it restarts, clients wait instead of being refused.
        self._http: socket.socket | None = None
        self._access = Access(self._gate, (self._intake.rebind, self._results.rebind), self._reload_token)

    def _reload_token(self) -> list[str]:
        """Have the pages read their token again; return its problems."""
        token = self._config.security.http_token
        if self._http is not None and token is not None:
            try:
                read_token(token)
            except CredentialError as error:
                return [f"security.http_token: {error}"]
            self._children.hang_up(PAGES)
        return []

    def _answered(self, answers: list[Answer]) -> None:
        self._metrics.answered(answers)
        for answer in answers:
            if answer.code is not None:
                self._rejections.note(answer.source, answer.code, answer.reason)

    def _make_operations(self, config: Config) -> None:
        #: For the watchdog of the process (serve.py).
        self.probe = PipelineProbe(self._stations())
        self.operations = Operations(
            config=config,
            drive=self._drive,
            language=self._language,
            writer=self._writer,
            reader=self._reader,
            admission=self._admission,
            retention=self._retention,
            backlog=self._backlog,
            serving=self._serving,
            metrics=self._metrics,
            access=self._access,
            timeline=self._timeline,
            rejections=self._rejections,
            alarms=self._alarms,
            files=self._files,
            probe=self.probe,
            children=self._children,
            deliveries=self._deliveries,
            shadows=self._shadows,
            settings=StartSettings(self._path),
            identity=self._identity,
            prefetch=self._cluster.prefetch if self._cluster else lambda _before, _after: None,
        )
        self._control = ControlServer(
            self._context, config.endpoints.control, self.operations.handlers(), self._handles["control"]
        )

    def _stations(self) -> list[tuple[str, Station]]:
        return [
            ("intake", self._intake.call),
            ("journal", self._writer.call_journal),
            ("writer", lambda then: self._writer.run(lambda _store: then())),
            ("drive", lambda then: self._drive.ask_later("status", {}).add_done_callback(lambda _answer: then())),
            ("publish", self._results.call),
        ]

    # Life

    def start(self) -> None:
        """Start results before intake, so that every verdict is published, and work last."""
        for image in self._recovery.pending:
            self._backlog.add(image.source, image.key.length)
        for text in self._texts_to_make:
            self._backlog.add(text.source, text.size_bytes)
        try:
            if self._gate:
                self._gate.start()
            self._results.start(self.operations.heartbeat)
            self._control.start()
            self._writer.start(self)
            self._writer.store_rules(self._serving.current.routes)
            self.operations.started(self._path, self._note)
            warn_of_weights(self._serving.current.catalog)
            self._files.poll()
            self._bad_images.start()
            self._alarms.start(self._recovery.last_seq)
            self._retention.start()
            self._accept_again()
            pages = self._bind_pages()
            self._intake.start()
            consumers = self._deliveries.children(self._recovery.last_seq)
            cluster = self._cluster.children() if self._cluster else []
            self._children.start(cluster + pages + consumers)  # after intake: nothing of theirs holds images up
            self._shadows.read()
            if self._cluster:
                self._cluster.start(self._drive)
            self._drive.start(self)
            self._language.start(self)
            self._language.generate(self._texts_to_make)
        except BaseException as error:
            self._close()
            if isinstance(error, StartError):
                raise StartError(f"{self._path}: {error}") from None
            raise
        pending = len(self._recovery.pending) + len(self._texts_to_make)
        self._log.info("started", pending=pending, policy=self._config.policy)

    def _bind_pages(self) -> list[ChildSpec]:
        """Bind `endpoints.http`; return the process that serves it (daemon/dashboard), if there is one."""
        endpoint = self._config.endpoints.http
        if endpoint is None:
            return []
        self._http = bind_http(endpoint, has_token=self._config.security.http_token is not None)
        self._log.info("http_bound", url=url_of(self._http))
        fd = self._http.fileno()
        argv = (sys.executable, "-m", "daemon.dashboard", str(self._path.resolve()), "--fd", str(fd))
        lost = "the pages, /healthz, /readyz and /metrics do not answer"
        return [ChildSpec(PAGES, argv, pass_fds=(fd,), beats=True, longest_back_off_s=_PAGES_BACK_OFF_S, lost=lost)]

    def _accept_again(self) -> None:
        """Queue the images of the last run; those that crashed it become `unknown`."""
        poison = {image.inspection_id: reason for image, reason in self._poison}
        self._drive.accept([image for image in self._recovery.pending if image.inspection_id not in poison])
        for image, reason in self._poison:
            self._bad_images.give_order((image, reason))
        self.finished([Verdict(image, "unknown", reason="bad_image") for image, _ in self._poison])

    def stop(
        self, goes_on: Callable[[int], bool] = lambda _: True, tell: Callable[[str], None] = lambda _: None
    ) -> None:
        """Stop in this order, since each step feeds the next.

        0. with `stop.backlog_for` intake answers busy until every image has its verdict, this time has passed, or
        `goes_on`, asked about once a second with the number of images left, says no: then only the last batches run;
        1. intake takes nothing more, and answers what the writer still has of it;
        2. running batches and steps finish, waiting images stay in the journal, bad ones are copied out of it;
        3. the writer stores their verdicts; a database that lost its name is copied, and `tell` gets the progress;
        4. the stream publishes these; 5. child processes end, which may read all of them by then, and before the
        database is closed; 6. control answers to the last.
        """
        left_s = self._config.stop.longest_s
        if self._config.stop.backlog_for is not None:
            self._finish_backlog(left_s, goes_on)
            left_s = _LAST_BATCHES_S  # what runs now is what hangs, or what the end of the time cuts short
        self._close(left_s, tell)
        self._log.info("stopped", backlog=self._backlog.images)

    def _finish_backlog(self, within_s: float, goes_on: Callable[[int], bool]) -> None:
        self.operations.drain_to_stop()
        until_s = time.monotonic() + within_s
        ask_at_s = 0.0
        while self._backlog.images and (now_s := time.monotonic()) < until_s:
            if now_s >= ask_at_s:
                if not goes_on(self._backlog.images):
                    return
                ask_at_s = now_s + 1.0
            time.sleep(_DRAIN_POLL_S)

    def _close(self, running_batches_s: float = 0.0, tell: Callable[[str], None] = lambda _: None) -> None:
        self._intake.stop()
        was_running = self._drive.is_alive
        are_decoders_idle = self._drive.stop(running_batches_s) and was_running
        self._language.stop(running_batches_s)
        self._shadows.stop()
        self._bad_images.stop(_BAD_IMAGES_S)
        self._retention.stop()
        self._writer.stop()
        try:
            self._store.end_run(current_user())
        except (SQLAlchemyError, OSError) as error:
            self._log.warning("stop_not_noted", error=str(getattr(error, "orig", error)))
        self._database_files.copy_if_lost(tell)
        self._alarms.stop()
        self._results.stop()
        self._children.stop()
        if self._cluster:
            self._cluster.stop()
        self._control.stop()
        if self._http:
            self._http.close()
        self._deliveries.close()
        if self._gate:
            self._gate.stop()
        self._reader.close()
        self._store.close()
        self._decode_marks.close(clean=are_decoders_idle)
        self._journal.close()
        if not end_context(self._context):
            self._log.warning("context_left_behind", why="libzmq waits for subscribers that are gone")
        self._locks.close()

    # Reports of the drivers, each on its own thread: first to the counters, then to the driver that acts

    def accepted(self, images: list[Image]) -> None:
        self._metrics.accepted(images)
        self._drive.accept(images)

    def published(self, messages: list[Message]) -> None:
        self._metrics.published(messages)
        self._results.publish(messages)
        self._alarms.published(messages)

    def done(self, images: list[tuple[str, int]]) -> None:
        self._leave_backlog(images)
        self._metrics.completed(len(images))

    def judged(self, answers: list[Judged]) -> None:
        self._shadows.offer(answers)

    def finished(self, verdicts: list[Verdict]) -> None:
        self._writer.store_verdicts(verdicts)

    def bad_image(self, image: Image, reason: str) -> None:
        self._bad_images.give_order((image, reason))

    def batch_done(self, batch: BatchDone) -> None:
        self._metrics.batch_done(batch)
        self._timeline.batches.append(batch)

    def editions_ended(self, numbers: list[int]) -> None:
        self._writer.end_editions(numbers)

    def switched(self, switch: ExpertSwitch) -> None:
        self._metrics.switched(switch)
        self._timeline.loads.append(switch)
        self._writer.store_switch(switch)

    def sampled(self, sample: QueueSample) -> None:
        self._timeline.samples.append(sample)

    def texts_accepted(self, texts: list[Generation]) -> None:
        self._metrics.texts_accepted(len(texts))
        self._language.generate(texts)

    def token(self, text: Generation, index: int, piece: str) -> None:
        self._results.publish_token(text, index, piece)

    def text_finished(self, ended: Generation) -> None:
        self._metrics.text_finished(ended)
        self._writer.finish_generation(ended)

    def texts_done(self, texts: list[tuple[str, int]]) -> None:
        self._leave_backlog(texts)

    def _leave_backlog(self, finished: list[tuple[str, int]]) -> None:
        for source, size_bytes in finished:
            self._backlog.leave(source, size_bytes)

    def describe(self) -> str:
        config = self._config
        pages = f" pages {reachable(url_of(self._http))}," if self._http else ""
        return (
            f"{count_text(len(self._serving.current.routes.recipes), 'board type')},"
            f" {count_text(self._serving.current.catalog.judges, 'expert')},"
            f" policy {config.policy}, intake {', '.join(config.endpoints.intake)},"
            f" results {config.endpoints.results},{pages} {len(self._recovery.pending)} images recovered"
            f"{''.join(f'; {said}' for said in self._language.unopened())}"
        )


def _raise_problems(path: Path, problems: list[str]) -> None:
    if problems:
        raise ConfigError(at_their_keys(path, problems))


def _torch_devices(config: Config) -> Devices:
    from daemon.dispatch.torch_devices import TorchDevices  # noqa: PLC0415  torch, unless other devices are given

    return TorchDevices(config.devices)


def _served_model(
    model: Model, budget_bytes: int, gets_on: Callable[[], None], on_token: Callable[[Generation, int, str], None]
) -> "ServedModel":
    from daemon.language.served_model import ServedModel  # noqa: PLC0415  torch, only with a model

    return ServedModel(model, budget_bytes, gets_on, on_token)
