import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner, Result

from daemon.wire.control import ask
from tests import ROOT
from tests.lines import a_jpeg, a_line
from tests.simulated import a_service
from tests.tools.run_commands import start_coserve
from tools.cli.main import app

LIGHT = (
    "check",
    "rules check",
    "status",
    "experts",
    "experts list",
    "queues",
    "reload",
    "drain",
    "results",
    "explain",
    "export",
    "camera",
)


def coserve(*arguments: str, **environ: str) -> Result:
    return CliRunner().invoke(app, list(arguments), env=environ)


def test_the_command_starts_light_and_commands_that_need_no_torch_do_not_import_it() -> None:
    code = (
        "import sys; from tools.cli.main import app\n"
        "if early := {'numpy', 'sqlalchemy', 'torch'} & {*sys.modules}: sys.exit(f'itself: {early}')\n"
        f"for words in {[[*command.split(), *_arguments(command)] for command in LIGHT]!r}:\n"
        "    try: app(words)\n"
        "    except SystemExit: pass\n"
        "    if 'torch' in sys.modules: sys.exit(' '.join(words))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False, cwd=ROOT
    )
    assert done.returncode == 0, f"too much was imported by coserve {done.stderr}"


def _arguments(command: str) -> list[str]:
    example = "routing_rules/examples/minimal.yaml"
    return {
        "check": [example],
        "rules check": [example],
        "camera": [example, "no-folder"],
        "explain": ["1", "--config", example],
        "export": ["--lot", "L", "--out", "no/folder", "--config", example],
    }.get(command, ["--config", example])


def test_check_names_every_mistake_of_every_file(tmp_path: Path, experts_folder: Path) -> None:
    config = a_line(tmp_path, experts_folder)
    assert coserve("check", str(config)).exit_code == 0
    rules = tmp_path / "rules.yaml"
    rules.write_text(
        rules.read_text(encoding="utf-8")
        .replace("bridge: 0.99", "brigde: 0.99")
        .replace("review_below: 0.0", "review_below: 1.5"),
        encoding="utf-8",
    )
    done = coserve("check", str(config), "--json")
    assert done.exit_code == 1
    report = json.loads(done.stdout)
    text = "\n".join(report["problems"])
    assert "rules.yaml:9:" in text
    assert "`bridge`" in text


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("COSERVE_DATABASE", "postgresql://me:sec/ret@nowhere/x", "a line keeps its results in a SQLite file"),
        ("COSERVE_DATABASE", "sqlite:////proc/x/inspection.db", "database: nothing can be written in /proc"),
        ("COSERVE_JOURNAL", "/proc/journal", "journal: nothing can be written in /proc"),
        ("COSERVE_IMAGES", "{file}/images", "is a file, where a folder is needed"),
        ("COSERVE_DEVICES", "{{'cuda:97': {{expert_memory: 1GB}}}}", "devices.cuda:97: torch sees "),
        ("COSERVE_RECORD", "/nonexistent/trace.jsonl", "record: there is no folder /nonexistent"),
    ],
)
def test_check_refuses_places_where_a_start_would_fail(
    tmp_path: Path, experts_folder: Path, key: str, value: str, expected: str
) -> None:
    config = a_line(tmp_path / "line", experts_folder)
    done = coserve("check", str(config), **{key: value.format(file=config)})
    assert done.exit_code == 1
    assert expected in done.stdout
    assert len(done.stdout.splitlines()) == 1
    assert "sec" not in done.stdout


def test_check_reads_every_weights_file(tmp_path: Path, experts_folder: Path) -> None:
    config = a_line(tmp_path, experts_folder)
    (tmp_path / "experts" / "C0603.safetensors").unlink()
    weights = tmp_path / "experts" / "R0402.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.unlink()
    weights.write_bytes(data)
    done = coserve("check", str(config))
    assert done.exit_code == 1
    assert "C0603.safetensors" in done.stdout
    assert "sha256" in done.stdout
    assert "catalog.yaml:" in done.stdout


def test_rules_check_exits_with_1_for_mistakes_and_0_without(tmp_path: Path) -> None:
    assert coserve("rules", "check", str(ROOT / "routing_rules/examples/mainboard.yaml")).exit_code == 0
    wrong = tmp_path / "rules.yaml"
    wrong.write_text("boards: {}\nclassifier: {}\n", encoding="utf-8")
    done = coserve("rules", "check", str(wrong))
    assert done.exit_code == 1
    assert f"{wrong}:2:1" in done.stdout
    assert "classifiers" in done.stdout


def test_results_are_printed_as_json(tmp_path: Path, experts_folder: Path) -> None:
    config = a_line(tmp_path, experts_folder)
    folder = tmp_path / "pictures" / "open-board" / "S1"
    folder.mkdir(parents=True)
    for number in range(3):
        (folder / f"R{number}.R0402.jpg").write_bytes(a_jpeg(number))
    (folder / "R9.R0402.png").write_bytes(b"no image")
    with a_service(config, tmp_path / "daemon.log"):
        done = coserve("camera", str(config), str(tmp_path / "pictures"), "--json")
        assert done.exit_code == 1, done.stderr
        account = json.loads(done.stdout)
        assert (account["accepted"], account["rejected bad_image"]) == (3, 1)
        while ask(f"ipc://{tmp_path}/run/control.sock", "status")["backlog"]:
            time.sleep(0.05)
        assert re.search(r", ready, up for \d+ s, policy", coserve("status", "--config", str(config)).stdout)
    rows = json.loads(coserve("results", "--config", str(config), "--json").stdout)
    assert [row["serial"] for row in rows] == ["S1"] * 3
    assert {row["verdict"] for row in rows} <= {"pass", "fail", "review"}


@pytest.mark.parametrize(
    ("command", "imported", "status"), [("run", "daemon.serve", 0), ("check", "daemon.line.line", 1)]
)
def test_ctrl_c_while_a_command_is_still_importing_ends_it_as_later(
    tmp_path: Path, experts_folder: Path, command: str, imported: str, status: int
) -> None:
    code = (
        "import builtins, os, signal, sys\nfrom tools.cli.main import main\nreal = builtins.__import__\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a shell's background ignores it
        "def importing(name, *rest, **named):\n"
        f"    if name == {imported!r}: os.kill(os.getpid(), signal.SIGINT)\n"
        "    return real(name, *rest, **named)\n"
        "builtins.__import__ = importing\nsys.argv[0] = 'coserve'\nmain()\n"
    )
    words = [sys.executable, "-c", code, command, str(a_line(tmp_path, experts_folder))]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == status
    assert done.stderr == ("coserve: stopped by Ctrl-C\n" if status else "")


def test_a_line_that_cannot_start_says_so_in_one_line(tmp_path: Path, experts_folder: Path) -> None:
    config = a_line(tmp_path, experts_folder, policy="lru")
    checked = coserve("check", str(config))
    assert (checked.exit_code, "samba" in checked.stdout) == (1, True)
    settings = yaml.safe_load(config.read_text(encoding="utf-8"))
    for changes, named in (
        ({}, "samba"),
        ({"policy": "samba", "rules": "elsewhere.yaml"}, "elsewhere.yaml"),
        ({"policy": "samba", "record": "nowhere/trace.jsonl"}, "nowhere/trace.jsonl"),
    ):
        config.write_text(yaml.safe_dump(settings | changes), encoding="utf-8")
        done = start_coserve("run", str(config))
        assert (done.returncode, len(done.stderr.strip().splitlines()), named in done.stderr) == (2, 1, True), (
            done.stderr
        )
