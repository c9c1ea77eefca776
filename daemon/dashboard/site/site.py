"""What every page is given: the configuration, the daemon to ask, the database, live events, pictures, templates.

A page is a module with `router(site) -> APIRouter`; app.py names them all. Its routes are plain functions (`def`, not
`async def`): they run in a few threads, so that a question to the database holds up nobody's events. To show a page:
`site.page(request, "line.html", boards=…)`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from fastapi import Request
from fastapi.responses import HTMLResponse
from markupsafe import Markup

from daemon.config.settings import Config
from daemon.dashboard.site.cached_answers import Kept
from daemon.dashboard.site.database import Database
from daemon.dashboard.site.live import Live
from daemon.dashboard.site.pictures import WIDTHS, Pictures
from daemon.units import size_text
from daemon.wire.control import ask

_ANSWER_WITHIN_S = 1.0
_STATUS_KEEPS_S = 0.5
#: The pages in the order of the navigation: path, title, and the key that follows `g`.
NAVIGATION = (
    ("/", "Line", "l"),
    ("/boards", "Boards", "b"),
    ("/review", "Review", "r"),
    ("/defects", "Defects", "d"),
    ("/experts", "Experts", "e"),
    ("/machine", "Machine", "m"),
)


@dataclass(frozen=True, slots=True)
class Site:
    """One line's web pages. Everything may be used from any thread."""

    config: Config
    database: Database
    live: Live
    pictures: Pictures
    templates: jinja2.Environment
    _status: Kept[Mapping[str, Any]]

    def ask_daemon(self, kind: str, /, *, timeout_s: float = _ANSWER_WITHIN_S, **fields: Any) -> dict[str, Any]:
        """Return control's answer to `kind`. ControlError with `code` and `reason` where there is none."""
        return ask(self.config.endpoints.control, kind, timeout_s=timeout_s, **fields)

    def status(self) -> Mapping[str, Any]:
        """Control's `status`, at most half a second old, asked once for all who wait. ControlError as above."""
        return self._status.get()

    def render(self, template: str, **context: Any) -> str:
        """A fragment's text, for events and htmx."""
        return self.templates.get_template(template).render(**context)

    def page(self, request: Request, template: str, *, status_code: int = 200, **context: Any) -> HTMLResponse:
        """A whole page. `template` extends base.html; everything in `context` is escaped where it is shown."""
        shell = {
            "path": request.url.path,
            "navigation": NAVIGATION,
            "has_token": self.config.security.http_token is not None,
        }
        return HTMLResponse(self.render(template, **shell, **context), status_code)


def make_site(config: Config) -> Site:
    """NoDatabase where there is no database."""
    return Site(
        config=config,
        database=Database(config.database),
        live=Live(),
        pictures=Pictures(config.images),
        templates=_templates(),
        _status=Kept(_STATUS_KEEPS_S, lambda: ask(config.endpoints.control, "status", timeout_s=_ANSWER_WITHIN_S)),
    )


def _templates() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parents[1] / "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals["widths"] = WIDTHS
    environment.filters |= {"moment": _moment, "percent": _percent, "number": _number, "ms": _ms, "size": _size}
    return environment


def _moment(value: str | None, style: str = "full") -> Markup:
    """A stored time as `<time>`: app.js shows it in the reader's zone. `style` is `full`, `time` or `date`."""
    if not value:
        return Markup("–")
    try:
        said = f"{datetime.fromisoformat(value):%Y-%m-%d %H:%M:%S} UTC"
    except ValueError:
        return Markup("{}").format(value)
    return Markup('<time datetime="{}" data-style="{}" title="{}">{}</time>').format(value, style, said, said)


def _percent(share: float | None, digits: int = 1) -> str:
    return "–" if share is None else f"{100 * share:.{digits}f} %"


def _number(value: float | None) -> str:
    """Thousands apart by a thin space."""
    return "–" if value is None else f"{value:,}".replace(",", "\u202f")


def _ms(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value / 1000:.1f} s" if value >= 10_000 else f"{value:.1f} ms" if value < 100 else f"{value:.0f} ms"


def _size(value: float | None) -> str:
    return "–" if value is None else size_text(value)
