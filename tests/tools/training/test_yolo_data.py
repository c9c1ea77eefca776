"""YOLO data sets as labelling programs, Roboflow, Windows and Macs write them."""

import unicodedata
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.tools.training.yolo import BOX, SIDES, a_data_set
from tools.terminal.console import CommandError
from tools.training.labelled import YoloData, read_yolo_data


def refusal(file: Path) -> str:
    with pytest.raises(CommandError) as error:
        read_yolo_data(file)
    return str(error.value)


@pytest.mark.promise("Queries and exports", "Classes are named as `data.yaml` writes them: 0402, NO and 1_2 are names")
@pytest.mark.parametrize(
    ("names", "classes"),
    [
        ("[0402, 0603, NO, ON, 1_2, 12:30, 1e3, true, 0x1F]", "0402 0603 NO ON 1_2 12:30 1e3 true 0x1F"),
        ("{'10': k, '0': a, '1': b, 2: c, 3: d, 4: e, 5: f, 6: g, 7: h, 8: i, '9': j}", "a b c d e f g h i j k"),
        ("['Pru\u0308f', \"a b\"]", "Prüf|a b"),
    ],
)  # fmt: skip
def test_class_names_are_text_as_written_in_the_order_of_their_numbers(
    tmp_path: Path, names: str, classes: str
) -> None:
    file = a_data_set(tmp_path, f"{SIDES}names: {names}\n")
    assert read_yolo_data(file).classes == tuple(classes.split("|") if "|" in classes else classes.split())


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (f"{SIDES}names: {{0: a, 2: b}}", "data.yaml:3:1: names: expected a list of class names"),
        (f"{SIDES}names: {{bridge: 0, void: 1}}", "without gaps"),
        (f"{SIDES}names: {{0: a, '0': b}}", "data.yaml:3:15: duplicate key `0`"),
        (f"{SIDES}names: ['é', 'e\u0301']", "data.yaml:3:1: names: classes 0 and 1 are both é"),
        (f"{SIDES}names: bridge", "names: expected a list of class names"),
        (f"{SIDES}names: [a, ~]", "names: class 1 is None, not text"),
        (f"{SIDES}names: ['a\u200b']", "'a\\u200b' is not a string"),
        (f"{SIDES}names: [a, b]\nnc: 3", "data.yaml:4:1: nc: there are 2 names, not 3"),
        (f"{SIDES}names: [a]\nkpt_shape: [4, 3]", "data.yaml:4:1: kpt_shape: poses are not read: export boxes"),
        ("train: images/train\nnames: [a]", "has no val; expected path, train, val and names"),
        (f"path: D:\\pcb\n{SIDES}names: [a, b]".replace("images/train", "no\\train"), "a drive letter or backslashes"),
        (f"{SIDES}names: [a, b]".replace("images/train", "none/images"), "data.yaml:1:1: train: "),
        (f"{SIDES}names: [a, b]".replace("images/train", "labels/train"), "holds no image"),
        (
            f"{SIDES}names: [a, b]".replace("images/train", "train.txt"),
            "train.txt:2: there is no picture images/no.png",
        ),
        (f"{SIDES}names: [a, b]".replace("images/train", "[images/train, images]"), "train0.png is there twice"),
    ],
)
def test_what_is_wrong_in_data_yaml_is_refused_with_its_line(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "train.txt").write_text("images/train/train0.png\nimages/no.png\n", encoding="utf-8")
    assert said in refusal(a_data_set(tmp_path, f"{text}\n"))


def files_of(data: YoloData) -> list[str]:
    return sorted(each.file.name for each in (*data.train, *data.held_out))


@pytest.mark.promise(
    "Queries and exports", "Paths of Roboflow, of Windows and of another PC are found beside `data.yaml`"
)
@pytest.mark.parametrize(
    ("paths", "noted"),
    [
        ("path: .\ntrain: images/train\nval: images/val", ""),
        ("path:\ntrain: ./images/train/\nval: [images/val]", ""),
        ("train: ../images/train\nval: ../images/val", "train: ../images/train is read from"),
        ("train: images\\train\nval: .\\images\\val", "images/train"),
        ("path: D:\\pcb\ntrain: images\\train\nval: images\\val", "path: D:\\pcb is not on this PC: read from"),
        ("path: /home/other/pcb\ntrain: images/train\nval: images/val", "/home/other/pcb is not on this PC"),
        ("train: /home/other/pcb/images/train\nval: C:\\pcb\\images\\val", "/home/other/pcb/images/train is read from"),
        ("train: train.txt\nval: lists/val.txt", ""),
    ],
)
def test_pictures_are_found_where_the_data_set_lies_now(tmp_path: Path, paths: str, noted: str) -> None:
    file = a_data_set(tmp_path, f"{paths}\nnames: [a, b]\n")
    (tmp_path / "train.txt").write_bytes("./images/train/train0.png\r\nimages\\train\\train1.png\r\n".encode("utf-16"))
    (tmp_path / "lists").mkdir()
    (tmp_path / "lists/val.txt").write_text("images/val/val0.png\nD:\\x\\images\\val\\val1.png\n", encoding="utf-8-sig")
    data = read_yolo_data(file)
    assert files_of(data) == ["train0.png", "train1.png", "val0.png", "val1.png"]
    assert noted in "\n".join(data.notes)
    assert bool(noted) == bool(data.notes)
    assert all(len(each.boxes) == 1 for each in data.train)


