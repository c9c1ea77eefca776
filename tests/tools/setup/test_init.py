"""`coserve init`: five answers, by options or typed, make a line that `coserve check` reads."""

import re
import socket
import stat
import subprocess
from pathlib import Path

import pytest
import yaml

from daemon.check import check_line
from daemon.config.settings import load_config
from daemon.host.machine import EVERYWHERE
from routing_rules.compile import compile_rules
from tests.lines import a_jpeg
from tests.tools.run_commands import start_coserve
from tools.setup.line_files import Answers, config_text, free_ports, rules_text


#: What the console script of the package does.
def init(*words: str, cwd: Path, typed: str = "") -> subprocess.CompletedProcess[str]:
    return start_coserve("init", *words, cwd=cwd, input=typed)


def test_without_a_question_a_line_is_made_whose_only_lack_is_its_experts(tmp_path: Path) -> None:
    done = init("line", "--yes", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    problems, facts = check_line(tmp_path / "line/coserve.yaml")
    assert problems == []
    assert "the catalog has no experts" in facts["warnings"][0]
    for command in (
        "coserve train all training --out line/experts",
        "coserve check line/coserve.yaml",
        "coserve doctor line/coserve.yaml",
        "coserve run line/coserve.yaml",
    ):
        assert command in done.stdout
    config = load_config(tmp_path / "line/coserve.yaml", {})
    assert config.journal == tmp_path / "line/data/journal"
    assert config.journal.is_dir()
    assert "#" in (tmp_path / "line/coserve.yaml").read_text()


ANSWERS = Answers({"b": {"C": 1}}, Path("data"), {"cpu": 10**9}, "here", None)


def test_a_second_line_on_one_pc_takes_ports_that_neither_a_line_beside_it_nor_a_program_has(tmp_path: Path) -> None:
    def made(name: str) -> set[int]:
        (tmp_path / name).mkdir()
        (config := tmp_path / name / "coserve.yaml").write_text(config_text(config.parent, ANSWERS))
        endpoints = load_config(config, {}).endpoints
        return {int(url.rpartition(":")[2]) for url in (endpoints.intake[1], endpoints.results, str(endpoints.http))}

    first = made("first")
    (taken, *_) = free_ports(tmp_path / "second")
    with socket.create_server(("127.0.0.1", taken)):
        assert made("second").isdisjoint({*first, taken})


def test_a_new_line_has_the_time_zone_of_its_pc_and_check_says_where_a_line_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TZ", "Europe/Berlin")
    config = tmp_path / "coserve.yaml"
    config.write_text(config_text(tmp_path, ANSWERS))
    (tmp_path / "rules.yaml").write_text(rules_text(ANSWERS.boards))
    (tmp_path / "experts").mkdir()
    (tmp_path / "experts/catalog.yaml").write_text("experts: {}\n")
    assert load_config(config, {}).plant.timezone == "Europe/Berlin"
    assert not any("timezone" in warning for warning in check_line(config)[1]["warnings"])
    config.write_text(config.read_text().replace("plant: {timezone: Europe/Berlin}\n", ""))
    warning = check_line(config)[1]["warnings"][-1]
    assert warning.startswith(f"{config}: no plant.timezone: days, and times that people type, are UTC")
    assert warning.endswith("plant: {timezone: Europe/Berlin}")


def test_what_is_typed_is_asked_again_until_it_can_be_used(tmp_path: Path) -> None:
    typed = "board-x R0402\nboard-x R0402=3 U=U1,U2\n\n12\n1GB\nyes\nnetwork\n5\never\n"
    done = init("line", cwd=tmp_path, typed=typed)
    assert done.returncode == 0, done.stderr
    for complaint in ("not 'R0402'", "12 holds no expert", "expected no, here or network", "a duration such as"):
        assert complaint in done.stdout + done.stderr
    written = yaml.safe_load((tmp_path / "line/coserve.yaml").read_text())
    assert written["devices"]["cpu"]["expert_memory"] == "1GB"
    assert "images_for" not in written["retention"]
    assert yaml.safe_load((tmp_path / "line/rules.yaml").read_text())["boards"]["board-x"]["components"] == {
        "R0402": 3,
        "U": ["U1", "U2"],
    }


def test_a_dashboard_for_the_network_gets_a_token_for_its_owner_and_an_address_to_type_elsewhere(
    tmp_path: Path,
) -> None:
    done = init("line", "--dashboard", "network", "--board", "a QFP64=1", "--yes", cwd=tmp_path)
    address = re.search(r"the dashboard is at http://([^/]+):[0-9]+/$", done.stdout, re.MULTILINE)
    assert address is not None, done.stdout
    assert address[1] not in ("127.0.0.1", "localhost", *EVERYWHERE)
    assert "training/QFP64/ok" in done.stdout
    assert "R0402" not in done.stdout
    token = tmp_path / "line/keys/http_token"
    assert stat.S_IMODE(token.stat().st_mode) == 0o600
    assert len(token.read_text().strip()) == 64
    problems, _ = check_line(tmp_path / "line/coserve.yaml")
    assert not [problem for problem in problems if "http" in problem]


def test_board_types_are_read_from_sample_images(tmp_path: Path) -> None:
    for name in ("m-1/A1/R1.R0402.png", "m-1/A1/R10.R0402.png", "m-1/A2/R2.R0402.jpg", "pilot: x/B1/U1.QFP64.png"):
        (tmp_path / "pictures" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "pictures" / name).write_bytes(a_jpeg())
    done = init("line", "--images", "pictures", "--yes", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    boards = yaml.safe_load((tmp_path / "line/rules.yaml").read_text())["boards"]
    assert {name: board["components"] for name, board in boards.items()} == {
        "m-1": {"R0402": ["R1", "R2", "R10"]},
        "pilot: x": {"QFP64": ["U1"]},
    }
    assert set(compile_rules((tmp_path / "line/rules.yaml").read_text(), "rules").experts) == {"R0402", "QFP64"}


def test_nothing_is_overwritten_and_nothing_is_left_of_a_refusal(tmp_path: Path) -> None:
    (tmp_path / "line").mkdir()
    (tmp_path / "line/rules.yaml").write_text("mine")
    done = init("line", "--yes", cwd=tmp_path)
    assert (done.returncode, "never overwritten" in done.stderr) == (2, True)
    assert [path.name for path in (tmp_path / "line").iterdir()] == ["rules.yaml"]
    assert (tmp_path / "line/rules.yaml").read_text() == "mine"


@pytest.mark.parametrize(
    ("words", "output"),
    [
        (("--board", f"a R0402={'R' * 129}"), "expected how many there are, or designators of 1 to 128 characters"),
        (("--data", "mainboard-b R0402=4"), "looks like a board type and its components"),
        (("--images", "nowhere"), "no folder nowhere"),
        (("--memory", "much"), "expected a size"),
    ],
)
def test_an_answer_that_cannot_be_used_is_one_sentence(tmp_path: Path, words: tuple[str, ...], output: str) -> None:
    done = init("line", "--yes", *words, cwd=tmp_path)
    assert done.returncode == 2
    assert output in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "line").exists()
