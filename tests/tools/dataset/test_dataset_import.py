"""`coserve dataset import`: COCO, YOLO and folders; what is wrong in them is named."""

import json
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from PIL import Image

from tests.tools.run_commands import coserve
from tools.dataset.read import read_dataset
from tools.dataset.write import write_dataset
from tools.terminal.console import CommandError
from tools.training import TrainingError
from tools.training.labelled import read_yolo_data

#: As https://cocodataset.org/#format-data has it.
COCO: dict[str, Any] = {
    "info": {"year": 2026, "version": "1.0"},
    "images": [
        {"id": number, "file_name": f"R0402/{number}-S{number}.png", "width": 80, "height": 60} for number in (1, 2, 3)
    ],
    "annotations": [{"id": 1, "image_id": 1, "category_id": 5, "bbox": [8, 6, 32, 30], "area": 960, "iscrowd": 1}],
    "categories": [{"id": 0, "name": "bridge"}, {"id": 5, "name": "bridge", "supercategory": "bridge"}],  # Roboflow
}


def a_dataset(folder: Path, content: Any) -> Path:
    """Write three pictures of three boards, and the file that describes them."""
    for number in (1, 2, 3):
        file = folder / "images" / "R0402" / f"{number}-S{number}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        cv2.imwrite(str(file), np.full((60, 80, 3), 40 * number, np.uint8))
    (folder / "images" / "broken.png").write_bytes(b"\x89PNG")
    (folder.parent / "secret.png").write_bytes((folder / "images" / "R0402" / "1-S1.png").read_bytes())
    (folder / "images" / "link.png").symlink_to(folder.parent / "secret.png")
    file = folder / "annotations.json"
    text = content if isinstance(content, str) else json.dumps(content)
    file.write_bytes(text.encode(errors="surrogateescape"))
    return file


def imported(file: Path, form: str, out: Path, *words: object, status: int = 0) -> str:
    done = coserve("dataset", "import", file, "--format", form, "--out", out, *words, status=status)
    return done.stdout if status == 0 else done.stderr


@pytest.mark.parametrize("prefix", ["", "images/"], ids=["CVAT", "Label Studio"])
def test_boxes_become_what_train_detector_reads(tmp_path: Path, prefix: str) -> None:
    content = json.dumps(COCO).replace("R0402/", f"{prefix}R0402/")
    file, out = a_dataset(tmp_path / "in", content), tmp_path / "out"
    imported(file, "coco", out)
    data = read_yolo_data(out / "data.yaml")
    photographs = {each.file.name: each for each in (*data.train, *data.held_out)}
    assert data.classes == ("bridge",)
    assert set(photographs) == {"1-S1.png", "2-S2.png", "3-S3.png"}
    assert photographs["1-S1.png"].boxes.tolist() == [pytest.approx([0.1, 0.1, 0.5, 0.6, 0])]
    assert len(photographs["3-S3.png"].boxes) == 0, "somebody looked, and there is nothing on it"
    assert {each.file.parent.name for each in photographs.values()} == {"R0402"}


