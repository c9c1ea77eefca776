"""Bring a release to a line: check all of it before anything changes, then put it in force between two boards.

The files come first, each compared with its digest; an interrupted pull has changed nothing, and the next one resumes.
Then weights become stored versions, rules and catalog are checked together as the daemon would, and both are replaced
while no board is open, so that no board has verdicts of two releases.
"""

import hashlib
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from daemon.registry.hub_store import Source
from daemon.registry.manifest import Manifest, ReleaseError, SignedManifest, decode, refusal, signer_of
from daemon.wire.control import ControlError
from experts.catalog import CatalogEntry
from experts.durable import replace_text, switching
from experts.people import current_user
from experts.weights import file_sha256
from tools.experts.change import entry_problems
from tools.experts.line import ExpertsLine
from tools.registry.line_releases import LineReleases

#: Each check for open boards holds new ones back for this long, and no longer if this process is killed.
_HOLD_S = 5.0
_LOOK_EVERY_S = 0.1
_RELOAD_S = 60.0


@dataclass(frozen=True, slots=True)
class Pulled:
    """A release that is in force now. `heard`: a running daemon serves it; else its next start will."""

    manifest: Manifest
    signer: str
    fetched_bytes: int
    changed: tuple[str, ...]
    rules_changed: bool
    heard: bool
    lost_comments: bool


@dataclass(frozen=True, slots=True)
class PullOptions:
    """What to pull, and the conditions under which it may be put in force.

    `newest`: for a timer, the newest of an unrevoked signer of this line, unless the line has had it: a person's
    rollback stays. `within_s`: how long to wait for open boards to close; None: not at all, and a board may have
    verdicts of two releases. `allow_older`: a person wants to go back, or to take an expired release.
    """

    number: int | None = None
    newest: bool = False
    within_s: float | None = 600.0
    allow_older: bool = False


def pull(line: ExpertsLine, source: Source, name: str, options: PullOptions = PullOptions()) -> Pulled | str:
    """Put a release in force; with `newest`, return the name of the one in force if the line has had the newest.

    Raises ReleaseError or VersionsError, and the line keeps what it had; also if a revoked key signed the release in
    force and none replaces it.
    """
    with line.versions.changing():
        releases = LineReleases(line)  # `changing` has undone what a killed pull left half replaced
    with releases.pulling():
        numbers = source.numbers(name)
        if not numbers:
            raise ReleaseError(f"{source} has no release {name}; it has {', '.join(source.names()) or 'none'}")
        revoked = releases.revoked(source.revoked())
        if not options.newest:
            number = numbers[-1] if options.number is None else options.number
            return _pull(releases, source, name, (number, source.manifest(name, number)), options)
        facts = releases.in_force().get(name)
        number, signed = release = _newest_signed(releases, source, name, numbers, revoked)
        is_had = facts is not None and facts.seen.get(str(number)) == _sha256(signed)
        if facts is None or not is_had or releases.unsettled(name).exists():
            return _pull(releases, source, name, release, options)
        in_force = f"{name}/{facts.number}"
        if facts.signer in (file.name for file in revoked):
            raise ReleaseError(
                f"{in_force}, which is in force, is signed by {facts.signer}, which is revoked, and {source} has no"
                " newer release of another signer: see what it changed (coserve changes), and go back if you must"
            )
        return in_force


def _newest_signed(
    releases: LineReleases, source: Source, name: str, numbers: Sequence[int], revoked: Sequence[Path]
) -> tuple[int, SignedManifest]:
    """Return the newest release of an unrevoked signer; else the newest of all, which will be refused."""
    signers = releases.signers()
    for number in reversed(numbers):
        signed = source.manifest(name, number)
        with suppress(ReleaseError):
            if signer_of(signed, signers, f"{name}/{number}") not in revoked:
                return number, signed
    return numbers[-1], source.manifest(name, numbers[-1])


