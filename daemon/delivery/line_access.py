"""The line's side of `LineAccess`: questions of consumers to its database, kept pictures and control socket."""

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from daemon.config.settings import Config
from daemon.consumers.protocol import NotYetError, ReviewAnswerError
from daemon.storage.database.reader import ResultsReader
from daemon.wire.control import ControlError, ask

#: Error codes of control after which a later try may succeed.
_LATER = frozenset({"no_answer", "no_daemon", "not_allowed", "not_stored", "internal"})


class StoredLine:
    """`LineAccess` of the line that a configuration describes; its database is opened at the first question."""

    def __init__(self, config: Config) -> None:
        self._config = config

    @property
    def alarms(self) -> Path:
        return self._config.alarms

    @cached_property
    def _reader(self) -> ResultsReader:
        return ResultsReader(self._config.database)

    def end(self) -> tuple[int, str | None]:
        return self._reader.end()

    def at(self, seq: int) -> str | None:
        return self._reader.at(seq)

    def before_oldest(self) -> int:
        return self._reader.before_oldest()

    def picture(self, inspection_id: int) -> bytes | None:
        path, is_coming = self._reader.kept_copy(inspection_id)
        if path is None:
            if is_coming:
                raise NotYetError
            return None
        try:
            return (self._config.images.parent / path).read_bytes()
        except FileNotFoundError:
            return None

    def review(self, fields: Mapping[str, Any]) -> None:
        try:
            ask(self._config.endpoints.control, "review", **fields)
        except ControlError as error:
            raise ReviewAnswerError(error.reason, is_final=error.code not in _LATER) from None
