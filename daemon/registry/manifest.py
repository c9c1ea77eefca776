"""A release: the experts, backbones and rules of a line, each by its sha256, under a name and a number that only grows.

A manifest is canonical JSON without paths; its signature is that of exactly these bytes.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from daemon.errors import ReleaseError
from daemon.registry.signing import PublicKey, is_signed_by, signature_bytes
from daemon.units import count_text, printable
from experts.catalog import CatalogEntry, Digest

MAX_MANIFEST_BYTES = 16 << 20
MAX_FILE_BYTES = 32 << 30
MAX_RULES_BYTES = 4 << 20
_MAX_EXPERTS = 10_000
_NAME = r"^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$"

ReleaseName = Annotated[str, StringConstraints(pattern=_NAME)]
Number = Annotated[int, Field(ge=1, lt=2**31)]
ExpertName = Annotated[str, StringConstraints(min_length=1, max_length=128)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class StoredFile(_Part):
    sha256: Digest
    bytes: Annotated[int, Field(ge=1, le=MAX_FILE_BYTES)]


class ReleasedExpert(_Part):
    """One expert: its catalog entry, with an empty `file`; `bytes` is the size of its weights."""

    bytes: Annotated[int, Field(ge=1, le=MAX_FILE_BYTES)]
    entry: CatalogEntry


class Manifest(_Part):
    format: Literal["coserve-release-1"] = "coserve-release-1"
    name: ReleaseName
    number: Number
    made_at: AwareDatetime
    expires_at: AwareDatetime
    made_by: Annotated[str, StringConstraints(max_length=128)]
    line: Annotated[str, StringConstraints(max_length=128)]
    note: Annotated[str, StringConstraints(max_length=128)] | None = None
    experts: Annotated[dict[ExpertName, ReleasedExpert], Field(max_length=_MAX_EXPERTS)] = {}
    backbones: Annotated[tuple[StoredFile, ...], Field(max_length=_MAX_EXPERTS)] = ()
    rules: StoredFile | None = None

    @property
    def release(self) -> str:
        """Name for people: `mainboards/7`."""
        return f"{self.name}/{self.number}"

    @property
    def files(self) -> dict[str, int]:
        files = {expert.entry.sha256: expert.bytes for expert in self.experts.values()}
        return files | {file.sha256: file.bytes for file in (*self.backbones, *([self.rules] if self.rules else ()))}

    @property
    def contents(self) -> str:
        parts = f"{count_text(len(self.experts), 'expert')}, {count_text(len(self.backbones), 'backbone')}"
        return parts + (", rules" if self.rules is not None else ", no rules")

    def encoded(self) -> bytes:
        return canonical(self.model_dump(mode="json", exclude_defaults=True) | {"format": self.format})


@dataclass(frozen=True, slots=True)
class SignedManifest:
    """A manifest's bytes and its signature, as a store holds them, unchecked."""

    data: bytes
    signature: bytes


def canonical(document: Any) -> bytes:
    return json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def parse_release(text: str) -> tuple[str, int]:
    name, _, number = text.partition("/")
    if not (is_name(name) and re.fullmatch("[1-9][0-9]{0,9}", number)):
        raise ReleaseError(f"expected NAME/NUMBER such as mainboards/7, not {printable(text)!r}")
    return name, int(number)


def is_name(text: str) -> bool:
    return re.fullmatch(_NAME[1:-1], text) is not None


def decode(data: bytes, what: str) -> Manifest:
    """Parse a manifest without checking its signature. Raises ReleaseError."""
    if len(data) > MAX_MANIFEST_BYTES:
        raise ReleaseError(f"{what} has {len(data)} bytes; a manifest has {MAX_MANIFEST_BYTES} at most")
    try:
        manifest = Manifest.model_validate_json(data)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the manifest"
        raise ReleaseError(f"{what} is not a release: {printable(where)}: {printable(first['msg'])}") from None
    if canonical(json.loads(data)) != data:
        raise ReleaseError(f"{what} is not a release: it is not in the canonical form that `coserve plant push` writes")
    backbones = {file.sha256 for file in manifest.backbones}
    for name, expert in manifest.experts.items():
        if expert.entry.file or (expert.entry.backbone is not None and expert.entry.backbone.file):
            raise ReleaseError(
                f"{what} is not a release: expert {printable(name)} names a path; manifests name files by sha256 only"
            )
        if expert.entry.backbone is not None and expert.entry.backbone.sha256 not in backbones:
            raise ReleaseError(f"{what} is not a release: expert {printable(name)} names a backbone that it lacks")
    if manifest.rules is not None and manifest.rules.bytes > MAX_RULES_BYTES:
        raise ReleaseError(f"{what} has rules of {manifest.rules.bytes} bytes; at most {MAX_RULES_BYTES} are taken")
    return manifest


def signer_of(signed: SignedManifest, signers: Mapping[Path, PublicKey], what: str) -> Path:
    if not signers:
        raise ReleaseError(f"{what}: this line accepts no signers: name their keys in plant.signers of coserve.yaml")
    signature = signature_bytes(signed.signature)
    if signature is None:
        raise ReleaseError(f"{what}: its signature is cut off or changed: copy the release again")
    for file, key in signers.items():
        if is_signed_by(signed.data, signature, key):
            return file
    names = ", ".join(file.name for file in signers)
    raise ReleaseError(
        f"{what} is signed by nobody in plant.signers ({names}), or was changed after signing:"
        " ask who made it, and add that key only if you trust its owner"
    )


def refusal(manifest: Manifest, highest: int | None, now: datetime, *, allow_older: bool = False) -> str | None:
    """Return why a line that has had the number `highest` of this name must not take a release, None if it may."""
    if allow_older:
        return None
    if manifest.expires_at <= now:
        return f"{manifest.release} expired at {manifest.expires_at}: push a newer one, or pull it with --allow-older"
    if highest is not None and manifest.number < highest:
        return (
            f"{manifest.release} is older than {manifest.name}/{highest}, which this line has had: it may be a replay;"
            " pull it with --allow-older if you want to go back"
        )
    return None
