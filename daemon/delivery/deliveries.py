"""The consumers of a line as its daemon sees them: their checks, a process to keep running for each, their status."""

import json
import os
import sys
import zlib
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from daemon.config.settings import CREDENTIALS, Config, at_their_lines
from daemon.consumers.kinds import make_consumer
from daemon.consumers.protocol import NotYetError, ReviewAnswerError
from daemon.errors import MissingExtraError
from daemon.host.children import ChildSpec
from daemon.storage.database.reader import ResultsReader
from daemon.wire.control import ControlError, ask
from routing_rules.load import KeyPath

_UNSET = f"{CREDENTIALS} is not set here: systemd sets it for a unit with LoadCredential="
_PAGE_BYTES = 4096
#: Reader and writer take no lock: a half-written page is read again.
_TRIES = 5
_MAX_TEXT = 600


class SharedStatusPage:
    """Shared memory for a consumer's status. A full disk does not affect it, and it outlives the process."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    @classmethod
    def make(cls, name: str) -> "SharedStatusPage":
        fd = os.memfd_create(f"coserve-{name}", os.MFD_CLOEXEC)
        os.ftruncate(fd, _PAGE_BYTES)
        return cls(fd)

    def write(self, facts: Mapping[str, Any]) -> None:
        short = {key: value[:_MAX_TEXT] if isinstance(value, str) else value for key, value in facts.items()}
        text = json.dumps(short).encode()
        head = f"{len(text):08d} {zlib.crc32(text):08x} ".encode()
        os.pwrite(self.fd, (head + text)[:_PAGE_BYTES], 0)

    def read(self) -> dict[str, Any]:
        for _ in range(_TRIES):
            page = os.pread(self.fd, _PAGE_BYTES, 0)
            try:
                size, checksum = int(page[:8]), int(page[9:17], 16)
            except ValueError:
                return {}
            text = page[18 : 18 + size]
            if zlib.crc32(text) == checksum:
                return json.loads(text)
        return {}

    def close(self) -> None:
        os.close(self.fd)


#: Error codes of control after which a later try may succeed.
_LATER = frozenset({"no_answer", "no_daemon", "not_allowed", "not_stored", "internal"})


class StoredLine:
    """`LineAccess` of a configured line; the first question opens its database."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self.name, self.alarms = config.line, config.alarms

    @cached_property
    def _reader(self) -> ResultsReader:
        return ResultsReader(self._config.database)

    def end(self) -> tuple[int, str | None]:
        return self._reader.end()

    def at(self, seq: int) -> str | None:
        return self._reader.at(seq)

    def before_oldest(self) -> int:
        return self._reader.before_oldest()

    def defects(self) -> Mapping[str, str]:
        return self._reader.defects()

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


class Deliveries:
    """The consumers' processes and their status, which outlives each process."""

    def __init__(self, config: Config, path: Path) -> None:
        self._config = config
        self._path = path.absolute()
        self._status_pages = {name: SharedStatusPage.make(name) for name in config.consumers}

    def children(self, last_seq: int) -> list[ChildSpec]:
        return [
            ChildSpec(
                f"consumer {name}",
                (
                    *(sys.executable, "-m", "daemon.delivery", str(self._path), name),
                    *("--status-page", str(status_page.fd), "--newest", str(last_seq)),
                ),
                pass_fds=(status_page.fd,),
                beats=True,
            )
            for name, status_page in self._status_pages.items()
        ]

    def status(self, last_seq: int, children: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return `name, kind, position, behind, missed, state, last_error` of each: positions are null at first."""
        by_name = {child["name"]: child for child in children}
        return [self._row(name, last_seq, by_name.get(f"consumer {name}", {})) for name in self._status_pages]

    def close(self) -> None:
        for status_page in self._status_pages.values():
            status_page.close()

    def _row(self, name: str, last_seq: int, child: Mapping[str, Any]) -> dict[str, Any]:
        page = self._status_pages[name].read()
        position = page.get("position")
        state, last_error = page.get("state", "waiting"), page.get("last_error")
        if state == "connected" and child.get("state") != "running":
            state, last_error = "waiting", f"its process ended: {child.get('last_end')}"
        elif last_error is None and position is None and child.get("last_end"):
            last_error = f"its process ended: {child['last_end']}"
        return {
            "name": name,
            "kind": self._config.consumers[name].kind,
            "position": position,
            "behind": None if position is None else max(0, last_seq - position),
            "missed": page.get("missed", 0),
            "state": state,
            "last_error": last_error,
        }


def consumer_problems(path: Path, config: Config) -> list[str]:
    problems: list[tuple[KeyPath, str]] = []
    for name, settings in config.consumers.items():
        unset = [(key, _UNSET) for key, file in settings.files().items() if CREDENTIALS in file.parts]
        problems += [(("consumers", name, *key), problem) for key, problem in unset or settings.file_problems()]
        try:
            make_consumer(name, settings, config.journal, StoredLine(config))
        except MissingExtraError as error:
            problems.append((("consumers", name, "kind"), str(error)))
    return at_their_lines(path, problems)


def consumer_warnings(path: Path, config: Config) -> list[str]:
    consumers = config.consumers.items()
    warnings = [(("consumers", name, *key), text) for name, one in consumers for key, text in one.warnings()]
    return at_their_lines(path, warnings)
