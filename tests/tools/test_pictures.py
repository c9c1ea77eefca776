"""Which files of a person's folder are pictures, and their bytes as the daemon takes them."""

import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageOps

from experts.errors import ImageError
from experts.vision.preprocess import decode
from tests.experts.pictures import a_picture, encoded
from tools.dataset.write import read_picture
from tools.pictures import HIDDEN, as_payload, find_pictures, orientation, read_pixels
from tools.training import TrainingError
from tools.training.everything import type_folders
from tools.training.labelled import read_labelled

PICTURE = a_picture(64, 48)
WHOLE = encoded(PICTURE, "JPEG", quality=95)


def a_folder(root: Path, *names: str) -> Path:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(b"x")
    return root


SYSTEM = [
    *("._R1.png", ".R1.png", "__MACOSX/ok/R1.png", "@eaDir/R1.png/THUMB_M.png", "ok/@eaDir/R1.png", "Thumbs.db"),
    *(".thumbnails/R1.jpg", "#recycle/R1.bmp", "$RECYCLE.BIN/R1.tif"),
]


def test_each_picture_is_found_by_its_suffix_and_what_is_left_out_is_counted_by_reason(tmp_path):
    names = ["a.PNG", "b.jpg", "c.JPEG", "d.jfif", "e.bmp", "f.TIF", "g.tiff", "h.webp"]

    found = find_pictures(a_folder(tmp_path, *names, *SYSTEM, "notes.txt", ".DS_Store", "a.gif", "b.GIF", "c.heic"))

    assert [file.name for file in found.files] == names
    assert found.left_out.pop(HIDDEN) == len(SYSTEM)
    assert sorted((text.split()[0], count) for text, count in found.left_out.items()) == [(".gif", 2), (".heic", 1)]


def test_a_depth_finds_pictures_there_and_folders_pipes_and_loops_of_links_are_none(tmp_path):
    """Reading a pipe would wait for ever, following a loop too."""
    a_folder(tmp_path / "in", "0.png", "ok/1.png", "ok/deep/2.png")
    (tmp_path / "in/folder.png").mkdir()
    (tmp_path / "in/again").symlink_to(tmp_path / "in")
    (tmp_path / "in/link.png").symlink_to(tmp_path / "in/0.png")
    os.mkfifo(tmp_path / "in/pipe.png")

    def names(depth: int | None) -> list[str]:
        return [file.name for file in find_pictures(tmp_path / "in", depth).files]

    assert names(None) == ["0.png", "link.png", "1.png", "2.png"]
    assert (names(1), names(2)) == (["0.png", "link.png"], ["0.png", "link.png", "1.png"])


def test_a_folder_within_that_cannot_be_read_is_left_out_aloud(tmp_path, monkeypatch):
    a_folder(tmp_path, "ok/1.png", "lost+found/2.png")
    read, closed = os.scandir, str(tmp_path / "lost+found")

    def scandir(place: str):
        if place in (closed, str(tmp_path / "none")):
            raise PermissionError(13, "Permission denied", place)
        return read(place)

    monkeypatch.setattr(os, "scandir", scandir)
    found = find_pictures(tmp_path)
    assert [file.name for file in found.files] == ["1.png"]
    assert found.left_out == {f"the folder {closed} cannot be read (Permission denied)": 1}
    with pytest.raises(PermissionError):
        find_pictures(tmp_path / "none")


def turned(mark: int) -> Image.Exif:
    exif = Image.Exif()
    exif[274] = mark
    return exif