def test_uploaded_pictures_of_one_board_stay_on_one_side(tmp_path: Path) -> None:
    names = ("1a2b3c4d-1-S1", "12345678-7-S1")
    content = COCO | {
        "images": [{"id": number, "file_name": f"images/{name}.png"} for number, name in enumerate(names)]
    }
    file = a_dataset(tmp_path / "in", content | {"annotations": []})
    for name in names:
        cv2.imwrite(str(tmp_path / "in" / "images" / f"{name}.png"), np.full((60, 80, 3), 9, np.uint8))
    assert [(each.stem, each.board) for each in read_dataset(file, "coco")] == [("1-S1", "S1"), ("7-S1", "S1")]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("R0402/1-S1", "../../secret", "'../../secret.png' leads out of"),
        ("R0402/1-S1", "link", "'link.png' leads out of"),
        ("R0402/", "missing/", "3 of 3 pictures are not in"),
        ('80, "height": 60', '60, "height": 80', "boxes are for 60 x 80: bring the picture as it was drawn on\n"),
        ('"id": 2, "file_name"', '"id": 1, "file_name"', "the image 1 is there twice"),
        ("R0402/2-S2", "other/R0402/1-S1", "R0402/1-S1.png is there twice"),
        ('"categories": [', '"categories": [{"id": 5, "name": "void"}, ', "the category 5 is there twice"),
        ('"annotations": [', '"annotations": [{"id": 2, "category_id": 0}, ', "classes 0 and 1 are both bridge"),
        ('"name": "bridge"', '"name": 402', "annotations.json: categories: class 0 is 402, not text"),
        ('"name": "bridge"', '"name": "Br\udcfccke"', "annotations.json:1: is not UTF-8 text: save it as UTF-8"),
        ('"annotations": [', '"annotations": [{"id": 1}, ', "the annotation 1 is there twice"),
        ("[8, 6, 32, 30]", "[8, 6, 32, 30, 45]", "1-S1.png: expected a bbox of x, y, width, height"),
        ('"bbox": [8, 6, 32, 30]', '"segmentation": [[8, 6, 9, 9, 8, 9]]', "1-S1.png: expected a bbox of x, y"),
        ('"iscrowd": 1', '"attributes": {"rotation": 30.0}', "1-S1.png is a rotated box"),
        ('"iscrowd": 1', '"rotation": 30.0', "1-S1.png is a rotated box"),
        ("[8, 6, 32, 30]", "[0.1, 0.1, 0.4, 0.5]", "expected the box bridge (0.1, 0.1, 0.5, 0.6) in pixels, inside"),
        ("R0402/1-S1", "broken", "at picture 1: "),
        ("[8, 6, 32, 30]", "[8, 6, 320, 30]", "the box bridge (8.0, 6.0, 328.0, 36.0) in pixels, inside"),
        ("[8, 6, 32, 30]", f"[8, 6, 1{'0' * 400}, 30]", "too large"),
        ('"category_id": 5', '"category_id": 6', "of annotation 1 the category or the image is not in the file"),
        ('"name": "bridge"', '"name": "\\ud800"', "is not a string of 1 to 128 characters"),
        ('{"info"', "{", "annotations.json: not in the format coco"),
        ('"file_name"', '"name"', "'file_name' is missing"),
        ('"annotations"', '"shapes"', "export as COCO or YOLO there"),
    ],
)
def test_what_is_wrong_is_named_and_nothing_is_written(tmp_path: Path, old: str, new: str, message: str) -> None:
    content = json.dumps(COCO)
    assert old in content
    file = a_dataset(tmp_path / "in", content.replace(old, new))
    said = imported(file, "coco", tmp_path / "out", status=1)
    assert message in said
    assert str(file) in said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "secret.png"]


def test_a_yolo_data_set_comes_back_with_its_boxes_and_both_of_its_sides(tmp_path: Path) -> None:
    imported(a_dataset(tmp_path / "in", COCO), "coco", tmp_path / "yolo")
    pictures = sorted(read_dataset(tmp_path / "yolo" / "data.yaml", "yolo"), key=lambda each: each.stem)
    assert [(each.component, each.stem, each.board, each.label) for each in pictures] == [
        ("R0402", "1-S1", "S1", None),
        ("R0402", "2-S2", "S2", None),
        ("R0402", "3-S3", "S3", None),
    ]
    assert [[box.label for box in each.boxes or ()] for each in pictures] == [["bridge"], [], []]
    assert (pictures[0].boxes or [])[0][1:5] == pytest.approx((8, 6, 40, 36), abs=1e-4)
    imported(tmp_path / "yolo" / "data.yaml", "YOLO", tmp_path / "new" / "again")
    first, second = (read_yolo_data(tmp_path / name / "data.yaml") for name in ("yolo", "new/again"))
    assert [each.file.name for each in first.train] == [each.file.name for each in second.train]


