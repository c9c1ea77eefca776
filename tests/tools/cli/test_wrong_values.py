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
    ("words", "said"),
    [
        (["profile", "c.yaml", "--pick", "worst"], "--pick: expected one of best, random, not 'worst'"),
        (["profile", "c.yaml", "--max-batch", "0"], "--max-batch: expected a whole number from 1, not '0'"),
        (["profile", "c.yaml", "--initial", "x"], "--initial: expected a number from 1 to 99, not 'x'"),
        (["train", "classifier", "f", "--seed", "1.5"], "--seed: expected a whole number, not '1.5'"),
        (["simulate", "--loading", "none"], "--loading: expected one of slots, ordinary, not 'none'"),
        (["bench", "scheduler", "--queued", "1", "--queued", "many"], "--queued: expected a whole number, not 'many'"),
        (["review", "first"], "ID: expected a whole number from 1, not 'first'"),
        (["results", "--verdict", "bad"], "--verdict: expected one of pass, fail, review, unknown, not 'bad'"),
        (["moe", "fit", "m", "--mode", "none"], "--mode: expected one of duoserve, emoe, all, not 'none'"),
    ],
)
def test_a_value_that_cannot_be_read_is_one_sentence(words: list[str], said: str) -> None:
    assert refused(*words).startswith(f"coserve: {said}")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["train", "classifier", "."],
            "--architecture: expected one of resnet18, resnet34, resnet50, resnet101",
        ),
        (["train", "detector", "FILE"], "--architecture: expected one of yolov5n, "),
        (["import", "FILE"], "--architecture: expected one of resnet18, "),
    ],
)
def test_a_network_that_is_not_known_is_refused_before_anything_is_read(
    tmp_path: Path, words: list[str], said: str
) -> None:
    (tmp_path / "file").touch()
    words = [str(tmp_path / "file") if word == "FILE" else word for word in words]
    answer = refused(*words, "--architecture", "resnet19")
    assert answer.startswith(f"coserve: {said}")
    assert answer.endswith("not 'resnet19'")


def test_a_profile_is_refused_before_the_line_is_read(tmp_path: Path) -> None:
    config = tmp_path / "coserve.yaml"
    config.touch()
    assert refused("profile", str(config), "--memory", "much").startswith("coserve: --memory: expected a size such as")
    assert refused("profile", str(config), "--usage", "guess").startswith("coserve: --usage: expected rules, database,")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["simulate", "--policy", "best"], "--policy: policy 'best' is unknown: expected one of samba, "),
        (["bench", "scheduler", "--policy", "best"], "--policy: policy 'best' is unknown: expected one of samba, "),
        (["bench", "line", "--policy", "best"], "--policy: policy 'best' is unknown: expected one of samba, "),
        (["bench", "live", "--classifier", "yolo11n"], "--classifier: expected one of resnet18, "),
        (["bench", "online", "--live", "--detector", "x"], "--detector: expected one of yolov5n, "),
        (["moe", "bench", ".", "--device", "tpu"], "--device: expected cpu, cuda:0, cuda:1, … or auto, not 'tpu'"),
        (["moe", "import", ".", "--storage", "zip"], "--storage: expected one of exact, int8, int4, not 'zip'"),
        (
            ["rejudge", "c.yaml", "--verdict", "bad"],
            "--verdict: expected one of pass, fail, review, unknown, not 'bad'",
        ),
    ],
)
def test_a_name_that_no_command_knows_is_refused_with_those_that_are_known(words: list[str], said: str) -> None:
    assert refused(*words).startswith(f"coserve: {said}")


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
            said = refused(*names, param.opts[0], "no such value")
            assert said.startswith(f"coserve: {max(param.opts, key=len)}: expected "), (names, said)
            assert said.endswith("not 'no such value'"), (names, said)
            tried += 1
    assert tried > 100
