"""The breaks (tests/promises) and the pages fit the code and the marks of the tests."""

import re

import pytest

from tests import ROOT
from tests.promises.breaks import BREAKS, Break
from tests.promises.page import promises

PROMISES = promises()


@pytest.mark.parametrize("item", BREAKS, ids=lambda item: f"{item.file}: {item.promise}")
def test_each_break_fits_the_code_its_promise_and_its_tests(item: Break) -> None:
    assert (ROOT / item.file).read_text(encoding="utf-8").count(item.find) == 1
    assert item.find != item.replace
    assert any(promise.text.startswith(item.promise) for promise in PROMISES)
    for test in item.tests:
        file, _, name = test.partition("::")
        text = (ROOT / "tests" / file).read_text(encoding="utf-8")
        assert not name or f"def {name}(" in text


def test_each_mark_has_its_section_and_each_row_of_an_attack_its_mark() -> None:
    pages = "\n".join((ROOT / f"docs/{page}.md").read_text(encoding="utf-8") for page in ("reliability", "security"))
    for promise in PROMISES:
        assert re.search(rf"(?m)^#+ {re.escape(promise.section)}$", pages), promise
    for section in ("Beyond this machine", "HTTP", "Prepared files"):
        text = re.split(r"(?m)^## ", pages.split(f"\n## {section}\n")[1])[0]
        rows = re.findall(r"(?m)^\| (.+) \|$", text)[1:]
        assert sorted(rows) == sorted(promise.text for promise in PROMISES if promise.section == section)
