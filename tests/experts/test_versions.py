"""Versions beside a catalog: kept, promoted, rolled back, pruned; and a process that is killed at any moment of it."""

import json
import multiprocessing
import os
import shutil
import signal
import sys
from pathlib import Path

import pytest

from experts.catalog import CatalogEntry, CatalogFile
from experts.catalog_edit import read
from experts.versions import Versions, VersionsError
from experts.weights import Block, file_sha256, write_weights

CATALOG = """\
# The line's experts, by hand. Ask Ines before changing R0402.
experts:
  R0402:   # the small resistor
    architecture: resnet18
    file: R0402.safetensors  # beside this file
    classes: [ok, missing]
    input_size: 64
    normalisation: {mean: [0.4, 0.4, 0.4], std: [0.2, 0.2, 0.2]}
    sha256: "SHA"   # from the import
    temperature: 1.3
  # the large one waits for its own camera
  "0805": {architecture: resnet18, file: R0402.safetensors, classes: [ok, 'NO'], input_size: 64, normalisation: none, sha256: "SHA"}
# end
"""  # noqa: E501


def weights(path: Path, number: int) -> str:
    """A weights file of nothing much; its sha256."""
    block = Block("w", "F32", (256,), bytes([number]) * 1024)
    return write_weights(path, [block], {"architecture": "resnet18"})


def a_folder(folder: Path) -> Versions:
    folder.mkdir(parents=True, exist_ok=True)
    sha256 = weights(folder / "R0402.safetensors", 0)
    (folder / "catalog.yaml").write_text(CATALOG.replace("SHA", sha256), encoding="utf-8")
    return Versions(folder / "catalog.yaml")


def a_candidate(versions: Versions, number: int, name: str = "R0402", **fields) -> CatalogEntry:
    """Return the entry of other weights for `name`, with their whole path."""
    file = versions.folder.parent / f"new-{number}.safetensors"
    fields = {"sha256": weights(file, number), "temperature": 0.5 + number, "file": str(file)} | fields
    model = next(iter(versions.read().values())).in_force
    assert model is not None
    return model.model_copy(update=fields)


def put(versions: Versions, number: int) -> str:
    with versions.changing() as change:
        return change.put("R0402", a_candidate(versions, number), source="a test")


def promote(versions: Versions, version: str) -> None:
    with versions.changing() as change:
        change.promote({"R0402": version})


def roll_back(versions: Versions) -> str:
    with versions.changing() as change:
        version = change.before("R0402")
        change.promote({"R0402": version}, "rollback")
    return version


def in_force(versions: Versions) -> str:
    """The version that the catalog names, whose weights must be what it says."""
    entry = CatalogFile.model_validate(read(versions.catalog.read_text(encoding="utf-8"))).experts["R0402"]
    assert file_sha256(versions.folder / entry.file) == entry.sha256
    return entry.sha256[:12]


def test_a_candidate_changes_nothing_until_it_is_promoted_and_again_when_rolled_back(tmp_path: Path):
    versions = a_folder(tmp_path / "experts")
    before = versions.catalog.read_text(encoding="utf-8")
    first = in_force(versions)
    second, third = put(versions, 1), put(versions, 2)
    assert versions.catalog.read_text(encoding="utf-8") == before
    promote(versions, second)
    promote(versions, third)
    assert in_force(versions) == third
    assert versions.read()["R0402"].lineage == [first, second, third]
    assert roll_back(versions) == second
    assert roll_back(versions) == first == in_force(versions)
    with pytest.raises(VersionsError, match="is the first version here"):
        roll_back(versions)
    did = [(step.did, step.version) for step in versions.read()["R0402"].steps if step.did != "put"]
    moves = [("promote", second), ("promote", third), ("rollback", second), ("rollback", first)]
    assert did == [("found", first), *moves]
    assert all(step.by and step.at for step in versions.read()["R0402"].steps)


def test_a_catalog_written_by_hand_keeps_its_comments_and_gets_them_back(tmp_path: Path):
    versions = a_folder(tmp_path / "experts")
    before = versions.catalog.read_text(encoding="utf-8")
    version = put(versions, 1)
    promote(versions, version)
    after = versions.catalog.read_text(encoding="utf-8")
    assert [line.split("#")[1:] for line in after.splitlines()] == [line.split("#")[1:] for line in before.splitlines()]
    assert f"file: versions/R0402/{version}.safetensors  # beside this file" in after
    assert "temperature: 1.5\n" in after
    roll_back(versions)
    again = versions.catalog.read_text(encoding="utf-8")
    first = in_force(versions)
    assert again.replace(f"versions/R0402/{first}.safetensors", "R0402.safetensors") == before


