"""Replaces one entry of a catalog that a person wrote and keeps the rest of the text: comments, order, quotes.

The places of keys and values come from PyYAML's own parser; only the values that differ are written anew. The result is
parsed and compared with the intended entries before it is written: a form of YAML that this module does not understand
(anchors, merge keys) makes it write the whole catalog anew, without comments.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from experts.catalog import CatalogEntry, CatalogFile, dump, rendered, replace_text, write_catalog
from routing_rules.document import read_yaml_text

_Edit = tuple[int, int, str]
_MAX_EDITS = 50


def read(text: str, name: str = "the catalog") -> Any:
    """Return a catalog's values as every file of a line is read. Raises yaml.YAMLError with the first mistake."""
    document = read_yaml_text(text, name)
    if document.problems:
        raise yaml.YAMLError(str(document.problems[0]))
    return {} if document.data is None else document.data


def add_to_catalog(path: Path, expert: str, entry: Mapping[str, Any]) -> None:
    """Add or replace one entry, and make the file if there is none. Raises ValidationError, yaml.YAMLError."""
    document = read(path.read_text(encoding="utf-8")) if path.exists() else {}
    entries = CatalogFile.model_validate({"experts": document.get("experts") or {}}).experts
    replace_entries(path, entries, {expert: CatalogEntry.model_validate(dict(entry))})


def replace_entries(path: Path, entries: Mapping[str, CatalogEntry], changed: Mapping[str, CatalogEntry]) -> bool:
    """Write `changed` at once into a catalog that holds `entries`; return True if comments were lost."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    intended = {**entries, **changed}
    edited: str | None = text if len(changed) <= _MAX_EDITS else None  # each edit parses the whole text
    for name, entry in changed.items():
        edited = _with_entry(edited, name, entry) if edited is not None else None
    if edited is not None and _has_entries(edited, intended):
        replace_text(path, edited.replace("\n", "\r\n") if b"\r\n" in path.read_bytes() else edited)
        return False
    write_catalog(path, {key: each.model_dump(mode="json", exclude_defaults=True) for key, each in intended.items()})
    return "#" in text


def _has_entries(text: str, entries: Mapping[str, CatalogEntry]) -> bool:
    try:
        return CatalogFile.model_validate(read(text)).experts == dict(entries)
    except (yaml.YAMLError, ValidationError):
        return False


def _with_entry(text: str, name: str, entry: CatalogEntry) -> str | None:
    """Return `text` with `entry` under `name`, appended if it is new; None if the text's form does not allow it.

    A comment behind a changed value stays; one between the lines of such a value goes.
    """
    root, data = yaml.compose(text, Loader=yaml.SafeLoader), read(text)
    if not data:
        return f"{text.rstrip()}\n{dump({'experts': {name: rendered(entry)}})}" if text else None
    experts = _value(root, "experts")
    if experts is not None and not data["experts"]:
        text = text[: experts.start_mark.index] + text[experts.end_mark.index :]
        place = _next_line(text, experts.start_mark.index)
        return text[:place] + _lines(text, place, {name: rendered(entry)}, 2) + text[place:]
    if not isinstance(experts, yaml.MappingNode) or experts.flow_style:
        return None
    present = _value(experts, name)
    if present is None:
        return _added(text, experts, {name: rendered(entry)})
    edits = _changes(text, present, entry, data["experts"][name]) if isinstance(present, yaml.MappingNode) else None
    if edits is None:
        return None
    for start, end, replacement in sorted(edits, reverse=True):
        text = text[:start] + replacement + text[end:]
    return text


def _changes(text: str, node: yaml.MappingNode, entry: CatalogEntry, old: Any) -> list[_Edit] | None:
    values, short = entry.model_dump(mode="json"), rendered(entry)
    if node.flow_style:
        start, end = node.start_mark.index, node.end_mark.index
        return None if "#" in text[start:end] else [(start, end, dump(short, on_one_line=True))]
    edits: list[_Edit] = []
    for key, value in node.value:
        end = _end(value)
        if end is None or key.value not in values:
            return None
        if old[key.value] != values[key.value]:
            edits.append((value.start_mark.index, end, dump(values[key.value], on_one_line=True)))
    missing = {key: value for key, value in short.items() if key not in old}
    if missing:
        place = _line_after(text, node)
        if place is None:
            return None
        edits.append((place, place, _lines(text, place, missing, node.value[0][0].start_mark.column)))
    return edits


def _added(text: str, experts: yaml.MappingNode, entry: Mapping[str, Any]) -> str | None:
    place = _line_after(text, experts)
    if place is None or not experts.value:
        return None
    return text[:place] + _lines(text, place, entry, experts.value[0][0].start_mark.column) + text[place:]


def _lines(text: str, place: int, items: Mapping[str, Any], column: int) -> str:
    block = "".join(f"{' ' * column}{line}\n" for line in dump(dict(items)).splitlines())
    return block if text[:place].endswith("\n") else "\n" + block


def _value(node: Any, name: str) -> Any:
    if not isinstance(node, yaml.MappingNode):
        return None
    return next((value for key, value in node.value if key.value == name), None)


def _end(node: Any) -> int | None:
    """Return where a value ends, None for a text block, whose end mark lies behind the comments after it."""
    if isinstance(node, yaml.ScalarNode):
        return node.end_mark.index if node.style not in ("|", ">") else None
    if node.flow_style or not node.value:
        return node.end_mark.index
    last = node.value[-1]
    return _end(last[1] if isinstance(last, tuple) else last)


def _line_after(text: str, node: yaml.MappingNode) -> int | None:
    end = _end(node)
    return None if end is None else _next_line(text, end)


def _next_line(text: str, place: int) -> int:
    newline = text.find("\n", place)
    return len(text) if newline < 0 else newline + 1
