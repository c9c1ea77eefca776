"""What editions and candidates tell of each expert: its versions, who did what, and the way back."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from experts.editions.candidates import Shadow, read_candidates, write_candidates
from experts.editions.edition import EditionError
from experts.editions.folder import EditionFolder
from experts.editions.history import experts_of, keep_candidates, past
from tests.experts.editions.test_edition_folder import a_folder, an_edition, an_entry, weights

START = datetime(2026, 11, 28, tzinfo=UTC)


def in_force(
    folder: EditionFolder,
    number: int,
    new: Path,
    sha256: str,
    why: str,
    temperature: float = 1.0,
    day: int | None = None,
) -> None:
    """Put an edition in force in which R0402 alone differs."""
    before = folder.in_force()
    assert before is not None
    experts = before.experts | {"R0402": an_entry(sha256, temperature)}
    fields = {
        "parent": before.number,
        "why": why,
        "created_at": START + timedelta(days=day or number),
        "experts": experts,
    }
    edition = an_edition(number, sha256).model_copy(update=fields)
    with folder.changing() as writer:
        folder.weights.enter({sha256: new})
        writer.add(edition)
        writer.point(edition)


@pytest.mark.promise("Versions of experts", "A recalibration is promoted and rolled back as other weights are")
def test_promotions_and_rollbacks_make_a_lineage_and_a_recalibration_is_a_version(tmp_path: Path) -> None:
    folder, new = a_folder(tmp_path / "experts"), tmp_path / "new.safetensors"
    (first,) = folder.weights.all()
    second = weights(new, 2)
    in_force(folder, 2, new, second, "promote")
    in_force(folder, 3, new, second, "promote", temperature=2.0)
    expert = experts_of(folder)["R0402"]
    assert [*expert.versions] == [first[:12], second[:12], expert.version]
    assert expert.version is not None
    assert expert.version.startswith(f"{second[:12]}+")
    assert expert.lineage == [first[:12], second[:12], expert.version]
    assert expert.before() == second[:12]
    in_force(folder, 4, new, second, "rollback")
    expert = experts_of(folder)["R0402"]
    assert (expert.version, expert.lineage) == (second[:12], [first[:12], second[:12]])
    assert [step.did for step in expert.steps] == ["found", "promote", "promote", "rollback"]
    assert {step.by for step in expert.steps} == {"ines"}
    in_force(folder, 5, new, first, "promote")
    in_force(folder, 6, new, second, "promote", temperature=2.0)
    in_force(folder, 7, new, second, "rollback")  # to an edition further back
    assert experts_of(folder)["R0402"].lineage == [first[:12], second[:12]]
    assert [step.did for step in experts_of(folder)["C0402"].steps] == ["found"]
    with pytest.raises(EditionError, match="first version here"):
        experts_of(folder)["C0402"].before()


def test_a_clock_that_was_set_back_changes_no_way_back(tmp_path: Path) -> None:
    folder, new = a_folder(tmp_path / "experts"), tmp_path / "new.safetensors"
    second = weights(new, 2)
    in_force(folder, 2, new, second, "promote", day=900)
    in_force(folder, 3, new, weights(new, 3), "promote", day=3)
    assert experts_of(folder)["R0402"].before() == second[:12]


def test_versions_whose_weights_are_gone_are_no_way_back(tmp_path: Path) -> None:
    folder, new = a_folder(tmp_path / "experts"), tmp_path / "new.safetensors"
    (first,) = folder.weights.all()
    in_force(folder, 2, new, weights(new, 2), "promote")
    in_force(folder, 3, new, weights(new, 3), "promote")
    gone = experts_of(folder)["R0402"].lineage[1]
    folder.weights.remove(weights(new, 2))
    expert = experts_of(folder)["R0402"]
    assert gone not in expert.versions
    assert expert.before() == first[:12]


def test_an_edition_that_was_never_in_force_is_no_part_of_the_history(tmp_path: Path) -> None:
    folder, new = a_folder(tmp_path / "experts"), tmp_path / "new.safetensors"
    with folder.changing() as writer:
        writer.add(an_edition(2, weights(new, 9), parent=1))  # a kill left it
    in_force(folder, 3, new, weights(new, 3), "promote")
    in_force(folder, 4, new, weights(new, 4), "promote")
    assert [edition.number for edition in past(folder, 4)] == [4, 3, 1]
    assert len(experts_of(folder)["R0402"].lineage) == 3


def test_candidates_wait_are_shadowed_and_leave_when_they_come_into_force(tmp_path: Path) -> None:
    folder, new = a_folder(tmp_path / "experts"), tmp_path / "new.safetensors"
    sha256, catalog = weights(new, 2), folder.catalog
    entries = {"R0402": an_entry(sha256).model_copy(update={"file": str(new)})}
    version = keep_candidates(folder, entries, "/train/out", "first")["R0402"]
    assert keep_candidates(folder, entries, "/train/out") == {"R0402": version}, "it is known: nothing is done"
    assert version == sha256[:12]
    shadow = Shadow(version=version, images=100, agreement=0.99)
    write_candidates(catalog, read_candidates(catalog).shadowed("R0402", shadow, None))
    expert = experts_of(folder)["R0402"]
    assert (expert.named(version[:6]), expert.shadow, expert.version != version) == (version, shadow, True)
    assert sorted(step.did for step in expert.steps) == ["found", "put", "shadow"]
    assert (expert.waiting, expert.versions[version].source) == ([version], "/train/out")
    in_force(folder, 2, new, sha256, "promote")
    expert = experts_of(folder)["R0402"]
    assert (expert.version, expert.shadow, expert.waiting) == (version, None, [])
    assert expert.versions[version].source == "/train/out"


def test_a_damaged_list_of_candidates_is_named(tmp_path: Path) -> None:
    folder = a_folder(tmp_path / "experts")
    (folder.root / "candidates.json").write_text("{")
    with pytest.raises(EditionError, match=r"candidates\.json: .*put it back from a backup, or delete it"):
        experts_of(folder)
