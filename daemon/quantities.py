"""What values of a configuration are made of: sizes, durations and counts, as a person writes them."""

import re
from typing import Annotated

from pydantic import BeforeValidator, Field

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
    """Bytes of `250MB`, `1.5GiB` or a plain number."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(value))
    if isinstance(value, bool) or match is None or match[2].upper() not in _UNITS:
        raise ValueError(f"expected a size such as 250MB, 1.5GiB or a number of bytes, not {value!r}")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def parse_seconds(value: object) -> float:
    """Seconds of `500ms`, `20s`, `2m`, `12h`, `30d`, `3y`; a bare number is refused: its unit would be a guess."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]+)\s*", str(value))
    if match is None or match[2] not in _SECONDS:
        raise ValueError(f"expected a duration such as 500ms, 20s, 2m, 12h or 30d, not {value!r}")
    return float(match[1]) * _SECONDS[match[2]]


Bytes = Annotated[int, BeforeValidator(parse_bytes), Field(gt=0)]
Seconds = Annotated[float, BeforeValidator(parse_seconds), Field(gt=0)]
Count = Annotated[int, Field(ge=1)]
