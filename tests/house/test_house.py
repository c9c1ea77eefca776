import pytest

from tests import ROOT
from tests.house.counts import Source, arrows, circles, sources
from tests.house.picture import draw


def a_source(path: str, text: str = "") -> Source:
    return Source(path, text)


@pytest.fixture(scope="module")
def rooms() -> dict[str, set[str]]:
    return arrows(sources())


def test_the_picture_of_the_rooms_is_that_of_the_imports(rooms: dict[str, set[str]]) -> None:
    assert (ROOT / "docs/img/rooms.svg").read_text(encoding="utf-8") == draw(rooms), "run: make rooms"


def test_no_rooms_import_each_other(rooms: dict[str, set[str]]) -> None:
    assert circles(rooms) == []


@pytest.mark.parametrize("line", ["import daemon.b.two", "from daemon.b import two", "from daemon.b.two import thing"])
def test_rooms_that_import_each_other_are_found(line: str) -> None:
    files = [
        a_source("daemon/a/one.py", line),
        a_source("daemon/b/__init__.py"),
        a_source("daemon/b/two.py", "def f():\n    from daemon.a.one import other"),
    ]
    assert circles(arrows(files)) == [["daemon.a", "daemon.b"]]
