from tests import ROOT
from tests.house.counts import arrows, sources
from tests.house.picture import draw


def test_the_picture_of_the_rooms_is_that_of_the_imports() -> None:
    assert (ROOT / "docs/img/rooms.svg").read_text(encoding="utf-8") == draw(arrows(sources())), "run: make rooms"
