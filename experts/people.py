"""Who does something, and when, as files and results note it."""

import getpass
import os
from datetime import UTC, datetime


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def current_user() -> str:
    """Return the user's name; under sudo, of the person who called it."""
    try:
        return os.environ.get("SUDO_USER") or getpass.getuser()
    except (KeyError, OSError):  # a process number without a name
        return str(os.getuid())