def _pull(
    releases: LineReleases, source: Source, name: str, release: tuple[int, SignedManifest], options: PullOptions
) -> Pulled:
    line, (number, signed) = releases.line, release
    manifest, signer = accepted(releases, name, number, signed, options)
    fetched_bytes = _fetch(releases, source, manifest)
    entries = _local_entries(releases, manifest)
    rules = releases.store.place(manifest.rules.sha256) if manifest.rules is not None else None
    versions = _store_versions(line, manifest, entries, rules)
    is_running = _wait_for_boards(line, options.within_s)
    try:
        replace_text(releases.unsettled(name), f"{manifest.release}\n", like=line.config.catalog)
        pulled = _put_in_force(releases, manifest, versions, rules)
    finally:
        if is_running:
            _hold_boards(line, 0.0)
    releases.store.add_manifest(name, number, signed, needs_files=False)
    releases.note(name, number, signer, _sha256(signed))
    releases.store.drop_objects()
    return Pulled(manifest, signer, fetched_bytes, *pulled)


def accepted(
    releases: LineReleases, name: str, number: int, signed: SignedManifest, options: PullOptions
) -> tuple[Manifest, str]:
    """Return a release that this line may take, and its signer. Raises ReleaseError."""
    what = f"{name}/{number}"
    file = signer_of(signed, releases.signers(), what)
    if file in releases.revoked():
        raise ReleaseError(
            f"{what} is signed by {file.name}, which is revoked: have it signed by another person, take the key out of"
            f" plant.signers, and look at what else it signed; this line notes it in {releases.store.folder}/revoked"
        )
    manifest = decode(signed.data, what)
    if (manifest.name, manifest.number) != (name, number):
        raise ReleaseError(f"{what}: its manifest says {manifest.release}: the store was changed; see who did it")
    facts = releases.in_force().get(name)
    if facts is not None and facts.seen.get(str(number), _sha256(signed)) != _sha256(signed):
        other = "is another release than the one of this number that this line has had"
        raise ReleaseError(f"{what} {other}: each store counts for itself; push it there with another --name")
    highest = None if facts is None else max(map(int, facts.seen))
    if facts is not None and facts.number < number and str(number) in facts.seen:
        highest = number  # forward again, after a return
    if reason := refusal(manifest, highest, datetime.now(UTC), allow_older=options.allow_older):
        raise ReleaseError(reason)
    return manifest, file.name


def _fetch(releases: LineReleases, source: Source, manifest: Manifest) -> int:
    """Fetch the files that the line lacks; return their bytes."""
    files = releases.weights()
    present = {sha256 for sha256, file in files.items() if file.is_file() and file_sha256(file) == sha256}
    rules = manifest.rules.sha256 if manifest.rules is not None else None
    needed = {sha256: size for sha256, size in manifest.files.items() if sha256 not in present or sha256 == rules}
    missing = {sha256: size for sha256, size in needed.items() if not releases.store.has(sha256)}
    releases.store.check_free_space(sum(missing.values()) + sum(needed.values()))  # once here, and once as versions
    for sha256, size in needed.items():
        releases.store.fetch(source.pieces, sha256, size)
    return sum(missing.values())


def _local_entries(releases: LineReleases, manifest: Manifest) -> dict[str, CatalogEntry]:
    present = releases.weights()

    def place(_: str, sha256: str) -> str:
        file = releases.store.place(sha256) if releases.store.has(sha256) else present[sha256]
        return str(file.resolve())

    return {name: expert.entry.with_files(place) for name, expert in manifest.experts.items()}


