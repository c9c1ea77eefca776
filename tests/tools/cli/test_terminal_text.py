"""No text from outside (rules, folders, archives, rows, logs) steers the terminal or breaks the output."""

import io
import json
import os
import pty
import re
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from tests import ROOT
from tests.tools.backup.test_backup import a_folder
from tools.backup.archive import write_backup
from tools.terminal.console import print_json

#: Sets the window's title, and colours all that follows; as C1 characters too. Brackets look like rich's markup.
NASTY = "\x1b]0;pwned\x07\x1b[31m\x9b31m\u202e[/red]"
#: What our own colours, bars and screens need.
OWN_CODES = re.compile(rb"\x1b\[\??[0-9;]*[A-Za-z]")


def on_a_terminal(*command: object, folder: Path) -> str:
    """Return what a command shows on a terminal, without its own colours; fail if anything else steers it."""
    ours, theirs = pty.openpty()
    environ = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "200"}
    words = [os.fsencode(str(word)) for word in command]
    with subprocess.Popen(words, stdin=theirs, stdout=theirs, stderr=theirs, cwd=folder, env=environ) as process:
        os.close(theirs)
        shown = b""
        try:
            while piece := os.read(ours, 65536):
                shown += piece
        except OSError:  # the last writer has ended
            pass
        process.wait()
    os.close(ours)
    assert b"\x1b]0" not in shown
    assert b"\x1b[31mpwned" not in shown
    text = OWN_CODES.sub(b"", shown).decode()
    assert not [sign for sign in text if not sign.isprintable() and sign not in "\r\n"], text
    assert "Traceback" not in text
    return text


def coserve(*words: object, folder: Path) -> str:
    return on_a_terminal(sys.executable, "-m", "tools", *words, folder=folder)


def rules(folder: Path) -> str:
    boards = {NASTY: {"components": {f"R{NASTY}": 1}}}
    (folder / "rules.yaml").write_text(yaml.safe_dump({"boards": boards, "classifiers": {f"a{NASTY}": {"x": 1}}}))
    return coserve("rules", "check", "rules.yaml", folder=folder)


def start(folder: Path) -> str:
    (folder / "coserve.yaml").write_text(
        yaml.safe_dump({"rules": NASTY, "catalog": NASTY, "devices": {"cpu": {"expert_memory": "1MB"}}})
    )
    return coserve("run", "coserve.yaml", folder=folder)


def restored(folder: Path) -> str:
    a_folder(folder / "line")
    write_backup(folder / "line" / "coserve.yaml", folder / "line.tar")
    with tarfile.open(folder / "line.tar") as tar, tarfile.open(folder / "bad.tar", "w") as bad:
        for member in tar.getmembers()[:-1]:
            bad.addfile(member, tar.extractfile(member))
        for name in (f"a{NASTY}", f"../{NASTY}"):
            member = tarfile.TarInfo(name)
            member.size = 10 * 2**20
            bad.addfile(member, io.BytesIO(bytes(member.size)))
    return coserve("restore", "bad.tar", f"to{NASTY.replace('/', '')}", folder=folder)


def unreadable_names(folder: Path) -> str:
    name = os.fsdecode(b"caf\xe9-\x1b]0;x\x07")
    (folder / name).mkdir()
    (folder / name / "rules.yaml").write_text("boards: [")
    return coserve("rules", "check", f"{name}/rules.yaml", folder=folder)


@pytest.mark.promise(
    "Prepared files",
    "names in rules, settings, folders, archives, weights, rows and log events | escape sequences, "
    "bidi marks, rich's markup | commands and the daemon's log show such characters as escapes and no "
    "markup; JSON has them as `\\u001b`. Settings, rules and catalog with such a character are "
    "refused",
)
@pytest.mark.parametrize("show", [rules, start, restored, unreadable_names])
def test_no_name_from_outside_steers_the_terminal(tmp_path: Path, show: Callable[[Path], str]) -> None:
    text = show(tmp_path)
    assert r"\x1b" in text


def test_json_is_exact_and_steers_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    value = {"serial": NASTY, "file": os.fsdecode(b"caf\xe9"), "label": "gelötet 部品", "tag": "\U000e0041"}
    print_json(value)
    text = capsys.readouterr().out
    assert json.loads(text) == value
    assert "gelötet 部品" in text
    assert text.replace("\n", "").isprintable()


def test_all_that_a_person_reads_goes_through_one_printer() -> None:
    """Another console, or a column that reads markup, would show names from outside as they are."""
    pattern = re.compile(r"(?<!\w)Console\(|typer\.secho|TextColumn\((?!.*markup=False)")
    files = [file for file in (ROOT / "tools").rglob("*.py") if pattern.search(file.read_text(encoding="utf-8"))]
    assert files == []
