"""Make a release of what a line has in force, sign it and bring it to a folder or a hub."""

from datetime import UTC, datetime, timedelta

from daemon.registry.hub_store import Source
from daemon.registry.manifest import Manifest, ReleasedExpert, ReleaseError, SignedManifest, StoredFile
from daemon.registry.signing import SecretKey, signature_of
from experts.people import current_user
from experts.weights import file_sha256
from tools.experts.line import ExpertsLine, entries_in_force


def push(
    line: ExpertsLine,
    to: Source,
    key: SecretKey,
    name: str,
    *,
    valid_for_s: float,
    with_rules: bool = True,
    note: str | None = None,
) -> Manifest:
    """Add the next release to `to`, its files first: it is there whole or not at all. ReleaseError, VersionsError."""
    experts = entries_in_force(line.experts())
    if problems := line.problems(experts):
        raise ReleaseError("the line itself has mistakes, so nothing was pushed:\n" + "\n".join(problems))
    folder = line.versions.folder
    files = {entry.sha256: folder / entry.file for entry in experts.values()}
    backbones = {entry.backbone.sha256: folder / entry.backbone.file for entry in experts.values() if entry.backbone}
    rules = None
    if with_rules:
        rules = StoredFile(sha256=file_sha256(line.config.rules), bytes=line.config.rules.stat().st_size)
    now = datetime.now(UTC).replace(microsecond=0)
    manifest = Manifest(
        name=name,
        number=max(to.numbers(name), default=0) + 1,
        made_at=now,
        expires_at=now + timedelta(seconds=valid_for_s),
        made_by=current_user(),
        line=line.config.line,
        note=note,
        experts={
            expert: ReleasedExpert(bytes=files[entry.sha256].stat().st_size, entry=entry.with_files(lambda *_: ""))
            for expert, entry in experts.items()
        },
        backbones=tuple(StoredFile(sha256=sha256, bytes=file.stat().st_size) for sha256, file in backbones.items()),
        rules=rules,
    )
    every = files | backbones | ({rules.sha256: line.config.rules} if rules is not None else {})
    for sha256, file in every.items():
        to.add_object(file, sha256)
    data = manifest.encoded()
    to.add_manifest(name, manifest.number, SignedManifest(data, signature_of(data, key).encode()))
    return manifest
