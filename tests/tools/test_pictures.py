"""Which files of a person's folder are pictures, and their bytes as the daemon takes them."""

import os
from pathlib import Path

import pytest

from tools.pictures import HIDDEN, find_pictures


def a_folder(root: Path, *names: str) -> Path:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(b"x")
    return root


@pytest.mark.parametrize(
    "name",
    ["._R1.png", ".R1.png", "__MACOSX/ok/R1.png", "@eaDir/R1.png/THUMB_M.png", "ok/@eaDir/R1.png", "Thumbs.db",
     ".thumbnails/R1.jpg", "#recycle/R1.bmp", "$RECYCLE.BIN/R1.tif"],
)  # fmt: skip
def test_files_of_an_operating_system_are_no_pictures_and_are_counted(tmp_path, name):
    found = find_pictures(a_folder(tmp_path, "ok/R2.png", name))

    assert found.files == [tmp_path / "ok/R2.png"]
    assert found.left_out == {HIDDEN: 1}


def test_every_suffix_that_the_decoder_reads_is_found_in_any_case(tmp_path):
    names = ["a.PNG", "b.jpg", "c.JPEG", "d.jfif", "e.bmp", "f.TIF", "g.tiff", "h.webp"]

    found = find_pictures(a_folder(tmp_path, *names, "notes.txt", "labels.json", ".DS_Store"))

    assert [file.name for file in found.files] == names
    assert not found.left_out


def test_pictures_of_a_kind_that_is_not_read_are_counted_by_suffix(tmp_path):
    found = find_pictures(a_folder(tmp_path, "a.gif", "b.GIF", "c.heic"))

    assert found.files == []
    assert sorted((text.split()[0], count) for text, count in found.left_out.items()) == [(".gif", 2), (".heic", 1)]


def test_a_depth_finds_pictures_there_and_nowhere_else(tmp_path):
    a_folder(tmp_path, "0.png", "ok/1.png", "ok/deep/2.png")

    assert [file.name for file in find_pictures(tmp_path, 1).files] == ["0.png"]
    assert [file.name for file in find_pictures(tmp_path, 2).files] == ["1.png"]
    assert [file.name for file in find_pictures(tmp_path).files] == ["0.png", "1.png", "2.png"]


def test_folders_pipes_and_loops_of_links_are_no_pictures(tmp_path):
    """Reading a pipe would wait for ever, following a loop too."""
    a_folder(tmp_path / "in", "R1.png")
    (tmp_path / "in/folder.png").mkdir()
    (tmp_path / "in/again").symlink_to(tmp_path / "in")
    (tmp_path / "in/R2.png").symlink_to(tmp_path / "in/R1.png")
    os.mkfifo(tmp_path / "in/pipe.png")

    assert [file.name for file in find_pictures(tmp_path / "in").files] == ["R1.png", "R2.png"]
