"""One rule for serials and names of boards, components and positions, on the wire, in files and in camera tools."""

import unicodedata

from routing_rules.document import hidden
from routing_rules.schema import MAX_NAME

NAME_EXPECTED = f"a string of 1 to {MAX_NAME} characters without control or invisible characters"


def text_in_use(text: str) -> str | None:
    """Return a text as it is used, published and stored, in NFC; None if it has control or invisible characters."""
    if text.isascii():
        return text if text.isprintable() else None
    return None if hidden(text) else unicodedata.normalize("NFC", text)


def name_in_use(value: object) -> str | None:
    """Return the name as it is used; None if it cannot be one."""
    name = text_in_use(value) if isinstance(value, str) else None
    return name if name is not None and 1 <= len(name) <= MAX_NAME else None
