"""The keys of a rules file and what each may hold (docs/rules.md); `check.py` checks what needs two places at once."""

import fnmatch
import re
import unicodedata
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, product, zip_longest
from typing import Annotated, Any, Literal, TypeGuard, cast

from pydantic import BaseModel, ConfigDict, Discriminator, Field, PlainValidator, Tag
from pydantic_core import PydanticCustomError

from routing_rules.routes import ANY_LABEL, COMPONENT

#: A pattern with more stars counts as not covered: nothing is refused by mistake.
_MAX_STARS = 6
MAX_NAME = 128
MAX_QUANTITY = 1_000_000
MAX_TIME_LIMIT_S = 7 * 86_400.0
_UNITS_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
_NEWEST = re.compile(r"([1-9][0-9]{0,3}) (board|image)s?")
_MAX_NEWEST = {"board": 200, "image": 1000}
_DURATION = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,9})?) ?(ms|s|m|h)")


def _expected(what: str) -> PydanticCustomError:
    """Say what is expected; `load.validate` writes it as "expected WHAT, found VALUE"."""
    return PydanticCustomError("expected", "{what}", {"what": what})


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_count(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def is_name(value: object) -> TypeGuard[str]:
    """Return True if the wire allows this board type or component (PROTOCOL.md, `inspect`)."""
    return (
        isinstance(value, str)
        and 1 <= len(value) <= MAX_NAME
        and not any(unicodedata.category(sign) in {"Cc", "Cs"} for sign in value)
        and value == value.strip()
    )


def _name(what: str) -> Callable[[object], str]:
    def check(value: object) -> str:
        if not is_name(value):
            raise _expected(f"{what}: text of 1 to {MAX_NAME} characters without blanks around it")
        return value

    return check


def _label(value: object) -> str:
    if not is_name(value) or value == ANY_LABEL:
        raise _expected(f"a label: text of 1 to {MAX_NAME} characters; `*` for all labels is not possible here")
    return value


@dataclass(frozen=True, slots=True)
class Glob:
    """A pattern of component types: `*` is any text, `?` any one character, all else itself; case counts."""

    text: str
    regex: re.Pattern[str]

    @classmethod
    def of(cls, text: str) -> "Glob":
        # Brackets are ordinary characters here; fnmatch would read them as a set.
        return cls(text, re.compile(fnmatch.translate(text.replace("[", "[[]"))))

    @property
    def head(self) -> str:
        """The literal text before the first wildcard."""
        return re.split(r"[*?]", self.text, maxsplit=1)[0]

    def matches(self, name: str) -> bool:
        return self.regex.fullmatch(name) is not None

    def covers(self, other: "Glob") -> bool:
        """Return True if this pattern matches every name, of one character or more, that `other` matches."""
        # NUL stands for the characters that no pattern names. A star is tried as nothing, as one of them, and as more
        # than this pattern can match without a star of its own.
        parts = re.sub(r"\*+", "*", other.text).replace("?", "\0").split("*")
        if len(parts) > _MAX_STARS + 1:
            return False
        fillings = product(("", "\0", "\0" * (len(self.text) + 1)), repeat=len(parts) - 1)
        names = ("".join(chain(*zip_longest(parts, filling, fillvalue=""))) for filling in fillings)
        return all(self.matches(name) for name in names if name)


def is_glob(text: str) -> bool:
    try:
        _glob(text)
    except PydanticCustomError:
        return False
    return True


def _glob(value: object) -> str:
    if not is_name(value):
        raise _expected(f"a pattern of component types such as QFP*: text of 1 to {MAX_NAME} characters")
    if "[" in value or "]" in value:
        raise _expected("a pattern in which only * (any text) and ? (one character) are wild, no brackets")
    if "**" in value:
        raise _expected("a pattern with single stars: ** means no more than *")
    return value


def _expert(value: object) -> str:
    if not is_name(value):
        raise _expected('the name of an expert, in quotes where it has {component}: expert: "{component}"')
    if set("{}") & set(value.replace(COMPONENT, "")):
        raise _expected(f"the name of an expert, with no braces but those of `{COMPONENT}`")
    return value


def _number(what: str, low: float, high: float, *, is_whole: bool = False, above: bool = False) -> PlainValidator:
    """Return a check of a number from `low`, or `above` it, to `high`."""

    def check(value: Any) -> float:
        is_right = _is_count(value) if is_whole else _is_number(value)
        if not is_right or not low <= value <= high or (above and value == low):
            raise _expected(what)
        return value if is_whole else float(value)

    return PlainValidator(check)


def _time_limit(value: object) -> float:
    parts = _DURATION.fullmatch(value) if isinstance(value, str) else None
    seconds = float(parts[1]) * _UNITS_S[parts[2]] if parts else 0.0
    if not 0.0 < seconds <= MAX_TIME_LIMIT_S:
        raise _expected("a duration above 0 and to 168h, with its unit: 500ms, 20s, 2m or 1h")
    return seconds


def _window(value: object) -> tuple[float, str, str]:
    """Return how far an alarm looks back: the number, of `boards`, `images` or `seconds`, and the text."""
    if (parts := _NEWEST.fullmatch(str(value))) and int(parts[1]) <= _MAX_NEWEST[parts[2]]:
        return int(parts[1]), f"{parts[2]}s", str(value)
    with suppress(PydanticCustomError):
        return _time_limit(value), "seconds", str(value)
    raise _expected("how far it looks back: to `200 boards`, to `1000 images`, or a duration to 168h such as 10m")


def _fractions(value: object, length: int, what: str) -> tuple[float, ...]:
    parts = cast("list[Any]", value) if isinstance(value, list) else []
    if len(parts) != length or not all(_is_number(part) and 0 <= part <= 1 for part in parts):
        raise _expected(what)
    return tuple(map(float, parts))


def _region(value: object) -> tuple[float, float, float, float]:
    what = "[x1, y1, x2, y2] in fractions of the image from 0 to 1, with x1 < x2 and y1 < y2"
    x1, y1, x2, y2 = _fractions(value, 4, what)
    if not (x1 < x2 and y1 < y2):
        raise _expected(what)
    return x1, y1, x2, y2


def _point(value: object) -> tuple[float, float]:
    x, y = _fractions(value, 2, "[x, y] in fractions of the image from 0 to 1")
    return x, y


def _either(expectation: str, **tags: type) -> Discriminator:
    """Choose a union's member by the value's shape, so that a mistake names one expectation, not all."""

    def choose(value: object) -> str | None:
        return next((tag for tag, shape in tags.items() if isinstance(value, shape) and value is not True), None)

    return Discriminator(choose, custom_error_type="expected", custom_error_message=expectation)


Name = Annotated[str, PlainValidator(_name("a name"))]
Label = Annotated[str, PlainValidator(_label)]
AnyLabel = Annotated[str, PlainValidator(_name("a label, or `*` for all that are not named"))]
Designator = Annotated[str, PlainValidator(_name("a designator"))]
Code = Annotated[str, PlainValidator(_name("a defect code"))]
StepName = Annotated[str, PlainValidator(_name("the name of an entry of detectors or steps"))]
PatternText = Annotated[str, PlainValidator(_glob)]
Expert = Annotated[str, PlainValidator(_expert)]
Fraction = Annotated[float, _number("a number from 0 to 1", 0, 1)]
Count = Annotated[int, _number("a count: a whole number from 0", 0, MAX_QUANTITY, is_whole=True)]
_Quantity = Annotated[
    int, _number(f"a quantity: a whole number from 1 to {MAX_QUANTITY}", 1, MAX_QUANTITY, is_whole=True)
]
Seconds = Annotated[float, PlainValidator(_time_limit)]
Thresholds = dict[AnyLabel, Fraction]

Positions = Annotated[
    Annotated[_Quantity, Tag("<quantity>")] | Annotated[list[Designator], Field(min_length=1), Tag("<designators>")],
    _either(
        "a quantity (a whole number from 1) or a list of designators", **{"<quantity>": int, "<designators>": list}
    ),
]
Then = Annotated[
    Annotated[StepName, Tag("<step>")]
    | Annotated[dict[AnyLabel, StepName | None], Field(min_length=1), Tag("<branches>")],
    _either(
        "the name of an entry of detectors or steps, or a mapping of labels to such names",
        **{"<step>": str, "<branches>": dict},
    ),
]


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class BoardEntry(_Strict):
    components: Annotated[dict[Name, Positions], Field(min_length=1)]
    time_limit: Seconds | None = None
    extras: Literal["allow", "refuse"] = "refuse"
    share: Annotated[float, _number(f"a number above 0, to {MAX_QUANTITY}", 0, MAX_QUANTITY, above=True)] = 1.0


class ClassifierEntry(_Strict):
    """`expert` is required; check.py says so, so that the rest of an entry without one is checked too."""

    expert: Expert = ""
    pass_labels: list[Label] = Field(default=[], alias="pass")
    review_below: Fraction = 0.5
    then: Then | None = None
    on_clear: Literal["pass", "review"] = "review"
    pass_rate: Fraction = 0.95


class PositionEntry(_Strict):
    at: Annotated[tuple[float, float], PlainValidator(_point)]
    tolerance: Annotated[float, _number("a fraction of the image's longer side, above 0 and to 1", 0, 1, above=True)]


class RequirementEntry(_Strict):
    min: Count | None = None
    max: Count | None = None
    confidence: Fraction | None = None
    region: Annotated[tuple[float, float, float, float], PlainValidator(_region)] | None = None
    position: PositionEntry | None = None


Requirements = Annotated[
    Annotated[RequirementEntry, Tag("<one>")]
    | Annotated[list[RequirementEntry], Field(min_length=1), Tag("<several>")],
    _either("a mapping such as {min: 2}, or a list of such mappings", **{"<one>": dict, "<several>": list}),
]


class DetectorEntry(_Strict):
    expert: Expert = ""
    fail_on: Thresholds = {}
    review_on: Thresholds = {}
    require: dict[Label, Requirements] = {}
    ignore: list[Label] = []
    review_below: Fraction = 0.0
    then: Then | None = None
    pass_rate: Fraction = 0.95


class AlarmEntry(_Strict):
    verdict: Literal["fail", "review", "unknown"] = "fail"
    count: Annotated[int, _number("a count: a whole number from 1 to 1000", 1, 1000, is_whole=True)]
    same: tuple[Literal["board_type", "component", "designator", "defect"], ...] = ()
    component: PatternText | None = None
    within: Annotated[tuple[float, str, str], PlainValidator(_window)]


class RulesFile(_Strict):
    """A whole file. `check.py` checks what is required of it, on all of its sound parts."""

    boards: dict[Name, BoardEntry] = {}
    classifiers: dict[PatternText, ClassifierEntry] = {}
    detectors: dict[StepName, DetectorEntry] = {}
    steps: dict[StepName, ClassifierEntry] = {}
    defects: dict[Label, Code] = {}
    alarms: Annotated[dict[Name, AlarmEntry], Field(max_length=32)] = {}
