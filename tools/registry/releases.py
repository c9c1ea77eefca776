"""Make a signed release of what a line has in force; check all of one, and put it in force as the next edition.

Weights come first, each compared with its digest, straight to where editions have them; an interrupted pull has changed
nothing, and the next one resumes. Then the edition in force, with the release's experts and rules, is made the next one
(daemon/line/making.py): boards that have begun stay in theirs.
"""

from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory

from daemon.config.settings import Config
from daemon.errors import ConfigError
from daemon.line.making import Draft, Made, draft_of
from daemon.registry.hub_store import Source
from daemon.registry.manifest import (
    Manifest,
    ReleasedExpert,
    ReleaseError,
    SignedManifest,
    StoredFile,
    decode,
    refusal,
    signer_of,
)
from daemon.registry.signing import PublicKey, SecretKey, key_id, read_public_key, signature_of
from daemon.registry.store import Store, check_free_space, fetch_file, locked
from daemon.wire.keys import KeyFileError
from experts.durable import make_folders, replace_text
from experts.editions.edition import Edition, FromRelease
from experts.editions.folder import EditionFolder
from experts.editions.history import past
from experts.people import current_user
from experts.weights import file_sha256
from tools.experts.change import entry_problems
from tools.experts.line import ExpertsLine, put_first_in_force

#: Editions that are asked for their release: each file names all experts.
_NEWEST = 100


class LineReleases:
    """Releases that a line has had: editions name them, `releases/` has their manifests and revoked keys."""

    def __init__(self, line: ExpertsLine) -> None:
        self.line = line
        self.editions = line.folder
        self.store = Store(self.editions.root / "releases")

    def pulling(self) -> AbstractContextManager[None]:
        """Hold the right to pull, for one process at a time. Raises ReleaseError."""
        make_folders(self.store.folder, self.editions.root)
        return locked(self.store.folder, busy="another pull is under way on this line: pull again when it is over")

    def signers(self) -> dict[Path, PublicKey]:
        """Return the keys that `plant.signers` names, by their files. Raises ReleaseError."""
        try:
            return {file: read_public_key(file) for file in self.line.config.plant.signers}
        except OSError as error:
            what = f"{error.filename} cannot be read: {error.strerror}"
            raise ReleaseError(f"{self.line.path}: plant.signers: {what}") from None
        except KeyFileError as error:
            raise ReleaseError(f"{self.line.path}: plant.signers: {error}") from None

    def revoked(self, told: Collection[str] = ()) -> list[Path]:
        """Return the key files of signers revoked here before, or by a hub or stick now (`told`: ids of keys).

        The latter are noted here, so that their releases are refused from any source. Raises ReleaseError.
        """
        ids = {file: key_id(key) for file, key in self.signers().items()}
        folder = self.store.folder / "revoked"
        for file, key in ids.items():
            place = folder / f"{key.replace(' ', '-')}.sign"  # its id: a new key may have the old one's name
            if key in told and not place.exists():
                make_folders(folder, self.editions.root)
                replace_text(place, file.read_text(encoding="ascii"), like=self.editions.catalog)
        try:
            known = self.store.revoked()
        except (KeyFileError, OSError) as error:
            raise ReleaseError(str(error)) from None
        return [file for file, key in ids.items() if key in known]

    def seen(self, name: str) -> dict[int, str]:
        """Return the sha256 of each manifest that the line has had, by number: none comes twice as another one.

        A pull that was killed before it kept the manifest has left an edition that names it. Raises EditionError.
        """
        seen = {number: manifest_sha256(self.store.manifest(name, number)) for number in self.store.numbers(name)}
        for release in self.taken(name):
            if release.number in seen:
                break  # those before it are kept too
            seen[release.number] = release.sha256
        return seen

    def taken(self, name: str) -> list[FromRelease]:
        """Return the releases of this name that editions were made of, newest first. Raises EditionError."""
        in_force = self.editions.in_force()
        if in_force is None:
            return []
        editions = past(self.editions, in_force.number, depth=_NEWEST)
        return [each.release for each in editions if each.release is not None and each.release.name == name]


def manifest_sha256(signed: SignedManifest) -> str:
    return sha256(signed.data).hexdigest()


