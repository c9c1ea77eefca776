"""Which of the journal's segments may go: none that a row needs, and none that a commit in doubt may still need.

A commit that failed lies in the database's log until another is written over it: after a kill it may come true, and
then the journal has the only bytes of its images (docs/decisions.md, "A commit that failed").
"""

import structlog

from daemon.storage.database.store import Store
from daemon.storage.journal import Journal


class Segments:
    """Called by the writer's thread. Deleting is never urgent: what fails is tried again with the next segment."""

    def __init__(self, journal: Journal, store: Store) -> None:
        self._journal = journal
        self._store = store
        #: Segments below hold nothing of groups that are still to be answered; below `_frontier` they may go.
        self._answered = self._frontier = journal.frontier
        self._in_doubt = False
        self._failure: str | None = None
        self._log = structlog.get_logger("journal")

    @property
    def is_in_doubt(self) -> bool:
        """Whether the last commit of arrivals failed, and nothing has been written over it."""
        return self._in_doubt

    def begin(self) -> None:
        """What the last run left and no row needs goes."""
        self._journal.begin_after(max(self._store.segments_in_use, default=0))
        self._answered = self._frontier = self._journal.frontier
        self.drop()

    def committing(self) -> None:
        """Rows of arrivals are about to be committed: in doubt until `committed`."""
        self._in_doubt = True

    def committed(self) -> None:
        """A commit stands: what one before it may have left is written over."""
        self._in_doubt = False

    def end_doubt(self) -> None:
        """Write over a commit that failed; the database's errors while it takes nothing."""
        self._store.write_over()
        self.committed()
        self._advance()

    def answered(self, frontier: int) -> None:
        """A group is answered, and segments below `frontier` hold nothing of later ones."""
        self._answered = max(self._answered, frontier)
        self._advance()

    def drop(self) -> None:
        """Delete what no row needs any more."""
        failure = None
        try:
            self._journal.drop_segments(self._store.segments_in_use, self._frontier)
        except OSError as error:
            failure = str(error)
            if failure != self._failure:
                self._log.warning("segments_not_deleted", error=failure)
        self._failure = failure

    def _advance(self) -> None:
        if self._answered > self._frontier and not self._in_doubt:
            self._frontier = self._answered
            self.drop()
