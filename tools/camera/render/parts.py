"""The component library: 16 component types in 7 package families, and the defects each can have.

Lengths are pixels of the board image (one pixel is about 40 µm here). A part lies with its body centred on the
origin, x to the right and y down; polarity marks are on the left, pin 1 is at the bottom left.
"""

from dataclasses import dataclass, replace
from typing import Any, Literal

Family = Literal["chip", "led", "sot23", "soic", "qfp", "electrolytic", "connector"]

#: Defects that a classifier sees: where the body is, how it lies, which part it is.
PLACEMENT_DEFECTS = ("missing", "shifted", "rotated", "reversed", "tombstone", "wrong_part")
#: Defects that a detector sees: what the solder and the leads look like.
SOLDER_DEFECTS = ("bridge", "insufficient", "lifted_lead")


@dataclass(frozen=True, slots=True)
class Pad:
    """One solder pad: centre, size, and the direction that leads away from the body."""

    x: float
    y: float
    w: float
    h: float
    out: tuple[int, int]


@dataclass(frozen=True, slots=True)
class PartType:
    """A component type as the renderer draws it.

    `shift_px` and `skew_deg` are where a good placement ends and a defect begins: good parts stay within a fifth of
    each range's first number, bad ones lie inside the range.
    """

    name: str
    family: Family
    prefix: str
    crop_px: int
    length: float
    width: float
    pads: tuple[Pad, ...]
    lead_px: float
    thickness: float
    defects: tuple[str, ...]
    shift_px: tuple[float, float]
    skew_deg: tuple[float, float] = (13, 45)
    marking: str = ""

    @property
    def labels(self) -> tuple[str, ...]:
        """Return the classes of this type's classifier, `ok` first."""
        return ("ok", *(kind for kind in PLACEMENT_DEFECTS if kind in self.defects))


def _two_ended(
    name: str,
    family: Family,
    crop_px: int,
    body: tuple[float, float],
    pad: Pad,
    defects: tuple[str, ...],
    **looks: Any,
) -> PartType:
    """Return a part with `pad` at its right end and the same at its left."""
    prefix = {"chip": name[0], "led": "LED"}.get(family, "C")
    pads = (replace(pad, x=-pad.x, out=(-1, 0)), pad)
    return PartType(
        name, family, prefix, crop_px, *body, pads, defects=("missing", "shifted", "rotated", *defects), **looks
    )


def _chip(name: str, crop_px: int, length: float, width: float, marking: str = "") -> PartType:
    pad = Pad(length / 2, 0, 4 + length * 0.28, width + 3, (1, 0))
    defects = ("tombstone", "wrong_part", "insufficient")
    if length < 40:
        defects = (*defects, "bridge")  # two pads this close can be joined by one run of solder
    looks = {"lead_px": length * 0.2, "thickness": width * 0.55, "shift_px": (0.16 * length + 1, 0.3 * length + 1)}
    return _two_ended(name, "chip", crop_px, (length, width), pad, defects, marking=marking, **looks)


def _led(name: str, crop_px: int, length: float, width: float) -> PartType:
    pad, looks = Pad(length / 2, 0, 16, width + 2, (1, 0)), {"lead_px": 8, "thickness": 12, "shift_px": (7, 13)}
    defects = ("reversed", "tombstone", "wrong_part", "insufficient")
    return _two_ended(name, "led", crop_px, (length, width), pad, defects, **looks)


def _row(count: int, pitch: float, y: float, w: float, h: float) -> list[Pad]:
    first = -(count - 1) / 2
    return [Pad((first + k) * pitch, y, w, h, (0, 1 if y > 0 else -1)) for k in range(count)]


