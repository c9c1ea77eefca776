"""What a start makes: a refusal of the operating system or of the database becomes one sentence for the user."""

from collections.abc import Callable
from typing import ParamSpec, TypeVar

from daemon.errors import StartError
from daemon.storage.database.connections import StoreError

P = ParamSpec("P")
T = TypeVar("T")


def made(make: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
    """What `make` gives; StartError where this machine refuses it."""
    try:
        return make(*arguments, **named)
    except StoreError as error:
        raise StartError(str(error)) from None
    except OSError as error:
        raise StartError(f"{error.filename or arguments[0]}: {error.strerror or error}") from None
