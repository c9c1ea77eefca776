import struct

import cv2
import numpy as np
import pytest
from PIL import Image

from experts.errors import ImageError
from experts.vision.preprocess import decode
from tests.experts.pictures import a_picture, encoded

PICTURE = a_picture(64, 48)
COLOUR = Image.fromarray(PICTURE)
GREY = COLOUR.convert("L")
DEEP = (PICTURE[..., 0].astype(np.uint16) << 8) | 0x7F
DEEP_GREY = np.repeat(PICTURE[..., :1], 3, axis=2)
TRANSPARENT = COLOUR.copy()
TRANSPARENT.putalpha(Image.fromarray(PICTURE[..., 1]))


def rgb(image: Image.Image) -> np.ndarray:
    return np.asarray(image.convert("RGB"))


def opencv(kind: str, image: np.ndarray, *options: int) -> bytes:
    return cv2.imencode(kind, image, list(options))[1].tobytes()


def rotated(kind: str, orientation: int, image: Image.Image = COLOUR, **options) -> bytes:
    if kind == "TIFF":
        return encoded(image, kind, tiffinfo={274: orientation}, **options)
    exif = Image.Exif()
    exif[274] = orientation
    return encoded(image, kind, exif=exif, **options)


def big_endian_tiff(orientation: int) -> bytes:
    """A 2 × 1 grey TIFF written by hand, most significant byte first."""
    tags = [(256, 3, 2 << 16), (257, 3, 1 << 16), (258, 3, 8 << 16), (259, 3, 1 << 16), (262, 3, 1 << 16)]
    tags += [(273, 4, 8), (274, 3, orientation << 16), (277, 3, 1 << 16), (278, 3, 1 << 16), (279, 4, 2)]
    body = b"".join(struct.pack(">HHII", tag, kind, 1, value) for tag, kind, value in tags)
    return b"MM\0*" + struct.pack(">I", 10) + bytes([10, 200]) + struct.pack(">H", len(tags)) + body + bytes(4)


EXACT = {
    "PNG": (encoded(COLOUR), PICTURE),
    "grey PNG": (encoded(GREY), rgb(GREY)),
    "PNG with alpha": (encoded(TRANSPARENT), PICTURE),
    "grey PNG with alpha": (encoded(GREY.convert("LA")), rgb(GREY)),
    "palette PNG": (encoded(COLOUR.quantize(64)), rgb(COLOUR.quantize(64))),
    "1-bit PNG": (encoded(COLOUR.convert("1")), rgb(COLOUR.convert("1"))),
    "16-bit grey PNG": (opencv(".png", DEEP), DEEP_GREY),
    "16-bit RGB PNG": (opencv(".png", PICTURE[..., ::-1].astype(np.uint16) * 257), PICTURE),
    "BMP": (encoded(COLOUR, "BMP"), PICTURE),
    "palette BMP": (encoded(COLOUR.quantize(64), "BMP"), rgb(COLOUR.quantize(64))),
    "1-bit BMP": (encoded(COLOUR.convert("1"), "BMP"), rgb(COLOUR.convert("1"))),
    "BMP with alpha": (encoded(TRANSPARENT, "BMP"), PICTURE),
    "TIFF": (encoded(COLOUR, "TIFF"), PICTURE),
    "LZW TIFF": (encoded(COLOUR, "TIFF", compression="tiff_lzw"), PICTURE),
    "deflate TIFF": (encoded(COLOUR, "TIFF", compression="tiff_adobe_deflate"), PICTURE),
    "packbits TIFF": (encoded(COLOUR, "TIFF", compression="packbits"), PICTURE),
    "TIFF with alpha": (encoded(TRANSPARENT, "TIFF"), PICTURE),
    "palette TIFF": (encoded(COLOUR.quantize(64), "TIFF"), rgb(COLOUR.quantize(64))),
    "1-bit TIFF": (encoded(COLOUR.convert("1"), "TIFF", compression="tiff_lzw"), rgb(COLOUR.convert("1"))),
    "CMYK TIFF": (encoded(COLOUR.convert("CMYK"), "TIFF"), rgb(COLOUR.convert("CMYK"))),
    "BigTIFF": (encoded(COLOUR, "TIFF", big_tiff=True), PICTURE),
    "big-endian TIFF": (big_endian_tiff(1), np.array([[[10] * 3, [200] * 3]], dtype=np.uint8)),
    "big-endian 16-bit grey TIFF": (encoded(Image.fromarray(DEEP.astype(">u2")), "TIFF"), DEEP_GREY),
    "big-endian 16-bit grey LZW TIFF": (
        encoded(Image.fromarray(DEEP.astype(">u2")), "TIFF", compression="tiff_lzw"),
        DEEP_GREY,
    ),
    "16-bit grey TIFF": (opencv(".tiff", DEEP), DEEP_GREY),
    "16-bit RGB TIFF": (opencv(".tiff", PICTURE[..., ::-1].astype(np.uint16) * 257), PICTURE),
    "16-bit RGBA TIFF": (
        opencv(".tiff", np.dstack([PICTURE[..., ::-1], PICTURE[..., 0]]).astype(np.uint16) * 257),
        PICTURE,
    ),
    "TIFF of three pages": (encoded(COLOUR, "TIFF", save_all=True, append_images=[GREY, GREY]), PICTURE),
    "PNG with bytes behind it": (encoded(COLOUR) + b"behind", PICTURE),
}
LOSSY = {
    "JPEG": (encoded(COLOUR, "JPEG", quality=95, subsampling=0), PICTURE),
    "progressive JPEG": (encoded(COLOUR, "JPEG", quality=95, subsampling=0, progressive=True), PICTURE),
    "grey JPEG": (encoded(GREY, "JPEG", quality=95, subsampling=0), rgb(GREY)),
    "CMYK JPEG": (encoded(COLOUR.convert("CMYK"), "JPEG", quality=95, subsampling=0), PICTURE),
    "JPEG with bytes behind it": (encoded(COLOUR, "JPEG", quality=95, subsampling=0) + b"behind", PICTURE),
    "JPEG TIFF": (encoded(COLOUR, "TIFF", compression="jpeg", quality=95), PICTURE),
}


