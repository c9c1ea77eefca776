"""Rows of requests for text, through the writer thread, which alone writes to the database.

The writer takes all waiting requests as one group, one commit each; results that cannot be written are tried again.
"""

import threading
from collections import deque
from collections.abc import Callable
from typing import Protocol

import structlog

from daemon.intake.admission import TextStored
from daemon.records import AcceptedText, Published, TextOutcome, TextRequest
from daemon.storage.database.generations import accept_texts, finish_texts
from daemon.storage.database.store import Store
from daemon.storage.journal import WriteFailed
from daemon.storage.writer import Writer

#: Rows of one transaction, so that images do not wait long behind it.
_AT_ONCE = 64
_RETRY_S = 0.5

Reply = Callable[[TextStored], None]


class TextReports(Protocol):
    """Reports on requests for text, made by the writer thread after the commit."""

    def texts_accepted(self, texts: list[AcceptedText]) -> None: ...
    def published(self, messages: list[Published]) -> None: ...
    def texts_done(self, texts: list[tuple[str, int]]) -> None:
        """Report durable texts: source and bytes in the backlog of each."""
        ...


class TextRows:
    """`write` and `finish` from any thread; `start` names the receiver of its reports."""

    _reports: TextReports

    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self._requests: deque[tuple[TextRequest, Reply]] = deque()
        self._outcomes: deque[TextOutcome] = deque()
        self._is_in_doubt = False
        self._log = structlog.get_logger("writer")

    def start(self, reports: TextReports) -> None:
        self._reports = reports

    def write(self, request: TextRequest, reply: Reply) -> None:
        self._requests.append((request, reply))
        task = self._writer.run(self._accept)
        task.add_done_callback(lambda done: self._refuse("the daemon stops") if done.cancelled() else None)

    def finish(self, outcome: TextOutcome) -> None:
        self._outcomes.append(outcome)
        self._writer.run(self._finish)

    def _accept(self, store: Store) -> None:
        group = [self._requests.popleft() for _ in range(min(_AT_ONCE, len(self._requests)))]
        if not group:
            return
        try:
            self._end_doubt(store)
            stored = store.transact(accept_texts, [request for request, _ in group])
        except Exception as error:  # noqa: BLE001  each publisher keeps its request and sends it again
            self._is_in_doubt = True
            self._log.warning("requests_failed", requests=len(group), error=str(error))
            for _, reply in group:
                reply(WriteFailed(str(error)))
            return
        self._reports.texts_accepted([text for text in stored if isinstance(text, AcceptedText)])
        for (_, reply), text in zip(group, stored, strict=True):
            reply(text)

    def _refuse(self, reason: str) -> None:
        while self._requests:
            self._requests.popleft()[1](WriteFailed(reason))

    def _finish(self, store: Store) -> None:
        group = [self._outcomes[place] for place in range(min(_AT_ONCE, len(self._outcomes)))]
        if not group:
            return
        try:
            self._end_doubt(store)
            written = store.transact(finish_texts, group)
        except Exception as error:  # noqa: BLE001  any outcome is kept and tried again
            self._is_in_doubt = True
            self._log.warning("texts_not_written", outcomes=len(self._outcomes), error=str(error))
            retry = threading.Timer(_RETRY_S, lambda: self._writer.run(self._finish))
            retry.daemon = True
            retry.start()
            return
        for _ in group:
            self._outcomes.popleft()
        self._reports.published(written.published)
        self._reports.texts_done(written.done)

    def _end_doubt(self, store: Store) -> None:
        """Overwrite the remains of a failed commit, so that they cannot take effect after a later one."""
        if self._is_in_doubt:
            store.write_over()
            self._is_in_doubt = False