def test_pictures_that_are_in_train_and_val_are_counted(tmp_path: Path) -> None:
    data = read_yolo_data(a_data_set(tmp_path, "train: images\nval: images/val\nnames: [a, b]\n"))
    assert "2 pictures of val are in train too" in "\n".join(data.notes)


def test_a_picture_of_a_mac_finds_its_label_whose_name_looks_alike(tmp_path: Path) -> None:
    file = a_data_set(tmp_path)
    for number, forms in enumerate((("NFC", "NFD"), ("NFD", "NFC"))):
        for kind, form in zip(("images/train/{}.png", "labels/train/{}.txt"), forms, strict=True):
            name = unicodedata.normalize(form, f"Prüf{number}")
            (tmp_path / kind.format(f"train{number}")).rename(tmp_path / kind.format(name))
    data = read_yolo_data(file)
    assert [len(each.boxes) for each in data.train] == [1, 1]
    assert data.notes == ()


@pytest.mark.promise(
    "Queries and exports",
    "Half of a side's pictures without a label file is refused before training, fewer are counted",
)
def test_label_files_that_fit_no_picture_are_counted_and_half_of_them_missing_is_refused(tmp_path: Path) -> None:
    file = a_data_set(tmp_path)
    labels = tmp_path / "labels/train"
    for picture in ("more", "other"):
        (tmp_path / f"images/train/{picture}.png").write_bytes((tmp_path / "images/train/train0.png").read_bytes())
    (labels / "more.txt").write_bytes(b"\xef\xbb\xbf" + BOX.encode())
    (labels / "classes.txt").write_text("a\nb\n")
    (labels / "OTHER.txt").touch()
    (tmp_path / "images/train/left.gif").touch()
    notes = read_yolo_data(file).notes
    assert notes[0].startswith(f"{file}: train: 1 file left out: .gif is not read")
    assert notes[1] == (
        f"{file}: train: 1 of 4 pictures have no label file (other.png); label files without a picture (OTHER.txt)"
    )
    (labels / "train1.txt").rename(labels / "train1.TXT")
    (labels / "more.txt").rename(labels / "more.png.txt")
    said = refusal(file)
    assert "train: 3 of 4 pictures have no label file (more.png, other.png, train1.png)" in said
    assert "label files without a picture (OTHER.txt, more.png.txt, train1.TXT). Give both one name" in said
    for picture in ("more", "other", "train1"):
        (labels / f"{picture}.txt").touch()
    assert len(read_yolo_data(file).train) == 4, "the advice works"


@pytest.mark.parametrize(
    ("line", "box"),
    [
        ("1 0.5 0.5 0.2 0.4", [0.4, 0.3, 0.6, 0.7, 1]),
        ("0 0.1 0.2 0.5 0.1 0.3 0.6", [0.1, 0.1, 0.5, 0.6, 0]),  # an outline
        ("0 0.3 0.1 0.5 0.3 0.3 0.5 0.1 0.3", [0.1, 0.1, 0.5, 0.5, 0]),  # the corners of a rotated box
        ("0 0.5 0.5 0.2 0.2 0.97", "expected `class x y width height`"),
        ("0 0.5 0.5 0.2 0.2 0.45 0.5 2 0.55 0.5 0", "or an outline, not"),  # a box with two key points
        ("0 0.5 0.5 0.2 0.2 0.45 0.5 1", "or an outline, not"),
        ("2 0.5 0.5 0.2 0.2", "with a class from 0 to 1"),
        ("bridge 0.5 0.5 0.25 0.5", "with a class from 0 to 1"),
        ("0 20 10 8 4", "expected fractions of the image"),
        ("0 0.5 0.5 0.2 0", "0 to 1, with a size"),
        ("0 0.05 0.1 0.2 0.4", "of a box inside it"),  # two corners
    ],
)  # fmt: skip
def test_rotated_boxes_and_outlines_become_boxes_and_poses_are_refused_by_line(
    tmp_path: Path, line: str, box: Any
) -> None:
    file = a_data_set(tmp_path, labels=f"{line}\n")
    if isinstance(box, str):
        assert f"{tmp_path / 'labels/train/train0.txt'}:1: expected" in (said := refusal(file))
        assert box in said
    else:
        assert read_yolo_data(file).train[0].boxes.tolist() == [pytest.approx(box)]


def test_boxes_of_a_picture_that_other_programs_turn_are_refused_and_the_advice_works(tmp_path: Path) -> None:
    file = a_data_set(tmp_path)
    picture = tmp_path / "images/train/train0.png"
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.open(picture).save(picture, exif=exif)
    assert "train0.png: its EXIF mark 6 turns or mirrors it in other programs" in refusal(file)
    picture.unlink()  # the mark of a WebP is behind its pixels
    Image.effect_noise((700, 700), 90).save(picture.with_suffix(".webp"), lossless=True, exif=exif)
    assert "train0.webp: its EXIF mark 6 turns or mirrors it in other programs" in refusal(file)
    Image.new("RGB", (96, 48)).save(picture.with_suffix(".webp"), exif=Image.Exif())
    assert len(read_yolo_data(file).train) == 2
