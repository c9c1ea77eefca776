"""Moments as a person types them on the command line, as the UTC text that the database holds."""

import re
from datetime import UTC, date, datetime, timedelta
from typing import Literal

from daemon.units import utc_text

EXPECTED = "a day (2026-11-21), a time (2026-11-21T09:28, UTC unless it ends in an offset), today, yesterday, or 2h ago"

_AGO = re.compile(r"([0-9]{1,6}(?:\.[0-9]{1,3})?) ?(s|min|m|h|d|w)(?: ago)?")
_UNITS_S = {"s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0, "w": 7 * 86400.0}
_DAY = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")


class MomentError(ValueError):
    """No moment can be made of the text; the message says what is expected."""


def moment(text: str, now: datetime, edge: Literal["begin", "end"]) -> str:
    """`2026-11-21`, `2026-11-21T09:28`, `2h`, `today` as `2026-11-21T00:00:00.000Z`; `now` is an aware datetime.

    A whole day begins with its first moment; at the `end` edge it counts whole, so that is the next day's first.
    """
    said = text.strip().lower()
    day = {"today": now.astimezone(UTC).date(), "yesterday": now.astimezone(UTC).date() - timedelta(days=1)}.get(said)
    ago = _AGO.fullmatch(said)
    try:
        if _DAY.fullmatch(said):
            day = date.fromisoformat(said)
        if day is not None:
            first = datetime(day.year, day.month, day.day, tzinfo=UTC)
            return _text(first if edge == "begin" else first + timedelta(days=1))
        if said == "now":
            return _text(now)
        if ago is not None:
            return _text(now - timedelta(seconds=float(ago[1]) * _UNITS_S[ago[2]]))
        at = datetime.fromisoformat(said.upper())
        return _text(at if at.tzinfo else at.replace(tzinfo=UTC))
    except (ValueError, OverflowError):
        raise MomentError(f"expected {EXPECTED}, found {text!r}") from None


def _text(at: datetime) -> str:
    return utc_text(at.timestamp())
