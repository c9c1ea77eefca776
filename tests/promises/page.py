"""The tables of docs/reliability.md and docs/security.md, from the marks `promise` of the tests.

A mark stands on the first test of its promise: `@pytest.mark.promise("A heading of the page", "What is promised")`.
Where a table has more columns, the text is all its cells but the last two, as in Markdown: "attack | what happens".
"""

import ast
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests import ROOT

PAGES = (ROOT / "docs/reliability.md", ROOT / "docs/security.md")
_TESTS = ROOT / "tests"


@dataclass(frozen=True)
class Promise:
    """A row of a table, below the heading `section`."""

    section: str
    text: str
    test: str
    command: str

    @property
    def row(self) -> str:
        return f"| {self.text} | `{self.test}` | `make {self.command}` |"


def promises() -> list[Promise]:
    """What the marks of all tests say, in the order of the files."""
    return [promise for path in sorted(_TESTS.rglob("test_*.py")) for promise in _promises_of(path)]


def _promises_of(path: Path) -> Iterator[Promise]:
    text = path.read_text(encoding="utf-8")
    if "mark.promise(" not in text:
        return
    tree = ast.parse(text)
    of_file = [ast.unparse(node) for node in tree.body if isinstance(node, ast.Assign)]
    is_long = any(line.startswith("pytestmark = ") and "test_all" in line for line in of_file)
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            marks = [ast.unparse(mark) for mark in node.decorator_list]
            command = "test-all" if is_long or "pytest.mark.test_all" in marks else "test"
            for mark in node.decorator_list:
                if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.promise":
                    section, promise = (ast.literal_eval(argument) for argument in mark.args)
                    yield Promise(section, promise, f"{path.relative_to(_TESTS)}::{node.name}", command)


def with_tables(page: str, given: list[Promise]) -> str:
    """The page with the rows that the promises give: those that it has in its order, then new ones."""
    of_section = defaultdict(dict[str, Promise])
    for promise in given:
        of_section[promise.section][promise.text] = promise
    lines, section, rows = [], "", None
    for line in [*page.splitlines(), ""]:
        if line.startswith("#"):
            section = line.lstrip("# ")
        if rows is not None and line.startswith("| "):
            text = line.removeprefix("| ").rsplit(" | ", 2)[0]
            if promise := rows.pop(text, None):
                lines.append(promise.row)
            continue
        if rows:
            lines += [promise.row for promise in rows.values()]
        rows = None
        if line.startswith("|---") and section in of_section and lines[-1].endswith("| test | run by |"):
            rows = of_section[section]
        lines.append(line)
    return "\n".join(lines[:-1]) + "\n"


def write_pages() -> None:
    for path in PAGES:
        path.write_text(with_tables(path.read_text(encoding="utf-8"), promises()), encoding="utf-8")
