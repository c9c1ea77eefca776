"""`coserve dataset import`: files as the programs' specifications show them; what is wrong in them is named."""

import json
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest

from tests.tools.run_commands import coserve
from tools.training.labelled import read_labelled
from tools.training.photographs import read_yolo_data

#: As https://docs.cvat.ai/docs/dataset_management/formats/format-cvat/ has it: CVAT for images 1.1.
CVAT = """<?xml version="1.0" encoding="utf-8"?>
<annotations>
  <version>1.1</version>
  <meta>
    <task>
      <id>7</id><name>boards</name><size>3</size><mode>annotation</mode>
      <labels>
        <label><name>bridge</name><color>#aa0000</color><type>rectangle</type><attributes></attributes></label>
        <label><name>ok</name><type>tag</type></label>
      </labels>
    </task>
    <dumped>2026-11-21 09:28:11.123456+00:00</dumped>
  </meta>
  <image id="0" name="R0402/1-S1.png" width="80" height="60">
    <box label="bridge" source="manual" occluded="0" xtl="8.00" ytl="6.00" xbr="40.00" ybr="36.00" z_order="0">
      <attribute name="sure">yes</attribute>
    </box>
  </image>
  <image id="1" name="R0402/2-S2.png" width="80" height="60">
    <tag label="ok" source="manual"></tag>
  </image>
  <image id="2" name="R0402/3-S3.png" width="80" height="60">
  </image>
</annotations>
"""
_BOX = {"from_name": "box", "to_name": "image", "original_width": 80, "original_height": 60, "image_rotation": 0}
#: As https://labelstud.io/guide/task_format has it; the second was uploaded.
LABEL_STUDIO: list[dict[str, Any]] = [
    {
        "id": 1,
        "data": {"image": "/data/local-files/?d=images/R0402/1-S1.png"},
        "annotations": [
            {"id": 10, "was_cancelled": False, "result": []},
            {
                "id": 11,
                "completed_by": 1,
                "was_cancelled": False,
                "result": [
                    {
                        "id": "Dx_aB91ISN",
                        "type": "rectanglelabels",
                        "origin": "manual",
                        "value": {
                            "x": 10.0,
                            "y": 10.0,
                            "width": 40.0,
                            "height": 50.0,
                            "rotation": 0,
                            "rectanglelabels": ["bridge"],
                        },
                        **_BOX,
                    }
                ],
            },
            {"id": 12, "was_cancelled": True, "result": []},
        ],
        "predictions": [{"model_version": "coserve", "score": 0.4, "result": []}],
    },
    {
        "id": 2,
        "data": {"image": "/data/upload/3/1a2b3c4d-2-S2.png"},
        "annotations": [
            {
                "result": [
                    {"type": "choices", "from_name": "label", "to_name": "image", "value": {"choices": ["ok"]}},
                ]
            }
        ],
        "predictions": [],
    },
    {"id": 3, "data": {"image": "/data/upload/3/3-S3.png"}, "annotations": [{"result": []}], "predictions": []},
]
#: As https://cocodataset.org/#format-data has it.
COCO: dict[str, Any] = {
    "info": {"year": 2026, "version": "1.0"},
    "images": [
        {"id": number, "file_name": f"R0402/{number}-S{number}.png", "width": 80, "height": 60} for number in (1, 2, 3)
    ],
    "annotations": [{"id": 1, "image_id": 1, "category_id": 5, "bbox": [8, 6, 32, 30], "area": 960, "iscrowd": 0}],
    "categories": [{"id": 5, "name": "bridge", "supercategory": "defect"}],
}


def a_dataset(folder: Path, form: str, content: Any) -> Path:
    """Write three pictures of three boards, and the file that describes them."""
    for number in (1, 2, 3):
        file = folder / "images" / "R0402" / f"{number}-S{number}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        cv2.imwrite(str(file), np.full((60, 80, 3), 40 * number, np.uint8))
    (folder / "images" / "broken.png").write_bytes(b"\x89PNG")
    (folder.parent / "secret.png").write_bytes((folder / "images" / "R0402" / "1-S1.png").read_bytes())
    (folder / "images" / "link.png").symlink_to(folder.parent / "secret.png")
    file = folder / {"cvat": "annotations.xml"}.get(form, "annotations.json")
    file.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return file


def imported(file: Path, form: str, out: Path, *words: object, status: int = 0) -> str:
    done = coserve("dataset", "import", file, "--format", form, "--out", out, *words, status=status)
    return done.stdout if status == 0 else done.stderr


