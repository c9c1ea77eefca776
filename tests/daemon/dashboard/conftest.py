"""Fixtures of every page's tests."""

from tests.daemon.dashboard.browser import browser, open_page, shown_line

__all__ = ["browser", "open_page", "shown_line"]
