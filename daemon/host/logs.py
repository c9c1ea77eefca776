"""Log events: to the journal with a field for each key if stderr is the journal; else to stderr as logfmt."""

import re
from collections.abc import Callable, MutableMapping
from pathlib import Path
from typing import Any, TextIO

import structlog
from logging_journald import JournaldTransport, check_journal_stream

from daemon.units import printable

JOURNAL_SOCKET = Path("/run/systemd/journal/socket")
_SEND_WITHIN_S = 1.0
#: syslog(3)
_PRIORITIES = {"critical": 2, "error": 3, "warning": 4, "info": 6, "debug": 7}
#: Names with another meaning in the journal (systemd.journal-fields(7)); such a key gets our prefix.
_TAKEN = frozenset({"MESSAGE", "MESSAGE_ID", "PRIORITY", "CODE_FILE", "CODE_LINE", "CODE_FUNC", "ERRNO", "UNIT"})
_render = structlog.processors.LogfmtRenderer(key_order=["event"], bool_as_flag=False)


def configure_logs(stderr: TextIO, journal_socket: Path = JOURNAL_SOCKET) -> None:
    processors: list[structlog.typing.Processor] = [
        structlog.processors.add_log_level,
        structlog.processors.format_exc_info,
    ]
    factory: Callable[..., Any] = structlog.PrintLoggerFactory(stderr)
    if check_journal_stream():
        journal = JournaldLogger(stderr, journal_socket)
        processors.append(journal.fields)
        factory = lambda *_: journal  # noqa: E731
    else:
        processors += [
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.LogfmtRenderer(key_order=["timestamp", "level", "event"], bool_as_flag=False),
            lambda _logger, _method, text: printable(str(text)),
        ]
    structlog.configure(processors=processors, logger_factory=factory, cache_logger_on_first_use=True)


class JournaldLogger:
    """A structlog logger into the journal (to `stderr` where it refuses): `MESSAGE`, `PRIORITY`, `EVENT`, each key."""

    def __init__(self, stderr: TextIO, socket: Path) -> None:
        self._stderr = stderr
        # Addressed at each send: a journal that was restarted has another socket under the same path.
        self._transport = JournaldTransport(socket, connected=False)
        self._transport.socket.settimeout(_SEND_WITHIN_S)

    @staticmethod
    def fields(_logger: object, _method: str, event: MutableMapping[str, Any]) -> dict[str, Any]:
        """Convert an event to the journal's fields: the last processor."""
        priority = _PRIORITIES.get(str(event.pop("level", "info")), 6)
        trace = event.pop("exception", None)
        message = f"{_render(None, '', dict(event))}".removeprefix("event=")
        fields = {_field(key): _text(value) for key, value in event.items() if value is not None}
        if trace:
            message, fields["EXCEPTION"] = f"{message}\n{trace}", str(trace)
        return {**fields, "MESSAGE": _text(message), "PRIORITY": str(priority), "SYSLOG_IDENTIFIER": "coserve"}

    def msg(self, **entry: str) -> None:
        try:
            self._transport.send(entry.items())
        except (OSError, ValueError):
            prefix = f"<{entry['PRIORITY']}>"
            text = "".join(f"{prefix}{line}\n" for line in entry["MESSAGE"].splitlines())
            self._stderr.write(text)
            self._stderr.flush()

    debug = info = warning = warn = error = err = exception = critical = fatal = failure = log = msg


def _field(key: str) -> str:
    """Return a name that the journal accepts: capitals, digits and underscores, a letter first, 64 at most."""
    name = re.sub(r"[^A-Z0-9_]", "_", key.upper()).lstrip("_0123456789")[:64] or "KEY"
    return f"COSERVE_{name}" if name in _TAKEN or name.startswith("SYSLOG_") else name


def _text(value: object) -> str:
    text = ("false", "true")[value] if isinstance(value, bool) else str(value)
    return text.encode(errors="replace").decode()