@dataclass(frozen=True, slots=True)
class Pulled:
    manifest: Manifest
    release: FromRelease
    fetched_bytes: int
    made: Made

    @property
    def changed(self) -> list[str]:
        """Return the experts that are new or others than in the edition before."""
        before = {} if self.made.before is None else self.made.before.experts
        return [name for name, entry in self.made.edition.experts.items() if before.get(name) != entry]

    @property
    def rules_changed(self) -> bool:
        return self.made.before is None or self.made.before.rules != self.made.edition.rules


@dataclass(frozen=True, slots=True)
class PullOptions:
    """What to pull, and the conditions under which it may be put in force.

    `newest`: for a timer, the newest of an unrevoked signer of this line, unless the line has had it: a person's
    rollback stays. `ends_earlier`: boards of earlier editions end at once. `allow_older`: a person wants to go back, or
    to take an expired release. `discard`: give up edits of the working files that were never loaded.
    """

    number: int | None = None
    newest: bool = False
    ends_earlier: bool = False
    allow_older: bool = False
    discard: bool = False


def pull(line: ExpertsLine, source: Source, name: str, options: PullOptions = PullOptions()) -> Pulled | str:
    """Put a release in force; with `newest`, return the name of the newest one if the line has had it.

    Raises ReleaseError or EditionError, and the line keeps what it had; also if a revoked key signed the release that
    it took last and none replaces it.
    """
    releases = LineReleases(line)
    with releases.pulling():
        numbers = source.numbers(name)
        if not numbers:
            raise ReleaseError(f"{source} has no release {name}; it has {', '.join(source.names()) or 'none'}")
        revoked = releases.revoked(source.revoked())
        if not options.newest:
            number = numbers[-1] if options.number is None else options.number
            return _pull(releases, source, name, (number, source.manifest(name, number)), options)
        number, signed = release = _newest_signed(releases, source, name, numbers, revoked)
        if releases.seen(name).get(number) != manifest_sha256(signed):
            return _pull(releases, source, name, release, options)
        taken = next(iter(releases.taken(name)), None)
        if taken is not None and taken.signer in (file.name for file in revoked):
            raise ReleaseError(
                f"{name}/{taken.number}, which this line took last, is signed by {taken.signer}, which is revoked, and"
                f" {source} has no newer release of another signer: see what it changed (coserve changes), and go back"
                " if you must"
            )
        return f"{name}/{number}"


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
    releases: LineReleases, source: Source, name: str, offered: tuple[int, SignedManifest], options: PullOptions
) -> Pulled:
    line, folder, (number, signed) = releases.line, releases.editions, offered
    manifest, release = accepted(releases, name, number, signed, options)
    fetched_bytes = _fetch(folder, source, manifest)
    rules = None if manifest.rules is None else _rules(source, manifest.rules)

    def build(before: Edition | None) -> Draft:
        base = Draft("", {}, "pull") if before is None else draft_of(before, folder, "pull")
        experts = {
            each: new.entry.with_files(lambda _, digest: str(folder.weights.place(digest)))
            for each, new in manifest.experts.items()
        }
        unknown = {each: entry for each, entry in experts.items() if base.experts.get(each) != entry}
        problems = [why for each, new in unknown.items() for why in entry_problems(each, new, Path("/"), forward=True)]
        if problems:
            raise ReleaseError(f"{manifest.release} has experts that cannot be used:\n" + "\n".join(problems))
        return replace(
            base,
            rules=base.rules if rules is None else rules,
            experts={**base.experts, **experts},
            note=manifest.release,
            release=release,
            ends_earlier=options.ends_earlier,
        )

    if line.config.catalog.exists():
        put_first_in_force(line)
    try:
        made = line.make_edition(build, discard=options.discard)
    except ConfigError as error:
        raise ReleaseError(f"{manifest.release} does not fit this line:\n{error}") from None
    releases.store.add_manifest(name, number, signed, needs_files=False)
    for part in folder.weights.folder.glob("*/[!.]*.part"):
        part.unlink()  # of a release that was never fetched to its end
    return Pulled(manifest, release, fetched_bytes, made)