@pytest.mark.parametrize(("form", "content"), [("cvat", CVAT), ("label-studio", LABEL_STUDIO), ("coco", COCO)])
def test_boxes_become_what_train_detector_reads(tmp_path: Path, form: str, content: Any) -> None:
    file, out = a_dataset(tmp_path / "in", form, content), tmp_path / "out"
    imported(file, form, out)
    data = read_yolo_data(out / "data.yaml")
    photographs = {each.file.name: each for each in (*data.train, *data.held_out)}
    assert data.classes == ("bridge",)
    assert set(photographs) == {"1-S1.png", "2-S2.png", "3-S3.png"}
    assert photographs["1-S1.png"].boxes.tolist() == [pytest.approx([0.1, 0.1, 0.5, 0.6, 0])]
    assert len(photographs["3-S3.png"].boxes) == 0, "somebody looked, and there is nothing on it"
    assert {each.file.parent.name for each in photographs.values()} == {"R0402"}


def test_a_task_that_nobody_has_annotated_teaches_no_detector(tmp_path: Path) -> None:
    tasks = [LABEL_STUDIO[0], LABEL_STUDIO[1], {**LABEL_STUDIO[2], "annotations": []}]
    said = imported(a_dataset(tmp_path / "in", "label-studio", tasks), "label-studio", tmp_path / "out")
    assert "1 picture left out: no detector has judged it, and nobody has drawn a box" in said
    assert not list((tmp_path / "out").rglob("3-S3*"))


@pytest.mark.parametrize("form", ["cvat", "label-studio"])
def test_labels_without_boxes_become_what_train_classifier_reads(tmp_path: Path, form: str) -> None:
    cvat = CVAT.replace("</image>", '<tag label="bridge" source="manual"/></image>', 1).replace("<box ", "<!-- <box ")
    cvat = cvat.replace("</box>", "</box> -->")
    bridge = {"type": "choices", "value": {"choices": ["bridge"]}}
    tasks = [{**LABEL_STUDIO[0], "annotations": [{"result": [bridge]}]}, *LABEL_STUDIO[1:]]
    content: Any = cvat if form == "cvat" else tasks
    imported(a_dataset(tmp_path / "in", form, content), form, tmp_path / "out")
    files = {path.relative_to(tmp_path / "out").as_posix() for path in (tmp_path / "out").rglob("*.png")}
    assert files == {"R0402/bridge/1-S1.png", "R0402/ok/2-S2.png", "unsorted/R0402/3-S3.png"}
    (tmp_path / "out" / "R0402" / "ok" / "9.png").write_bytes(
        (tmp_path / "out" / "unsorted" / "R0402" / "3-S3.png").read_bytes()
    )
    pixels = np.full((60, 80, 3), 200, np.uint8)
    cv2.imwrite(str(tmp_path / "out" / "R0402" / "bridge" / "8.png"), pixels)
    data, _ = read_labelled(tmp_path / "out" / "R0402", 32)
    assert data.labels == ("bridge", "ok")


def test_pictures_of_one_name_in_two_folders_are_told_apart_by_the_path_of_their_task(tmp_path: Path) -> None:
    from tools.dataset.read import read_dataset

    file = a_dataset(tmp_path / "in", "label-studio", LABEL_STUDIO[:1])
    (other := tmp_path / "in" / "images" / "Z").mkdir()
    cv2.imwrite(str(other / "1-S1.png"), np.full((60, 80, 3), 250, np.uint8))
    (picture,) = read_dataset(file, "label-studio")
    assert picture.file.parent.name == "R0402"
    file.write_text(file.read_text().replace("?d=images/R0402/", "?d="), encoding="utf-8")
    assert "may be several pictures" in imported(file, "label-studio", tmp_path / "out", status=1)


def test_uploaded_pictures_of_one_board_stay_on_one_side(tmp_path: Path) -> None:
    from tools.dataset.read import read_dataset

    task = json.dumps(LABEL_STUDIO[:1]).replace("/data/local-files/?d=images/R0402/1-S1", "/data/upload/3/NAME")
    tasks = [json.loads(task.replace("NAME", name))[0] for name in ("1a2b3c4d-1-S1", "12345678-7-S1")]
    file = a_dataset(tmp_path / "in", "label-studio", tasks)
    for name in ("1a2b3c4d-1-S1", "12345678-7-S1"):
        cv2.imwrite(str(tmp_path / "in" / "images" / f"{name}.png"), np.full((60, 80, 3), 9, np.uint8))
    assert [(each.stem, each.board) for each in read_dataset(file, "label-studio")] == [("1-S1", "S1"), ("7-S1", "S1")]


