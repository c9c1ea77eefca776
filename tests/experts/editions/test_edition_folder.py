"""Editions: one immutable file each, one pointer, and weights by their sha256."""

import json
import multiprocessing
import os
import signal
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest

from experts.catalog import CatalogEntry, read_catalog
from experts.durable import replace_text
from experts.editions.edition import Edition, EditionError, decode
from experts.editions.folder import EditionFolder, EditionsBusyError
from experts.editions.weights import WeightsStore
from experts.weights import Block, file_sha256, write_weights

RULES = "boards:\n  mainboard: {}\n"


def weights(file: Path, number: int) -> str:
    block = Block("w", "F32", (256,), bytes([number]) * 1024)
    return write_weights(file, [block], {"architecture": "resnet18"})


def an_entry(sha256: str, temperature: float = 1.0) -> CatalogEntry:
    return CatalogEntry(
        architecture="resnet18",
        file="",
        classes=("ok", "missing"),
        input_size=64,
        normalisation="none",
        sha256=sha256,
        temperature=temperature,
    )


def an_edition(number: int, sha256: str, rules: str = RULES, **fields) -> Edition:
    at = datetime(2026, 11, 28, tzinfo=UTC)
    fields = {"created_at": at, "who": "ines", "why": "reload"} | fields
    return Edition(number=number, rules=rules, experts={"R0402": an_entry(sha256), "C0402": an_entry(sha256)}, **fields)


def a_folder(root: Path) -> EditionFolder:
    """A catalog, rules and edition 1 of them in force."""
    root.mkdir(parents=True)
    sha256 = weights(root / "R0402.safetensors", 1)
    catalog, rules = root / "catalog.yaml", root / "rules.yaml"
    rules.write_text(RULES)
    experts = {"R0402": an_entry(sha256), "C0402": an_entry(sha256)}
    document = {name: entry.with_files(lambda *_: "R0402.safetensors") for name, entry in experts.items()}
    catalog.write_text(json.dumps({"experts": {k: v.model_dump(mode="json") for k, v in document.items()}}))
    folder = EditionFolder(catalog)
    with folder.changing() as writer:
        assert folder.weights.enter({sha256: root / "R0402.safetensors"}) == {}
        writer.add(an_edition(1, sha256))
        writer.point(an_edition(1, sha256))
    return folder


def put_in_force(folder: EditionFolder, edition: Edition, new: Path) -> None:
    rules = folder.root / "rules.yaml"
    with folder.changing() as writer:
        writer.follow(rules)
        folder.weights.enter(dict.fromkeys(edition.weights, new))
        if edition.number not in folder.numbers():
            writer.add(edition)
        writer.point(edition, rules)
        writer.follow(rules)


def test_an_edition_is_read_as_it_was_written(tmp_path: Path) -> None:
    edition = an_edition(7, "ab" * 32, note="Kontrast höher", parent=6)
    assert decode(edition.encoded(), tmp_path) == edition
    assert [*decode(edition.encoded(), tmp_path).experts] == ["R0402", "C0402"]
    assert decode(edition.encoded(), tmp_path).sha256 == edition.sha256


def test_a_cut_or_changed_file_is_refused_whatever_was_changed(tmp_path: Path) -> None:
    data = an_edition(7, "ab" * 32).encoded()
    for end in range(0, len(data) - 2, 7):
        with pytest.raises(EditionError, match="cut off or damaged"):
            decode(data[:end], tmp_path)
    for old, new in ((b"ines", b"ivan"), (b"1.0", b"1.1"), (b"mainboard", b"Mainboard"), (b"abab", b"abac")):
        if old in data:
            with pytest.raises(EditionError, match="changed after it was made"):
                decode(data.replace(old, new, 1), tmp_path)


def test_an_edition_of_a_newer_coserve_is_named_as_such(tmp_path: Path) -> None:
    class Newer(Edition):
        def _document(self) -> dict:
            return super()._document() | {"format": "coserve-edition-2", "colours": 3}

    newer = Newer(**dict(an_edition(7, "ab" * 32)))
    with pytest.raises(EditionError, match=r"newer CoServe \(coserve-edition-2\): install that one"):
        decode(newer.encoded(), tmp_path)


def test_a_pointer_to_nothing_says_what_is_there(tmp_path: Path) -> None:
    folder = a_folder(tmp_path / "experts")
    replace_text(folder.pointer, "12\n")
    with pytest.raises(EditionError, match=r"there is no edition 12: .*newest here are 1: put it back"):
        folder.in_force()
    replace_text(folder.pointer, "twelve\n")
    with pytest.raises(EditionError, match="holds no number of an edition"):
        folder.in_force()


def test_an_edition_never_changes(tmp_path: Path) -> None:
    folder = a_folder(tmp_path / "experts")
    with folder.changing() as writer, pytest.raises(EditionError, match="needs another number"):
        writer.add(an_edition(1, "ab" * 32))
    assert folder.numbers() == [1]
    assert folder.file(1).stat().st_mode & 0o222 == 0


