"""Which versions of an expert there are today: the one in force, those kept beside it."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from experts.versions import Expert, Versions, VersionsError

Standing = Literal["in force", "kept", "gone", "not known"]


@dataclass(frozen=True, slots=True)
class ExpertsNow:
    """The experts of a catalog, or why they cannot be told."""

    experts: Mapping[str, Expert]
    problem: str | None = None

    @classmethod
    def of(cls, catalog: Path) -> "ExpertsNow":
        try:
            return cls(Versions(catalog).read())
        except (VersionsError, OSError) as error:
            return cls({}, str(error).splitlines()[0])

    def standing(self, expert: str, version: str) -> Standing:
        if self.problem is not None:
            return "not known"
        known = self.experts.get(expert)
        if known is not None and known.version == version:
            return "in force"
        return "kept" if known is not None and version in known.kept else "gone"

    def said_of(self, expert: str, version: str) -> str:
        match self.standing(expert, version):
            case "in force":
                return "it is in force today"
            case "not known":
                return f"the catalog cannot be read now ({self.problem})"
            case "kept":
                return f"it is kept beside the catalog; in force today is {self.experts[expert].version or 'none'}"
            case _:
                known = self.experts.get(expert)
                here = (
                    f"in force today is {known.version or 'none'}"
                    if known
                    else "the catalog has no such expert any more"
                )
                return f"these weights are kept no longer; {here}"