def marked(kind: str, mark: int) -> bytes:
    if kind == "TIFF":
        return encoded(PICTURE, kind, tiffinfo={274: mark})
    return encoded(PICTURE, kind, exif=turned(mark), **({"lossless": True} if kind == "WEBP" else {}))


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "TIFF", "WEBP"])
@pytest.mark.parametrize("mark", [1, 3, 5, 6, 8])
def test_an_orientation_mark_is_ignored_and_upright_turns_at_the_source(kind, mark):
    content = marked(kind, mark)
    stored = decode(as_payload(marked(kind, 1)), "image")

    assert orientation(content) == mark
    np.testing.assert_array_equal(read_pixels(content), stored)
    np.testing.assert_array_equal(decode(as_payload(content), "image"), stored)
    image = Image.fromarray(stored)
    image.getexif()[274] = mark
    expected = np.asarray(ImageOps.exif_transpose(image))
    np.testing.assert_array_equal(decode(as_payload(content, upright=True), "image"), expected)


def test_a_webp_goes_to_the_daemon_as_a_png_and_every_other_file_as_it_is():
    webp = encoded(Image.fromarray(np.dstack([PICTURE, PICTURE[..., 0]])), "WEBP", lossless=True, exact=True)

    np.testing.assert_array_equal(decode(as_payload(webp), "image"), PICTURE)
    assert as_payload(WHOLE) is WHOLE
    for length in (12, 20, 100, len(webp) // 2, len(webp) - 2):
        with pytest.raises(ImageError):
            as_payload(webp[:length])
    later = [Image.new("RGB", (64, 48))]
    with pytest.raises(ImageError, match="the WebP is animated: send each picture as a file of its own"):
        as_payload(encoded(PICTURE, "WEBP", save_all=True, append_images=later))


DAMAGED = {
    "cut": WHOLE[: len(WHOLE) // 2],
    "cut, with an end marker": WHOLE[: len(WHOLE) // 2] + b"\xff\xd9",
    "a bad sector": WHOLE[:700] + bytes(300) + WHOLE[1000:],
    "empty": b"",
    "an AppleDouble file": b"\0\5\x16\7\0\2\0\0Mac OS X",
}


@pytest.mark.promise("Cameras", "What the daemon refuses as damaged, no tool trains with, cuts or exports")
@pytest.mark.parametrize("name", DAMAGED)
def test_what_the_daemon_refuses_is_refused_by_name_in_training_and_data_sets(tmp_path, name):
    a_folder(tmp_path, "ok/1.jpg", "ok/2.jpg", "bad/1.jpg", "bad/2.jpg")
    for number, path in enumerate(sorted(tmp_path.rglob("*.jpg"))):
        path.write_bytes(encoded(a_picture(64, 48, seed=number), "JPEG"))
    (tmp_path / "ok/2.jpg").write_bytes(DAMAGED[name])

    with pytest.raises(TrainingError, match=r"ok/2\.jpg: .*take it out of the folder"):
        read_labelled(tmp_path, 32)
    with pytest.raises(ImageError):
        read_picture(tmp_path / "ok/2.jpg")


def test_training_reads_big_endian_tiffs_and_webps_ignores_marks_aloud_and_passes_over_files_of_a_mac(tmp_path):
    """As ImageJ writes its TIFFs."""
    for label in ("ok", "missing"):
        for number in range(2):
            picture = a_picture(64, 48, seed=number + 2 * (label == "ok"))
            a_folder(tmp_path, f"{label}/._{number}.png", "@eaDir/1.png/THUMB.png", f"__MACOSX/{label}/._1.png")
            deep = Image.fromarray(picture[..., 0].astype(">u2") << 8)
            content = encoded(deep, "TIFF") if number else encoded(picture, "WEBP", lossless=True, exif=turned(6))
            (tmp_path / label / f"{number}.{'tif' if number else 'webp'}").write_bytes(content)

    data, warnings = read_labelled(tmp_path, 48)

    assert data.counts() == {"missing": 2, "ok": 2}
    assert sum("2 files left out: hidden" in text for text in warnings) == 2
    assert sum("2 pictures with an orientation mark: it is ignored" in text for text in warnings) == 1
    a_folder(tmp_path / "all", "R0402/ok/1.png", "__MACOSX/R0402/ok/._1.png", "@eaDir/1.png")
    assert [folder.name for folder in type_folders(tmp_path / "all")] == ["R0402"]