def test_two_people_cannot_make_editions_at_once(tmp_path: Path) -> None:
    folder = a_folder(tmp_path / "experts")
    busy = pytest.raises(EditionsBusyError, match=f"process {os.getpid()} is making an edition")
    with folder.changing(), busy, folder.changing():
        pass


def test_weights_enter_whole_or_not_at_all(tmp_path: Path) -> None:
    store, file = WeightsStore(tmp_path / "catalog.yaml"), tmp_path / "new.safetensors"
    sha256 = weights(file, 3)
    wrong = "ab" * 32
    problems = store.enter({sha256: file, wrong: file, "cd" * 32: tmp_path / "none"})
    assert [*problems] == [wrong, "cd" * 32]
    assert f"its sha256 is {sha256[:12]}…" in problems[wrong]
    assert store.all() == {sha256: file.stat().st_size}
    assert file_sha256(store.place(sha256)) == sha256
    assert store.remove(sha256) > 0
    assert store.all() == {}


def test_working_files_that_differ_are_written_anew_and_others_stay(tmp_path: Path) -> None:
    folder, new = a_folder(tmp_path / "experts"), tmp_path / "new.safetensors"
    before = folder.catalog.read_text()
    put_in_force(folder, an_edition(2, next(iter(folder.weights.all())), "# ours\n" + RULES, parent=1), new)
    assert (folder.root / "rules.yaml").read_text() == "# ours\n" + RULES
    assert folder.catalog.read_text() == before
    put_in_force(folder, an_edition(3, weights(new, 2), parent=2), new)
    text = folder.catalog.read_text()
    assert text.startswith("# Written from edition 3; comments are not kept.")
    entry = read_catalog(folder.catalog)["R0402"]
    assert file_sha256(folder.root / entry.file) == entry.sha256


def test_a_pointer_that_was_lost_is_no_first_start(tmp_path: Path) -> None:
    folder = a_folder(tmp_path / "experts")
    folder.pointer.unlink()
    assert folder.current() is None  # as a kill leaves the first edition
    with folder.changing() as writer:
        writer.add(an_edition(2, next(iter(folder.weights.all())), parent=1))
    with pytest.raises(EditionError, match=r"current is missing, and editions 1, 2 are here: coserve rollback NUMBER"):
        folder.current()


def test_a_working_file_that_was_saved_while_an_edition_came_into_force_is_kept(tmp_path: Path) -> None:
    folder = a_folder(tmp_path / "experts")
    rules, real = folder.root / "rules.yaml", folder.root / "real.yaml"
    rules.rename(real)
    rules.symlink_to(real)
    new = an_edition(2, next(iter(folder.weights.all())), "# new\n" + RULES, parent=1)
    with folder.changing() as writer:
        writer.add(new)
        writer.point(new, rules)
    rules.write_text("# mine\n" + RULES)
    with folder.changing() as writer, pytest.raises(EditionError, match=r"rules\.yaml was saved while edition 2 came"):
        writer.follow(rules)
    assert rules.read_text() == "# mine\n" + RULES
    real.rename(folder.root / "mine.yaml")
    with folder.changing() as writer:
        writer.follow(rules)
    assert rules.read_text() == new.rules
    assert rules.is_symlink()
    assert not folder.is_rewriting


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: gives files to others")
def test_what_root_makes_belongs_to_the_owner_of_the_folder(tmp_path: Path) -> None:
    folder, new = a_folder(tmp_path / "experts"), tmp_path / "new.safetensors"
    folder.catalog.chmod(0o600)
    rules = folder.root / "rules.yaml"
    for place in (folder.root, folder.folder, folder.catalog, folder.pointer, rules):
        os.chown(place, 4242, 4242)
    put_in_force(folder, an_edition(2, weights(new, 2), "# new\n" + RULES, parent=1), new)
    made = (folder.file(2), folder.pointer, folder.catalog, rules, folder.weights.place(file_sha256(new)))
    assert {place.stat().st_uid for place in made} == {4242}


def test_a_link_in_place_of_the_lock_is_never_followed(tmp_path: Path) -> None:
    folder, other = a_folder(tmp_path / "experts"), tmp_path / "other"
    other.write_text("of somebody else")
    (folder.folder / ".lock").unlink()
    (folder.folder / ".lock").symlink_to(other)
    with pytest.raises(EditionError, match=r"\.lock: Too many levels of symbolic links"), folder.changing():
        pass
    assert other.read_text() == "of somebody else"


def dies_at(number: int, work, *arguments) -> bool:
    """Do `work` in a process that is killed right before its `number`th change of a file; whether it came so far."""

    def child() -> None:
        changes_left = number

        def count(event: str, args: tuple) -> None:
            nonlocal changes_left
            writes = event == "open" and args[2] & (os.O_WRONLY | os.O_RDWR) and ".lock" not in str(args[0])
            if writes or event in ("os.rename", "os.remove", "os.mkdir", "os.chmod"):
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
