"""UTC text as RESULTS.md and PROTOCOL.md write it: `2026-11-21T09:28:11.123Z`."""

from datetime import UTC, datetime


def to_text(wall_s: float) -> str:
    """`wall_s` (seconds since the epoch) to the millisecond."""
    ms = round(wall_s * 1000)
    moment = datetime.fromtimestamp(ms // 1000, UTC)
    return f"{moment:%Y-%m-%dT%H:%M:%S}.{ms % 1000:03d}Z"


def to_wall_s(text: str) -> float:
    """Seconds since the epoch of a stored time."""
    return datetime.fromisoformat(text).timestamp()
