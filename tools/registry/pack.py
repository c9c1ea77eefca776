"""Make a release of what a line has in force, sign it and bring it to a folder or a hub."""

from datetime import UTC, datetime, timedelta
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory

from daemon.config.settings import Config
from daemon.registry.hub_store import Source
from daemon.registry.manifest import Manifest, ReleasedExpert, ReleaseError, SignedManifest, StoredFile
from daemon.registry.signing import SecretKey, signature_of
from experts.editions.folder import EditionFolder
from experts.people import current_user


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