DOCTYPE = '<!DOCTYPE a [<!ENTITY x SYSTEM "file:///etc/passwd">]>'


@pytest.mark.parametrize(
    ("form", "old", "new", "message"),
    [
        ("cvat", "R0402/1-S1", "../../secret", "'../../secret.png' leads out of"),
        ("cvat", "R0402/1-S1", "/etc/hostname", "leads out of"),
        ("cvat", "R0402/1-S1", "link", "'link.png' leads out of"),
        ("cvat", "R0402/1-S1", "missing", "No such file or directory"),
        ("cvat", "R0402/1-S1", "broken", "at picture 1: "),
        ("cvat", "<annotations>", f"{DOCTYPE}<annotations>", "a document type (<!DOCTYPE …>) is not read: delete it"),
        ("cvat", "</annotations>", "", "not in the format cvat"),
        ("cvat", 'xbr="40.00"', 'xbr="400.00"', "the box bridge (8.0, 6.0, 400.0, 36.0) is not in"),
        ("cvat", 'xbr="40.00"', 'xbr="nan"', "the box bridge (8.0, 6.0, nan, 36.0) is not in"),
        ("cvat", 'xbr="40.00"', 'xbr="wide"', "could not convert string to float: 'wide'"),
        ("cvat", 'xbr="40.00"', 'xbr="4.00"', "is not in"),
        ("cvat", '<tag label="ok"', '<tag label="odd"', "at picture 2: tag: expected a label of <meta>"),
        ("cvat", "<box ", '<box rotation="30.0" ', "no rotation"),
        ("cvat", 'xtl="8.00" ytl="6.00"', 'points="8.00,6.00;40.00,36.00"', "'xtl' is missing"),
        ("coco", "[8, 6, 32, 30]", "[8, 6, 32]", "not enough values to unpack"),
        ("coco", "[8, 6, 32, 30]", "[8, 6, 320, 30]", "is not in"),
        (
            "coco",
            '"category_id": 5',
            '"category_id": 6',
            "of annotation 1 the category or the image is not in the file",
        ),
        ("coco", "[8, 6, 32, 30]", f"[8, 6, 1{'0' * 400}, 30]", "too large"),
        ("coco", '"name": "bridge"', '"name": "\\ud800"', "surrogates not allowed"),
        ("coco", '"image_id": 1', '"image_id": 9', "of annotation 1 the category or the image is not in the file"),
        ("coco", '{"info"', "{", "annotations.json: not in the format coco"),
        ("coco", '"file_name"', '"name"', "'file_name' is missing"),
        ("label-studio", '"width": 40.0', '"width": 140.0', "is not in"),
        ("label-studio", '"rotation": 0', '"rotation": 45', "a box in R0402/1-S1.png is rotated"),
        (
            "label-studio",
            '"rectanglelabels": ["bridge"]',
            '"polygonlabels": ["bridge"]',
            "'rectanglelabels' is missing",
        ),
        ("label-studio", '"choices": ["ok"]', '"choices": ["ok", "odd"]', "too many values to unpack"),
        ("label-studio", "3-S3.png", "9-S9.png", "No such file or directory"),
    ],
)
def test_what_is_wrong_is_named_and_nothing_is_written(
    tmp_path: Path, form: str, old: str, new: str, message: str
) -> None:
    content = {"cvat": CVAT, "coco": json.dumps(COCO), "label-studio": json.dumps(LABEL_STUDIO)}[form]
    assert old in content
    file = a_dataset(tmp_path / "in", form, content.replace(old, new))
    said = imported(file, form, tmp_path / "out", status=1)
    assert message in said
    assert str(file) in said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "secret.png"]


def test_pictures_of_one_name_and_labels_that_climb_do_not_meet(tmp_path: Path) -> None:
    content = CVAT.replace("R0402/2-S2", "C0603/../1-S1").replace(">ok<", ">../../ok<").replace('"ok"', '"../../ok"')
    assert "leads out of" in imported(a_dataset(tmp_path / "a", "cvat", content), "cvat", tmp_path / "out", status=1)
    content = CVAT.replace(">ok<", ">../../ok<").replace('"ok"', '"../../ok"').replace("bridge", "../bridge")
    start, end = content.index("<box"), content.index("</box>") + len("</box>")
    content = content[:start] + '<tag label="../bridge"/>' + content[end:]
    imported(a_dataset(tmp_path / "b", "cvat", content), "cvat", tmp_path / "out")
    files = {path.relative_to(tmp_path / "out").as_posix() for path in (tmp_path / "out").rglob("*.png")}
    assert files == {"R0402/_bridge/1-S1.png", "R0402/_.._ok/2-S2.png", "unsorted/R0402/3-S3.png"}
    twice = CVAT.replace("R0402/2-S2", "R0402/1-S1")
    said = imported(a_dataset(tmp_path / "c", "cvat", twice), "cvat", tmp_path / "again", status=1)
    assert "already: rename one of them" in said
    assert not (tmp_path / "again").exists()


