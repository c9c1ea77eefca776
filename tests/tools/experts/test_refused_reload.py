"""A reload that the command refuses is told to the daemon. One that the daemon refuses: test_history.py."""

from pathlib import Path
from typing import Any

import pytest

from daemon.errors import ConfigError
from tests.tools.backup.test_backup import a_folder
from tools.experts.line import ExpertsLine, open_line


def test_a_reload_that_the_command_refused_is_told_to_the_daemon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, dict[str, Any]]] = []
    config = a_folder(tmp_path / "line")
    (config.parent / "rules.yaml").write_text("boards: {}\nfails: 3\n", encoding="utf-8")
    monkeypatch.setattr(ExpertsLine, "ask", lambda _, kind, **fields: asked.append((kind, fields)))
    with pytest.raises(ConfigError):
        open_line(config).reload("new limits")
    ((kind, told),) = asked
    assert (kind, told["note"]) == ("reload_refused", "new limits")
    assert "rules.yaml" in told["reason"]
