import subprocess
import sys
from pathlib import Path

import pytest

from tests import ROOT
from tests.lines import a_line
from tests.tools.run_commands import coserve

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
    done = coserve("check", config, status=1, **{key: value.format(file=config)})
    (mistake,) = [line for line in done.stdout.splitlines() if not line.startswith("warning: ")]
    assert expected in mistake
    assert "sec" not in mistake


def test_check_reads_every_weights_file(tmp_path: Path, experts_folder: Path) -> None:
    config = a_line(tmp_path, experts_folder)
    (tmp_path / "experts" / "C0603.safetensors").unlink()
    weights = tmp_path / "experts" / "R0402.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.unlink()
    weights.write_bytes(data)
    done = coserve("check", config, status=1)
    assert "C0603.safetensors" in done.stdout
    assert "sha256" in done.stdout
    assert "catalog.yaml:" in done.stdout


def test_rules_check_exits_with_1_for_mistakes_and_0_without(tmp_path: Path) -> None:
    coserve("rules", "check", ROOT / "routing_rules/examples/mainboard.yaml")
    wrong = tmp_path / "rules.yaml"
    wrong.write_text("boards: {}\nclassifier: {}\n", encoding="utf-8")
    done = coserve("rules", "check", wrong, status=1)
    assert f"{wrong}:2:1" in done.stdout
    assert "classifiers" in done.stdout


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