def _store_versions(
    line: ExpertsLine, manifest: Manifest, entries: Mapping[str, CatalogEntry], rules: Path | None
) -> dict[str, str]:
    """Store the experts that the line lacks as versions; return the version of each expert to be promoted."""
    problems = line.new_problems(entries, rules)
    if problems:
        raise ReleaseError(f"{manifest.release} does not fit this line:\n" + "\n".join(problems))
    with line.versions.changing() as change:
        stored = {name: change.find(name, entry) for name, entry in entries.items()}
        new = {name: entries[name] for name, version in stored.items() if version is None}
        for name, entry in new.items():
            problems += entry_problems(name, entry, Path("/"), forward=True)
        if problems:
            raise ReleaseError(f"{manifest.release} has experts that cannot be used:\n" + "\n".join(problems))
        versions = {**stored, **(change.put_all(new, manifest.release) if new else {})}
        return {
            name: version
            for name, version in versions.items()
            if version is not None and version != change.expert(name).version
        }


def _wait_for_boards(line: ExpertsLine, within_s: float | None) -> bool:
    """Hold new boards until the open ones have closed; return True if a daemon runs. Raises ReleaseError."""
    until_s, state = time.monotonic() + (within_s or 0.0), _hold_boards(line, _HOLD_S)
    if state is None:
        _require_no_open_board(line, within_s)
        return False
    while within_s is not None:
        time.sleep(_LOOK_EVERY_S)  # images that came just before the first check are counted by the next
        state = _hold_boards(line, _HOLD_S)
        if state is None or not any(state.values()):
            break
        if time.monotonic() > until_s:
            _hold_boards(line, 0.0)
            raise ReleaseError(
                f"{state['open_boards']} boards were still open, with {state['images']} images under way, after"
                f" {within_s:g} s: nothing has changed; pull again in a pause, or with --now"
            )
    return True


def _require_no_open_board(line: ExpertsLine, within_s: float | None) -> None:
    from sqlalchemy import func, select

    from daemon.storage.database.schema import boards

    query = select(func.count()).select_from(boards).where(boards.c.verdict.is_(None))
    is_open = line.in_database(lambda connection: connection.execute(query).scalar_one())
    if is_open and within_s is not None:
        raise ReleaseError(
            f"no daemon runs, and {is_open} boards are open in the results: start the line so that they close, or"
            " pull with --now"
        )


def _hold_boards(line: ExpertsLine, seconds: float) -> dict[str, Any] | None:
    """Let no board begin for `seconds`; return counts of open work, None without a daemon. Raises ReleaseError."""
    try:
        answer = line.ask("hold_boards", seconds=seconds)
    except ControlError as error:
        raise ReleaseError(f"the daemon did not hold new boards ({error.reason}): nothing has changed") from None
    return None if answer is None else {key: answer[key] for key in ("open_boards", "images")}


def _put_in_force(
    releases: LineReleases, manifest: Manifest, versions: Mapping[str, str], rules: Path | None
) -> tuple[tuple[str, ...], bool, bool, bool]:
    """Replace catalog and rules together and have the daemon read both; if it refuses, restore the old ones."""
    line = releases.line
    catalog, place = files = (line.versions.catalog, line.config.rules)
    with line.versions.changing() as change:
        old = {file: file.read_bytes().decode() if file.exists() else "" for file in files}
        new = rules.read_bytes().decode() if rules is not None else old[place]
        before = {name: change.expert(name).in_force for name in versions}
        with switching(catalog, old):
            if versions:
                change.promote(versions, note=manifest.release)
            if new != old[place]:
                replace_text(place, new)
        try:
            heard = line.ask("reload", timeout_s=_RELOAD_S, who=current_user(), note=manifest.release) is not None
        except ControlError as error:
            if error.code != "bad_rules":
                raise ReleaseError(
                    f"{manifest.release} is in the line's files, but the daemon did not read them ({error.reason}):"
                    " coserve reload, then pull it again"
                ) from None
            with switching(catalog, old):
                replace_text(place, old[place])
                change.take_back(old[catalog], before)
            releases.unsettled(manifest.name).unlink(missing_ok=True)
            raise ReleaseError(
                f"the daemon refused {manifest.release}, so the old files are restored: {error}"
            ) from None
        return tuple(versions), new != old[place], heard, change.lost_comments


def _sha256(signed: SignedManifest) -> str:
    return hashlib.sha256(signed.data).hexdigest()
