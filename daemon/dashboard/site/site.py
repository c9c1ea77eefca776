"""The services that every page gets: configuration, the daemon, the database, live topics, pictures, templates.

Routes are plain functions (`def`, not `async def`): a question to the database delays no events.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from datetime import date, datetime
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal
from unicodedata import normalize
from urllib.parse import urlencode

import jinja2
from fastapi import Request
from fastapi.responses import HTMLResponse
from markupsafe import Markup
from pydantic import AfterValidator, StringConstraints

from daemon.config.plant_time import PlantTime
from daemon.config.settings import Config, PlantClock
from daemon.dashboard.site.database import CachedAnswer, Database, NoDatabase, TooMuchToCount
from daemon.dashboard.site.live import POLL_S, LiveTopics
from daemon.dashboard.site.pictures import WIDTHS, PictureFolder
from daemon.dashboard.site.stored_rules import StoredRules
from daemon.units import counted, printable, size_text, utc_text
from daemon.wire.control import ControlError, ask

_CONTROL_TIMEOUT_S = 1.0
#: A text in an address or a form.
ShortText = Annotated[str, StringConstraints(max_length=128)]
SearchText = Annotated[ShortText, StringConstraints(strip_whitespace=True), AfterValidator(partial(normalize, "NFC"))]
Verdict = Literal["", "pass", "fail", "review", "unknown"]
#: A line's pages in the order of the navigation.
NAVIGATION = (
    ("/", "Line", "l"),
    ("/boards", "Boards", "b"),
    ("/review", "Review", "r"),
    ("/defects", "Defects", "d"),
    ("/experts", "Experts", "e"),
    ("/machine", "Machine", "m"),
)


class Filters:
    """The filters in an address, as a dataclass; a link leaves out those that have their default."""

    __slots__ = ()

    def fields(self, **changes: Any) -> dict[str, Any]:
        defaults = asdict(type(self)())  # type: ignore[call-overload]
        fields = asdict(self) | changes  # type: ignore[call-overload]
        return {name: value for name, value in fields.items() if value not in ("", None, defaults.get(name))}

    def query(self, **changes: Any) -> str:
        return urlencode(self.fields(**changes))


class PageShell:
    """Services that a line's and a plant's pages share, for any thread: frame, live parts, the plant's clock."""

    def __init__(
        self,
        database: Database,
        clock: PlantClock,
        navigation: Sequence[tuple[str, str, str]],
        defect: Callable[[Any], str],
        *folders: Path,
        has_token: bool,
    ) -> None:
        """`navigation` names the pages: path, title, and the key that follows `g`; `folders` have more templates."""
        self.database = database
        self.live = LiveTopics()
        self.plant = clock.clock()
        self.templates = jinja2.Environment(
            loader=jinja2.FileSystemLoader([Path(__file__).parents[1] / "templates", *folders]),
            autoescape=True,
            finalize=_visible,
            undefined=jinja2.StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self.templates.globals |= {
            "widths": WIDTHS,
            "plant_zone": clock.timezone or "",
            "navigation": navigation,
            "has_token": has_token,
            "part": self.live.text,
        }
        self.templates.filters |= {
            "moment": partial(_moment, self.plant),
            "percent": _percent,
            "number": _number,
            "ms": _ms,
            "size": _size,
            "defect": defect,
            "reason": _reason,
            "counted": counted,
        }

    def today(self) -> date:
        return self.plant.today(time.time())

    def day_began(self) -> str:
        return self.plant.days(self.today()).since

    def add_part(
        self, name: str, template: str, context: Callable[[], Mapping[str, Any]], problem: str, every_s: float = POLL_S
    ) -> None:
        """Add a live part, `part(name)` in a page. If `context` fails, it shows `problem` and the reason."""

        def make() -> str:
            try:
                return self.render(template, **context())
            except (ControlError, NoDatabase, TooMuchToCount) as error:
                return self.render("_problem.html", title=problem, remedy=str(error))

        self.live.add(name, make, every_s)

    def render(self, template: str, **context: Any) -> str:
        return self.templates.get_template(template).render(**context)

    def page(self, request: Request, template: str, *, status_code: int = 200, **context: Any) -> HTMLResponse:
        return HTMLResponse(self.render(template, path=request.url.path, **context), status_code)


class Site(PageShell):
    def __init__(self, config: Config) -> None:
        self.config = config
        self.pictures = PictureFolder(config.images)
        database = Database(config.database)
        self.rules = StoredRules(database)
        has_token = config.security.http_token is not None
        super().__init__(database, config.plant, NAVIGATION, self.rules.defect, has_token=has_token)
        #: Return control's `status`, at most half a second old; ControlError if there is none.
        self.status = CachedAnswer(0.5, lambda: self.ask_daemon("status")).get

    def ask_daemon(self, kind: str, /, *, timeout_s: float = _CONTROL_TIMEOUT_S, **fields: Any) -> dict[str, Any]:
        return ask(self.config.endpoints.control, kind, timeout_s=timeout_s, **fields)


def _visible(value: object) -> object:
    """Show invisible characters in older names as escapes, but keep the spaces and line ends of our texts."""
    return printable(value, "\n\r\t\u2009\u202f") if type(value) is str else value


def _moment(plant: PlantTime, value: str | datetime | None, style: str = "full") -> Markup:
    """Format a time as `<time>`, `full`, `time` or `date`. app.js shows it in the plant's zone, or the reader's."""
    if not value:
        return Markup("–")
    value = utc_text(value.timestamp()) if isinstance(value, datetime) else value
    try:
        text = plant.text(value)
    except ValueError:
        return Markup("{}").format(value)
    return Markup('<time datetime="{}" data-style="{}" title="{}">{}</time>').format(value, style, text, text)


def _percent(share: float | None, digits: int = 1) -> str:
    return "–" if share is None else f"{100 * share:.{digits}f} %"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:,}".replace(",", "\u202f")


def _reason(reason: str | None) -> str:
    return "no expert yet" if reason == "no_expert" else (reason or "").replace("_", " ")


def _ms(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value / 1000:.1f} s" if value >= 10_000 else f"{value:.1f} ms" if value < 100 else f"{value:.0f} ms"


def _size(value: float | None) -> str:
    return "–" if value is None else size_text(value)
