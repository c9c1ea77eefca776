"""`coserve dataset export`: stored pictures as the programs read them that they are for, complete or not at all."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from pycocotools.coco import COCO

from experts.vision import frameworks
from tests.contract.client import Line
from tests.sql import sql
from tests.tools.run_commands import coserve
from tools.training.labelled import board_of, read_yolo_data

#: Of the same board S1: images that the detector has failed, and where a person drew boxes.
DRAWN = [("void", 4.0, 5.0, 20.0, 30.0), ("bridge", -3.0, 50.0, 90.0, 58.0)]


@pytest.fixture(scope="module")
def line(judged: Line, tmp_path_factory: pytest.TempPathFactory) -> Line:
    """A line on which Eva has failed one image of DF and drawn boxes on it, and passed another."""
    folder = tmp_path_factory.mktemp("dataset") / "line"
    shutil.copytree(judged.folder, folder, ignore=shutil.ignore_patterns("run"))
    config = folder / "coserve.yaml"
    failed, passed, reversed_ = numbers(folder, "component = 'DF'")
    words = ("--reviewer", "eva", "--config", config)
    coserve("review", failed, "fail", "--defect", "D9", "--new-code", *words)
    coserve("review", passed, "pass", *words)
    ((review,),) = sql(folder, "SELECT review_id FROM reviews WHERE inspection_id = ?", values=[failed])
    insert = "INSERT INTO drawn_boxes (review_id, label, x1, y1, x2, y2) VALUES (?, ?, ?, ?, ?, ?)"
    for box in DRAWN:
        sql(folder, insert, values=(review, *box))
    # Boxes of a decision that was overruled count no more.
    coserve("review", reversed_, "fail", "--defect", "D9", "--new-code", *words)
    ((review,),) = sql(folder, "SELECT max(review_id) FROM reviews")
    sql(folder, insert, values=(review, "void", 1, 1, 9, 9))
    coserve("review", reversed_, "pass", "--after", review, *words)
    line = Line.__new__(Line)
    line.folder, line.config = folder, config
    return line


def numbers(folder: Path, condition: str) -> list[int]:
    query = f"SELECT inspection_id FROM inspections WHERE image_path IS NOT NULL AND {condition} ORDER BY 1"  # noqa: S608
    return [number for (number,) in sql(folder, query)]


def export(line: Line, out: Path, form: str, *words: object, status: int = 0) -> Any:
    """Run the command, and return what its JSON says."""
    done = coserve(
        *("dataset", "export", "--out", out, "--format", form, *words, "--json", "--config", line.config), status=status
    )
    return json.loads(done.stdout) if status == 0 else done.stderr


def answered(line: Line, number: int) -> str:
    """Return the label that the classifier of an image answered: a pass, which a person's pass confirms."""
    return sql(line.folder, "SELECT label FROM stages WHERE inspection_id = ? AND step = 0", values=[number])[0][0]


def detected(line: Line, number: int) -> list[Sequence[Any]]:
    """Return the detector's boxes (label, confidence, corners), cut at the edges of 80 x 60 pixels."""
    query = "SELECT label, confidence, x1, y1, x2, y2 FROM detections WHERE inspection_id = ? ORDER BY detection_id"
    rows = sql(line.folder, query, values=[number])
    cut = [
        (*row[:2], *(min(max(at, 0), limit) for at, limit in zip(row[2:], (80, 60) * 2, strict=True))) for row in rows
    ]
    return [row for row in cut if row[2] < row[4] and row[3] < row[5]]


def test_folders_have_decided_pictures_by_label_and_others_unsorted(line: Line, tmp_path: Path) -> None:
    report = export(line, tmp_path / "out", "folders", "--component", "DF", "--component", "DU")
    failed, passed, reversed_ = numbers(line.folder, "component = 'DF'")
    files = {path.relative_to(tmp_path / "out").as_posix() for path in (tmp_path / "out").rglob("*") if path.is_file()}
    undecided = {f"unsorted/DU/{number}-S1.jpg" for number in numbers(line.folder, "component = 'DU'")}
    # The fail is of a defect that a later step judges: it does not say what the classifier should have answered.
    assert files == {f"unsorted/DF/{failed}-S1.jpg", *undecided} | {
        f"DF/{answered(line, number)}/{number}-S1.jpg" for number in (passed, reversed_)
    }
    assert sum(row["pictures"] for row in report["pictures"]) == len(files) == 6
    assert {board_of(Path(file)) for file in files} == {"S1"}


