"""Patterns of component types: `*` is any text, `?` any one character, all else itself; case counts."""

import fnmatch
import re
from collections.abc import Sequence
from dataclasses import dataclass

#: Past these bounds a question of coverage is answered "not covered": nothing is refused by mistake.
MAX_STATES = 5_000
MAX_TOGETHER = 32


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
    def is_wild(self) -> bool:
        return "*" in self.text or "?" in self.text

    @property
    def head(self) -> str:
        """The literal text in front of the first wildcard."""
        return re.split(r"[*?]", self.text, maxsplit=1)[0]

    def matches(self, name: str) -> bool:
        return self.regex.fullmatch(name) is not None


def covering(glob: Glob, earlier: Sequence[Glob]) -> tuple[Glob, ...]:
    """The patterns of `earlier` that together match every name that `glob` matches, or () if a name is left over.

    If one alone is enough, it is the only one. A name has at least one character.
    """
    if not glob.is_wild:
        return next(((cover,) for cover in earlier if cover.matches(glob.text)), ())
    head = glob.head
    near = [cover for cover in earlier if cover.head.startswith(head) or head.startswith(cover.head)]
    # Without a wildcard among them they match finitely many names, and `glob` matches more.
    near = sorted(near, key=lambda cover: not cover.is_wild)[:MAX_TOGETHER]
    if not any(cover.is_wild for cover in near) or not _Inclusion(near, glob).holds():
        return ()
    for cover in near:
        if _Inclusion([cover], glob).holds():
            return (cover,)
    for cover in tuple(near):
        fewer = [pattern for pattern in near if pattern is not cover]
        if _Inclusion(fewer, glob).holds():
            near = fewer
    return tuple(cover for cover in earlier if cover in near)


class _Inclusion:
    """Test that every name of one glob matches one of several others: the subset construction, one bit per position.

    The globs that cover are laid one behind the other; bit i of a state says that position i may be reached.
    """

    def __init__(self, covers: Sequence[Glob], glob: Glob) -> None:
        self._glob = _collapsed(glob.text)
        self._start = self._accept = self._stars = self._any = 0
        self._literal: dict[str, int] = {}
        position = 0
        for cover in covers:
            self._start |= 1 << position
            for sign in _collapsed(cover.text):
                bit = 1 << position
                if sign == "*":
                    self._stars |= bit
                elif sign == "?":
                    self._any |= bit
                else:
                    self._literal[sign] = self._literal.get(sign, 0) | bit
                position += 1
            self._accept |= 1 << position
            position += 1
        # Characters that no pattern names behave alike, so one that cannot occur in any stands for them all.
        self._alphabet = [*dict.fromkeys([*self._literal, *(sign for sign in self._glob if sign not in "*?")]), ""]

    def holds(self) -> bool:
        start = self._closed(self._start)
        pending = [(at, start) for at in self._skips(0)]
        states = set(pending)
        while pending:
            at, state = pending.pop()
            for following, reached in self._steps(at, state):
                if following == len(self._glob) and not reached & self._accept:
                    return False
                if (following, reached) not in states:
                    states.add((following, reached))
                    pending.append((following, reached))
            if len(states) > MAX_STATES:
                return False
        return True

    def _steps(self, at: int, state: int) -> list[tuple[int, int]]:
        if at == len(self._glob):
            return []
        sign = self._glob[at]
        signs = self._alphabet if sign in "*?" else [sign]
        behind = self._skips(at if sign == "*" else at + 1)
        return [(following, self._after(state, letter)) for letter in signs for following in behind]

    def _skips(self, at: int) -> list[int]:
        """`at`, and the position behind it where a star is there that may stand for nothing."""
        return [at, at + 1] if self._glob[at : at + 1] == "*" else [at]

    def _after(self, state: int, sign: str) -> int:
        moved = (state & (self._any | self._literal.get(sign, 0))) << 1
        return self._closed(moved | state & self._stars)

    def _closed(self, state: int) -> int:
        return state | (state & self._stars) << 1


def _collapsed(text: str) -> str:
    return re.sub(r"\*+", "*", text)
