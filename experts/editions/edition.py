"""An edition: the rules' text and every expert's settings and weights, under a number that only grows.

Its file is `{"sha256": …, "edition": {…}}`; the digest is that of the edition's JSON as written. It names no paths:
weights lie by their sha256 (experts/editions/weights.py).
"""

import hashlib
import json
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from experts.catalog import CatalogEntry, Digest

FORMAT = "coserve-edition-1"
Why = Literal["reload", "promote", "rollback", "pull", "restore"]
Number = Annotated[int, Field(ge=1, lt=2**31)]
Name = Annotated[str, StringConstraints(min_length=1, max_length=128)]


class EditionError(Exception):
    """An edition is missing, damaged or refused; the text says which, why and what to do."""


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class FromRelease(_Part):
    """The signed release that an edition took its experts from."""

    name: str
    number: Number
    sha256: Digest
    signer: str


class Edition(_Part):
    """`parent` was in force when it was made. `ends_earlier`: images of earlier editions are not judged any more."""

    number: Number
    parent: Number | None = None
    created_at: AwareDatetime
    who: str
    why: Why
    note: str | None = None
    release: FromRelease | None = None
    ends_earlier: bool = False
    rules: str
    experts: dict[Name, CatalogEntry]

    @property
    def sha256(self) -> str:
        return hashlib.sha256(_written(self._document())).hexdigest()

    @property
    def rules_version(self) -> str:
        """The first 12 hex digits of the rules' sha256 (RESULTS.md, `rules_version`)."""
        return hashlib.sha256(self.rules.encode()).hexdigest()[:12]

    @property
    def weights(self) -> set[str]:
        """Return the sha256 of all weights, backbones included."""
        return set[str]().union(*(entry.weights for entry in self.experts.values()))

    def has_content_of(self, other: "Edition") -> bool:
        return self.rules == other.rules and self.experts == other.experts

    def encoded(self) -> bytes:
        return _written({"sha256": self.sha256, "edition": self._document()}) + b"\n"

    def _document(self) -> dict[str, Any]:
        return {"format": FORMAT, **self.model_dump(mode="json", exclude_defaults=True)}


def decode(data: bytes, file: Path) -> Edition:
    """Parse an edition's file. Raises EditionError."""
    try:
        whole = json.loads(data)
        digest, document = whole["sha256"], whole["edition"]
        written_as = document.pop("format")
    except (ValueError, KeyError, TypeError, AttributeError):
        raise EditionError(f"{file} is cut off or damaged: {_REMEDY}") from None
    if hashlib.sha256(_written({"format": written_as, **document})).hexdigest() != digest:
        raise EditionError(f"{file} was changed after it was made: {_REMEDY}")
    if written_as != FORMAT:
        raise EditionError(f"{file} was made by a newer CoServe ({written_as}): install that one, or {_ROLLBACK}")
    try:
        return Edition.model_validate(document, strict=False)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise EditionError(f"{file} is not an edition: {where}: {first['msg']}: {_REMEDY}") from None


_ROLLBACK = "go back to another edition: coserve rollback"
_REMEDY = f"put the file back from a backup, or {_ROLLBACK}"


def _written(document: Any) -> bytes:
    # Keys stay in their order: the experts' is that of the catalog.
    return json.dumps(document, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()
