"""A reload that is refused, by the daemon or by the command, is in the daemon's log and in `changes`."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import structlog
from structlog.testing import capture_logs

from daemon.errors import ConfigError
from daemon.operations import Operations
from daemon.storage.database.changes import Change
from daemon.wire.control import ControlError
from tests.tools.backup.test_backup import a_folder
from tools.experts.line import ExpertsLine, open_line

REASON = "rules.yaml:3: no component R9\nrules.yaml:4: unknown key fails_on"


@pytest.fixture
def daemon(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A daemon whose files have two mistakes; `rows` are those of `changes` that it writes."""

    def refuse(*_: object, **__: object) -> None:
        raise ControlError("bad_rules", REASON)

    monkeypatch.setattr(Operations, "_reload", refuse)
    daemon: Any = object.__new__(Operations)
    rows: list[Change] = []
    daemon.rows, daemon._log = rows, structlog.get_logger()
    daemon.writer = SimpleNamespace(store_changes=lambda notes: rows.extend(notes.rows))
    return daemon


def test_a_reload_that_the_daemon_refused_is_in_its_log_and_in_changes(daemon: Any) -> None:
    with capture_logs() as log, pytest.raises(ControlError):
        daemon.reload("eva", "line 3")
    daemon.reload_or_say_why()  # SIGHUP: nobody to answer
    assert [(row.who, row.what, row.subject) for row in daemon.rows[:1]] == [("eva", "reload_refused", "files")]
    assert [row.note for row in daemon.rows] == [
        f"{why}: rules.yaml:3: no component R9 (and 1 more: the log)" for why in ("line 3", "by signal SIGHUP")
    ]
    assert [entry["problem"] for entry in log if entry["event"] == "reload_refused"] == REASON.splitlines()


def test_a_reload_that_the_command_refused_is_told_to_the_daemon(
    daemon: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def ask(_: ExpertsLine, kind: str, *, who: str, note: str | None, reason: str) -> None:
        asked.append(kind)
        daemon._note_refusal(who, note, reason)

    config = a_folder(tmp_path / "line")
    (config.parent / "rules.yaml").write_text("boards: {}\nfails: 3\n", encoding="utf-8")
    monkeypatch.setattr(ExpertsLine, "ask", ask)
    with pytest.raises(ConfigError):
        open_line(config).reload("new limits")
    assert (asked, daemon.rows[0].note.startswith("new limits: ")) == (["reload_refused"], True)
    assert "rules.yaml" in daemon.rows[0].note
