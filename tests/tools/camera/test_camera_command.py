"""What `coserve camera` publishes, seen by a socket in the daemon's place; test_cli has the command line."""

import inspect
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import yaml
import zmq

from tests.lines import a_jpeg
from tools.camera.command import (
    FIRST_SEED,
    board_plan,
    images_of,
    publish_folder,
    publish_rendered,
    rendered_images,
)
from tools.camera.render import board_types, render_board
from tools.cli.demo import demo
from tools.demo.prepare import JUDGED_SEEDS, PANELS


@contextmanager
def an_intake(folder: Path) -> Iterator[tuple[Path, list[tuple[dict[str, Any], bytes]]]]:
    """A configuration, and the list that takes every (header, payload) published to it, once; each is accepted."""
    received: list[tuple[dict[str, Any], bytes]] = []
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.linger = 0
        port = router.bind_to_random_port("tcp://127.0.0.1")
        config = folder / "coserve.yaml"
        endpoints = {"intake": [f"tcp://127.0.0.1:{port}"], "results": "ipc://r.sock", "control": "ipc://c.sock"}
        settings = {"endpoints": endpoints, "rules": "rules.yaml", "catalog": "catalog.yaml"}
        config.write_text(yaml.safe_dump(settings | {"devices": {"cpu": {"expert_memory": "1GB"}}}), encoding="utf-8")
        stop = threading.Event()
        thread = threading.Thread(target=_accept, args=(router, received, stop))
        thread.start()
        try:
            yield config, received
        finally:
            stop.set()
            thread.join()


def _accept(router: zmq.Socket[bytes], received: list[tuple[dict[str, Any], bytes]], stop: threading.Event) -> None:
    seen: set[str] = set()
    while not stop.is_set():
        if not router.poll(10):
            continue
        identity, magic, raw, *payload = router.recv_multipart()
        header = json.loads(raw)
        body: dict[str, Any] = {"type": "welcome", "max_payload_bytes": 10**7}
        if header["type"] != "hello":
            if header["id"] not in seen:  # else it is sent again, for the answer came late
                received.append((header, payload[0]))
            seen.add(header["id"])
            body = {"type": "accepted", "id": header["id"]}
        router.send_multipart([identity, magic, json.dumps({"credit": 32, **body}).encode()])


def a_picture_folder(root: Path, *names: str) -> Path:
    for number, name in enumerate(names):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(a_jpeg(number))
    return root


