"""Pictures that are served smaller than they are stored, for lists, cards and screens, and never at any price."""

import io
import os
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.daemon.dashboard.web import Web
from tests.experts.pictures import a_chunk, a_png, encoded

SIZE = (2448, 1648)  # a camera of 4 megapixels
BOX = (1200, 800, 1440, 960)


def a_photo(size: tuple[int, int] = SIZE) -> Image.Image:
    """Grey noise, with a red block where the box is: nothing that compresses to nothing."""
    noise = np.random.default_rng(0).integers(80, 120, (size[1] // 8, size[0] // 8, 3), np.uint8)
    photo = Image.fromarray(noise).resize(size, Image.Resampling.BILINEAR)
    photo.paste((220, 20, 20), BOX)
    return photo


def a_bomb(side: int) -> bytes:
    """A PNG of a few hundred kilobytes that would unpack to side × side pixels."""
    packing, row = zlib.compressobj(1), b"\0" * (1 + side)
    body = b"".join([*(packing.compress(row) for _ in range(side)), packing.flush()])
    return a_png(side, side, 0, a_chunk(b"IDAT", body))


@pytest.fixture(scope="module")
def web(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Web]:
    """A board with one finding, whose picture is a large PNG with a box; the expert's page shows it too."""
    line = Web(tmp_path_factory.mktemp("reduced") / "line")
    line.add_board(1, "B-1")
    line.add_image(1, 1, image_path="images/d/1.png", designator="R1")
    line.add_stage(1, label="bridge")
    line.sql("UPDATE stream_position SET last_seq = 1")
    line.add_version("R0402")
    line.add_box(1, 0, "bridge", 0.9, *BOX)
    line.add_picture("images/d/1.png", encoded(a_photo()))
    with line.running() as running:
        yield running


def add(web: Web, number: int, data: bytes, suffix: str = ".png") -> str:
    web.add_image(number, 1, "pass", image_path=f"images/d/{number}{suffix}")
    web.add_picture(f"images/d/{number}{suffix}", data)
    return f"/pictures/{number}"


def fetch(web: Web, path: str) -> tuple[int, str, bytes]:
    answer = web.get(path)
    return answer.status, answer.headers["content-type"], answer.data


def shown(web: Web, path: str) -> Image.Image:
    status, _, data = fetch(web, path)
    assert status == 200, data
    return Image.open(io.BytesIO(data))


def peak_kib(web: Web) -> int:
    assert web.process
    text = Path(f"/proc/{web.process.pid}/status").read_text(encoding="ascii")
    return next(int(row.split()[1]) for row in text.splitlines() if row.startswith("VmHWM"))


def test_a_large_picture_is_served_in_two_widths_and_whole(web: Web) -> None:
    whole = fetch(web, "/pictures/1")[2]
    for width in (480, 1600):
        status, kind, data = fetch(web, f"/pictures/1?width={width}")
        assert (status, kind) == (200, "image/jpeg")
        assert len(data) < len(whole) / 4
        image = Image.open(io.BytesIO(data))
        assert image.size == (width, round(SIZE[1] * width / SIZE[0]))
        scale = width / SIZE[0]
        red, green, _ = image.getpixel((int(1320 * scale), int(880 * scale)))  # pyright: ignore[reportGeneralTypeIssues]
        assert red > 180
        assert green < 60
    assert shown(web, "/pictures/1").size == SIZE


def test_every_kind_of_picture_is_made_smaller_or_comes_whole(web: Web) -> None:
    wide = a_photo((960, 640))
    deep, big_endian = (Image.fromarray(np.full((640, 960), 200 * 256 + 17, order)) for order in ("<u2", ">u2"))
    kinds = [
        *((encoded(wide.convert(mode)), ".png") for mode in ("P", "RGBA", "1")),
        *((encoded(wide.convert(mode), "JPEG"), ".jpg") for mode in ("L", "CMYK")),
        (encoded(wide, "JPEG", progressive=True), ".jpg"),
        *((encoded(wide, kind), f".{kind[:3].lower()}") for kind in ("TIFF", "BMP", "PPM")),
        (encoded(deep), ".png"),
        (encoded(big_endian, "TIFF"), ".tif"),
    ]
    for number, (data, suffix) in enumerate(kinds, 100):
        image = shown(web, f"{add(web, number, data, suffix)}?width=480")
        assert (number, image.format, image.size) == (number, "JPEG", (480, 320))
    assert abs(image.getpixel((240, 160)) - 200) < 4  # pyright: ignore[reportOperatorIssue, reportPossiblyUnboundVariable]
    for number, whole in ((150, encoded(a_photo((480, 320)))), (151, encoded(wide)[:-20_000])):
        assert fetch(web, f"{add(web, number, whole)}?width=480") == (200, "image/png", whole)
    assert fetch(web, f"{add(web, 152, b'no picture', '.tif')}?width=480")[0] == 404


@pytest.mark.parametrize("mark", range(1, 9))
def test_a_picture_lies_as_experts_saw_it_whatever_its_orientation_mark_says(web: Web, mark: int) -> None:
    flat = Image.new("RGB", (960, 640))
    flat.paste((220, 20, 20), (0, 0, 240, 240))
    path = add(web, 300 + mark, encoded(flat, "TIFF", tiffinfo={274: mark}), ".tif")
    for query in ("", "?width=480"):
        image = shown(web, path + query).getchannel("R")
        assert image.width / image.height == 1.5
        corners = [image.getpixel((x, y)) for x in (10, image.width - 10) for y in (10, image.height - 10)]
        assert [bool(red > 128) for red in corners] == [True, False, False, False]  # pyright: ignore[reportOperatorIssue]
    assert f'viewBox="0 0 {flat.width} {flat.height}"' in web.get(f"/boards/1?inspection={300 + mark}").text


def test_a_tiffs_header_alone_gives_its_size_and_refuses_what_is_too_large(web: Web) -> None:
    path = add(web, 400, encoded(Image.new("1", (6000, 5000)), "TIFF"), ".tif")
    os.truncate(web.folder / "images/d/400.tif", 1 << 28)
    fetch(web, "/pictures/1?width=480")
    before = peak_kib(web)
    assert 'viewBox="0 0 6000 5000"' in web.get("/boards/1?inspection=400").text
    for query in ("", "?width=480"):
        assert "6000 × 5000 pixels are too many to unpack" in web.get(path + query).text
    assert peak_kib(web) - before < 16 * 1024


@pytest.mark.parametrize("side", [6000, 30_000])
def test_a_bomb_comes_as_it_lies_and_takes_no_memory(web: Web, side: int) -> None:
    bomb = a_bomb(side)
    assert len(bomb) < 5_000_000 < side * side
    path = add(web, 200 + side, bomb)
    fetch(web, "/pictures/1?width=480")
    before = peak_kib(web)
    assert fetch(web, f"{path}?width=480") == (200, "image/png", bomb)
    assert web.get("/boards/1").status == 200
    assert peak_kib(web) - before < 16 * 1024
