"""Raw pixels in `images/` are PGM or PPM, which viewers open: a header of ours, then the bytes that the camera sent."""

Shape = tuple[int, int, int]

_GREY, _COLOUR = (b"P5", ".pgm"), (b"P6", ".ppm")
SUFFIXES = frozenset({_GREY[1], _COLOUR[1]})


def header_of(shape: Shape) -> tuple[bytes, str]:
    """What stands before the payload, and the file's suffix. `shape` is (height, width, channels)."""
    height, width, channels = shape
    kind, suffix = _GREY if channels == 1 else _COLOUR
    return b"%s\n%d %d\n255\n" % (kind, width, height), suffix


def as_sent(content: bytes, suffix: str) -> tuple[bytes, Shape | None]:
    """The payload of a file with this suffix, and its shape where it is raw pixels; ValueError: a damaged header."""
    if suffix not in SUFFIXES:
        return content, None
    kind, size, _, payload = content.split(b"\n", 3)
    width, height = map(int, size.split())
    return payload, (height, width, 1 if kind == _GREY[0] else 3)
