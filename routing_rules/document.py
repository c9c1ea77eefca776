"""YAML text to plain data of which every key and every value still knows its line and column.

Beyond PyYAML's own loaders: YAML 1.2 scalars (NO, ON and yes stay text), keys always the text as written (`0402:` is
not octal), text in NFC, duplicate keys as mistakes, and bounds on depth and on what aliases expand to.
"""

import math
import re
import unicodedata
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any, cast

import yaml

MAX_TEXT_BYTES = 8 * 1024 * 1024
MAX_DEPTH = 40
#: After expanding aliases: a page of nested aliases would otherwise stand for billions of values.
MAX_VALUES = 200_000

_STR_TAGS = ("!", "tag:yaml.org,2002:str")
_CONSTANTS: dict[str, bool | None] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL"), None),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
}
_INTEGER = re.compile(r"[-+]?[0-9]{1,18}")
_BASED = re.compile(r"0o[0-7]{1,18}|0x[0-9a-fA-F]{1,15}")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")

KeyPath = tuple[str | int, ...]


@dataclass(frozen=True, slots=True, order=True)
class Problem:
    """One mistake in a file, with what to do. Line and column count from 1; line 0 is the file as a whole."""

    file: str
    line: int
    column: int
    message: str

    def __str__(self) -> str:
        place = f":{self.line}:{self.column}" if self.line else ""
        return f"{self.file}{place}: {self.message}"


@dataclass(slots=True)
class SourcePlace:
    """Line and column at which a value starts, and those of each key and value inside it."""

    line: int
    column: int
    children: "dict[str | int, tuple[int, int, SourcePlace]]" = field(
        default_factory=dict[str | int, "tuple[int, int, SourcePlace]"]
    )


@dataclass(frozen=True, slots=True)
class Document:
    """A parsed file. `data` is None if `problems` made it unreadable or the file is empty."""

    name: str
    text: str
    data: Any
    problems: tuple[Problem, ...]
    root: SourcePlace
    #: Values that were put into `data` from outside of the file, and what to call their place.
    outside: dict[KeyPath, str] = field(default_factory=dict[KeyPath, str])

    def where(self, path: KeyPath, *, key: bool = False) -> tuple[int, int]:
        """Line and column, from 1, of the value at `path`, or of its key; if absent, of its nearest parent."""
        place = self.root
        at = (place.line, place.column)
        for depth, part in enumerate(path):
            child = place.children.get(part)
            if child is None:
                return at
            key_line, key_column, place = child
            # An absent value is shown at the key that should hold it: that is where a person looks.
            at = (key_line, key_column)
            if depth == len(path) - 1 and not key:
                return place.line, place.column
        return at

    def value(self, path: KeyPath) -> Any:
        return value_at(self.data, path)

    def keys(self, path: KeyPath) -> list[str]:
        """Return the keys of the mapping at `path`; none if it is not a mapping."""
        value = self.value(path)
        return list(cast("dict[str, Any]", value)) if isinstance(value, dict) else []

    def written(self, path: KeyPath) -> str:
        """Return the plain scalar at `path` as written: `0402`, where the data has 402; "" for anything else."""
        if self._outside(path):
            return ""
        line, column = self.where(path)
        rest = self.text.splitlines()[line - 1 : line]
        return re.split(r"[\s,\]}]", rest[0][column - 1 :], maxsplit=1)[0] if rest else ""

    def problem(self, path: KeyPath, message: str, *, key: bool = False) -> Problem:
        if place := self._outside(path):
            return Problem(place, 1, 1, message)
        line, column = self.where(path, key=key)
        return Problem(self.name, line, column, message)

    def _outside(self, path: KeyPath) -> str | None:
        return next(
            (self.outside[part] for end in range(len(path), 0, -1) if (part := path[:end]) in self.outside), None
        )


def value_at(data: Any, path: KeyPath) -> Any:
    for part in path:
        try:
            data = data[part]
        except (KeyError, IndexError, TypeError):
            return None
    return data


def read_yaml(path: Path) -> Document:
    """Read a file; an unreadable one is a `Document` with only that problem."""
    name = str(path)
    try:
        if path.stat().st_size > MAX_TEXT_BYTES:
            return _unreadable(name, "", 1, 1, f"the file is larger than {MAX_TEXT_BYTES // 2**20} MiB")
        raw = path.read_bytes()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        return _unreadable(name, "", 0, 0, f"cannot read the file: {reason}")
    try:
        return read_yaml_text(raw.decode("utf-8-sig"), name, refuse_hidden=True)
    except UnicodeDecodeError as error:
        line, column = _position(raw[: error.start].decode("utf-8", "replace"))
        return _unreadable(name, "", line, column, "not UTF-8 text: save the file as UTF-8")


