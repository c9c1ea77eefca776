"""Reports of the drivers, one way: first to the counters, then to the driver that acts on them."""

from dataclasses import dataclass

from daemon.dispatch.drive import Drive
from daemon.intake.backlog import Backlog
from daemon.language.models import LanguageModels
from daemon.language.text_rows import TextRows
from daemon.monitor.metrics import Metrics
from daemon.monitor.timeline import WorkTimeline
from daemon.records import Accepted, AcceptedText, BatchDone, ExpertSwitch, Outcome, Published, QueueSample, TextOutcome
from daemon.storage.quarantine import BadImages
from daemon.storage.results_stream import GeneratedToken, ResultsStream
from daemon.storage.writer import Writer


@dataclass(frozen=True, slots=True, kw_only=True)
class Reports:
    """Made last, of all the drivers, and given to each when it starts: no driver knows another.

    Each method is called in the thread of the driver that reports.
    """

    metrics: Metrics
    timeline: WorkTimeline
    backlog: Backlog
    drive: Drive
    writer: Writer
    bad_images: BadImages
    texts: TextRows
    language: LanguageModels
    results: ResultsStream

    # From the writer

    def accepted(self, images: list[Accepted]) -> None:
        self.metrics.accepted(images)
        self.drive.accept(images)

    def published(self, messages: list[Published]) -> None:
        self.metrics.published(messages)
        self.results.publish(messages)

    def done(self, images: list[tuple[str, int]]) -> None:
        self._leave_backlog(images)
        self.metrics.completed(len(images))

    # From the drive

    def finished(self, outcome: Outcome) -> None:
        self.metrics.finished(outcome)
        self.writer.finish(outcome)

    def bad_image(self, image: Accepted, reason: str) -> None:
        self.bad_images.keep(image, reason)

    def batch_done(self, batch: BatchDone) -> None:
        self.metrics.batch_done(batch)
        self.timeline.batch(batch)

    def switched(self, switch: ExpertSwitch) -> None:
        self.metrics.switched(switch)
        self.timeline.load(switch)
        self.writer.switch(switch)

    def sampled(self, sample: QueueSample) -> None:
        self.timeline.sample(sample)

    # From language models and the rows of their texts

    def texts_accepted(self, texts: list[AcceptedText]) -> None:
        self.metrics.texts_accepted(len(texts))
        self.language.generate(texts)

    def token(self, text: AcceptedText, index: int, piece: str) -> None:
        self.results.publish_token(GeneratedToken(text.request.source, text.request.request_id, index, piece))

    def text_finished(self, outcome: TextOutcome) -> None:
        self.metrics.text_finished(outcome)
        self.texts.finish(outcome)

    def texts_done(self, texts: list[tuple[str, int]]) -> None:
        self._leave_backlog(texts)

    def _leave_backlog(self, finished: list[tuple[str, int]]) -> None:
        for source, size_bytes in finished:
            self.backlog.leave(source, size_bytes)