def test_what_an_export_wrote_comes_back_as_it_was(tmp_path: Path) -> None:
    from tools.dataset.read import read_dataset
    from tools.dataset.write import write_dataset

    pictures = read_dataset(a_dataset(tmp_path / "in", "cvat", CVAT), "cvat")
    for form, name in (("coco", "annotations.json"), ("label-studio", "tasks.json"), ("cvat", "annotations.xml")):
        write_dataset(pictures, form, tmp_path / form)  # type: ignore[arg-type]
        again = read_dataset(tmp_path / form / name, form)  # type: ignore[arg-type]
        assert [(each.stem, each.component, each.board) for each in again] == [
            (each.stem, each.component, each.board) for each in pictures
        ]
        assert [[tuple(box) for box in each.boxes or ()] for each in again] == [
            [pytest.approx(tuple(box)) if not box else tuple(box) for box in each.boxes or ()] for each in pictures
        ]
        assert form == "coco" or [each.label for each in again] == [each.label for each in pictures]


def test_a_yolo_data_set_comes_back_with_its_boxes_and_both_of_its_sides(tmp_path: Path) -> None:
    from tools.dataset.read import read_dataset

    imported(a_dataset(tmp_path / "in", "cvat", CVAT), "cvat", tmp_path / "yolo")
    pictures = sorted(read_dataset(tmp_path / "yolo" / "data.yaml", "yolo"), key=lambda each: each.stem)
    assert [(each.component, each.stem, each.board, each.label) for each in pictures] == [
        ("R0402", "1-S1", "S1", None),
        ("R0402", "2-S2", "S2", None),
        ("R0402", "3-S3", "S3", None),
    ]
    assert [[box.label for box in each.boxes or ()] for each in pictures] == [["bridge"], [], []]
    assert (pictures[0].boxes or [])[0][1:5] == pytest.approx((8, 6, 40, 36), abs=1e-4)
    imported(tmp_path / "yolo" / "data.yaml", "yolo", tmp_path / "again")
    first, second = (read_yolo_data(tmp_path / name / "data.yaml") for name in ("yolo", "again"))
    assert [each.file.name for each in first.train] == [each.file.name for each in second.train]


def test_a_yolo_data_set_that_is_wrong_or_climbs_is_named(tmp_path: Path) -> None:
    imported(a_dataset(tmp_path / "in", "cvat", CVAT), "cvat", tmp_path / "yolo")
    label = next((tmp_path / "yolo").rglob("1-S1.txt"))
    label.write_text("7 0.5 0.5 0.1 0.1\n", encoding="utf-8")
    said = imported(tmp_path / "yolo" / "data.yaml", "yolo", tmp_path / "out", status=1)
    assert f"{label}:1: expected `class x y width height` with a class from 0 to 0" in said
    label.write_text("0 0.5 0.5 0.1 0.1\n", encoding="utf-8")
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


def test_folders_of_sides_name_no_component_type(tmp_path: Path) -> None:
    (file := tmp_path / "in" / "train" / "ok" / "1-S1.png").parent.mkdir(parents=True)
    cv2.imwrite(str(file), np.full((60, 80, 3), 90, np.uint8))
    imported(tmp_path / "in", "folders", tmp_path / "out")
    assert (tmp_path / "out" / "ok" / "1-S1.png").is_file()


@pytest.mark.parametrize("form", ["yolo", "coco"])
def test_a_picture_whose_boxes_lie_outside_of_it_is_no_example_of_a_good_one(tmp_path: Path, form: Any) -> None:
    from tools.dataset.read import read_dataset
    from tools.dataset.write import LabelledBox, write_dataset

    marked, *others = read_dataset(a_dataset(tmp_path / "in", "coco", COCO), "coco")
    outside = others[0]._replace(board=marked.board, boxes=[LabelledBox("bridge", 900, 900, 950, 950)])
    _, left_out = write_dataset([marked, outside, others[1]], form, tmp_path / "out")
    assert left_out == {"its boxes lie outside of it": 1}