@pytest.mark.parametrize("name", EXACT)
def test_lossless_images_come_out_as_stored(name: str):
    payload, expected = EXACT[name]
    image = decode(payload, "image")
    assert image.dtype == np.uint8
    np.testing.assert_array_equal(image, expected)


@pytest.mark.parametrize("name", LOSSY)
def test_lossy_images_come_out_nearly_as_stored(name: str):
    payload, expected = LOSSY[name]
    image = decode(payload, "image")
    assert image.shape == expected.shape
    assert np.abs(image.astype(int) - expected).mean() < 4


def test_orientation_is_ignored_in_every_kind_of_file():
    np.testing.assert_array_equal(decode(rotated("TIFF", 6, compression="tiff_lzw"), "image"), PICTURE)
    np.testing.assert_array_equal(decode(rotated("TIFF", 6, big_tiff=True), "image"), PICTURE)
    np.testing.assert_array_equal(decode(big_endian_tiff(3), "image"), decode(big_endian_tiff(1), "image"))
    assert decode(rotated("JPEG", 6), "image").shape == PICTURE.shape


NOISE = np.random.default_rng(0).integers(0, 256, (150, 150, 3), dtype=np.uint8)
WHOLE = {
    "JPEG": encoded(NOISE, "JPEG"),
    "progressive JPEG": encoded(NOISE, "JPEG", progressive=True),
    "PNG": encoded(NOISE),
    "BMP": encoded(NOISE, "BMP"),
    "TIFF": encoded(NOISE, "TIFF"),
    "LZW TIFF": encoded(NOISE, "TIFF", compression="tiff_lzw"),
}


@pytest.mark.parametrize("name", ["PNG", "LZW TIFF"])
def test_damage_inside_compressed_pixels_is_noticed(name: str):
    payload = bytearray(WHOLE[name])
    middle = len(payload) // 2
    payload[middle : middle + 20] = bytes(byte ^ 0x55 for byte in payload[middle : middle + 20])
    with pytest.raises(ImageError):
        decode(bytes(payload), "image")


def test_floating_point_tiffs_are_refused_rather_than_guessed():
    with pytest.raises(ImageError, match="32 bits in format 3"):
        decode(encoded(Image.fromarray(PICTURE[..., 0].astype(np.float32)), "TIFF"), "image")


def test_sixteen_bits_in_separate_planes_are_refused_as_pillow_misreads_them():
    tags = [(256, 3, 2), (257, 3, 1), (258, 3, 16), (259, 3, 1), (262, 3, 2), (277, 3, 3), (278, 3, 1), (284, 3, 2)]
    tags[2:3] = [(258, 3, 16)]
    body = b"".join(struct.pack("<HHII", tag, kind, 1, value) for tag, kind, value in tags)
    places = struct.pack("<6I", 8, 12, 16, 4, 4, 4)
    body += struct.pack("<HHII", 273, 4, 3, 20) + struct.pack("<HHII", 279, 4, 3, 32)
    with pytest.raises(ImageError, match="16 bits in separate planes"):
        decode(b"II*\0" + struct.pack("<I", 44) + bytes(12) + places + struct.pack("<H", 10) + body + bytes(4), "image")


def test_a_bmp_whose_masks_put_red_elsewhere_is_refused_as_opencv_ignores_them():
    head = struct.pack("<IiiHHIIiiII", 40, 1, 1, 1, 32, 3, 0, 0, 0, 0, 0)
    payload = b"BM" + struct.pack("<IHHI", 70, 0, 0, 66) + head + struct.pack("<III", 0xFF, 0xFF00, 0xFF0000) + bytes(4)
    with pytest.raises(ImageError, match="unusual order"):
        decode(payload, "image")


@pytest.mark.parametrize("shape", [None, (48, 64, 2), (48, 65, 3), (0, 64, 3), (-48, -64, 3)])
def test_raw_pixels_that_do_not_fit_their_shape_are_refused(shape: tuple[int, int, int] | None):
    with pytest.raises(ImageError):
        decode(PICTURE.tobytes(), "raw", shape)


def test_decoding_says_nothing_on_standard_error(capfd: pytest.CaptureFixture[str]):
    for payload in (WHOLE["PNG"][:2000], WHOLE["LZW TIFF"][:2000], WHOLE["JPEG"][:2000], WHOLE["BMP"][:2000]):
        with pytest.raises(ImageError):
            decode(payload, "image")
    assert capfd.readouterr().err == ""
