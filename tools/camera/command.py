"""A folder of images, or rendered boards, published to a line with a progress bar."""

import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import cv2
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn

from coserve_client import CameraImage, CurveClient, PublishAccount, Publisher, PublishError, publish_images
from tools.camera.files import board_of
from tools.camera.layout import Layout, WrongSizeError, cut
from tools.camera.render import Board, board_types, render_board
from tools.camera.watch_folder import SUFFIXES
from tools.cli.console import errors, fail
from tools.cli.open_line import settings_of
from tools.cli.progress import Bars

#: A person at a terminal wants to hear sooner than a camera does that nobody answers.
_PATIENCE_S = 15.0
#: Share of parts with a defect on rendered boards; real lines have fewer, a demo has something to show. Some pass.
DEFECT_RATE = 0.02
#: Seeds of published boards lie above those that training and its held-out boards draw from.
FIRST_SEED = 1_000_000


def publish_folder(
    config: Path | str,
    folder: Path,
    *,
    rate: float | None,
    source: str,
    lot: str | None,
    curve: CurveClient | None = None,
    layout: Layout | None = None,
) -> PublishAccount:
    """Publish `folder/BOARD_TYPE/SERIAL/DESIGNATOR.COMPONENT.png`; leaves with status 2 where nothing fits that.

    With a layout, whole boards: `SERIAL.png` anywhere below `folder`. `config` is the line's, or its endpoint.
    """
    if not folder.is_dir():
        fail(f"no folder {folder}", status=2)
    if layout is not None:
        pictures = sorted(path for path in folder.rglob("*.*") if path.suffix.lower() in SUFFIXES)
        if not pictures:
            fail(f"{folder} holds no picture named SERIAL.png (or .jpg, .bmp, .tif)", status=2)
        images = _from_pictures(pictures, layout, lot)
        return _publish(config, images, len(pictures) * len(layout.parts), rate=rate, source=source, curve=curve)
    files = sorted(path for path in folder.glob("*/*/*.*") if path.suffix.lower() in SUFFIXES and "." in path.stem)
    if not files:
        fail(
            f"{folder} holds no image named BOARD_TYPE/SERIAL/DESIGNATOR.COMPONENT.png (or .jpg, .bmp, .tif)", status=2
        )
    if left := sorted({path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES} - set(files)):
        text = f"left out, not named BOARD_TYPE/SERIAL/DESIGNATOR.COMPONENT: {len(left)} images, the first is {left[0]}"
        errors.print(text, markup=False)
    return _publish(config, _from_files(files, lot), len(files), rate=rate, source=source, curve=curve)


def publish_rendered(
    config: Path | str,
    boards: int,
    *,
    rate: float | None,
    source: str,
    seed: int,
    lot: str | None,
    prefix: str | None = None,
) -> PublishAccount:
    """Render boards of the demo's types and publish their parts in placement order, board by board."""
    prefix = prefix or f"R{int(time.time()):x}"
    total = sum(len(board_types()[kind].places) for _, kind, _ in board_plan(boards, seed, prefix))
    return _publish(config, rendered_images(boards, seed, prefix, lot), total, rate=rate, source=source)


def write_video(video: Path, boards: int, seed: int, prefix: str | None) -> tuple[Path, Path]:
    """Rendered boards of one type that pass in a video; its layout and its serials (tools/camera/belt.py)."""
    from tools.camera.belt import write_belt

    kind = "sensor-node"
    prefix = prefix or f"R{int(time.time()):x}"
    serials = [f"{prefix}-{number + 1:03d}" for number in range(boards)]
    seeds = [FIRST_SEED + seed * 10_000 + number for number in range(boards)]
    return write_belt(video, serials, seeds, DEFECT_RATE, kind)


def board_plan(boards: int, seed: int, prefix: str) -> list[tuple[str, str, int]]:
    """(serial, board type, seed) of each board: the types in turn, every board another seed."""
    kinds = sorted(board_types())
    return [
        (f"{prefix}-{number + 1:03d}", kinds[number % len(kinds)], FIRST_SEED + seed * 10_000 + number)
        for number in range(boards)
    ]


def rendered_images(boards: int, seed: int, prefix: str, lot: str | None) -> Iterator[CameraImage]:
    """The parts of each board as PNG images to publish."""
    for serial, kind, board_seed in board_plan(boards, seed, prefix):
        yield from images_of(render_board(kind, board_seed, DEFECT_RATE), serial, lot)


def images_of(board: Board, serial: str, lot: str | None) -> Iterator[CameraImage]:
    """One board's parts, in placement order."""
    for placement in board.placements:
        _, payload = cv2.imencode(".png", cv2.cvtColor(placement.crop(), cv2.COLOR_RGB2BGR))
        yield CameraImage(
            f"{serial}/{placement.designator}",
            payload.tobytes(),
            board_of(board.board_type, serial, lot),
            placement.component,
            {"designator": placement.designator},
        )


def _from_files(files: list[Path], lot: str | None) -> Iterator[CameraImage]:
    for path in files:
        designator, component = path.stem.split(".", 1)
        serial, kind = path.parent.name, path.parent.parent.name
        board = board_of(kind, serial, lot)
        yield CameraImage(f"{serial}/{designator}", path.read_bytes(), board, component, {"designator": designator})


def _from_pictures(files: list[Path], layout: Layout, lot: str | None) -> Iterator[CameraImage]:
    for path in files:
        picture = cv2.imread(str(path), cv2.IMREAD_COLOR)
        if picture is None:
            fail(f"{path} cannot be decoded", status=1)
        try:
            found = cut(picture, layout)
        except WrongSizeError as error:
            fail(f"{path}: {error}", status=1)
        board = board_of(layout.board, path.stem, lot)
        for part in found:
            more = {"designator": part.designator}
            yield CameraImage(f"{path.stem}/{part.designator}", part.png, board, part.component, more)


def _publish(
    config: Path | str,
    images: Iterable[CameraImage],
    total: int,
    *,
    rate: float | None,
    source: str,
    curve: CurveClient | None = None,
) -> PublishAccount:
    endpoint = config if isinstance(config, str) else endpoint_of(config)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with (
        Bars(*columns, console=errors) as bar,
        Publisher(endpoint, source, patience_s=_PATIENCE_S, curve=curve) as publisher,
    ):
        task = bar.add_task(f"publishing to {endpoint}", total=total)
        try:
            account = publish_images(
                publisher, images, rate=rate, progress=lambda account: bar.update(task, completed=account.answered)
            )
        except (PublishError, ValueError) as error:
            bar.stop()
            fail(str(error), status=1)
    for refusal in account.refusals:
        errors.print(refusal, markup=False)
    return account


def endpoint_of(config: Path) -> str:
    """Where the line of `config` takes images; leaves with status 2 where there is no such file, or mistakes in it."""
    return settings_of(config).endpoints.intake[0]
