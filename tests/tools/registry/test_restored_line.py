"""A restored line knows what it has had: the keys of its signers, those that were revoked, the highest releases."""

import shutil
from pathlib import Path

import pytest

from daemon.config.settings import load_config
from daemon.errors import ReleaseError
from daemon.registry.signing import read_signing_key
from daemon.registry.store import Store
from tests.tools.registry.test_killed import release
from tools.backup.archive import write_backup
from tools.backup.restore import unpack
from tools.experts.line import open_line
from tools.registry.releases import PullOptions, pull, push

__all__ = ["release"]


class Restored:
    """A line that has had release 2, restored from its backup on a PC that has nothing else of it."""

    def __init__(self, folder: Path, line: Path) -> None:
        self.folder, self.line, self.stick = folder, line, Store(folder / "stick")
        self.push()
        self.pull()

    def push(self, valid_for_s: float = 3600.0) -> None:
        key = read_signing_key(self.folder / "keys" / "anna.sign_secret")
        push(load_config(self.folder / "other" / "coserve.yaml", {}), self.stick, key, "line", valid_for_s=valid_for_s)

    def pull(self, number: int | None = None, *, allow_older: bool = False) -> None:
        pull(open_line(self.line), self.stick, "line", PullOptions(number, allow_older=allow_older))

    def restore(self) -> None:
        report = write_backup(self.line, self.folder / "line.tar")
        assert not [warning for warning in report["warnings"] if "signers" in warning]
        shutil.rmtree(self.line.parent)
        (self.folder / "keys" / "anna.sign").unlink()
        self.line = unpack(self.folder / "line.tar", self.folder / "restored").config


@pytest.fixture
def kit(release: tuple[Path, str, str], tmp_path: Path) -> Restored:
    return Restored(tmp_path, release[0])


@pytest.mark.promise(
    "Upgrades, ways back, backups",
    "A restored line has the keys of its signers; a revoked key stays revoked, and an older or expired release is "
    "refused unless a person names it",
)
def test_an_older_or_expired_release_is_refused_by_a_restored_line_unless_a_person_names_it(kit: Restored) -> None:
    kit.restore()
    (signer,) = load_config(kit.line, {}).plant.signers
    assert signer.is_relative_to(kit.line.parent)
    with pytest.raises(ReleaseError, match="line/1 is older than line/2, which this line has had"):
        kit.pull(1)
    kit.push(valid_for_s=-1.0)
    with pytest.raises(ReleaseError, match="line/3 expired at"):
        kit.pull()
    kit.pull(1, allow_older=True)


def test_a_revoked_key_stays_revoked_on_a_restored_line(kit: Restored) -> None:
    revoked = kit.folder / "stick" / "revoked"
    revoked.mkdir()
    shutil.copy(kit.folder / "keys" / "anna.sign", revoked)
    with pytest.raises(ReleaseError, match=r"anna\.sign, which is revoked"):
        kit.pull()
    kit.restore()
    shutil.rmtree(revoked)
    kit.push()
    with pytest.raises(ReleaseError, match=r"line/3 is signed by anna\.sign, which is revoked"):
        kit.pull()
