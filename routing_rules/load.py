"""Check files that people write against a pydantic model; all mistakes at once, with line, column and right name."""

import types
from collections.abc import Mapping
from typing import Annotated, Any, TypeGuard, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from routing_rules.document import Document, KeyPath, Problem, meant, nearest, read_yaml, read_yaml_text, value_at

__all__ = ["Document", "KeyPath", "Problem", "nearest", "read_yaml", "read_yaml_text", "salvage", "validate"]

Model = TypeVar("Model", bound=BaseModel)

#: pydantic's kinds of error whose own text speaks of Python rather than of the file.
_EXPECTED: dict[str, str] = {
    "dict_type": "a mapping (`key: value` lines)",
    "mapping_type": "a mapping (`key: value` lines)",
    "model_type": "a mapping (`key: value` lines)",
    "list_type": "a list",
    "tuple_type": "a list",
    "set_type": "a list",
    "string_type": "text",
    "string_too_short": "text that is not empty",
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "finite_number": "a number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "path_type": "a path",
    "none_required": "nothing",
    "too_short": "at least one entry",
}
_LIMITS: dict[str, str] = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<", "multiple_of": "a multiple of"}


def validate(model: type[Model], document: Document) -> tuple[Model | None, list[Problem]]:
    """Return the document as `model`, or None and every mistake, in the order of the file."""
    sound, problems, _ = salvage(model, document)
    return (None if problems else sound), problems


def salvage(model: type[Model], document: Document) -> tuple[Model | None, list[Problem], list[KeyPath]]:
    """Return the sound part of the document, its mistakes, and the paths of the parts taken out."""
    problems = list(document.problems)
    if document.data is None and problems:
        return None, problems, []
    data = _unshared({} if document.data is None else document.data)
    removed: list[KeyPath] = []
    first = True
    while True:
        try:
            sound = model.model_validate(data)
        except ValidationError as error:
            errors = error.errors(include_url=False)
            if first:
                problems += _problems(model, document, errors)
            first = False
            taken = [path for detail in errors if _remove(data, path := _to_remove(detail, data))]
            if not taken:
                return None, sorted(problems), removed
            removed += taken
        else:
            return sound, sorted(problems), removed


def _unshared(data: Any) -> Any:
    """Copy data so that aliases no longer share: taking a part out of one leaves the others whole."""
    if _is_mapping(data):
        return {key: _unshared(value) for key, value in data.items()}
    if _is_list(data):
        return [_unshared(value) for value in data]
    return data


def _to_remove(detail: ErrorDetails, data: Any) -> KeyPath:
    """Return the path of the smallest entry whose removal ends this error, () for the whole document."""
    path = _path(detail, data)
    if detail["type"] == "missing":
        path = path[:-1]
    # Taking one item out of a list would move its neighbours: the list goes as a whole.
    for depth, part in enumerate(path):
        if isinstance(part, int):
            return path[:depth]
    return path


def _remove(data: Any, path: KeyPath) -> bool:
    """Take an entry out of its mapping; return False if there is none (any more)."""
    parent = value_at(data, path[:-1])
    if not path or not _is_mapping(parent) or path[-1] not in parent:
        return False
    del parent[path[-1]]
    return True


def _path(detail: ErrorDetails, data: Any) -> KeyPath:
    """Return pydantic's location without what the file lacks: tags of unions, `[key]`; a missing key stays, last."""
    path: list[str | int] = []
    location = detail["loc"]
    for index, part in enumerate(location):
        is_key = _is_mapping(data) and part in data
        is_item = _is_list(data) and isinstance(part, int) and part < len(data)
        if is_key or is_item:
            data = value_at(data, (part,))
        elif not (detail["type"] == "missing" and index == len(location) - 1):
            continue
        path.append(part)
    return tuple(path)


