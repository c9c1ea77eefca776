from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from experts.catalog import UNREADABLE, CatalogError, CatalogFile, add_expert, read_catalog, resolve, write_catalog
from experts.spec import ExpertSpec, identified, name_of
from experts.weights import Block, read_header, write_weights
from tests.experts.samples import an_expert_file


def an_entry(spec: ExpertSpec, **fields) -> dict:
    entry = {
        "architecture": spec.architecture,
        "file": spec.file.name,
        "classes": list(spec.classes),
        "input_size": spec.input_size,
        "normalisation": "imagenet",
        "sha256": spec.sha256,
    }
    return {**entry, **fields}


def resolved(folder: Path, **entries: dict):
    return resolve(CatalogFile.model_validate({"experts": entries}), folder)


def test_an_entry_becomes_the_spec_of_its_file(tmp_path: Path):
    spec = an_expert_file(tmp_path)
    catalog, problems = resolved(tmp_path, r18=an_entry(spec, temperature=1.5))
    assert problems == []
    assert catalog["r18"] == identified(replace(spec, temperature=1.5))
    assert catalog.headers["r18"].metadata["origin"] == "a test"
    catalog["line"] = replace(spec, classes=())
    assert catalog.judges == 1, "a backbone has no classes"


def test_an_expert_is_another_one_with_other_settings_and_the_same_one_elsewhere(tmp_path: Path):
    spec = an_expert_file(tmp_path / "here")
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "copy").hardlink_to(spec.file)
    ids = [
        resolved(folder, r18=an_entry(spec, **fields))[0]["r18"].expert
        for folder, fields in (
            (tmp_path / "here", {}),
            (tmp_path / "there", {"file": "copy"}),
            (tmp_path / "here", {"temperature": 1.5}),
        )
    ]
    assert ids[0] == ids[1] != ids[2]
    assert [*map(name_of, ids)] == ["r18"] * 3


def test_all_mistakes_are_found_at_once_with_their_places(tmp_path: Path):
    spec = an_expert_file(tmp_path)
    detector = an_expert_file(tmp_path, "yolo", "yolov8n", 2)
    catalog, problems = resolved(
        tmp_path,
        typo=an_entry(spec, architecture="resnt18"),
        deeper=an_entry(spec, architecture="resnet34"),
        labels=an_entry(spec, classes=["a", "b"]),
        twice=an_entry(spec, classes=["a", "a", "b", "c", "d"]),
        size=an_entry(spec, input_size=96),
        odd=an_entry(detector, input_size=100, normalisation="none"),
    )
    assert len(catalog) == 0
    places = dict(problems)
    assert "did you mean resnet18?" in places["experts", "typo", "architecture"]
    assert "holds a resnet18" in places["experts", "deeper", "architecture"]
    assert "made for the classes" in places["experts", "labels", "classes"]
    assert "a appears more than once" in places["experts", "twice", "classes"]
    assert "made for 64 pixels" in places["experts", "size", "input_size"]
    assert "multiple of 32" in places["experts", "odd", "input_size"]


def test_an_expert_whose_file_is_missing_keeps_its_place_and_fits_no_slot(tmp_path: Path):
    spec = an_expert_file(tmp_path)
    catalog, problems = resolved(tmp_path, gone=an_entry(spec, file="gone.safetensors"), r18=an_entry(spec))
    assert [place for place, _ in problems] == [("experts", "gone", "file")]
    assert catalog["gone"].layout == UNREADABLE
    assert catalog["gone"].classes == spec.classes
    assert "gone" not in catalog.headers
    assert catalog["r18"] == identified(spec)


def test_a_file_in_the_memory_format_of_earlier_versions_is_to_be_imported_again(tmp_path: Path):
    spec = an_expert_file(tmp_path)
    header = read_header(spec.file).metadata | {"memory_format": "contiguous"}
    sha256 = write_weights(spec.file, [Block("w", "F32", (1,), bytes(4))], header)
    catalog, ((place, problem),) = resolved(tmp_path, r18=an_entry(spec, sha256=sha256))
    assert place == ("experts", "r18", "file")
    assert "holds its weights as contiguous, expected channels_last; import it again" in problem
    assert catalog["r18"].layout == UNREADABLE


def test_labels_that_yaml_could_mistake_come_back_as_they_were(tmp_path: Path):
    spec = an_expert_file(tmp_path)
    strange = ["NO", "on", "1e5", "0o17", "é ä", " padded ", "null", "~", "a: b", "12:30", "=", "2026-11-21"]
    file = tmp_path / "catalog.yaml"
    write_catalog(file, {"strange": an_entry(spec, classes=strange), "7": an_entry(spec)})
    document = yaml.safe_load(file.read_text(encoding="utf-8"))
    assert CatalogFile.model_validate(document).experts["strange"].classes == tuple(strange)
    assert list(document["experts"]) == ["strange", "7"]
    assert '"1e5"' in file.read_text(encoding="utf-8")


def test_adding_an_expert_keeps_the_others(tmp_path: Path):
    spec, file = an_expert_file(tmp_path), tmp_path / "catalog.yaml"
    file.write_text("experts:   # none yet\n")
    add_expert(file, "a", an_entry(spec))
    add_expert(file, "b", an_entry(spec))
    add_expert(file, "a", an_entry(spec, temperature=2.0))
    entries = read_catalog(file)
    assert {name: entry.temperature for name, entry in entries.items()} == {"a": 2.0, "b": 1.0}
    file.write_text("experts: [")
    with pytest.raises(CatalogError, match=r"catalog\.yaml:2:1"):
        add_expert(file, "a", an_entry(spec))
