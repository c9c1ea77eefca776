"""`coserve report` where a model is configured and no daemon listens: the template, at once, and why."""

import json
import socket
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from tests.daemon.dashboard.web import Web
from tools.cli.main import app


@pytest.fixture(params=["nobody", "left behind"])
def line(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A board that failed, in the database of a line that does not run; or whose daemon was killed."""
    web = Web(tmp_path / "line")
    web.add_board(1, "B-1")
    web.add_image(1, 1)
    settings = yaml.safe_load(web.config.read_text(encoding="utf-8"))
    settings["models"] = {"writer": {"checkpoint": "model", "memory": "1MB"}}
    web.config.write_text(yaml.safe_dump(settings), encoding="utf-8")
    if request.param == "left behind":
        (web.folder / "run").mkdir()
        with socket.socket(socket.AF_UNIX) as left:
            left.bind(str(web.folder / "run/intake.sock"))
    return web.config


def test_without_a_daemon_the_template_answers_and_says_what_to_do(line: Path) -> None:
    done = CliRunner().invoke(app, ["report", "B-1", "--config", str(line), "--wait", "2", "--json"])
    assert done.exit_code == 0, done.output
    said = json.loads(done.stdout)
    assert said["by"] == "template"
    assert said["why_not_the_model"].startswith("model writer: no daemon answers at ipc://")
    assert said["why_not_the_model"].endswith("start it with `coserve run`")
