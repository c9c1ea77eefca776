import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from experts.catalog import UNREADABLE, CatalogEntry, CatalogFile, resolve, write_catalog
from experts.catalog_edit import add_to_catalog, read
from experts.spec import ExpertSpec, identified, name_of
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


def test_labels_that_yaml_could_mistake_come_back_as_they_were(tmp_path: Path):
    spec = an_expert_file(tmp_path)
    strange = ["NO", "on", "1e5", "0o17", "é ä", " padded ", "null", "~", "a: b", "12:30", "=", "2026-11-21"]
    file = tmp_path / "catalog.yaml"
    write_catalog(file, {"strange": an_entry(spec, classes=strange), "7": an_entry(spec)})
    document = yaml.safe_load(file.read_text(encoding="utf-8"))
    assert CatalogFile.model_validate(document).experts["strange"].classes == tuple(strange)
    assert list(document["experts"]) == ["strange", "7"]
    assert '"1e5"' in file.read_text(encoding="utf-8")


def test_reading_a_catalog_needs_no_torch():
    code = "import experts.catalog, experts.weights, sys; sys.exit('torch' in sys.modules or 'cv2' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    "text",
    [
        "# ours\n",
        "# ours\nexperts: {}   # none yet\n# the end\n",
        "# ours\nexperts:   # none yet\n# the end\n",
        "# ours\nexperts:\n",
        "# ours\nexperts: {}",
        "experts:  # ours\n  0402: {ENTRY}  # flow\n\n  # between\n  NO: {ENTRY}\n  a: {ENTRY, nms_iou: 0.3}  # new\n",
    ],
)
@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_whatever_a_person_wrote_in_a_catalog_stays(tmp_path: Path, text: str, newline: str):
    entry = an_entry(an_expert_file(tmp_path))
    file = tmp_path / "catalog.yaml"
    flow = ", ".join(f"{key}: {json.dumps(value)}" for key, value in entry.items())
    text = text.replace("ENTRY", flow).replace("\n", newline)
    file.write_bytes(text.encode())
    others = {key: value for key, value in (read(text).get("experts") or {}).items() if key != "a"}
    add_to_catalog(file, "a", entry)
    after = file.read_bytes().decode()
    assert all(f"#{comment.split(newline)[0]}" in after for comment in text.split("#")[1:])
    assert after.count(newline) == after.count("\n")
    assert {key: value for key, value in read(after)["experts"].items() if key != "a"} == others
    assert CatalogFile.model_validate(read(after)).experts["a"] == CatalogEntry.model_validate(entry)
    assert list(read(after)["experts"]) == [*others, "a"]
