"""Environment variables that override settings of `coserve.yaml`, such as `COSERVE_DATABASE`; their text is YAML."""

import re
from collections.abc import Collection, Mapping
from typing import Any

import yaml
from pydantic import BaseModel

from routing_rules.load import Document, KeyPath, Problem, nearest

_PREFIX = "COSERVE_"
#: A variable with this prefix that is not a setting: the command line's default for the file.
_NOT_A_SETTING = "COSERVE_CONFIG"

#: Sections whose entries have names of their own, with the keys of an entry.
Named = Mapping[str, Collection[str]]


def is_setting(name: str) -> bool:
    """Return True if an environment variable of this name is meant to override a setting."""
    return name.startswith(_PREFIX) and name != _NOT_A_SETTING


def override(document: Document, environ: Mapping[str, str], settings: type[BaseModel], named: Named) -> list[Problem]:
    """Put the values of `environ` into the document's data; return the variables that are mistakes."""
    problems: list[Problem] = []
    for name in sorted(filter(is_setting, environ)):
        path = _setting(name.removeprefix(_PREFIX), document.data, settings, named)
        if path is None:
            close = nearest(name, [_PREFIX + key.upper() for key in settings.model_fields])
            hint = f"; did you mean {close}?" if close else ""
            problems.append(Problem(f"environment variable {name}", 1, 1, f"names no setting of coserve.yaml{hint}"))
            continue
        try:
            value = yaml.safe_load(environ[name])
        except yaml.YAMLError:
            problems.append(Problem(f"environment variable {name}", 1, 1, "its text is not a YAML value"))
            continue
        parent = document.data
        for key in path[:-1]:
            parent = parent.setdefault(key, {}) if isinstance(parent, dict) else {}
        parent[path[-1]] = value
        document.outside[path] = f"environment variable {name}"
    return problems


def _setting(suffix: str, data: Mapping[str, Any], settings: type[BaseModel], named: Named) -> KeyPath | None:
    """Return the key path of `ENDPOINTS_RESULTS` (or `ENDPOINTS__RESULTS`), or None."""
    flat = suffix.replace("__", "_").lower()
    for top, field in settings.model_fields.items():
        if flat == top:
            return (top,)
        if not flat.startswith(top + "_"):
            continue
        rest = flat.removeprefix(top + "_")
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            return (top, rest) if rest in field.annotation.model_fields else None
        if top in named:
            more = ["cpu", *(f"cuda:{n}" for n in range(16))] if top == "devices" else []
            for name in [*(data.get(top) or {}), *more]:
                key = rest.removeprefix(re.sub("[:.-]", "_", str(name)).lower() + "_")
                if key != rest and key in named[top]:
                    return (top, name, key)
    return None
