"""Values of options: moments as a person types them, and one sentence for a value that an option does not take.

Typer reads values with pydantic, whose own words name neither the option nor what it takes: "Input should be a valid
integer, unable to parse string as an integer".
"""

import re
from collections.abc import Iterable
from datetime import UTC, date, datetime, time, timedelta
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, get_args

import typer
from pydantic import ValidationError
from typer.core import TyperGroup

from daemon.config.plant_time import PlantTime, Shift
from daemon.errors import ConfigError, MissingExtraError, ReleaseError
from daemon.policy.presets import UnknownPolicyError, preset
from daemon.units import parse_bytes, utc_text
from daemon.wire.control import ControlError
from daemon.wire.keys import KeyFileError
from daemon.wire.messages import NAME, NAME_EXPECTED
from experts.moe.errors import ModelError
from tools.terminal.console import DEFAULT_CONFIG, CommandError, fail
from tools.terminal.open_line import settings_of

_NUMBERS = {int: "a whole number", float: "a number"}
_MOMENTS = "a day (2026-11-21), a time (2026-11-21T09:28, of the plant unless it ends in an offset), 09:28, today, "
_MOMENTS += "yesterday, or 2h ago"
_UTC = PlantTime()
#: The extra that brings each package that commands import when they run.
_EXTRAS = {"boto3": "plant", "psycopg": "plant", "tokenizers": "moe", "transformers": "moe"}
_AGO = re.compile(r"([0-9]{1,6}(?:\.[0-9]{1,3})?) ?(s|min|m|h|d|w)(?: ago)?")
_UNITS_S = {"s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0, "w": 7 * 86400.0}
_CLOCK = re.compile(r"[0-9]{1,2}:[0-9]{2}")
_DAY = re.compile(r"[0-9]{4}(-?)[0-9]{2}\1[0-9]{2}")


def _checked_note(text: str | None) -> str | None:
    if text is None or NAME.fullmatch(text):
        return text
    raise typer.BadParameter(f"expected {NAME_EXPECTED}, not {text!r}")


Note = Annotated[
    str | None, typer.Option("--note", metavar="TEXT", help="Why, for `coserve changes`.", callback=_checked_note)
]

Now = Annotated[
    bool, typer.Option("--now", help="Judge nothing more by earlier editions, not even boards that have begun.")
]


def since_option(said: str, panel: str | None = None) -> Any:
    """Return `--since`; `said` names what it chooses: `Judged then or later`."""
    times = "2026-11-21, 2026-11-21T09:28, 09:28 (the plant's clock), today, 2h (ago)"
    return typer.Option(metavar="TIME", help=f"{said}: {times}.", rich_help_panel=panel)


def until_option(said: str, panel: str | None = None) -> Any:
    return typer.Option(metavar="TIME", help=f"{said}; a day counts whole.", rich_help_panel=panel)


def shift_option(said: str, panel: str | None = None) -> Any:
    which = "the newest that has begun or that of a day: early, night@2026-11-21"
    return typer.Option(
        metavar="NAME[@DAY]", help=f"{said} in one shift of `plant.shifts`, {which}.", rich_help_panel=panel
    )


Discard = Annotated[
    bool, typer.Option("--discard", help="Give up edits of rules.yaml and catalog.yaml that were never loaded.")
]


class Commands(TyperGroup):
    """All commands and groups of commands. A command's errors, wrong values and Ctrl-C end it with one sentence.

    Every command takes the line's coserve.yaml as an argument as well as by `--config`.
    """

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        command = super().get_command(ctx, cmd_name)
        if isinstance(command, Commands) and command.commands and "Example:" not in (command.help or ""):
            texts = ((command.get_command(ctx, each).help or "") for each in command.commands)
            example = next((text.partition("Example: ")[2] for text in texts if "Example: " in text), "")
            command.help = f"{command.help}\n\nExample: {example}"
        if command is not None and command.help:  # rich would break its lines where the source does
            command.help = "\n\n".join(" ".join(part.split()) for part in command.help.split("\n\n"))
        return command

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, command, rest = super().resolve_command(ctx, args)
        return name, command, rest if command is None else _with_config(command, rest)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            fail("stopped by Ctrl-C", status=1)
        except typer.BadParameter as error:
            # Typer's own words name a missing value, and the usage.
            if error.param is None or not isinstance(error.__cause__, ValidationError | None) or not error.message:
                raise
            _refuse(error, error.param)
        except Exception as error:
            said = _in_a_sentence(error, f"{ctx.command_path} {ctx.invoked_subcommand}")
            if said is None:
                raise
            fail(*said)


def _in_a_sentence(error: Exception, command: str) -> tuple[str, int] | None:
    """Return all that a person needs to know of an error, and the exit status; None for a bug of ours."""
    match error:
        case ModuleNotFoundError(name=str(name)) if (package := name.partition(".")[0]) in _EXTRAS:
            missing = MissingExtraError(package, command, _EXTRAS[package])
            return str(missing), missing.status
        case UnicodeEncodeError():
            return f"{error.object}: names of files and folders must be UTF-8: rename it", 2
        case OverflowError():  # sqlite3's, for a number that was given as an option
            return "a number is too large: the results have numbers below 2^63", 2
        case OSError() if not isinstance(error, BrokenPipeError):
            remedy = ": do this as the user who owns it" if isinstance(error, PermissionError) else ""
            return f"{error.filename}: {error.strerror}{remedy}" if error.filename else str(error), 1
        case _:
            return (str(error), getattr(error, "status", 1)) if isinstance(error, _refusals()) else None


def _refusals() -> tuple[type[Exception], ...]:
    """Return the errors whose text says what to do. Imported late: most commands meet none."""
    from daemon.storage.database.connections import StoreError
    from experts.catalog import CatalogError
    from experts.editions.edition import EditionError
    from experts.errors import ExpertError

    of_daemon = (ConfigError, ControlError, KeyFileError, MissingExtraError, ReleaseError, StoreError)
    return CommandError, CatalogError, EditionError, ExpertError, ModelError, *of_daemon


def _with_config(command: Any, args: list[str]) -> list[str]:
    """Return `args` with the configuration where `command` declares it: as its first argument, or as `--config`."""
    declared = next((each for each in command.params if each.name == "config"), None)
    if declared is None or "--help" in args:
        return args
    with_value = {name for each in command.params if not getattr(each, "is_flag", False) for name in each.opts}
    free = [at for at, arg in enumerate(args) if not arg.startswith("-") and not (at and args[at - 1] in with_value)]
    if declared.param_type_name == "option":
        is_named = any(arg.partition("=")[0] in declared.opts for arg in args)
        at = next((at for at in free if args[at].endswith((".yaml", ".yml"))), None)
        return args if is_named or at is None else [*args[:at], *args[at + 1 :], "--config", args[at]]
    for at, arg in enumerate(args):
        name, _, value = arg.partition("=")
        if name == "--config" and (value or at + 1 < len(args)):
            return [value, *args[:at], *args[at + 1 :]] if value else [args[at + 1], *args[:at], *args[at + 2 :]]
    return [*args, str(DEFAULT_CONFIG)] if declared.required and not free and DEFAULT_CONFIG.is_file() else args


def parsed_size(option: str, text: str) -> int:
    """Return the bytes of a size such as 2GB; exit with status 2 if it is none."""
    try:
        return parse_bytes(text)
    except ValueError as error:
        fail(f"{option}: {error}", status=2)


def must_be_one_of(option: str, value: str, choices: Iterable[str]) -> None:
    """Exit with status 2 if `value` is not among `choices`, which are known only when the command runs."""
    choices = tuple(choices)
    if value not in choices:
        fail(f"{option}: expected one of {', '.join(choices)}, not {value!r}", status=2)


def must_be_policies(names: Iterable[str]) -> None:
    for name in names:
        try:
            preset(name)
        except UnknownPolicyError as error:
            fail(f"--policy: {error}", status=2)


def time_window(
    config: Path | PlantTime, since: str | None, until: str | None = None, shift: str | None = None
) -> tuple[str | None, str | None]:
    """Return the range of the options as UTC text, by the plant's clock; exit with status 2 if a value is wrong.

    The clock is that of a line's `config`, or given itself.
    """
    if since is None and until is None and shift is None:
        return None, None
    plant = config if isinstance(config, PlantTime) else settings_of(config).plant.clock()
    now = datetime.now(UTC)
    if shift is not None and (since is not None or until is not None):
        fail("--shift names its own time: leave out --since and --until", status=2)
    option = "--shift"
    try:
        if shift is not None:
            span = shift_span(shift, now, plant)
            return span.since, span.until
        option = "--since"
        begin = None if since is None else moment(since, now, "begin", plant)
        option = "--until"
        return begin, None if until is None else moment(until, now, "end", plant)
    except ValueError as error:
        fail(f"{option}: {error}", status=2)


def shift_span(text: str, now: datetime, plant: PlantTime) -> Shift:
    """Return the shift `early` that began last, or `early@2026-11-21`; ValueError says what is expected."""
    name, _, words = text.strip().partition("@")
    day = plant.today(now.timestamp())
    if words:
        named = _day(words.lower(), day)
        if named is None:
            raise ValueError(
                f"expected a day such as {name}@2026-11-21, {name}@today or {name}@yesterday, found {text!r}"
            )
        return plant.shift(name, named)
    newest = plant.shift(name, day)
    return newest if newest.since <= utc_text(now.timestamp()) else plant.shift(name, day - timedelta(days=1))


def moment(text: str, now: datetime, edge: Literal["begin", "end"], plant: PlantTime = _UTC) -> str:
    """Return `2026-11-21`, `2026-11-21T09:28`, `09:28`, `2h` or `today` as the database has times.

    `now` is an aware datetime. A time is of the plant's clock unless it has an offset; one without a day is its newest.
    A whole day is its first moment; at the `end` edge it is the next day's first moment. Raises ValueError, which says
    what is expected.
    """
    words = text.strip().lower()
    now_s = now.timestamp()
    today = plant.today(now_s)
    ago = _AGO.fullmatch(words)
    try:
        day = _day(words, today)
        if day is not None:
            return plant.days(day).until if edge == "end" else plant.days(day).since
        if words == "now":
            return utc_text(now_s)
        if ago is not None:
            return utc_text((now - timedelta(seconds=float(ago[1]) * _UNITS_S[ago[2]])).timestamp())
        if _CLOCK.fullmatch(words):
            clock = time.fromisoformat(words.zfill(5))
            begun = plant.at(today, clock)
            return utc_text(begun if begun <= now_s else plant.at(today - timedelta(days=1), clock))
        at = datetime.fromisoformat(words.upper())
        return utc_text(at.timestamp() if at.tzinfo else plant.at(at.date(), at.time()))
    except (ValueError, OverflowError):
        raise ValueError(f"expected {_MOMENTS}, found {text!r}") from None


def _day(words: str, today: date) -> date | None:
    if _DAY.fullmatch(words):
        return date.fromisoformat(words)
    return {"today": today, "yesterday": today - timedelta(days=1)}.get(words)


def _refuse(error: typer.BadParameter, param: Any) -> NoReturn:
    name = max(param.opts, key=len) if param.param_type_name == "option" else param.metavar or param.name.upper()
    expected = _expected(param)
    if not isinstance(error.__cause__, ValidationError) or expected is None:
        fail(f"{name}: {error.message.removesuffix('.')}", status=2)
    fail(f"{name}: expected {expected}, not {_refused_value(error.__cause__)!r}", status=2)


def _expected(param: Any) -> str | None:
    """Return the values that a choice or a number may have; None for any other parameter."""
    described = param.type_descriptor
    if described.choices:
        return f"one of {', '.join(str(getattr(choice, 'value', choice)) for choice in described.choices)}"
    number = _NUMBERS.get((*get_args(described.annotation), described.annotation)[0])
    lowest, highest = described.parameter_info.min, described.parameter_info.max
    if number is None or (lowest is None and highest is None):
        return number
    if lowest is None:
        return f"{number} up to {highest:g}"
    return f"{number} from {lowest:g}" + ("" if highest is None else f" to {highest:g}")


def _refused_value(error: ValidationError) -> Any:
    """Return the value itself. Each value of a list has an error of its own, within the list's."""
    first = error.errors()[0]
    inner = first.get("ctx", {}).get("error")
    return _refused_value(inner) if isinstance(inner, ValidationError) else first["input"]
