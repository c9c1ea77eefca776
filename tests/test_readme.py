"""The examples of the README run: its camera, its questions, its line, its rules, its commands, and where it leads."""

import re
import shlex
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import yaml

from daemon.config.settings import load_config
from daemon.wire.control import ask
from routing_rules.compile import compile_rules
from tests import ROOT
from tests.lines import a_jpeg, a_line
from tests.simulated import a_service
from tests.tools.run_commands import coserve, start_coserve
from tests.waiting import PATIENCE_S

README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")))
#: Kinds of files that name pages.
NAMING = (".json", ".py", ".service", ".yaml")


def blocks(language: str) -> list[str]:
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", README, flags=re.DOTALL | re.MULTILINE)
    return [text for name, text in fenced if name == language]


def test_the_camera_of_the_readme_publishes_and_its_questions_have_answers(
    tmp_path: Path, experts_folder: Path
) -> None:
    config = a_line(tmp_path, experts_folder)
    pictures = tmp_path / "pictures"
    pictures.mkdir()
    for number in range(1, 3):
        (pictures / f"R{number}.R0402.png").write_bytes(a_jpeg(number))
    (camera,) = blocks("python")
    assert len([line for line in camera.splitlines() if line.strip()]) <= 15
    camera = camera.replace("tcp://127.0.0.1:5570", f"ipc://{tmp_path}/run/intake.sock").replace(
        "mainboard-a", "open-board"
    )

    def publish(folder: Path) -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, "-c", camera]
        return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=PATIENCE_S, check=False)

    with a_service(config, tmp_path / "daemon.log"):
        done = publish(tmp_path)
        assert ("'accepted': 2" in done.stdout, done.returncode) == (True, 0), done.stderr
        (tmp_path / "empty" / "pictures").mkdir(parents=True)
        nothing = publish(tmp_path / "empty")
        assert nothing.returncode == 1, nothing.stdout
        while ask(f"ipc://{tmp_path}/run/control.sock", "status", timeout_s=PATIENCE_S)["backlog"]:
            time.sleep(0.05)
    questions = blocks("sql")
    assert len(questions) == 2
    with closing(sqlite3.connect(f"file:{tmp_path}/inspection.db?mode=ro", uri=True)) as database:
        for question in questions:
            database.execute(question).fetchall()
        assert database.execute(questions[1]).fetchall()[0][:2] == ("R0402", 2)


def test_the_line_of_the_readme_is_made_by_its_command_and_takes_its_consumer(tmp_path: Path) -> None:
    (command,) = [line for block in blocks("") for line in block.splitlines() if " init " in line]
    words = shlex.split(command.removeprefix("coserve "))
    process = start_coserve(*words, "--yes", cwd=tmp_path)
    assert process.returncode == 0, process.stderr
    config = tmp_path / "line" / "coserve.yaml"
    (consumers,) = [block for block in blocks("yaml") if block.startswith("consumers:")]
    config.write_text(config.read_text(encoding="utf-8") + consumers, encoding="utf-8")
    line = load_config(config, {})
    assert (line.policy, line.consumers["plant"].host) == ("coserve-plus", "broker.plant.lan")
    rules = compile_rules(config.with_name("rules.yaml").read_text(encoding="utf-8"), "rules.yaml")
    assert list(rules.recipes) == ["mainboard-a"]


def test_the_rules_of_the_readme_compile() -> None:
    text = next(block for block in blocks("yaml") if block.startswith("boards:"))
    assert list(compile_rules(text, "README.md").recipes) == list(yaml.safe_load(text)["boards"])


def test_every_command_of_the_readme_exists() -> None:
    commands = {
        tuple(line.removeprefix("coserve ").split())
        for block in blocks("")
        for line in block.splitlines()
        if line.startswith("coserve ")
    }
    assert len(commands) > 8
    groups = ("train", "rules", "bench", "moe", "experts")
    names = {words[:2] if words[0] in groups else words[:1] for words in commands}
    for name in sorted(names):
        done = coserve(*name, "--help")
        for words in commands:
            if words[: len(name)] == name:
                options = [word for word in words if word.startswith("--")]
                assert all(option in done.stdout for option in options), (words, done.stdout)


def anchors(page: Path) -> set[str]:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in re.findall(r"(?m)^#+ (.+)$", text)}


def test_what_the_pages_point_to_exists() -> None:
    for page in PAGES:
        for target, anchor in re.findall(r"\]\(([^)#\s:]*)(?:#([^)]*))?\)", page.read_text(encoding="utf-8")):
            path = page.parent / target if target else page
            assert path.exists(), (page.name, target)
            assert not anchor or anchor in anchors(path), (page.name, target, anchor)


def test_each_path_that_a_page_names_exists() -> None:
    """Paths of this repository: below its folders, or of a program; NAME stands for any."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    known = {*listed, *(str(parent) for file in listed for parent in Path(file).parents)}
    begins = ("daemon/", "docs/", "experts/", "routing_rules/", "systemd/", "tests/", "tools/")
    for page in PAGES:
        for path in re.findall(r"(?<![\w/.:~<-])(?:[\w.@-]+/)+[\w.@-]*", page.read_text(encoding="utf-8")):
            name = path.rstrip("./")
            if (name.startswith(begins) or name.endswith((".py", ".service"))) and "NAME" not in name:
                assert any(file == name or file.endswith(f"/{name}") for file in known), (page.name, path)


def test_commands_are_spelled_in_one_way_and_a_new_line_comes_before_the_demo() -> None:
    for page in PAGES:
        assert ".venv/bin/coserve" not in page.read_text(encoding="utf-8"), page.name
    begins = [README.index(text) for text in (". .venv/bin/activate", "coserve init", "coserve camera", "make demo\n")]
    assert begins == sorted(begins)
    (camera,) = blocks("python")
    (init,) = [line for block in blocks("") for line in block.splitlines() if " init " in line]
    (board_type,) = re.findall(r'"type": "([^"]+)"', camera)
    assert f'--board "{board_type} ' in init, "the camera sends to the line that was made"


def test_the_pages_that_code_and_units_name_exist() -> None:
    folders = ("daemon", "experts", "routing_rules", "systemd", "tests", "tools")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in NAMING]
    for path in files:
        for page in re.findall(r"\bdocs/[a-z-]+\.md", path.read_text(encoding="utf-8")):
            assert (ROOT / page).exists(), (path, page)


def test_every_page_of_the_documentation_can_be_reached_from_the_readme() -> None:
    linked = set(re.findall(r"\]\(([^)#:]+)\)", README))
    pages = {f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")}
    assert pages <= linked, sorted(pages - linked)