def test_a_folder_says_board_serial_designator_and_component(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    names = ("main/S1/R1.R0402.jpg", "main/S1/U1.QFP64.v2.png", "main/S2/R1.R0402.JPG", "other/S3/C1.C0603.tif")
    folder = a_picture_folder(tmp_path / "pictures", *names)
    a_picture_folder(folder, "main/S1/overview.jpg", "main/S1/notes.R0402.txt", "R9.R0402.jpg")
    with an_intake(tmp_path) as (config, received):
        account = publish_folder(config, folder, rate=None, source="camera", lot="L7")
    assert account.complete
    assert account.accepted == 4
    said = {h["id"]: (h["board"]["type"], h["board"]["serial"], h["designator"], h["component"]) for h, _ in received}
    assert said == {
        "S1/R1": ("main", "S1", "R1", "R0402"),
        "S1/U1": ("main", "S1", "U1", "QFP64.v2"),
        "S2/R1": ("main", "S2", "R1", "R0402"),
        "S3/C1": ("other", "S3", "C1", "C0603"),
    }
    assert {header["board"]["lot"] for header, _ in received} == {"L7"}
    assert received[0][1] == a_jpeg(0), "the bytes of the file, not decoded"
    assert f"2 images, the first is {folder / 'R9.R0402.jpg'}" in capfd.readouterr().err


def test_without_a_lot_none_is_sent(tmp_path: Path):
    folder = a_picture_folder(tmp_path / "pictures", "main/S1/R1.R0402.jpg")
    with an_intake(tmp_path) as (config, received):
        publish_folder(config, folder, rate=None, source="camera", lot=None)
    assert received[0][0]["board"] == {"type": "main", "serial": "S1"}


def test_a_folder_that_holds_nothing_fitting_is_named_with_the_layout(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    config = tmp_path / "coserve.yaml"
    wrong = a_picture_folder(tmp_path / "pictures", "S1/R1.R0402.jpg", "main/S1/overview.jpg")
    for folder, expected in (
        (tmp_path / "nowhere", f"no folder {tmp_path / 'nowhere'}"),
        (wrong, f"{wrong} holds no image named BOARD_TYPE/SERIAL/DESIGNATOR.COMPONENT.png"),
    ):
        with pytest.raises(SystemExit) as left:
            publish_folder(config, folder, rate=None, source="camera", lot=None)
        assert left.value.code == 2
        assert expected in capfd.readouterr().err


def test_a_missing_configuration_is_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    folder = a_picture_folder(tmp_path / "pictures", "main/S1/R1.R0402.jpg")
    with pytest.raises(SystemExit) as left:
        publish_folder(tmp_path / "none.yaml", folder, rate=None, source="camera", lot=None)
    assert left.value.code == 2
    assert f"no file {tmp_path / 'none.yaml'}" in capfd.readouterr().err


def test_every_board_of_a_plan_has_a_serial_and_a_seed_of_its_own():
    plan = board_plan(10, 7, "D1")
    assert [serial for serial, _, _ in plan] == [f"D1-{n:03d}" for n in range(1, 11)]
    assert {kind for _, kind, _ in plan} == set(board_types())
    seeds = [seed for _, _, seed in (*plan, *board_plan(10, 8, "D2"))]
    assert len(set(seeds)) == len(seeds)
    assert board_plan(10, 7, "D1") == plan


def test_published_boards_are_none_that_training_or_judging_saw():
    assert min(seed for _, _, seed in board_plan(4, 0, "D1")) >= FIRST_SEED > max(*JUDGED_SEEDS, PANELS)


def test_the_command_draws_other_boards_than_the_demo_unless_a_seed_says_which(tmp_path: Path):
    def published(*words: str) -> list[bytes]:
        with an_intake(tmp_path) as (config, received):
            command = [sys.executable, "-m", "tools", "camera", str(config), "--render", "1", *words]
            assert subprocess.run(command, capture_output=True, timeout=120, check=False).returncode == 0
        return [payload for _, payload in received]

    seed = inspect.signature(demo).parameters["seed"].default
    shown = {image.payload for image in rendered_images(1, seed, "D1", None)}
    assert shown.isdisjoint(published())
    assert shown == set(published("--seed", str(seed)))


def test_rendered_boards_are_published_as_their_crops(tmp_path: Path):
    with an_intake(tmp_path) as (config, received):
        account = publish_rendered(config, 1, rate=None, source="camera", seed=3, lot=None, prefix="T")
    ((serial, kind, seed),) = board_plan(1, 3, "T")
    assert account.accepted == len(board_types()[kind].places) == len(received)
    assert [h["designator"] for h, _ in received] == [place.designator for place in board_types()[kind].places]
    assert {h["board"]["serial"] for h, _ in received} == {serial}
    assert [h["id"] for h, _ in received] == [image.image_id for image in rendered_images(1, 3, "T", None)]
    assert seed == FIRST_SEED + 30_000


def test_a_published_crop_is_the_rendered_one_pixel_by_pixel():
    board = render_board("sensor-node", 1, 0.1)
    for placement, image in zip(board.placements, images_of(board, "S1", "L1"), strict=True):
        pixels = cv2.imdecode(np.frombuffer(image.payload, np.uint8), cv2.IMREAD_COLOR_RGB)
        assert pixels is not None
        assert np.array_equal(pixels, placement.crop())
        assert image.component == placement.component
        assert image.image_id == f"S1/{placement.designator}"
        assert image.board == {"type": "sensor-node", "serial": "S1", "lot": "L1"}