def read_yaml_text(text: str, name: str, *, refuse_hidden: bool = False, as_written: bool = False) -> Document:
    """Parse `text`; YAML's own mistakes are in `problems`, with `name` as the file.

    With `as_written` every value that is not null is text: 0402 is a name, not a number.
    """
    if len(text) > MAX_TEXT_BYTES:
        return _unreadable(name, text, 1, 1, f"the text is larger than {MAX_TEXT_BYTES // 2**20} MiB")
    builder = _Builder(name, refuse_hidden, as_written)
    try:
        node = builder.build(text)
    except _UnreadableError as error:
        return Document(name, text, None, (*builder.problems, error.problem), SourcePlace(1, 1))
    except yaml.YAMLError as error:
        line, column, message = _syntax(error, text)
        return Document(name, text, None, (*builder.problems, Problem(name, line, column, message)), SourcePlace(1, 1))
    except UnicodeEncodeError as error:
        line, column = _position(text[: error.start])
        return _unreadable(name, text, line, column, "a character that no UTF-8 file can hold")
    return Document(name, text, node.data, tuple(builder.problems), node.place)


def _unreadable(name: str, text: str, line: int, column: int, message: str) -> Document:
    return Document(name, text, None, (Problem(name, line, column, message),), SourcePlace(1, 1))


def _position(before: str) -> tuple[int, int]:
    return before.count("\n") + 1, len(before) - (before.rfind("\n") + 1) + 1


def _syntax(error: yaml.YAMLError, text: str) -> tuple[int, int, str]:
    if isinstance(error, yaml.MarkedYAMLError):
        mark = error.problem_mark or error.context_mark
        line, column = (mark.line + 1, mark.column + 1) if mark else (1, 1)
        what = ", ".join(part for part in (error.context, error.problem) if part)
        if "token" in what and text.splitlines()[line - 1 : line] and "\t" in text.splitlines()[line - 1]:
            what += " (a tab: indent with spaces)"
        return line, column, f"not YAML: {what}"
    if isinstance(error, yaml.reader.ReaderError):
        return *_position(_before(error, text)), f"not YAML: {error.reason}"
    return 1, 1, f"not YAML: {error}"


def _before(error: yaml.reader.ReaderError, text: str) -> str:
    """Return the text before a forbidden character: libyaml counts bytes, PyYAML's own reader characters."""
    offset = int(error.position)
    return text[:offset] if error.encoding == "unicode" else text.encode()[:offset].decode("utf-8", "ignore")


class _UnreadableError(Exception):
    def __init__(self, problem: Problem) -> None:
        super().__init__(str(problem))
        self.problem = problem


@dataclass(frozen=True, slots=True)
class _Node:
    """A value with its places; `values` counts it with everything in it, `height` its levels of nesting."""

    data: Any
    place: SourcePlace
    values: int
    height: int


