"""Where the images of a camera are: counted so that none can be missed."""

from collections import Counter, deque
from dataclasses import dataclass, field


@dataclass(slots=True)
class SpoolAccount:
    """Where the images are. Each one that was `published`, or `found` in the spool at the start, is in one of:

    `accepted`, `duplicate`, `rejected` (by code), `set_aside` (spool entries that cannot be read), `spooled` (waits on
    the disk), `in_memory` (younger than half a second, or the disk refuses). `refused` ones were never taken.
    `differing` duplicates are lost to another image with their id. `busy` and `resent` count what happened on the way.
    """

    published: int = 0
    found: int = 0
    accepted: int = 0
    duplicate: int = 0
    differing: int = 0
    rejected: Counter[str] = field(default_factory=Counter)
    refused: int = 0
    set_aside: int = 0
    spooled: int = 0
    in_memory: int = 0
    busy: int = 0
    resent: int = 0
    refusals: deque[str] = field(default_factory=lambda: deque(maxlen=20))

    @property
    def complete(self) -> bool:
        """Whether the daemon holds every image that was published or found."""
        return self.published + self.found == self.accepted + self.duplicate and not (self.refused or self.differing)

    @property
    def lost(self) -> int:
        """Images that will give no verdict unless somebody acts."""
        return self.rejected.total() + self.differing + self.refused + self.set_aside

    def as_dict(self) -> dict[str, int]:
        """The account as a table's rows; what did not happen and is no state is left out."""
        row = {"published": self.published, "found in the spool": self.found, "accepted": self.accepted}
        row |= {"duplicate": self.duplicate, "of another image": self.differing}
        row |= {f"rejected {code}": count for code, count in sorted(self.rejected.items())}
        row |= {"refused, no room": self.refused, "set aside": self.set_aside}
        always = ("published", "accepted")
        left = {"left in the spool": self.spooled, "in memory": self.in_memory}
        left |= {"busy": self.busy, "resent": self.resent}
        return {name: count for name, count in (row | left).items() if count or name in always}
