"""Values as people write and read them: sizes, durations, counts, UTC times, and text in a spreadsheet's cell."""

import re
from datetime import UTC, datetime
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field

#: More is a slip of the pen: a limit that never limits.
MAX_BYTES, MAX_COUNT = 2**46, 2**30
_UNITS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0, "y": 31_536_000.0}


def parse_bytes(value: object) -> int:
    """Return the bytes of `250MB`, `1.5GiB` or a plain number."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(value))
    if isinstance(value, bool) or match is None or match[2].upper() not in _UNITS:
        raise ValueError(f"expected a size such as 250MB, 1.5GiB or a number of bytes, not {value!r}")
    size_bytes = float(match[1]) * _UNITS[match[2].upper()]
    if size_bytes > MAX_BYTES:
        raise ValueError(f"expected a size of 64TiB at most, not {value!r}")
    return int(size_bytes)


def parse_seconds(value: object) -> float:
    """Return the seconds of `500ms`, `20s`, `2m`, `12h`, `30d`, `3y`; a bare number is refused: its unit is unknown."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]+)\s*", str(value))
    if match is None or match[2] not in _SECONDS:
        raise ValueError(f"expected a duration such as 500ms, 20s, 2m, 12h or 30d, not {value!r}")
    seconds = float(match[1]) * _SECONDS[match[2]]
    if seconds <= 100 * _SECONDS["y"]:
        return seconds
    raise ValueError(f"expected a duration of 100y at most, not {value!r}")


def between(min_s: float, max_s: float, expected: str) -> AfterValidator:
    def check(value: float) -> float:
        if not min_s <= value <= max_s:
            raise ValueError(f"expected a duration {expected}")
        return value

    return AfterValidator(check)


Bytes = Annotated[int, BeforeValidator(parse_bytes), Field(gt=0)]
Seconds = Annotated[float, BeforeValidator(parse_seconds), Field(gt=0)]
Count = Annotated[int, Field(ge=1, le=MAX_COUNT)]


def size_text(size_bytes: float) -> str:
    """Format a size in powers of ten and three digits: `812 B`, `45 kB`, `44.8 MB`, `2.0 GB`."""
    value = float(size_bytes)
    for unit, digits in (("B", 0), ("kB", 0), ("MB", 1), ("GB", 1)):
        shown = 0 if value >= 99.95 else digits
        if round(value, shown) < 1000:
            return f"{value:.{shown}f} {unit}"
        value /= 1000
    return f"{value:,.1f} TB"


def count_text(number: float, noun: str, plural: str = "") -> str:
    """Format a number with its noun for a terminal: `1 image`, `1,042 images`."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def counted(number: int, noun: str, plural: str = "") -> str:
    """The same for a page, with thin spaces between thousands: `2 140 boards`."""
    return count_text(number, noun, plural).replace(",", "\u202f")


def utc_text(wall_s: float) -> str:
    """Return seconds since the epoch as the wire and the database write a time: `2026-11-21T09:28:11.123Z`."""
    ms = round(wall_s * 1000)
    moment = datetime.fromtimestamp(ms // 1000, UTC)
    return f"{moment:%Y-%m-%dT%H:%M:%S}.{ms % 1000:03d}Z"


def wall_seconds(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


def monotonic_of(stamp: str, now_s: float, now_wall_s: float) -> float:
    """Convert the time of a row that a restart found to this process's monotonic clock.

    If the wall clock was set back since, return `now_s`: the downtime does not count.
    """
    return now_s - max(0.0, now_wall_s - wall_seconds(stamp))


#: A spreadsheet takes text that begins so for a formula, and would run it on the reader's PC. In countries with a
#: decimal comma it divides a CSV file at semicolons too, and then does not see the quotes around a line break. It may
#: drop control, zero-width and bidi characters before it looks.
_UNSEEN = r"\s\0-\x1f\x7f-\x9f\xad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u202a-\u202e"
_UNSEEN += r"\u2060-\u206f\u3164\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufffb\U000e0000-\U000e0fff"
_FORMULA = re.compile(rf"(^|[;\r\n])(?=[{_UNSEEN}]*[=+@\uff1d\uff0b\uff0d\uff20-]|[\t\r])")


def spreadsheet_cell(value: Any) -> Any:
    """Return a value for a CSV file: text that a spreadsheet would run gets an apostrophe in front."""
    return _FORMULA.sub(r"\1'", value) if isinstance(value, str) else value


#: Letters and signs without ink: fillers of Hangul and Khmer, an empty pattern of Braille.
_BLANK = frozenset("\u034f\u115f\u1160\u17b4\u17b5\u2800\u3164\uffa0")


def printable(text: str, kept: str = "") -> str:
    """Return `text` with escapes for characters that are not seen or reverse text: names come from outside."""
    if text.isascii() and text.isprintable():
        return text
    is_shown = {sign: sign in kept or (sign.isprintable() and sign not in _BLANK) for sign in text}
    return "".join(sign if is_shown[sign] else ascii(sign)[1:-1] for sign in text)
