"""Values on their way into a spreadsheet, which takes some text for a formula and runs it on the reader's PC."""

from typing import Any

_FORMULA = ("=", "+", "-", "@", "\t", "\r")


def cell(value: Any) -> Any:
    """A value as a CSV file has it: text that would be run gets an apostrophe in front, numbers stay numbers."""
    return f"'{value}" if isinstance(value, str) and value.startswith(_FORMULA) else value
