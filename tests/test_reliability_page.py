"""What pages say of tests by hand: those that they name exist."""

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
PAGES = [TESTS.parent / "docs" / name for name in ("reliability.md", "service.md")]
NAMED = sorted(
    {
        (file, function)
        for page in PAGES
        for file, _, function in re.findall(r"`(?:tests/)?([\w/]+\.py)(::(\w+))?`", page.read_text(encoding="utf-8"))
        if "test_" in file
    }
)


@pytest.mark.parametrize(("file", "function"), NAMED)
def test_a_test_that_the_page_names_exists(file: str, function: str):
    path = TESTS / file
    assert path.is_file(), f"docs name tests/{file}, which is not there"
    if function:
        assert re.search(rf"^(async )?def {function}\(", path.read_text(encoding="utf-8"), re.MULTILINE), function
