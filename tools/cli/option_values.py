"""A value that an option does not take, as one sentence: which option, what it takes, what was given.

Typer reads values with pydantic, whose own words name neither: "Input should be a valid integer, unable to parse string
as an integer".
"""

from collections.abc import Iterable
from typing import Any, NoReturn, get_args

import typer
from pydantic import ValidationError
from typer.core import TyperGroup

from daemon.policy.presets import UnknownPolicyError, preset
from experts.vision.architectures import ARCHITECTURES
from tools.cli.console import fail

_NUMBERS = {int: "a whole number", float: "a number"}


class Commands(TyperGroup):
    """All commands, groups of commands too: what one of them cannot read is said, with status 2; Ctrl-C, with 1."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            fail("stopped by Ctrl-C", status=1)
        except typer.BadParameter as error:
            # A value that is missing was none to read: typer's own words name it, and the usage.
            if error.param is None or not isinstance(error.__cause__, ValidationError | None) or not error.message:
                raise
            _refuse(error, error.param)


def must_be_one_of(option: str, given: str, known: Iterable[str]) -> None:
    """For what is known only when the command runs; leaves with status 2."""
    known = tuple(known)
    if given not in known:
        fail(f"{option}: expected one of {', '.join(known)}, not {given!r}", status=2)


def must_be_architecture(option: str, given: str, *tasks: str) -> None:
    """The same of networks for `classify`, `detect`, or both."""
    must_be_one_of(option, given, (name for name, one in ARCHITECTURES.items() if one.task in tasks))


def must_be_policies(names: Iterable[str]) -> None:
    """The same of `--policy`, which takes more names than a list has."""
    for name in names:
        try:
            preset(name)
        except UnknownPolicyError as error:
            fail(f"--policy: {error}", status=2)


def _refuse(error: typer.BadParameter, param: Any) -> NoReturn:
    name = max(param.opts, key=len) if param.param_type_name == "option" else param.metavar or param.name.upper()
    expected = _expected(param)
    if not isinstance(error.__cause__, ValidationError) or expected is None:
        fail(f"{name}: {error.message.removesuffix('.')}", status=2)
    fail(f"{name}: expected {expected}, not {_given(error.__cause__)!r}", status=2)


def _expected(param: Any) -> str | None:
    """What a choice or a number may be; None for anything else."""
    described = param.type_descriptor
    if described.choices:
        return f"one of {', '.join(str(getattr(one, 'value', one)) for one in described.choices)}"
    number = _NUMBERS.get((*get_args(described.annotation), described.annotation)[0])
    least, most = described.parameter_info.min, described.parameter_info.max
    if number is None or (least is None and most is None):
        return number
    if least is None:
        return f"{number} up to {most:g}"
    return f"{number} from {least:g}" + ("" if most is None else f" to {most:g}")


def _given(error: ValidationError) -> Any:
    """The value itself: of a list, each is read by itself, and its error lies within the list's."""
    first = error.errors()[0]
    inner = first.get("ctx", {}).get("error")
    return _given(inner) if isinstance(inner, ValidationError) else first["input"]
