"""Reports of the drivers, one way: first to the counters, then to the driver that acts on them."""

from daemon.dispatch.drive import Drive
from daemon.intake.backlog import Backlog
from daemon.language.models import LanguageModels
from daemon.language.text_rows import TextRows
from daemon.monitor.metrics import Metrics
from daemon.monitor.timeline import WorkTimeline
from daemon.records import (
    Accepted,
    AcceptedText,
    BatchDone,
    ExpertSwitch,
    Outcome,
    Published,
    QueueSample,
    TextOutcome,
)
from daemon.storage.quarantine import BadImages
from daemon.storage.results_stream import GeneratedToken, ResultsStream
from daemon.storage.writer import Writer


class Reports:
    """Made last, of all the drivers, and given to each when it starts: no driver knows another.

    Each method is called in the thread of the driver that reports.
    """

    def __init__(  # noqa: PLR0913  it knows every driver
        self,
        *,
        metrics: Metrics,
        timeline: WorkTimeline,
        backlog: Backlog,
        drive: Drive,
        writer: Writer,
        bad_images: BadImages,
        texts: TextRows,
        language: LanguageModels,
        results: ResultsStream,
    ) -> None:
        self._metrics = metrics
        self._timeline = timeline
        self._backlog = backlog
        self._drive = drive
        self._writer = writer
        self._bad_images = bad_images
        self._texts = texts
        self._language = language
        self._results = results

    # From the writer

    def accepted(self, images: list[Accepted]) -> None:
        self._metrics.accepted(images)
        self._drive.accept(images)

    def published(self, messages: list[Published]) -> None:
        self._metrics.published(messages)
        self._results.publish(messages)

    def done(self, images: list[tuple[str, int]]) -> None:
        self._leave_backlog(images)
        self._metrics.completed(len(images))

    # From the drive

    def finished(self, outcome: Outcome) -> None:
        self._metrics.finished(outcome)
        self._writer.finish(outcome)

    def bad_image(self, image: Accepted, reason: str) -> None:
        self._bad_images.keep(image, reason)

    def batch_done(self, batch: BatchDone) -> None:
        self._metrics.batch_done(batch)
        self._timeline.batch(batch)

    def switched(self, switch: ExpertSwitch) -> None:
        self._metrics.switched(switch)
        self._timeline.load(switch)
        self._writer.switch(switch)

    def sampled(self, sample: QueueSample) -> None:
        self._timeline.sample(sample)

    # From language models and the rows of their texts

    def texts_accepted(self, texts: list[AcceptedText]) -> None:
        self._metrics.texts_accepted(len(texts))
        self._language.generate(texts)

    def token(self, text: AcceptedText, index: int, piece: str) -> None:
        self._results.publish_token(GeneratedToken(text.request.source, text.request.request_id, index, piece))

    def text_finished(self, outcome: TextOutcome) -> None:
        self._metrics.text_finished(outcome)
        self._texts.finish(outcome)

    def texts_done(self, texts: list[tuple[str, int]]) -> None:
        self._leave_backlog(texts)

    def _leave_backlog(self, finished: list[tuple[str, int]]) -> None:
        for source, size_bytes in finished:
            self._backlog.leave(source, size_bytes)