def accepted(
    releases: LineReleases, name: str, number: int, signed: SignedManifest, options: PullOptions
) -> tuple[Manifest, FromRelease]:
    """Return a release that this line may take, and how its edition names it. Raises ReleaseError."""
    what, digest = f"{name}/{number}", manifest_sha256(signed)
    file = signer_of(signed, releases.signers(), what)
    if file in releases.revoked():
        raise ReleaseError(
            f"{what} is signed by {file.name}, which is revoked: have it signed by another person, take the key out of"
            f" plant.signers, and look at what else it signed; this line notes it in {releases.store.folder}/revoked"
        )
    manifest = decode(signed.data, what)
    if (manifest.name, manifest.number) != (name, number):
        raise ReleaseError(f"{what}: its manifest says {manifest.release}: the store was changed; see who did it")
    seen = releases.seen(name)
    if seen.get(number, digest) != digest:
        other = "is another release than the one of this number that this line has had"
        raise ReleaseError(f"{what} {other}: each store counts for itself; push it there with another --name")
    highest, now = max(seen, default=None), datetime.now(UTC)
    if reason := refusal(manifest, highest, now, allow_older=options.allow_older):
        raise ReleaseError(reason)
    return manifest, FromRelease(name=name, number=number, sha256=digest, signer=file.name)


def _fetch(folder: EditionFolder, source: Source, manifest: Manifest) -> int:
    """Fetch the weights that the line lacks; return their bytes."""
    weights, needed = folder.weights, manifest.files
    if manifest.rules is not None:
        del needed[manifest.rules.sha256]
    for each in needed:
        if weights.has(each) and file_sha256(weights.place(each)) != each:
            weights.remove(each)
    missing = {each: size for each, size in needed.items() if not weights.has(each)}
    check_free_space(folder.root, sum(missing.values()))
    for each, size in missing.items():
        make_folders(weights.place(each).parent, folder.root)
        fetch_file(source.pieces, each, size, weights.place(each), weights.mode)
    return sum(missing.values())


def _rules(source: Source, file: StoredFile) -> str:
    data = b""
    for piece in source.pieces(file.sha256, 0):
        data += piece
        if len(data) > file.bytes:
            break  # a source that does not end must not fill the memory
    try:
        if sha256(data).hexdigest() == file.sha256:
            return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        pass
    raise ReleaseError("the release's rules are damaged: their bytes do not have their sha256, or are no text")


def push(
    config: Config,
    to: Source,
    key: SecretKey,
    name: str,
    *,
    valid_for_s: float,
    with_rules: bool = True,
    note: str | None = None,
) -> Manifest:
    """Add the next release to `to`, its files first: it is there whole or not at all.

    It is the edition in force, read once; files that people edit are not asked. Raises ReleaseError, EditionError.
    """
    folder = EditionFolder(config.catalog)
    edition = folder.in_force()
    if edition is None:
        raise ReleaseError(f"{folder.pointer}: no edition is in force on this line yet: coserve reload, then push")
    files = {each: folder.weights.place(each) for each in sorted(edition.weights)}
    if missing := [str(file) for file in files.values() if not file.is_file()]:
        raise ReleaseError(f"{missing[0]}: edition {edition.number} needs these weights: put the file back")
    rules = edition.rules.encode()
    backbones = {entry.backbone.sha256 for entry in edition.experts.values() if entry.backbone is not None}
    now = datetime.now(UTC).replace(microsecond=0)
    manifest = Manifest(
        name=name,
        number=max(to.numbers(name), default=0) + 1,
        made_at=now,
        expires_at=now + timedelta(seconds=valid_for_s),
        made_by=current_user(),
        line=config.line,
        note=note,
        experts={
            expert: ReleasedExpert(bytes=files[entry.sha256].stat().st_size, entry=entry)
            for expert, entry in edition.experts.items()
        },
        backbones=tuple(StoredFile(sha256=each, bytes=files[each].stat().st_size) for each in sorted(backbones)),
        rules=StoredFile(sha256=sha256(rules).hexdigest(), bytes=len(rules)) if with_rules else None,
    )
    with TemporaryDirectory() as temporary:
        if manifest.rules is not None:
            files[manifest.rules.sha256] = Path(temporary) / "rules.yaml"
            files[manifest.rules.sha256].write_bytes(rules)
        for each, file in files.items():
            to.add_object(file, each)
    data = manifest.encoded()
    to.add_manifest(name, manifest.number, SignedManifest(data, signature_of(data, key).encode()))
    return manifest