def test_a_yolo_data_set_that_climbs_is_named(tmp_path: Path) -> None:
    imported(a_dataset(tmp_path / "in", COCO), "coco", tmp_path / "yolo")
    (other := tmp_path / "other").mkdir()
    (file := other / "data.yaml").write_text(
        (tmp_path / "yolo" / "data.yaml").read_text().replace("images", "../yolo/images")
    )
    assert "leads out of" in imported(file, "yolo", tmp_path / "out", status=1)
    assert not (tmp_path / "out").exists()


def test_folders_of_labels_come_back_and_a_picture_without_a_label_is_named(tmp_path: Path) -> None:
    pixels = np.full((60, 80, 3), 90, np.uint8)
    names = ("R0402/ok/1-S1.png", "R0402/bridge/2-S2.png", "unsorted/R0402/3-S3.png")
    for name in names:
        (file := tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        cv2.imwrite(str(file), pixels)
    imported(tmp_path / "in", "folders", tmp_path / "out")
    assert {path.relative_to(tmp_path / "out").as_posix() for path in (tmp_path / "out").rglob("*.png")} == set(names)
    cv2.imwrite(str(tmp_path / "in" / "stray.png"), pixels)
    said = imported(tmp_path / "in", "folders", tmp_path / "again", status=1)
    assert "stray.png lies in no folder named after its label: move it to LABEL/stray.png" in said
    assert "no folder" in imported(tmp_path / "none", "folders", tmp_path / "again", status=2)
    words = ("--images", tmp_path)
    assert "--images goes with" in imported(tmp_path / "in", "folders", tmp_path / "again", *words, status=2)


def test_pictures_are_found_whatever_program_wrote_their_paths_and_the_others_are_counted(tmp_path: Path) -> None:
    content = json.dumps(COCO).replace("R0402/1-S1", r"C:\\\\pcb\\\\R0402\\\\1-S1").replace("R0402/3-S3", "gone")
    content = content.replace("R0402/2-S2", r"..\\\\..\\\\media\\\\R0402\\\\2-S2")
    file, said = a_dataset(tmp_path / "in", content), list[str]()
    pictures = read_dataset(file, "coco", say=said.append)
    assert [each.stem for each in pictures] == ["1-S1", "2-S2"]
    assert said == [
        f"{file}: 1 annotation marked iscrowd: each box counts as one object",
        f"{file}: left out: 1 of 3 pictures are not in {tmp_path / 'in/images'} (gone.png)",
        f"{file}: 3 pictures of {tmp_path / 'in/images'} not in it, left out (R0402/3-S3.png, broken.png, link.png)",
    ]


def test_a_turned_picture_is_stored_without_its_mark_where_the_boxes_fit_its_pixels(tmp_path: Path) -> None:
    file = a_dataset(tmp_path / "in", COCO)
    picture, exif = tmp_path / "in/images/R0402/1-S1.png", Image.Exif()
    exif[0x0112] = 6
    Image.open(picture).save(picture, exif=exif)
    write_dataset(read_dataset(file, "coco"), "yolo", tmp_path / "out")
    data = read_yolo_data(tmp_path / "out/data.yaml")
    assert {each.file.name: len(each.boxes) for each in (*data.train, *data.held_out)}["1-S1.png"] == 1
    exif[0x0112] = 3
    Image.open(picture).save(picture, exif=exif)
    with pytest.raises(TrainingError, match="EXIF mark 3"):
        read_dataset(file, "coco")


@pytest.mark.parametrize("form", ["label-studio", "cvat"])
def test_another_programs_own_format_is_refused_with_what_to_export(tmp_path: Path, form: str) -> None:
    file = a_dataset(tmp_path / "in", [])
    assert "export as COCO or YOLO" in imported(file, form, tmp_path / "out", status=2)
    assert "export as COCO or YOLO" in imported(file, "coco", tmp_path / "out", status=1)


def test_two_folders_that_look_alike_are_refused(tmp_path: Path) -> None:
    for name in ("\u00e9", "e\u0301"):
        (tmp_path / "in" / name).mkdir(parents=True)
        cv2.imwrite(str(tmp_path / "in" / name / "1.png"), np.full((60, 80, 3), 90, np.uint8))
    with pytest.raises(CommandError, match="is there twice"):
        read_dataset(tmp_path / "in", "folders")