@pytest.mark.parametrize(
    ("deed", "said"),
    [
        (lambda v, version: put(v, 1), "has version .* already"),
        (lambda v, version: promote(v, in_force(v)), "is in force already"),
        (lambda v, version: v.read()["R0402"].named("0123456789ab"), "is none of them"),
        (lambda v, version: v.read()["R0402"].named(version[:3]), "is none of them"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(tmp_path: Path, deed, said: str):
    versions = a_folder(tmp_path / "experts")
    version = put(versions, 1)
    with pytest.raises(VersionsError, match=said):
        deed(versions, version)


def test_weights_that_are_not_what_their_entry_says_are_not_kept(tmp_path: Path):
    versions = a_folder(tmp_path / "experts")
    entry = a_candidate(versions, 1)
    file = Path(entry.file)
    with file.open("r+b") as damaged:
        damaged.seek(-1, os.SEEK_END)
        damaged.write(b"\x7f")
    with versions.changing() as change, pytest.raises(VersionsError, match="is damaged: its sha256"):
        change.put("R0402", entry, source="a test")
    assert not list(versions.folder.glob(f"versions/*/*{entry.sha256[:12]}*"))
    assert list(versions.read()["R0402"].versions) == []


def test_two_changes_at_once_are_one_change_and_a_refusal_with_the_other_s_process(tmp_path: Path):
    versions = a_folder(tmp_path / "experts")
    with (
        versions.changing(),
        pytest.raises(VersionsError, match=f"by process {os.getpid()}"),
        Versions(versions.catalog).changing(),
    ):
        pass


@pytest.mark.skipif(os.getuid() == 0 and not shutil.which("setpriv"), reason="root may write everywhere")
def test_a_folder_that_may_not_be_written_is_named_with_who_may(tmp_path: Path):
    versions = a_folder(tmp_path / "experts")
    for path in (tmp_path, *tmp_path.parents):
        if path.stat().st_uid == os.getuid() and path.is_relative_to(tmp_path.parents[1]):
            path.chmod(path.stat().st_mode | 0o755)
    context = multiprocessing.get_context("fork")
    answer = context.SimpleQueue()

    def try_it() -> None:
        if os.getuid() == 0:
            os.setuid(65534)
        try:
            with versions.changing():
                answer.put("allowed")
        except VersionsError as error:
            answer.put(str(error))

    versions.folder.chmod(0o555)
    process = context.Process(target=try_it)
    process.start()
    process.join(90)
    versions.folder.chmod(0o755)
    assert process.exitcode == 0
    assert "group coserve-experts" in answer.get()


def test_pruning_takes_what_nobody_needs_and_never_what_is_in_force(tmp_path: Path):
    versions = a_folder(tmp_path / "experts")
    first, second, third = in_force(versions), put(versions, 1), put(versions, 2)
    promote(versions, second)
    promote(versions, third)
    with versions.changing() as change:
        with pytest.raises(VersionsError, match="is in force and stays"):
            change.prune("R0402", third)
        assert change.prune("R0402", second) > 0
    assert not versions.weights_file("R0402", second).exists()
    assert versions.read()["R0402"].lineage == [first, third]
    assert roll_back(versions) == first == in_force(versions)


def test_an_expert_id_that_is_a_path_stays_inside_the_folder(tmp_path: Path):
    versions = a_folder(tmp_path / "experts")
    for name in ("../../outside", "..", "a/b", ".hidden"):
        place = versions.weights_file(name, "0" * 12)
        assert place.resolve().parent.parent == (versions.folder / "versions").resolve()


def _dies_at(number: int, work, *arguments) -> bool:
    """Do `work` in a process that is killed right before its `number`th change of a file; whether it came so far."""

    def child() -> None:
        changes_left = number

        def count(event: str, args: tuple) -> None:
            nonlocal changes_left
            writes = event == "open" and args[2] & (os.O_WRONLY | os.O_RDWR) and ".versions.lock" not in str(args[0])
            if writes or event in ("os.rename", "os.link", "os.remove", "os.mkdir", "os.chmod", "os.truncate"):
                changes_left -= 1
                if changes_left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(count)
        work(*arguments)
        os._exit(0)

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join(90)
    assert process.exitcode in (0, -signal.SIGKILL)
    return process.exitcode != 0


@pytest.mark.promise(
    "Versions of experts",
    "A kill at any step leaves the old or the new version complete, and work can continue from there",
)
@pytest.mark.parametrize("deed", ["put", "promote", "rollback", "prune"])
def test_a_process_killed_at_any_step_leaves_the_old_state_or_the_new_one(tmp_path: Path, deed: str):
    base = a_folder(tmp_path / "base" / "experts")
    first, second = in_force(base), put(base, 1)
    if deed in ("rollback", "prune"):
        promote(base, second)
    third = put(base, 2) if deed == "prune" else ""
    number, killed, current = 0, True, ""
    while killed:
        number += 1
        folder = tmp_path / f"at-{number}"
        shutil.copytree(tmp_path / "base", folder, symlinks=True)
        versions = Versions(folder / "experts" / "catalog.yaml")
        work = {
            "put": (put, versions, 3),
            "promote": (promote, versions, second),
            "rollback": (roll_back, versions),
            "prune": (_prune, versions, third),
        }[deed]
        killed = _dies_at(number, *work)
        current, expert = in_force(versions), versions.read()["R0402"]
        assert current in (first, second)
        assert expert.version == expert.lineage[-1] == current
        for version, stored in expert.versions.items():
            if deed != "prune" or version != third:  # what is being pruned may be half gone; nobody goes back to it
                assert file_sha256(versions.folder / stored.entry.file) == stored.entry.sha256
        # And life goes on from there.
        fourth = put(versions, 4)
        promote(versions, fourth)
        assert in_force(versions) == fourth
        assert roll_back(versions) == current == in_force(versions)
        assert not list(versions.folder.rglob("*.part"))
    assert number > 4
    assert (current == first) == (deed in ("put", "rollback"))


def _prune(versions: Versions, version: str) -> None:
    with versions.changing() as change:
        change.prune("R0402", version)


def test_a_catalog_in_a_form_that_cannot_be_edited_is_written_anew_and_says_so(tmp_path: Path):
    versions = a_folder(tmp_path / "experts")
    text = versions.catalog.read_text(encoding="utf-8")
    versions.catalog.write_text(f"# ours\n{json.dumps(read(text))}\n", encoding="utf-8")
    sha256 = in_force(versions)
    with versions.changing() as change:
        version = change.put("0805", a_candidate(versions, 1, classes=("yes", "no")), source="a test")
        change.promote({"0805": version})
        assert change.lost_comments
    assert in_force(versions) == sha256
    entries = CatalogFile.model_validate(read(versions.catalog.read_text(encoding="utf-8"))).experts
    assert entries["0805"].classes == ("yes", "no")
    assert entries["R0402"].classes == ("ok", "missing")


def recalibrated(versions: Versions, temperature: float) -> str:
    """Put the weights in force with another temperature."""
    entry = versions.read()["R0402"].in_force
    assert entry is not None
    with versions.changing() as change:
        changed = entry.model_copy(update={"temperature": temperature})
        return change.put("R0402", changed.moved_from(versions.folder), source="a test")


def by_hand(versions: Versions, old: str, new: str) -> None:
    text = versions.catalog.read_text(encoding="utf-8")
    assert old in text
    versions.catalog.write_text(text.replace(old, new), encoding="utf-8")


def temperature(versions: Versions) -> float:
    entry = versions.read()["R0402"].in_force
    assert entry is not None
    return entry.temperature


def test_a_recalibration_is_a_version_of_its_own_that_is_promoted_and_rolled_back(tmp_path: Path):
    versions = a_folder(tmp_path / "experts")
    first = versions.read()["R0402"].version or ""
    second = recalibrated(versions, 1.1)
    assert second.partition("+")[0] == first
    assert second != first
    assert temperature(versions) == 1.3
    promote(versions, second)
    assert (versions.read()["R0402"].version, temperature(versions)) == (second, 1.1)
    assert "Ask Ines" in versions.catalog.read_text(encoding="utf-8")
    third = recalibrated(versions, 2)
    promote(versions, third)
    assert (roll_back(versions), temperature(versions)) == (second, 1.1)
    assert (roll_back(versions), temperature(versions)) == (first, 1.3)
    (file,) = (versions.folder / "versions" / "R0402").iterdir()
    assert file.stat().st_ino == (versions.folder / "R0402.safetensors").stat().st_ino  # once on the disk for all three
    assert [step.did for step in versions.read()["R0402"].steps] == [
        *("found", "put", "promote", "put", "promote", "rollback", "rollback")
    ]
