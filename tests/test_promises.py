"""The table of breaks (tests/promises) and the tables of the pages fit the code and the tests."""

import pytest

from tests import ROOT
from tests.promises.breaks import BREAKS, Break
from tests.promises.page import PAGES as GENERATED
from tests.promises.page import promises, with_tables

PAGES = "\n".join((ROOT / f"docs/{page}.md").read_text(encoding="utf-8") for page in ("reliability", "security"))


@pytest.mark.parametrize("item", BREAKS, ids=lambda item: f"{item.file}: {item.promise}")
def test_each_break_fits_the_code_its_page_and_its_tests(item: Break) -> None:
    assert (ROOT / item.file).read_text(encoding="utf-8").count(item.find) == 1
    assert item.find != item.replace
    assert f"\n| {item.promise}" in PAGES
    for test in item.tests:
        file, _, name = test.partition("::")
        text = (ROOT / "tests" / file).read_text(encoding="utf-8")
        assert not name or f"def {name}(" in text


def test_the_tables_of_the_pages_are_what_the_marks_of_the_tests_give() -> None:
    given = promises()
    for page in GENERATED:
        text = page.read_text(encoding="utf-8")
        assert text == with_tables(text, given), "run: python -m tests.promises --pages"
    assert [promise for promise in given if promise.row not in PAGES] == [], "no table has this heading"
