"""Suggestions for misspelt names: the nearest of the right ones."""

from collections.abc import Iterable
from difflib import get_close_matches


def nearest(word: str, right: Iterable[str]) -> str | None:
    """The right name most like `word` (case is forgiven first), or None where none is near."""
    names = list(dict.fromkeys(right))
    folded = {name.casefold(): name for name in reversed(names)}
    if word.casefold() in folded:
        return folded[word.casefold()]
    close = get_close_matches(word, names, n=1, cutoff=0.6) or get_close_matches(word.casefold(), folded, n=1)
    if not close:
        return None
    return folded.get(close[0], close[0])


def meant(word: str, right: Iterable[str]) -> str:
    """The end of an error about a wrong name: the nearest right one, else all of them where they are few."""
    names = list(dict.fromkeys(right))
    close = nearest(word, names)
    if close is not None:
        return f"; did you mean `{close}`?"
    if 0 < len(names) <= 12:
        return "; expected " + ("one of " if len(names) > 1 else "") + ", ".join(f"`{name}`" for name in names)
    return ""
