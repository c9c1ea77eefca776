"""A value that an option does not take: one sentence with the option, what it takes and what was given."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main
from typer.testing import CliRunner

from tools.cli.main import app


def refused(*words: str) -> str:
    done = CliRunner().invoke(app, list(words))
    assert done.exit_code == 2, done.output
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1, done.stderr
    return done.stderr.strip()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        # A value that cannot be read: a choice, a number, one of a list, an argument.
        (["simulate", "--loading", "fast"], "--loading: expected one of slots, ordinary, not 'fast'"),
        (["profile", "c.yaml", "--max-batch", "0"], "--max-batch: expected a whole number from 1, not '0'"),
        (["bench", "scheduler", "--queued", "1", "--queued", "many"], "--queued: expected a whole number, not 'many'"),
        (["worker", "--name", "pc2", "--address", "10.0.0.1"], "--address: expected HOST:PORT, not '10.0.0.1'"),
        (
            ["worker", "--name", "pc 2", "--head"],
            "--name: expected a `host` of coserve.yaml (letters, digits, '.', '_', '-'), not 'pc 2'",
        ),
        (["review", "first"], "ID: expected a whole number from 1, not 'first'"),
        (
            ["train", "all", "nowhere", "--out", "experts"],
            "no folder nowhere: name one with a subfolder for each component",
        ),
        (["plant", "releases", "nowhere"], "no folder nowhere: mount the stick, or make the folder first"),
        # A name that no command knows.
        (["simulate", "--policy", "best"], "--policy: policy 'best' is unknown: expected one of samba, "),
        (["bench", "compute", "--networks", "resnet19"], "--networks: expected one of resnet18, "),
        (["bench", "load", "--folder", "FILE"], "no folder "),
        (["moe", "bench", ".", "--device", "tpu"], "--device: expected cpu, cuda:0, cuda:1, … or auto, not 'tpu'"),
        (["moe", "import", ".", "--storage", "zip"], "--storage: expected one of exact, int8, int4, not 'zip'"),
        # Refused before anything is read.
        (["import", "FILE", "--architecture", "resnet19"], "--architecture: expected one of resnet18, "),
        (["profile", "FILE", "--memory", "much"], "--memory: expected a size such as"),
    ],
)
def test_a_value_that_an_option_does_not_take_is_one_sentence(tmp_path: Path, words: list[str], message: str) -> None:
    (tmp_path / "file").touch()
    words = [str(tmp_path / "file") if word == "FILE" else word for word in words]
    assert refused(*words).startswith(f"coserve: {message}")


def commands(group: Any, *names: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, *names, name)
        else:
            yield (*names, name), command


def test_no_option_of_any_command_answers_in_pydantics_words() -> None:
    tried = 0
    for names, command in commands(typer.main.get_command(app)):
        for param in command.params:
            described = param.type_descriptor
            if param.param_type_name != "option" or not (described.choices or described.annotation in (int, float)):
                continue
            message = refused(*names, param.opts[0], "no such value")
            assert message.startswith(f"coserve: {max(param.opts, key=len)}: expected "), (names, message)
            assert message.endswith("not 'no such value'"), (names, message)
            tried += 1
    assert tried > 80


@pytest.mark.parametrize(
    "words",
    [
        *(["status", "FILE"], ["status", "--config", "FILE"], ["check", "FILE"], ["check", "--config", "FILE"]),
        *(["check", "--config=FILE", "--json"], ["experts", "FILE"], ["experts", "list", "FILE"]),
        *(["explain", "S1", "FILE"], ["explain", "S1", "R1", "--json", "FILE"], ["db", "check", "FILE"]),
        *(["camera", "--config", "FILE", "--render", "1"], ["rejudge", "--rules", "r.yaml", "FILE"]),
        *(["pin", "R0402", "FILE", "--device", "cpu"], ["limits", "--memory", "cpu=1MB", "FILE"]),
    ],
)
def test_every_command_takes_the_configuration_as_an_argument_or_an_option(words: list[str], tmp_path: Path) -> None:
    file = str(tmp_path / "nowhere.yaml")
    done = CliRunner().invoke(app, [word.replace("FILE", file) for word in words])
    assert (done.exit_code, f"no file {file}" in done.stderr) == (2, True), done.output