def _leaded(
    name: str, family: Family, crop_px: int, body: tuple[float, float], pads: list[Pad], *, lead_px: float, marking: str
) -> PartType:
    turnable = family != "sot23"  # a SOT-23 turned by 180° misses its pads: it cannot be reversed
    placement = ("missing", "shifted", "rotated", "reversed", "wrong_part")
    pitch = min(abs(a.x - b.x) + abs(a.y - b.y) for a in pads for b in pads if a is not b and a.out == b.out)
    pitch = min(pitch, 14)
    return PartType(
        name=name,
        family=family,
        prefix="J" if family == "connector" else "Q" if name == "SOT23" else "U",
        crop_px=crop_px,
        length=body[0],
        width=body[1],
        pads=tuple(pads),
        lead_px=lead_px,
        thickness=9 if family == "sot23" else 22 if family == "connector" else 12,
        marking=marking,
        defects=(*(d for d in placement if turnable or d != "reversed"), *SOLDER_DEFECTS),
        shift_px=(0.45 * pitch + 0.5, 0.9 * pitch),
        skew_deg=(7, 24),
    )


def _qfp(name: str, crop_px: int, per_side: int, pitch: float, body: float, *, marking: str) -> PartType:
    reach, w, h = body / 2 + 9, pitch * 0.6, 15
    pads = [*_row(per_side, pitch, reach, w, h), *_row(per_side, pitch, -reach, w, h)]
    pads += [Pad(p.y, p.x, p.h, p.w, (p.out[1], 0)) for p in pads]
    return _leaded(name, "qfp", crop_px, (body, body), pads, lead_px=pitch * 0.42, marking=marking)


def _electrolytic(name: str, crop_px: int, base: float, marking: str) -> PartType:
    pad, defects = Pad(base / 2 + 1, 0, 24, base * 0.24, (1, 0)), ("reversed", "wrong_part", "insufficient")
    looks = {"lead_px": base * 0.11, "thickness": 26, "shift_px": (7, 12), "skew_deg": (14, 40)}
    return _two_ended(name, "electrolytic", crop_px, (base, base), pad, defects, marking=marking, **looks)


def _library() -> tuple[PartType, ...]:
    sot23 = [*_row(2, 21, 16, 10, 14), *_row(1, 1, -16, 10, 14)]
    sot23_5 = [*_row(3, 11.5, 17, 7, 13), *_row(2, 23, -17, 7, 13)]
    soic = {count: [*_row(count, 12.5, 28, 7.5, 17), *_row(count, 12.5, -28, 7.5, 17)] for count in (4, 8)}
    header = [*_row(5, 15, 35, 8.5, 16), *_row(5, 15, -35, 8.5, 16)]
    return (
        _chip("R0402", 64, 24, 12),
        _chip("R0603", 72, 33, 18, "103"),
        _chip("R0805", 80, 43, 26, "472"),
        _chip("C0402", 64, 24, 12),
        _chip("C0603", 72, 33, 18),
        _chip("C0805", 80, 43, 26),
        _leaded("SOT23", "sot23", 72, (32, 18), sot23, lead_px=6.5, marking="A6"),
        _leaded("SOT23-5", "sot23", 80, (34, 19), sot23_5, lead_px=4.6, marking="LB7"),
        _leaded("SOIC8", "soic", 96, (52, 40), soic[4], lead_px=5, marking="LM358|D024"),
        _leaded("SOIC16", "soic", 128, (104, 40), soic[8], lead_px=5, marking="74HC595|TX 2406"),
        _qfp("QFP32", 128, 8, 9.5, 80, marking="CS32F0|K6T6|2417"),
        _qfp("QFP44", 144, 11, 8, 92, marking="MCU-440|AU 16|2409"),
        _electrolytic("CE6", 96, 56, "100|16V"),
        _electrolytic("CE8", 112, 70, "220|35V"),
        _leaded("HDR10", "connector", 112, (88, 52), header, lead_px=5.5, marking=""),
        _led("LED0805", 80, 43, 25),
    )


def part_types() -> dict[str, PartType]:
    return {part.name: part for part in _library()}
