"""What drivers report, and who hears of it: the counters first, then the driver whose turn it is."""

from daemon.dispatch.drive import Drive
from daemon.intake.backlog import Backlog
from daemon.language.models import LanguageModels
from daemon.language.text_rows import TextRows
from daemon.monitor.metrics import Metrics
from daemon.monitor.timeline import WorkTimeline
from daemon.records import Accepted, AcceptedText, BatchDone, ExpertSwitch, Outcome, Published, TextOutcome
from daemon.storage.results_stream import ResultsStream, Token
from daemon.storage.writer import Writer


class Reports:
    """Each method is called by the driver to which it happened, in that one's thread."""

    _drive: Drive
    _writer: Writer
    _texts: TextRows
    _language: LanguageModels
    _results: ResultsStream

    def __init__(self, metrics: Metrics, timeline: WorkTimeline, backlog: Backlog) -> None:
        self._metrics = metrics
        self._timeline = timeline
        self._backlog = backlog

    def connect(
        self, *, drive: Drive, writer: Writer, texts: TextRows, language: LanguageModels, results: ResultsStream
    ) -> None:
        """Before any of them starts. They are made with these methods, so that nobody else can know them all."""
        self._drive = drive
        self._writer = writer
        self._texts = texts
        self._language = language
        self._results = results

    # Images

    def accepted(self, images: list[Accepted]) -> None:
        self._metrics.accepted(images)
        self._drive.accept(images)

    def finished(self, outcome: Outcome) -> None:
        self._metrics.finished(outcome)
        self._writer.finish(outcome)

    def published(self, messages: list[Published]) -> None:
        self._metrics.published(messages)
        self._results.publish(messages)

    def done(self, images: list[tuple[str, int]]) -> None:
        self._leave(images)
        self._metrics.completed(len(images))

    # Batches and loads

    def batch_done(self, batch: BatchDone) -> None:
        self._metrics.batch_done(batch)
        self._timeline.batch(batch)

    def switched(self, switch: ExpertSwitch) -> None:
        self._metrics.switched(switch)
        self._timeline.load(switch)
        self._writer.switch(switch)

    # Texts

    def texts_accepted(self, texts: list[AcceptedText]) -> None:
        self._metrics.texts_accepted(len(texts))
        self._language.submit(texts)

    def said(self, text: AcceptedText, index: int, piece: str) -> None:
        self._results.tell(Token(text.request.source, text.request.request_id, index, piece))

    def text_finished(self, outcome: TextOutcome) -> None:
        self._metrics.text_finished(outcome)
        self._texts.finish(outcome)

    def texts_done(self, texts: list[tuple[str, int]]) -> None:
        self._leave(texts)

    def _leave(self, finished: list[tuple[str, int]]) -> None:
        for source, size_bytes in finished:
            self._backlog.leave(source, size_bytes)
