"""A reload that is refused, by the daemon or by the command, is in the daemon's log and in `changes`."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from structlog.testing import capture_logs

from daemon.errors import ConfigError
from daemon.operations import Operations
from daemon.storage.database.changes import Change, ChangeNotes
from daemon.wire.control import ControlError
from tests.tools.backup.test_backup import a_folder
from tools.experts.line import ExpertsLine, open_line

REASON = "rules.yaml:3: no component R9\nrules.yaml:4: unknown key fails_on"


@pytest.fixture
def notes(monkeypatch: pytest.MonkeyPatch) -> tuple[Operations, list[Change]]:
    """A daemon whose files have two mistakes, and the rows of `changes` that it writes."""
    rows: list[Change] = []

    def refuse(*_: object, **__: object) -> None:
        raise ControlError("bad_rules", REASON)

    def write(notes: ChangeNotes) -> None:
        rows.extend(notes.rows)

    monkeypatch.setattr(Operations, "_reload", refuse)
    daemon = object.__new__(Operations)
    with capture_logs():
        daemon._log = Operations.__dataclass_fields__["_log"].default_factory()  # type: ignore[misc]
    daemon.writer = SimpleNamespace(store_changes=write)  # type: ignore[assignment]
    return daemon, rows


def test_a_reload_that_the_daemon_refused_is_in_its_log_and_in_changes(
    notes: tuple[Operations, list[Change]],
) -> None:
    daemon, rows = notes
    with capture_logs() as log, pytest.raises(ControlError):
        daemon.reload("eva", "line 3")
    daemon.reload_or_say_why()  # SIGHUP: nobody to answer
    by_eva, by_signal = rows
    assert (by_eva.who, by_eva.what, by_eva.subject) == ("eva", "reload_refused", "files")
    assert by_eva.note == "line 3: rules.yaml:3: no component R9 (and 1 more: the log)"
    assert by_signal.note is not None
    assert by_signal.note.startswith("by signal SIGHUP: rules.yaml:3")
    assert [entry["problem"] for entry in log if entry["event"] == "reload_refused"] == REASON.splitlines()


def test_a_reload_that_the_command_refused_is_told_to_the_daemon(
    notes: tuple[Operations, list[Change]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon, rows = notes

    def ask(_: ExpertsLine, kind: str, **fields: Any) -> None:
        assert kind == "reload_refused"
        daemon._reload_refused(fields)

    config = a_folder(tmp_path / "line")
    (config.parent / "rules.yaml").write_text("boards: {}\nfails: 3\n", encoding="utf-8")
    monkeypatch.setattr(ExpertsLine, "ask", ask)
    with pytest.raises(ConfigError):
        open_line(config).reload("new limits")
    (row,) = rows
    assert (row.what, row.note is not None and row.note.startswith("new limits: ")) == ("reload_refused", True)
    assert "rules.yaml" in str(row.note)
