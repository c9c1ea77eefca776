"""What takes the pictures of `make screenshots`: sizes, names, pages that do not answer."""

import io
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.screenshots.pictures import MAX_BYTES, Page, ScreenshotError, chromium, small, take
from tests.small_site import a_site

pytestmark = pytest.mark.test_all

PAGE = (
    b"<!doctype html><title>x</title><link rel=icon href=data:,><button onclick=\"document.title='y'\">Begin</button>"
)


@pytest.fixture
def site() -> Iterator[str]:
    with a_site({"/": PAGE}) as address:
        yield address


def size_of(file: Path) -> tuple[int, int]:
    with Image.open(file) as picture:
        return picture.size


def test_every_page_is_taken_at_each_width_after_what_a_person_does_first(site: str, tmp_path: Path) -> None:
    pytest.importorskip("playwright")
    if shutil.which("chromium") is None:
        pytest.skip("needs chromium: make system-tools")
    done: list[str] = []

    def begin(tab: object) -> None:
        tab.get_by_role("button").click()  # type: ignore[attr-defined]
        done.append(tab.title())  # type: ignore[attr-defined]

    with chromium() as browser:
        made = take(browser, site, [Page("line", "/", dark=True), Page("review", "/", begin=begin)], tmp_path)
        with pytest.raises(ScreenshotError, match="/nowhere answered 404"):
            take(browser, site, [Page("no", "/nowhere")], tmp_path)
    assert done == ["y", "y", "y"]
    sizes = {file.name: size_of(file) for file in made}
    assert sizes == {
        "dashboard-line-dark-1920.png": (1920, 1080),
        "dashboard-review-1920.png": (1920, 1080),
        "dashboard-line-dark-1280.png": (1280, 800),
        "dashboard-line-dark-390.png": (390, 844),
        "dashboard-review-1280.png": (1280, 800),
        "dashboard-review-390.png": (390, 844),
    }


def test_a_picture_is_kept_small_and_a_plain_one_exact() -> None:
    plain, loud = Image.new("RGB", (1280, 800), (17, 94, 171)), np.random.default_rng(1).integers(0, 255, (300, 400, 3))
    for picture, is_exact in ((plain, True), (Image.fromarray(loud.astype(np.uint8)), False)):
        png = io.BytesIO()
        picture.save(png, "PNG")
        made = small(png.getvalue())
        assert len(made) <= MAX_BYTES
        again = Image.open(io.BytesIO(made)).convert("RGB")
        assert again.size == picture.size
        assert (again.tobytes() == picture.tobytes()) == is_exact