class _Builder:
    """Builds data and places from parser events, which are not recursive: depth is ours to bound."""

    def __init__(self, name: str, refuse_hidden: bool, as_written: bool) -> None:
        self._refuse_hidden = refuse_hidden
        self._as_written = as_written
        self.problems: list[Problem] = []
        self._name = name
        self._values = 0
        self._anchors: dict[str, _Node | None] = {}
        self._events: Iterator[yaml.Event] = iter(())

    def build(self, text: str) -> _Node:
        self._events = yaml.parse(text, Loader=yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader)
        documents = 0
        node = _Node(None, SourcePlace(1, 1), 0, 0)
        for event in self._events:
            if isinstance(event, yaml.DocumentStartEvent):
                documents += 1
                if documents > 1:
                    raise self._stop(event, "a second document: expected one per file, without a `---` inside")
            elif not isinstance(event, (yaml.StreamStartEvent, yaml.StreamEndEvent, yaml.DocumentEndEvent)):
                node = self._node(event, 1)
        return node

    def _node(self, event: yaml.Event, depth: int) -> _Node:
        if depth > MAX_DEPTH:
            raise self._stop(event, f"nested deeper than {MAX_DEPTH} levels")
        if isinstance(event, yaml.AliasEvent):
            return self._alias(event, depth)
        anchor = getattr(event, "anchor", None)
        if anchor is not None:
            self._anchors[anchor] = None
        self._count(event, 1)
        if isinstance(event, yaml.ScalarEvent):
            node = _Node(self._scalar(event), self._place(event), 1, 1)
        elif isinstance(event, yaml.MappingStartEvent):
            node = self._mapping(event, depth)
        else:
            node = self._sequence(event, depth)
        if anchor is not None:
            self._anchors[anchor] = node
        return node

    def _mapping(self, event: yaml.MappingStartEvent, depth: int) -> _Node:
        self._refuse_tag(event)
        place, data = self._place(event), dict[str, Any]()
        values = height = 1
        while not isinstance(key_event := next(self._events), yaml.MappingEndEvent):
            key_node = self._node(key_event, depth + 1)
            node = self._node(next(self._events), depth + 1)
            values, height = values + key_node.values + node.values, max(height, key_node.height + 1, node.height + 1)
            line, column = self._at(key_event)
            key = self._key(key_event, key_node)
            if key is None:
                self._note(key_event, "a key must be text; text with braces or brackets goes in quotes")
            elif key in data:
                first = place.children[key][0]
                self._note(key_event, f"duplicate key `{key}`: it is already in line {first}; keep one of them")
            else:
                data[key] = node.data
                place.children[key] = (line, column, node.place)
        return _Node(data, place, values, height)

    def _sequence(self, event: yaml.Event, depth: int) -> _Node:
        self._refuse_tag(event)
        place, data = self._place(event), list[Any]()
        values = height = 1
        while not isinstance(item := next(self._events), yaml.SequenceEndEvent):
            node = self._node(item, depth + 1)
            values, height = values + node.values, max(height, node.height + 1)
            place.children[len(data)] = (*self._at(item), node.place)
            data.append(node.data)
        return _Node(data, place, values, height)

    def _alias(self, event: yaml.AliasEvent, depth: int) -> _Node:
        if event.anchor not in self._anchors:
            raise self._stop(event, f"`*{event.anchor}` refers to nothing: no `&{event.anchor}` before it")
        node = self._anchors[event.anchor]
        if node is None:
            raise self._stop(event, f"`*{event.anchor}` contains itself")
        self._count(event, node.values)
        if depth + node.height - 1 > MAX_DEPTH:
            raise self._stop(event, f"nested deeper than {MAX_DEPTH} levels")
        return node

    def _key(self, event: yaml.Event, node: _Node) -> str | None:
        """Return the key as written, also where YAML would read another value than text."""
        if isinstance(event, yaml.ScalarEvent):
            return unicodedata.normalize("NFC", event.value)
        return node.data if isinstance(node.data, str) else None

    def _scalar(self, event: yaml.ScalarEvent) -> str | int | float | bool | None:
        text = unicodedata.normalize("NFC", event.value)
        self._refuse_tag(event)
        # In files only: rules that were kept before must stay readable.
        if self._refuse_hidden and (sign := hidden(text)):
            raise self._stop(event, f"expected text without {sign}, a character that is not seen: write it anew")
        if event.style or event.tag is not None or (self._as_written and _CONSTANTS.get(text, True) is not None):
            return text
        if text in _CONSTANTS:
            return _CONSTANTS[text]
        if _INTEGER.fullmatch(text):
            return int(text)
        if _BASED.fullmatch(text):
            return int(text, 0)
        if _FLOAT.fullmatch(text) and math.isfinite(number := float(text)):
            return number
        return text

    def _refuse_tag(self, event: Any) -> None:
        if event.tag is not None and event.tag not in _STR_TAGS:
            self._note(event, f"a tag (`{event.tag}`) is not allowed here: write the plain value")

    def _count(self, event: yaml.Event, values: int) -> None:
        self._values += values
        if self._values > MAX_VALUES:
            raise self._stop(event, f"more than {MAX_VALUES} values, aliases expanded: write less, or fewer aliases")

    def _place(self, event: yaml.Event) -> SourcePlace:
        return SourcePlace(*self._at(event))

    def _at(self, event: yaml.Event) -> tuple[int, int]:
        mark: Any = event.start_mark
        return mark.line + 1, mark.column + 1

    def _note(self, event: yaml.Event, message: str) -> None:
        self.problems.append(Problem(self._name, *self._at(event), message))

    def _stop(self, event: yaml.Event, message: str) -> _UnreadableError:
        return _UnreadableError(Problem(self._name, *self._at(event), message))


def hidden(text: str) -> str:
    """Return the first control, bidi or zero-width character of `text` as its escape, "" if there is none."""
    unseen = (sign for sign in text if unicodedata.category(sign) in {"Cc", "Cf", "Cs", "Zl", "Zp"})
    return next(unseen, "").encode("unicode_escape").decode()


def nearest(word: str, right: Iterable[str]) -> str | None:
    """Return the right name most like `word`, case forgiven first; None if none is near."""
    names = list(dict.fromkeys(right))
    folded = {name.casefold(): name for name in reversed(names)}
    if word.casefold() in folded:
        return folded[word.casefold()]
    close = get_close_matches(word, names, n=1, cutoff=0.6) or get_close_matches(word.casefold(), folded, n=1)
    return folded.get(close[0], close[0]) if close else None


def meant(word: str, right: Iterable[str]) -> str:
    """Return the end of an error about a wrong name: the nearest right one, else all if they are few."""
    names = list(dict.fromkeys(right))
    close = nearest(word, names)
    if close is not None:
        return f"; did you mean `{close}`?"
    if 0 < len(names) <= 12:
        return "; expected " + ("one of " if len(names) > 1 else "") + ", ".join(f"`{name}`" for name in names)
    return ""
