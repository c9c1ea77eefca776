"""Images that `coserve camera` publishes, seen by a socket in the daemon's place; test_cli runs it at a line."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from coserve_client import publisher as publisher_module
from experts.vision.preprocess import decode
from tests.experts.pictures import a_picture, encoded
from tests.lines import a_jpeg
from tests.ports import free_port
from tests.tools.client.scripted_daemon import Answer, ScriptedDaemon
from tools.cli import camera as camera_command
from tools.cli.main import app


def camera(*words: object) -> tuple[int, str, str]:
    """Run `coserve camera`; status, stdout, stderr."""
    done = CliRunner().invoke(app, ["camera", *map(str, words)])
    return done.exit_code, done.stdout, done.stderr


def published(*words: object, status: int = 0) -> tuple[ScriptedDaemon, dict[str, int], str]:
    """Publish to a daemon that takes everything; it, the account, stderr."""
    with ScriptedDaemon() as daemon:
        ended, account, errors = camera(daemon.endpoint, *words, "--json")
    assert ended == status, errors
    return daemon, json.loads(account), errors


def a_picture_folder(root: Path, *names: str) -> Path:
    for number, name in enumerate(names):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(a_jpeg(number))
    return root


def parts(header: dict[str, Any]) -> tuple[str, ...]:
    return header["board"]["type"], header["board"]["serial"], header["designator"], header["component"]


def test_a_folder_says_board_serial_designator_and_component(tmp_path: Path) -> None:
    names = ("main/S1/R1.R0402.jpg", "main/S1/U1.QFP64.v2.png", "main/S2/R1.R0402.JPG", "other/S3/C1.C0603.tif")
    folder = a_picture_folder(tmp_path / "pictures", *names)
    a_picture_folder(folder, "main/S1/overview.jpg", "main/S1/n.R0402.txt", "R9.R0402.jpg", "main/S1/._R1.R0402.jpg")
    daemon, account, errors = published(folder, "--lot", "L7")
    assert (account["accepted"], account["sent"], account["files left out"]) == (4, 4, 3)
    assert {image.rpartition("/")[0]: parts(header) for image, header in daemon.headers.items()} == {
        "S1/R1": ("main", "S1", "R1", "R0402"),
        "S1/U1": ("main", "S1", "U1", "QFP64.v2"),
        "S2/R1": ("main", "S2", "R1", "R0402"),
        "S3/C1": ("other", "S3", "C1", "C0603"),
    }
    assert {header["board"]["lot"] for header in daemon.headers.values()} == {"L7"}
    assert next(iter(daemon.payloads.values())) == a_jpeg(0), "the bytes of the file, not decoded"
    assert "2 files left out: not named BOARD_TYPE/SERIAL/DESIGNATOR" in errors
    without_lot, _, _ = published(folder)
    assert next(iter(without_lot.headers.values()))["board"] == {"type": "main", "serial": "S1"}


@pytest.mark.promise(
    "Cameras",
    "File names are no reason to lose pictures: all that can be sent are, each other one is named, with the account",
)
def test_names_that_the_wire_takes_are_sent_and_each_other_one_is_named(tmp_path: Path) -> None:
    """All files hold the same bytes: boards may share serial and picture, and be named in any script."""
    good = {
        "psu/A 1/R1.R0603.png": ("psu", "A 1", "R1", "R0603"),
        "psu/板-1/R1 - Copy.R0603.png": ("psu", "板-1", "R1 - Copy", "R0603"),
        "psu/測-1/R1 - Copy.R0603.png": ("psu", "測-1", "R1 - Copy", "R0603"),
        "back/板-1/R1 - Copy.R0603.png": ("back", "板-1", "R1 - Copy", "R0603"),
        "psu/Pru\u0308f/R1.电阻.png": ("psu", "Prüf", "R1", "电阻"),
        "psu/Z1 /R1.R0603.png": ("psu", "Z1", "R1", "R0603"),
    }
    bad = {
        "psu/L1/R2.Geh\udce4use.png": r"its name: 'Geh\udce4use' is not UTF-8: correct it",
        "psu/\udc8a\udcee1/R1.R0603.png": r"its name: '\udc8a\udcee1' is not UTF-8: correct it",
        "psu/S\u200b1/R1.R0603.png": r"its name: 'S\u200b1' is not a string of 1 to 128 characters",
        f"psu/S2/{'x' * 129}.R0603.png": "is not a string of 1 to 128 characters",
    }
    for name in (*good, *bad):
        a_picture_folder(tmp_path, name)
    daemon, account, errors = published(tmp_path, status=1)
    assert sorted(map(parts, daemon.headers.values())) == sorted(good.values())
    assert (account["accepted"], account["not sent"]) == (6, 4)
    assert all(message in errors for message in bad.values()), errors


def test_images_are_saved_by_component_instead_of_published(tmp_path: Path) -> None:
    folder = a_picture_folder(tmp_path / "pictures", "S1.jpg", "late/S2.jpg")
    layout = tmp_path / "layout.yaml"
    layout.write_text(
        "board: main\nsize: [80, 60]\nparts:\n"
        "  R1: {component: 电阻, box: [0, 0, 20, 10]}\n  C1: {component: 电容, box: [0, 0, 20, 20]}\n"
        "  U1: {component: ../QFP, box: [0, 0, 40, 40]}\n"
    )
    out = tmp_path / "training"
    for count in (6, 12):
        status, account, errors = camera("nowhere.yaml", folder, "--layout", layout, "--save", out, "--json")
        assert (status, json.loads(account)) == (0, {"saved": 6}), errors
        assert len([path for path in out.rglob("*") if path.is_file()]) == count, "nothing is overwritten"
    assert {path.parent.name[:5] for path in out.rglob("*.png")} == {"电阻", "电容", "_QFP-"}
    crop = cv2.imread(str(out / "电阻" / "S1.R1.png"))
    assert crop is not None
    assert crop.shape == (10, 20, 3)
    (tmp_path / "empty").mkdir()
    assert camera("nowhere.yaml", tmp_path / "empty", "--save", out)[0] == 2


def test_wrong_use_is_status_2_with_what_to_do(tmp_path: Path) -> None:
    pictures = a_picture_folder(tmp_path / "pictures", "main/S1/R1.R0402.jpg")
    wrong = a_picture_folder(tmp_path / "wrong", "S1/R1.R0402.jpg", "main/S1/overview.jpg")
    at = "tcp://127.0.0.1:1"
    for words, message in {
        (at,): "name one of: a FOLDER of images",
        (at, "--watch"): "name one of: a FOLDER of images",
        (at, pictures, "--video", "v.avi"): "--video does not go with FOLDER",
        (at, pictures, "--serial", "S1"): "--serial does not go with FOLDER",
        (at, pictures, "--watch", "--rate", 1): "--rate does not go with --watch",
        (at, pictures, "--move-to", "done"): "--move-to does not go with FOLDER",
        (at, "--render", 1, "--layout", "l"): "--layout does not go with --render",
        (at, "--video", "v.avi"): "--layout FILE says where the parts lie",
        (at, "--video", "v.avi", "--layout", "l.yaml", "--every", 1): "name one of --serial SERIAL",
        (at, "--video", "v.avi", "--layout", "l.yaml", "--serial", "S"): "name one trigger",
        (at, "--video", "v", "--layout", "l", "--serial", "S", "--every", 1, "--encoding", "x"): "--encoding goes with",
        (at, tmp_path / "nowhere"): f"no folder {tmp_path / 'nowhere'}",
        (at, wrong): f"{wrong} holds no image named BOARD_TYPE/SERIAL/DESIGNATOR.COMPONENT.png",
        (at, pictures, "--lot", "L\u200b1"): "--lot: 'L\\u200b1' is not a string of 1 to 128 characters",
        (at, pictures, "--server-key", "k"): "--server-key and --client-key belong together",
        (at, pictures, "--watch", "--move-to", pictures / "done"): "which is watched: name a folder beside it",
        (tmp_path / "none.yaml", pictures): f"no file {tmp_path / 'none.yaml'}",
    }.items():
        status, _, errors = camera(*words)
        assert (status, message in errors) == (2, True), errors


LAYOUT = "board: main\nsize: [80, 60]\nparts:\n  R1: {component: R0402, box: [0, 0, 20, 10]}\n"


def part(serial: str, name: str) -> str:
    return f"main/{serial}/{name}"


@pytest.mark.promise("Cameras", "A damaged picture never ends an upload: it is named, all others are sent")
def test_a_bad_picture_is_named_and_the_others_are_cut_and_sent(tmp_path: Path) -> None:
    folder = a_picture_folder(tmp_path / "pictures", *(f"S{number}.jpg" for number in range(1, 8)))
    whole = (folder / "S1.jpg").read_bytes()
    zeros = whole[: len(whole) // 2] + bytes(300) + whole[len(whole) // 2 + 300 :]
    for number, content in enumerate((whole[: len(whole) // 2], zeros, b"", a_jpeg(9, width=40)), 2):
        (folder / f"S{number}.jpg").write_bytes(content)
    (folder / "S6.jpg").unlink()
    (folder / "S6.jpg").symlink_to("nowhere")
    (tmp_path / "layout.yaml").write_text(LAYOUT)
    daemon, account, errors = published(folder, "--layout", tmp_path / "layout.yaml", status=1)
    assert [header["board"]["serial"] for header in daemon.headers.values()] == ["S1", "S7"]
    assert (account["accepted"], account["not sent"]) == (2, 5)
    assert [f"not sent: {folder}/S{number}.jpg: " in errors for number in range(1, 8)] == [0, 1, 1, 1, 1, 1, 0]


def test_two_pictures_of_one_part_are_both_named_and_the_other_parts_are_sent(tmp_path: Path) -> None:
    names = ["C1.C0603.png", "C1.C0603.jpg", "R1.R0402.png", "R1.R0603.png", *(f"U{n}.QFP.png" for n in range(6))]
    folder = a_picture_folder(tmp_path, *(part("S1", name) for name in names))
    daemon, account, errors = published(folder, status=1)
    assert (len(daemon.headers), account["not sent"]) == (6, 4)
    for name in names[:4]:
        assert str(folder / part("S1", name)) in errors
    assert "more than one picture of main S1 R1: leave one" in errors


def test_orientation_marks_are_ignored_aloud_and_turned_only_if_that_is_asked_for(tmp_path: Path) -> None:
    picture = a_picture(80, 60)
    (tmp_path / "layout.yaml").write_text(LAYOUT)
    folder = a_picture_folder(tmp_path / "in", "S1.png", "S2.png", "S3.png")
    turned = Image.Exif()
    turned[274] = 3
    for name in ("S1", "S2", "S3"):
        (folder / f"{name}.png").write_bytes(encoded(picture, "PNG", exif=turned if name != "S1" else None))

    daemon, _, errors = published(folder, "--layout", tmp_path / "layout.yaml")
    assert len(set(daemon.payloads.values())) == 1
    assert errors.count("has an orientation mark: it is ignored") == 1
    daemon, _, errors = published(folder, "--layout", tmp_path / "layout.yaml", "--upright")
    parts = [decode(payload, "image") for payload in daemon.payloads.values()]
    assert "orientation" not in errors
    for got, expected in zip(parts, (picture, *2 * [picture[::-1, ::-1]]), strict=True):
        np.testing.assert_array_equal(got, expected[:10, :20])


def test_a_camera_that_is_ended_by_a_signal_prints_its_account(tmp_path: Path) -> None:
    folder = a_picture_folder(tmp_path, *(part("S1", f"R{number}.R0402.jpg") for number in range(20)))

    def end(_header: Answer, _times: int) -> Answer:
        if len(daemon.order) == 10:
            os.kill(os.getpid(), signal.SIGTERM)
        return {"type": "accepted"} if len(daemon.order) < 10 else {"type": "busy", "retry_after_ms": 100}

    with ScriptedDaemon(end) as daemon:
        status, account, errors = camera(daemon.endpoint, folder, "--json")

    rows = json.loads(account)
    assert (status, rows["accepted"] + rows["unanswered"] + rows["not sent"]) == (1, 20)
    assert f"no answer from the daemon for {20 - rows['accepted']} of 20 images" in errors


def test_two_signals_at_once_are_one_and_a_later_one_interrupts(monkeypatch: pytest.MonkeyPatch) -> None:
    """`timeout` sends SIGTERM to its command and to the command's group."""
    with camera_command._stop_on_signals() as stop:
        monkeypatch.setattr(camera_command, "_AT_ONCE_S", float("inf"))
        for number in (signal.SIGTERM, signal.SIGINT):
            os.kill(os.getpid(), number)
            assert stop.is_set()
    monkeypatch.setattr(camera_command, "_AT_ONCE_S", -1.0)
    with camera_command._stop_on_signals():
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.promise("Cameras", "While images wait, the camera says why in the daemon's words")
def test_a_camera_says_what_the_daemon_answered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publisher_module, "_NOTICE_S", 0.0)
    reason = "the disk has 1.2 GB left of 2 GB: free some"

    def full(_header: Answer, times: int) -> Answer:
        return {"type": "accepted"} if times > 6 else {"type": "busy", "retry_after_ms": 150, "reason": reason}

    with ScriptedDaemon(full) as daemon:
        status, _, errors = camera(daemon.endpoint, a_picture_folder(tmp_path, part("S1", "R1.R0402.jpg")))

    assert status == 0
    assert errors.count(f"the daemon takes no images now: {reason}") == 1
    assert "is the daemon running" not in errors.split(reason)[1]


def test_a_person_hears_soon_that_nobody_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(camera_command, "_PATIENCE_S", 0.1)
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    monkeypatch.setattr(publisher_module, "_NOTICE_S", 0.05)
    folder = a_picture_folder(tmp_path, part("S1", "R1.R0402.jpg"))
    status, account, errors = camera(endpoint, folder, "--json")
    assert (status, json.loads(account)["accepted"], json.loads(account)["not sent"]) == (1, 0, 1)
    assert f"no answer from {endpoint} for 0.1 s: is the daemon running" in " ".join(errors.split())
    assert "?." not in errors
    assert "no answer from the daemon for 1 of 1 image: the same command sends" in errors
