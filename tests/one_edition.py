"""The rules and experts that a line has in force, as all see them who read them: a mix would be seen as another one."""

import json
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from daemon.config.settings import load_config
from daemon.line.line import load_line
from daemon.registry.store import Store
from experts.catalog import CatalogEntry
from experts.editions.edition import Edition
from tools.backup.archive import write_backup
from tools.backup.restore import unpack
from tools.registry.releases import push


def seen_by(path: Path) -> set[str]:
    """Return the contents that a daemon that starts, a signed release and a restored backup of the line have."""
    with TemporaryDirectory() as scratch:
        store, key = Store(Path(scratch) / "stick"), Ed25519PrivateKey.generate()
        manifest = push(load_config(path, {}), store, key, "line", valid_for_s=60.0)
        assert manifest.rules is not None
        rules = store.checked(manifest.rules.sha256, manifest.rules.bytes).read_text(encoding="utf-8")
        signed = _content(rules, {name: expert.entry for name, expert in manifest.experts.items()})
        write_backup(path, Path(scratch) / "line.tar")
        restored = unpack(Path(scratch) / "line.tar", Path(scratch) / "restored").config
        return {_started(path), signed, _started(restored)}


def content_of(edition: Edition) -> str:
    return _content(edition.rules, edition.experts)


def _started(path: Path) -> str:
    line = load_line(path, {})
    assert line.served is not None
    assert line.catalog.headers.keys() == line.catalog.keys(), "every expert has its weights"
    return content_of(line.served.edition)


def _content(rules: str, experts: Mapping[str, CatalogEntry]) -> str:
    entries = {name: entry.model_dump(mode="json") for name, entry in experts.items()}
    return sha256(json.dumps([rules, entries], sort_keys=True).encode()).hexdigest()
