"""Make an edition: the one way in which rules and experts come into force.

Weights, then the edition's file, then the running daemon's consent, then the pointer, then the daemon, then the working
files. Whatever ends it, the edition before or the new one is in force, whole.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Protocol

from daemon.config.settings import Config
from daemon.errors import ConfigError
from daemon.line.line import QUIET_S, capacity_problems, load_rules_and_catalog
from daemon.line.served import Served, compile_edition
from experts.catalog import CatalogEntry
from experts.editions.edition import Edition, EditionError, FromRelease, Why
from experts.editions.folder import EditionFolder, without_files


@dataclass(frozen=True, slots=True)
class Draft:
    """Content of the next edition; the files of `experts` are absolute.

    `keeps_files`: the working files stay as people wrote them.
    """

    rules: str
    experts: Mapping[str, CatalogEntry]
    why: Why
    note: str | None = None
    release: FromRelease | None = None
    ends_earlier: bool = False
    keeps_files: bool = False


class RunningLine(Protocol):
    """The line's daemon, if one runs, and its database."""

    def highest(self) -> int | None:
        """Return the highest number that a row names, 0 for none; None if this user may not read the database."""

    def digest(self, number: int) -> str | None:
        """Return the sha256 of the edition that rows mean by a number; None if no row names it."""

    def check(self, served: Served) -> None:
        """Raises ConfigError if the daemon cannot judge by it beside what it has pinned and its budgets."""

    def adopt(self, number: int) -> dict[str, Any] | None:
        """Have the daemon judge by an edition; None if none runs. Raises EditionError if it did not."""


@dataclass(frozen=True, slots=True)
class Made:
    """`lacking`: weights that could not enter, with why. `adopted` is the daemon's answer, None if none runs."""

    edition: Edition
    before: Edition | None
    lacking: Mapping[str, str]
    adopted: dict[str, Any] | None

    @property
    def is_new(self) -> bool:
        return self.edition is not self.before


def make_edition(
    config: Config,
    who: str,
    build: Callable[[Edition | None], Draft],
    running: RunningLine,
    *,
    discard: bool = False,
    anew: bool = False,
) -> Made:
    """Put in force what `build` makes of the edition in force. Raises EditionError, ConfigError, OSError.

    Where nothing differs, weights that were missing enter, and the daemon adopts the edition in force once more. With
    `discard` edits of the working files that were never loaded are given up; with `anew` the same content gets a new
    number, and the edition in force may be damaged.
    """
    folder = EditionFolder(config.catalog)
    with folder.changing() as writer:
        writer.claim(config.journal)
        writer.follow(config.rules)  # a crash may have left them behind
        before = _in_force(folder, may_be_damaged=anew)
        draft = build(before)
        may_hold_edits = discard or draft.keeps_files
        _require_no_edits(config, before, may_hold_edits)
        edition = _edition_of(draft, who, before, _next_number(folder, running))
        served = compile_edition(edition, draft.experts, folder.root)
        if problems := capacity_problems(config, served.routes, served.catalog):
            raise ConfigError(problems)
        lacking = folder.enter(draft.experts)
        if not draft.keeps_files:
            _require_weights(lacking, edition, before)
            writer.require_writable(edition, config.rules)
        is_another = before is not None and running.digest(before.number) not in (None, before.sha256)
        must_differ = anew or is_another or draft.ends_earlier
        is_same = before is not None and before.has_content_of(edition) and draft.release in (None, before.release)
        rewrites = None if draft.keeps_files else config.rules
        if before is not None and is_same and not must_differ:
            if rewrites is not None:
                writer.point(before, rewrites)  # edits that are given up
            adopted = running.adopt(before.number)
            writer.follow(config.rules)
            return Made(before, before, lacking, adopted)
        writer.add(edition)
        try:
            running.check(served)
            _require_no_edits(config, before, may_hold_edits)  # that may have taken a minute
        except BaseException:
            writer.remove(edition.number)
            raise
        writer.point(edition, rewrites)
        adopted = running.adopt(edition.number)
        writer.follow(config.rules)
        return Made(edition, before, lacking, adopted)


def working_files(config: Config, note: str | None, *, now: bool = False) -> Draft:
    """Read what people edit, when no file is being written. Raises ConfigError with every mistake."""
    routes, catalog = load_rules_and_catalog(config, quiet_s=QUIET_S)
    experts = {name: entry.moved_from(config.catalog.parent) for name, entry in catalog.entries.items()}
    return Draft(routes.text, experts, "reload", note, ends_earlier=now, keeps_files=True)


def draft_of(edition: Edition, folder: EditionFolder, why: Why, note: str | None = None) -> Draft:
    return Draft(edition.rules, folder.absolute_entries(edition), why, note)


def _in_force(folder: EditionFolder, *, may_be_damaged: bool) -> Edition | None:
    try:
        return folder.in_force()
    except EditionError:
        if not may_be_damaged:
            raise
        return None


def _require_no_edits(config: Config, before: Edition | None, may_hold_edits: bool) -> None:
    if before is None or may_hold_edits:
        return
    if edited := EditionFolder(config.catalog).stale_files(before, config.rules):
        raise EditionError(
            f"{' and '.join(map(str, edited))}: edited, not in force: coserve reload first, or give the edits up with"
            " --discard"
        )


def _next_number(folder: EditionFolder, running: RunningLine) -> int:
    highest = running.highest()
    if highest is None:
        raise EditionError(
            "the database cannot be read, and a new edition could take the number of another: run this as a user who"
            " may read it (sudo)"
        )
    return max(highest, *folder.numbers(), 0) + 1


def _edition_of(draft: Draft, who: str, before: Edition | None, number: int) -> Edition:
    return Edition(
        number=number,
        parent=before.number if before is not None else None,
        created_at=datetime.now(UTC),
        who=who,
        why=draft.why,
        note=draft.note,
        release=draft.release,
        ends_earlier=draft.ends_earlier,
        rules=draft.rules,
        experts={name: without_files(entry) for name, entry in draft.experts.items()},
    )


def _require_weights(lacking: Mapping[str, str], edition: Edition, before: Edition | None) -> None:
    """Refuse an expert that is new or changed without its weights; others may have lost theirs."""
    changed = [e for name, e in edition.experts.items() if before is None or before.experts.get(name) != e]
    needed = set[str]().union(*(entry.weights for entry in changed))
    if problems := [why for sha256, why in lacking.items() if sha256 in needed]:
        raise EditionError("\n".join(problems))
