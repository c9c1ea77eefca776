"""Patterns of component types: `*` is any text, `?` any one character, all else itself; case counts."""

import fnmatch
import re
from dataclasses import dataclass
from itertools import chain, product, zip_longest

#: A pattern with more stars counts as not covered: nothing is refused by mistake.
_MAX_STARS = 6


@dataclass(frozen=True, slots=True)
class Glob:
    """One pattern, ready to match a whole component type with `regex.fullmatch`."""

    text: str
    regex: re.Pattern[str]

    @classmethod
    def of(cls, text: str) -> "Glob":
        # Brackets are ordinary characters here; fnmatch would read them as a set.
        return cls(text, re.compile(fnmatch.translate(text.replace("[", "[[]"))))

    @property
    def head(self) -> str:
        """The literal text in front of the first wildcard."""
        return re.split(r"[*?]", self.text, maxsplit=1)[0]

    def matches(self, name: str) -> bool:
        return self.regex.fullmatch(name) is not None

    def covers(self, other: "Glob") -> bool:
        """Return True if every name that `other` matches, of one character or more, matches this pattern too."""
        # NUL stands for the characters that no pattern names. A star is tried as nothing, as one of them, and as more
        # than this pattern can match without a star of its own.
        parts = re.sub(r"\*+", "*", other.text).replace("?", "\0").split("*")
        if len(parts) > _MAX_STARS + 1:
            return False
        fillings = product(("", "\0", "\0" * (len(self.text) + 1)), repeat=len(parts) - 1)
        names = ("".join(chain(*zip_longest(parts, filling, fillvalue=""))) for filling in fillings)
        return all(self.matches(name) for name in names if name)