def _problems(model: type[BaseModel], document: Document, errors: list[ErrorDetails]) -> list[Problem]:
    """Return one problem per place: members of a union that all refuse a value become one sentence."""
    data: Any = {} if document.data is None else document.data
    unknown = _unknown_keys(model, errors, data)
    misspelt = {(*path[:-1], nearest(str(path[-1]), right_keys)) for path, right_keys in unknown.items()}
    messages: dict[tuple[KeyPath, bool], list[str]] = {}
    for detail in errors:
        path = _path(detail, data)
        kind = detail["type"]
        if kind == "extra_forbidden":
            messages[path, True] = [f"unknown key `{path[-1]}`{meant(str(path[-1]), unknown[path])}"]
            continue
        if kind == "missing":
            if path in misspelt:
                continue  # its misspelt key is reported
            messages.setdefault((path, True), []).append(f"missing key `{path[-1]}`")
            continue
        at_key = detail["loc"][-1:] == ("[key]",) or not path
        texts = messages.setdefault((path, at_key), [])
        if (text := _expected(detail)) not in texts:
            texts.append(text)
    return [
        document.problem(path, _sentence(texts, document, path, data, at_key=at_key), key=at_key)
        for (path, at_key), texts in messages.items()
    ]


def _sentence(texts: list[str], document: Document, path: KeyPath, data: Any, *, at_key: bool) -> str:
    if not all(text.startswith("expected ") for text in texts):
        return "; ".join(texts)
    expected = " or ".join(text.removeprefix("expected ") for text in texts)
    value = path[-1] if at_key and path else value_at(data, path)
    expected = expected.removesuffix(f", not {value!r}")  # it is shown once
    if isinstance(value, (bool, int, float)):
        quotes = "; put it in quotes" if "text" in expected else ""
        return f"expected {expected}, found {_shown(document.written(path) or value)}{quotes}"
    return f"expected {expected}, found {_shown(value)}"


def _expected(detail: ErrorDetails) -> str:
    """Return what was expected at this place; a custom error's message says it already (`schema.py`)."""
    kind, context = detail["type"], detail.get("ctx", {})
    if kind == "expected":
        return "expected " + detail["msg"]
    if kind == "value_error":
        return str(context.get("error", detail["msg"]))
    if kind in {"literal_error", "enum"}:
        return "expected " + str(context.get("expected", "another value"))
    for name, sign in _LIMITS.items():
        if name in context:
            return f"expected a number {sign} {context[name]}"
    if kind in _EXPECTED:
        return "expected " + _EXPECTED[kind]
    return detail["msg"].replace("Input should be", "expected").replace("Value should", "expected to")


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return "a mapping" if value else "an empty mapping"
    if isinstance(value, list):
        return "a list" if value else "an empty list"
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return "true" if value else "false"
    text = str(value)
    return f"`{text if len(text) <= 40 else text[:37] + '...'}`"


def _unknown_keys(model: type[BaseModel], errors: list[ErrorDetails], data: Any) -> dict[KeyPath, list[str]]:
    return {
        _path(detail, data): _keys_at(model, detail["loc"][:-1])
        for detail in errors
        if detail["type"] == "extra_forbidden"
    }


def _keys_at(model: type[BaseModel], location: tuple[str | int, ...]) -> list[str]:
    """Return the keys that the model of `location` has, by walking the annotations along it."""
    kinds: list[Any] = [model]
    for part in location:
        kinds = [inner for kind in kinds for inner in _inside(kind, part)] or kinds
    names: list[str] = []
    for kind in _members(kinds):
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            names += [field.alias or name for name, field in kind.model_fields.items()]
    return names


def _inside(kind: Any, part: str | int) -> list[Any]:
    """Return the annotations one step further along a location; none if `part` is the tag of a union."""
    annotations: list[Any] = []
    for member in _members([kind]):
        if isinstance(member, type) and issubclass(member, BaseModel):
            annotations += [
                field.annotation for name, field in member.model_fields.items() if part in (name, field.alias)
            ]
        elif get_origin(member) in (dict, Mapping):
            annotations.append(get_args(member)[1])
        elif get_origin(member) in (list, tuple) and isinstance(part, int):
            annotations += [argument for argument in get_args(member) if argument is not Ellipsis]
    return annotations


def _members(kinds: list[Any]) -> list[Any]:
    """Open unions and `Annotated`."""
    annotations: list[Any] = []
    for kind in kinds:
        if get_origin(kind) is Annotated:
            annotations += _members([get_args(kind)[0]])
        elif get_origin(kind) in (Union, types.UnionType):
            annotations += _members(list(get_args(kind)))
        else:
            annotations.append(kind)
    return annotations


def _is_mapping(data: Any) -> TypeGuard[dict[Any, Any]]:
    return isinstance(data, dict)


def _is_list(data: Any) -> TypeGuard[list[Any]]:
    return isinstance(data, list)
