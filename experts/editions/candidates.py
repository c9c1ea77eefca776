"""Candidates: weights and settings that wait beside the editions, `candidates.json`. They move no pointer.

`coserve experts put`, `train`, `import` and `learn` add them; `shadow` marks one to answer beside the one in force.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from experts.catalog import CatalogEntry
from experts.durable import replace_text
from experts.editions.edition import EditionError
from experts.people import current_user, now

_FILE = "candidates.json"


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Candidate(_Part):
    """A version that can be promoted; the entry in its file names no weights."""

    expert: str
    version: str
    entry: CatalogEntry
    put_at: str
    put_by: str
    source: str


class Shadow(_Part):
    """A version that answers beside the one in force; images and agreement that it needs for its promotion."""

    version: str
    images: int
    agreement: float


class Step(_Part):
    """One action and its author; `before` was in force before. `found`: a reload, pull or restore brought it."""

    at: str
    by: str
    did: Literal["found", "put", "promote", "rollback", "prune", "shadow", "unshadow"]
    expert: str
    version: str
    before: str | None = None
    note: str | None = None


class Candidates(_Part):
    candidates: tuple[Candidate, ...] = ()
    shadows: dict[str, Shadow] = {}
    steps: tuple[Step, ...] = ()

    def with_step(
        self, did: Literal["put", "prune", "shadow", "unshadow"], expert: str, version: str, note: str | None
    ) -> "Candidates":
        """Record a change to a version that is not in force, and who made it."""
        step = Step(at=now(), by=current_user(), did=did, expert=expert, version=version, note=note)
        return self.model_copy(update={"steps": (*self.steps, step)})

    def put(self, expert: str, version: str, entry: CatalogEntry, source: str, note: str | None) -> "Candidates":
        new = Candidate(expert=expert, version=version, entry=entry, put_at=now(), put_by=current_user(), source=source)
        added = self.model_copy(update={"candidates": (*self.candidates, new)})
        return added.with_step("put", expert, version, note)

    def without(self, gone: Mapping[str, str]) -> "Candidates":
        """Return what remains once versions, by expert, are in force or pruned; their shadows end."""
        kept = tuple(each for each in self.candidates if gone.get(each.expert) != each.version)
        shadows = {name: shadow for name, shadow in self.shadows.items() if gone.get(name) != shadow.version}
        return self.model_copy(update={"candidates": kept, "shadows": shadows})

    def shadowed(self, expert: str, shadow: Shadow | None, note: str | None) -> "Candidates":
        """Mark a version as the shadow of an expert; None ends that."""
        others = {name: each for name, each in self.shadows.items() if name != expert}
        if shadow is None:
            ended = self.model_copy(update={"shadows": others})
            return ended.with_step("unshadow", expert, self.shadows[expert].version, note)
        marked = self.model_copy(update={"shadows": others | {expert: shadow}})
        return marked.with_step("shadow", expert, shadow.version, note)


def read_candidates(catalog: Path) -> Candidates:
    """Raises EditionError if the file is damaged."""
    file = catalog.with_name(_FILE)
    try:
        return Candidates.model_validate_json(file.read_bytes(), strict=False)
    except FileNotFoundError:
        return Candidates()
    except ValidationError as error:
        first = error.errors()[0]
        where = "".join(f"{part}: " for part in (".".join(map(str, first["loc"])),) if part)
        raise EditionError(f"{file}: {where}{first['msg']}: put it back from a backup, or delete it") from None


def write_candidates(catalog: Path, candidates: Candidates) -> None:
    """Replace the file; the holder of the editions' lock alone may (folder.py, `changing`)."""
    text = candidates.model_dump_json(exclude_defaults=True)
    replace_text(catalog.with_name(_FILE), text + "\n", like=catalog)
