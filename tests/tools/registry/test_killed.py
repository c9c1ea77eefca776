"""Pulls and restores killed at each step, or cut off from power: who reads the line sees one edition, whole."""

import os
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from daemon.config.settings import load_config
from daemon.registry.signing import make_signing_pair, read_signing_key
from daemon.registry.store import Store
from experts.editions.edition import EditionError
from experts.editions.folder import EditionFolder
from tests.editions import files_in_force
from tests.experts.editions.test_edition_folder import dies_at
from tests.faults.powercut import Disk, Unsynced
from tests.faults.shim import read_log, shim_environment
from tests.one_edition import content_of, seen_by
from tests.tools.backup.test_backup import CONFIG, RULES, a_folder, with_other_weights
from tools.backup import restore
from tools.backup.archive import write_backup
from tools.experts.line import open_line
from tools.registry import releases as pulling
from tools.registry.releases import LineReleases, push

KINDS: tuple[Unsynced, ...] = ("nothing", "some", "garbage")


@pytest.fixture
def release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, str, str]:
    """A line, the content that it has in force, and that of the release which waits for it in `stick`."""
    monkeypatch.setattr(pulling, "entry_problems", lambda *_, **__: [])  # weights without numbers: none can be run
    make_signing_pair(tmp_path / "keys", "anna")
    line = a_folder(tmp_path / "line", CONFIG + f"plant: {{signers: [{tmp_path}/keys/anna.sign]}}\n")
    other = a_folder(tmp_path / "other")
    with_other_weights(other.parent / "experts", 2)
    (other.parent / "rules.yaml").write_text(RULES + "# new\n", encoding="utf-8")
    released = files_in_force(other)
    key = read_signing_key(tmp_path / "keys" / "anna.sign_secret")
    push(load_config(other, {}), Store(tmp_path / "stick"), key, "line", valid_for_s=3600.0)
    before = in_force(line)
    after = before.model_copy(update={"rules": released.rules, "experts": before.experts | released.experts})
    return line, content_of(before), content_of(after)


def in_force(path: Path):
    edition = EditionFolder(load_config(path, {}).catalog).in_force()
    assert edition is not None
    return edition


def pull(path: Path) -> None:
    pulling.pull(open_line(path), Store(path.parents[1] / "stick"), "line")


@pytest.mark.promise(
    "Versions of experts",
    "A pull or a restore that is killed at any step leaves the edition before or the new one, never a mix: for a "
    "daemon that starts, for a signed release, for a backup, and for the next pull",
)
def test_a_pull_killed_after_the_pointer_moved_has_put_the_release_in_force(release: tuple[Path, str, str]) -> None:
    line, _, after = release

    def die() -> None:
        Store.add_manifest = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
        pull(line)

    assert dies_at(10**9, die)
    assert seen_by(line) == {after}
    said = pulling.pull(open_line(line), Store(line.parents[1] / "stick"), "line", pulling.PullOptions(newest=True))
    assert said == "line/1"


def test_the_release_taken_last_is_found_ninety_editions_back_and_damage_in_force_is_an_error(
    release: tuple[Path, str, str],
) -> None:
    line, _, _ = release
    pull(line)
    folder, edition = EditionFolder(load_config(line, {}).catalog), in_force(line)
    taken, releases = edition.release, LineReleases(open_line(line))
    with folder.changing() as writer:
        for number in range(edition.number + 1, edition.number + 91):
            edition = edition.model_copy(update={"number": number, "parent": number - 1, "release": None})
            writer.add(edition)
        writer.point(edition)
    assert taken is not None
    assert releases.taken("line")[0] == taken
    folder.file(edition.number).unlink()
    folder.file(edition.number).write_text("{}")
    with pytest.raises(EditionError):
        releases.taken("line")


@pytest.mark.test_all
@pytest.mark.parametrize("deed", ["pull", "restore"])
def test_killed_at_any_step_the_edition_before_or_the_new_one_is_seen_by_all(
    tmp_path: Path, release: tuple[Path, str, str], deed: str
) -> None:
    line, before, after = release
    archive = tmp_path / "line.tar"
    write_backup(line, archive)
    kills, seen = 0, set[str]()
    while True:
        path = tmp_path / f"at-{kills}" / "line" / "coserve.yaml"
        if deed == "pull":
            shutil.copytree(line.parent, path.parent)
            shutil.copytree(tmp_path / "stick", path.parents[1] / "stick")

        def work(path: Path = path) -> None:
            _ = pull(path) if deed == "pull" else restore.unpack(archive, path.parent)

        if not dies_at(kills + 1, work):
            break
        kills += 1
        if path.exists():
            (content,) = seen_by(path)
            seen.add(content)
        work()  # the next one goes on, or begins anew
        assert seen_by(path) == ({after} if deed == "pull" else {before})
        assert not [*path.parent.rglob("*.part"), *path.parent.rglob("rewriting"), *path.parents[1].glob(".*")]
        shutil.rmtree(path.parents[1])
    print(f"{deed}: killed at {kills} steps")
    assert seen == ({before, after} if deed == "pull" else set())  # a restore is there as a whole or not at all
    assert kills > 20


@pytest.mark.test_all
@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler: apt-get install gcc")
def test_a_pull_whose_power_is_cut_leaves_the_edition_before_or_the_new_one(
    tmp_path: Path, release: tuple[Path, str, str]
) -> None:
    line, before, after = release
    code = f"from tests.tools.registry.test_killed import cut_pull; cut_pull({str(line)!r})"
    cuts, seen, log, untouched = 0, set[str](), tmp_path / "calls", tmp_path / "untouched"
    shutil.copytree(line.parent, untouched)
    while True:
        disks = {kind: Disk(line.parent) for kind in KINDS}
        environ = os.environ | shim_environment((f"rename:kill-after:{cuts + 1}",), log, keep_bytes_of=line.parent)
        done = subprocess.run([sys.executable, "-c", code], env=environ, check=False, timeout=300)
        if done.returncode == 0:
            break
        cuts += 1
        for kind, disk in disks.items():
            disk.replay(read_log(log), log)
            disk.cut(kind, random.Random(cuts))
            (content,) = seen_by(line)
            seen.add(content)
        shutil.rmtree(line.parent)
        shutil.copytree(untouched, line.parent)
        for file in tmp_path.glob("calls*"):
            file.unlink()
    print(f"pull: {cuts} cuts of the power, each with {len(KINDS)} kinds of what was not synced")
    assert seen == {before, after}
    assert cuts > 4


def cut_pull(path: str) -> None:
    pulling.entry_problems = lambda *_, **__: []
    pull(Path(path))
