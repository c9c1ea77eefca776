"""The instrument before its measurements: the tests' browser notices what it must notice."""

from collections.abc import Iterator

import pytest

from tests.daemon.dashboard.browser import Pages
from tests.small_site import a_site
from tests.waiting import until

HEAD = b"<!doctype html><title>page</title><link rel=icon href=data:,>"
PAGES = {
    "/good": HEAD + b"<p>good",
    "/script": HEAD + b"<script>nobody()</script>",
    "/missing": HEAD + b"<img src=/nowhere.png>",
    "/abroad": HEAD + b"<img src=http://192.0.2.1/x.png>",
}


@pytest.fixture(scope="module")
def site() -> Iterator[str]:
    with a_site(PAGES) as address:
        yield address


@pytest.mark.parametrize("width", [1280, 390])
def test_a_good_page_has_no_complaints_and_the_asked_width(open_page: Pages, site: str, width: int) -> None:
    page = open_page(f"{site}/good", width=width, dark=True)
    assert page.evaluate("innerWidth") == width
    assert page.evaluate("matchMedia('(prefers-color-scheme: dark)').matches")


@pytest.mark.parametrize(
    ("path", "text"), [("/script", "nobody"), ("/missing", "404"), ("/abroad", "another host: http://192.0.2.1")]
)
def test_an_error_a_missing_file_and_another_host_are_heard(open_page: Pages, site: str, path: str, text: str) -> None:
    page = open_page(site + path, wait_until="domcontentloaded")

    def is_heard() -> bool:
        page.wait_for_timeout(20)  # the browser's events are heard meanwhile
        return any(text in complaint for complaint in open_page.complaints)

    until(is_heard, lambda: open_page.complaints)
    open_page.forgive(".")
