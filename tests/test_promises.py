"""The table of breaks (tests/promises) fits the code, the pages and the tests."""

import pytest

from tests import ROOT
from tests.promises.breaks import BREAKS, Break

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


def test_forty_promises_are_broken() -> None:
    assert len(BREAKS) >= 40
