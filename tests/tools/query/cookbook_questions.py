"""The questions of docs/results.md, as a reader copies them."""

import re
import shutil
import sqlite3
import subprocess
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests import ROOT

PAGE = ROOT / "docs" / "results.md"
_QUESTION = re.compile(r"^### ([0-9]+)\. (.+?)\n\n```sql\n(.+?)\n```", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Question:
    number: int
    title: str
    sql: str


def questions() -> list[Question]:
    matches = _QUESTION.findall(PAGE.read_text(encoding="utf-8"))
    return [Question(int(number), title, sql) for number, title, sql in matches]


def ask(database: Path, sql: str) -> list[dict[str, Any]]:
    """The answer, as Python's own SQLite gives it."""
    with closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as connection:
        connection.row_factory = sqlite3.Row
        return [dict(row) for row in connection.execute(sql)]


def ask_the_shell(database: Path, sql: str) -> list[str]:
    """Return the answer's lines, header first, as the stock `sqlite3` shell prints them; none without a shell."""
    if shutil.which("sqlite3") is None:
        return []
    options = ["-bail", "-readonly", "-batch", "-cmd", ".mode csv", "-cmd", ".headers on"]
    command = ["sqlite3", *options, str(database), sql]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return done.stdout.splitlines()
