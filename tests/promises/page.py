"""The promises that the tests' marks make, and the list of them.

A mark stands on the first test of its promise: `@pytest.mark.promise("A heading of the page", "What is promised")`.
The page is docs/reliability.md or docs/security.md; a text with ` | ` is a row there: "attack | what happens".
"""

import ast
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests import ROOT

LIST = ROOT / "build/promises.md"
_TESTS = ROOT / "tests"


@dataclass(frozen=True)
class Promise:
    section: str
    text: str
    test: str
    command: str


def promises() -> list[Promise]:
    """The marks of all tests, in the order of the files."""
    return [promise for path in sorted(_TESTS.rglob("test_*.py")) for promise in _promises_of(path.relative_to(_TESTS))]


def _promises_of(path: Path) -> Iterator[Promise]:
    text = (_TESTS / path).read_text(encoding="utf-8")
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
                    yield Promise(section, promise, f"{path}::{node.name}", command)


def write_list() -> None:
    of_section = defaultdict(list[Promise])
    for promise in promises():
        of_section[promise.section].append(promise)
    lines = ["# Promises", "", "Made from the marks of the tests by `make promises-list`."]
    for section, given in of_section.items():
        lines += ["", f"## {section}", "", "| promise | test | run by |", "|---|---|---|"]
        for promise in given:
            lines.append(f"| {promise.text.replace(' | ', ': ')} | `{promise.test}` | `make {promise.command}` |")
    LIST.parent.mkdir(exist_ok=True)
    LIST.write_text("\n".join(lines) + "\n", encoding="utf-8")
