"""Boards by serial, over the index on lower(serial): by a serial itself, or by its beginning in either case.

The case of A to Z alone is folded, here and in the database: SQLite's `lower` knows no other letters, nor does
PostgreSQL's under the collation C, which the column has there. In both, texts are in the order of their code points.
"""

import string

from sqlalchemy import ColumnElement, func, select

from daemon.storage.database.schema import boards

_FOLD = str.maketrans(string.ascii_uppercase, string.ascii_lowercase)
_LAST_SIGN = chr(0x10FFFF)
_SURROGATES = range(0xD800, 0xE000)


def folded(serial: str) -> str:
    """As lower(serial) has it."""
    return serial.translate(_FOLD)


def beginning(text: str) -> tuple[str, str | None]:
    """Serials that begin with `text`, in either case: lower(serial) is from the first to before the second of these.

    The second is None where none is behind them all.
    """
    first = folded(text)
    stem = first.rstrip(_LAST_SIGN)
    if not stem:
        return first, None
    following = ord(stem[-1]) + 1
    # No text has a surrogate, so no order has them either.
    return first, stem[:-1] + chr(_SURROGATES.stop if following in _SURROGATES else following)


def has_serial(*serials: str) -> ColumnElement[bool]:
    """Whether a row of `boards` has one of these serials, to the letter."""
    same = boards.alias("same")
    # A question of its own: SQLite would put the serial that is asked for into lower(serial), and then use no index.
    found = select(same.c.board_id).where(func.lower(same.c.serial).in_([folded(serial) for serial in serials]))
    return boards.c.board_id.in_(found) & boards.c.serial.in_(serials)