def test_only_chosen_pictures_are_exported_and_too_many_are_refused_with_their_number(
    line: Line, tmp_path: Path
) -> None:
    def count(*words: object) -> int:
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        return sum(row["pictures"] for row in export(line, tmp_path / "out", "folders", *words)["pictures"])

    assert count("--reviewed") == 3
    assert count("--reviewed", "--verdict", "fail") == 1
    assert count("--serial", "S2", "--type", "named") == len(
        numbers(line.folder, "board_id IN (SELECT board_id FROM boards WHERE serial = 'S2')")
    )
    unsure = "inspection_id IN (SELECT inspection_id FROM stages WHERE {} confidence < 0.3)"
    readable = "reason IS NOT 'bad_image'"
    assert count("--low-confidence", "--below", 0.3) == len(numbers(line.folder, f"{unsure.format('')} AND {readable}"))
    assert count("--low-confidence", "--below", 1.0, "--expert", "C0603") == len(
        numbers(line.folder, f"""{unsure.format("expert = 'C0603' AND").replace("0.3", "1.0")} AND {readable}""")
    )
    shutil.rmtree(tmp_path / "out")
    alone = export(line, tmp_path / "out", "folders", "--below", 0.3, status=2)
    assert "--below goes with --low-confidence: add it, or leave --below out" in alone
    total = len(numbers(line.folder, "true"))
    refused = export(line, tmp_path / "out", "folders", "--limit", 5, status=1)
    assert f"{total} pictures match, and --limit is 5: choose fewer (--lot," in refused
    assert not (tmp_path / "out").exists()


def test_serials_that_climb_stay_in_the_folder_and_an_unreadable_picture_is_counted(line: Line, tmp_path: Path) -> None:
    for form in ("folders", "yolo"):
        out = tmp_path / form / "out"
        report = export(line, out, form)
        assert sorted(path.name for path in out.parent.iterdir()) == ["out"]
        assert any("-_.._etc_passwd-" in path.name for path in out.rglob("*"))
        reasons = "the image is damaged, incomplete or of a kind that cannot be decoded"
        assert form == "yolo" or report["left_out"] == {reasons: 1}


@pytest.mark.promise(
    "A full disk, and years of results",
    "A data set that leaves the line is complete or not there, and never outside its folder",
)
def test_an_export_is_complete_or_not_there(line: Line, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").touch()
    assert "is there and not empty" in export(line, tmp_path / "full", "folders", status=2)
    assert "pictures of two boards" in export(line, tmp_path / "out", "yolo", "--serial", "S1", status=1)
    assert "no picture to write" in export(line, tmp_path / "out", "coco", "--lot", "none", status=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["full"]


def test_yolo_is_split_by_board_and_read_by_ultralytics_and_by_train_detector(line: Line, tmp_path: Path) -> None:
    frameworks.ultralytics()  # it would change this process's environment by itself
    from ultralytics.data.dataset import YOLODataset
    from ultralytics.data.utils import check_det_dataset

    out = tmp_path / "out"
    export(line, out, "yolo")
    data = check_det_dataset(str(out / "data.yaml"), autodownload=False)
    ours = read_yolo_data(out / "data.yaml")
    boards: list[set[str]] = []
    for side, photographs in (("train", ours.train), ("val", ours.held_out)):
        theirs = YOLODataset(img_path=data[side], data=data, task="detect", augment=False)
        assert {label["im_file"] for label in theirs.labels} == {str(each.file) for each in photographs}
        by_file = {label["im_file"]: label for label in theirs.labels}
        for each in photographs:
            label = by_file[str(each.file)]
            assert len(label["bboxes"]) == len(each.boxes)
            number = int(each.file.name.split("-")[0])
            if each.boxes.shape[0] and number not in numbers(line.folder, "component = 'DF'"):
                kinds = [(data["names"][int(kind)], *corners) for *corners, kind in each.boxes.tolist()]
                wanted = [(row[0], *row[2:]) for row in detected(line, number)]
                for kind, box in zip(sorted(kinds), sorted(wanted), strict=True):
                    assert kind[0] == box[0]
                    assert [at * side for at, side in zip(kind[1:], (80, 60) * 2, strict=True)] == pytest.approx(
                        box[1:], abs=0.01
                    )
        boards.append({board_of(each.file) for each in photographs})
    assert boards[0]
    assert boards[1]
    assert not boards[0] & boards[1]


def test_coco_is_read_by_pycocotools_with_scores_of_proposals_and_none_of_drawn_boxes(
    line: Line, tmp_path: Path
) -> None:
    export(line, tmp_path / "out", "coco", "--component", "DF")
    coco = COCO(str(tmp_path / "out" / "annotations.json"))
    failed, passed, reversed_ = numbers(line.folder, "component = 'DF'")
    by_number = {int(Path(image["file_name"]).name.split("-")[0]): image for image in coco.loadImgs(coco.getImgIds())}
    assert set(by_number) == {failed, passed, reversed_}
    assert all((tmp_path / "out" / "images" / image["file_name"]).is_file() for image in by_number.values())
    assert (by_number[failed]["width"], by_number[failed]["height"]) == (80, 60)

    def boxes(number: int) -> list[Any]:
        annotations = coco.loadAnns(coco.getAnnIds(imgIds=[by_number[number]["id"]]))
        return [(coco.cats[each["category_id"]]["name"], each.get("score"), *each["bbox"]) for each in annotations]

    assert boxes(failed) == [("void", None, 4, 5, 16, 25), ("bridge", None, 0, 50, 80, 8)]
    for number in (passed, reversed_):
        wanted = [(kind, score, x1, y1, x2 - x1, y2 - y1) for kind, score, x1, y1, x2, y2 in detected(line, number)]
        assert boxes(number) == wanted != []
