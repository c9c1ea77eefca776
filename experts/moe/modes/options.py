"""Options of a mode as a configuration gives them: known by name, of the right kind, in range."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from experts.moe.errors import ModelError


class Options(BaseModel, extra="forbid", frozen=True):
    """One class for each mode that has options; its fields are they."""


_Kind = TypeVar("_Kind", bound=Options)


def read_options(kind: type[_Kind], mode: str, checkpoint: Path, given: Mapping[str, Any]) -> _Kind:
    """Raises ModelError that names the first mistake."""
    try:
        return kind.model_validate(dict(given))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        known = ", ".join(kind.model_fields)
        message = f"mode {mode}, option {where}: {first['msg']}; options are: {known}"
        raise ModelError(checkpoint, message) from error
