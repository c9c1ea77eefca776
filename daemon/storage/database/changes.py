"""The table `changes`: who changed what about the line, appended and never changed; retention keeps all of it.

Rows `start` and `reload` tell what came into force, by subject: `rules`, an expert's name (its version), `settings of`
an expert. The value `new` holds until the subject's next such row, which has null if the subject is gone.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Literal

from sqlalchemy import Connection, and_, func, insert, select

from daemon.storage.database.schema import changes
from daemon.storage.database.transaction import Transaction

RULES = "rules"
PROGRAM = "CoServe"
_IN_FORCE = ("start", "reload")


@dataclass(frozen=True, slots=True)
class Change:
    """A row to append; `at` is UTC text."""

    at: str
    who: str
    what: str
    subject: str
    old: str | None = None
    new: str | None = None
    note: str | None = None


@dataclass(frozen=True, slots=True)
class State:
    """The values by subject since `at` (or `at_of` it): each that differs from its subject's last row becomes a row.

    `words_of` a subject say what changed; its row's note begins with them.
    """

    at: str
    who: str
    what: Literal["start", "reload", "settings", "keys"]
    values: Mapping[str, str]
    note: str | None = None
    at_of: Mapping[str, str] = field(default_factory=dict[str, str])
    words_of: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True, slots=True)
class ChangeNotes:
    """Changes of one moment: of a new run of `version`, `steps` that may have been written before, `rows`, `states`."""

    rows: tuple[Change, ...] = ()
    steps: tuple[Change, ...] = ()
    states: tuple[State, ...] = ()
    version: str | None = None


def expert_subject(expert: str) -> str:
    """Return the subject of an expert: its name, unless another subject has that."""
    return f"expert {expert}" if expert in (RULES, PROGRAM) else expert


def append(tx: Transaction, notes: ChangeNotes) -> None:
    """Append the rows of `notes`: steps first, which are older."""
    rows = [step for step in dict.fromkeys(notes.steps) if not _is_there(tx.connection, step)] + list(notes.rows)
    for state in notes.states:
        before = last_values(tx.connection, _IN_FORCE if state.what in _IN_FORCE else (state.what,))
        for subject in {**before, **state.values}:
            old, new = before.get(subject), state.values.get(subject)
            if old != new:
                at = state.at_of.get(subject, state.at)
                note = ": ".join(filter(None, (state.words_of.get(subject), state.note))) or None
                rows.append(Change(at, state.who, state.what, subject, old, new, note))
    if rows:
        tx.connection.execute(insert(changes), [asdict(row) for row in rows])


def last_values(connection: Connection, kinds: tuple[str, ...]) -> dict[str, str | None]:
    of_kinds = changes.c.what.in_(kinds) & (changes.c.subject != PROGRAM)
    newest = select(func.max(changes.c.change_id)).where(of_kinds).group_by(changes.c.subject)
    rows = connection.execute(select(changes.c.subject, changes.c.new).where(changes.c.change_id.in_(newest)))
    return dict(rows.tuples().all())


def _is_there(connection: Connection, step: Change) -> bool:
    """Return True if a step was appended before: no person makes the same one twice in a millisecond."""
    same = and_(*(changes.c[name].is_not_distinct_from(value) for name, value in asdict(step).items()))
    return connection.execute(select(changes.c.change_id).where(same).limit(1)).first() is not None
