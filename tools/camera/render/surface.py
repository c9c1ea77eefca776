"""Shapes, light and materials: what turns outlines into surfaces that look like metal, solder and plastic."""

from collections.abc import Sequence
from dataclasses import dataclass

import cv2
import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Colour = tuple[float, float, float]
Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Light:
    """The direction towards the lamp (unit vector, z towards the camera)."""

    x: float
    y: float
    z: float

    def turned(self, quarter_turns: int) -> "Light":
        """Return the lamp as seen by a part turned counter-clockwise by quarter turns."""
        x, y = self.x, self.y
        for _ in range(quarter_turns % 4):
            x, y = -y, x
        return Light(x, y, self.z)


@dataclass(frozen=True, slots=True)
class Patch:
    """A filled shape: where it lies on its layer, and how much of each pixel it covers."""

    rows: slice
    columns: slice
    mask: Floats

    @property
    def solid(self) -> NDArray[np.uint8]:
        return (self.mask > 0.5).astype(np.uint8)


class Layer:
    """A square transparent picture around a part, drawn `scale` times larger than it is shown.

    `pixels` is (n, n, 4) float32: red, green, blue multiplied by coverage, and coverage.
    """

    def __init__(self, side_px: int, scale: int) -> None:
        self.side_px, self.scale = side_px, scale
        self.pixels: Floats = np.zeros((side_px * scale, side_px * scale, 4), np.float32)

    def to_pixels(self, points: Sequence[Point] | NDArray[np.floating]) -> Floats:
        return (np.asarray(points, np.float32) + self.side_px / 2) * self.scale

    def fill(self, outlines: Sequence[Sequence[Point] | NDArray[np.floating]], soften_px: float = 0) -> Patch:
        """Return the union of closed outlines, given in part coordinates."""
        polygons = [self.to_pixels(outline) for outline in outlines]
        n, margin = self.side_px * self.scale, 3 + int(3 * soften_px * self.scale)
        every = np.concatenate(polygons)
        low = np.clip(np.floor(every.min(0)).astype(int) - margin, 0, n - 1)
        high = np.clip(np.ceil(every.max(0)).astype(int) + margin, low + 1, n)
        mask = np.zeros((high[1] - low[1], high[0] - low[0]), np.uint8)
        for polygon in polygons:
            cv2.fillPoly(mask, [np.round((polygon - low) * 16).astype(np.int32)], 255, cv2.LINE_AA, 4)
        cover = mask.astype(np.float32) / 255
        if soften_px:
            cover = cv2.GaussianBlur(cover, (0, 0), soften_px * self.scale)
        return Patch(slice(low[1], high[1]), slice(low[0], high[0]), cover.astype(np.float32))

    def text(self, words: str, at: Point, height_px: float, weight: float, angle_deg: float = 0) -> Patch:
        """Return words centred on a point, as printed or lasered on a body."""
        height = height_px * self.scale
        face, thickness = cv2.FONT_HERSHEY_SIMPLEX, max(1, round(weight * self.scale))
        size = height / 21
        (width, tall), _ = cv2.getTextSize(words, face, size, thickness)
        mask = np.zeros(self.pixels.shape[:2], np.uint8)
        x, y = self.to_pixels([at])[0]
        cv2.putText(mask, words, (int(x - width / 2), int(y + tall / 2)), face, size, 255, thickness, cv2.LINE_AA)
        if angle_deg:
            turn = cv2.getRotationMatrix2D((float(x), float(y)), angle_deg, 1)
            mask = cv2.warpAffine(mask, turn, mask.shape[::-1])
        return Patch(slice(None), slice(None), (mask.astype(np.float32) / 255).astype(np.float32))

    def paint(self, patch: Patch, colour: Floats | Colour, opacity: float = 1) -> None:
        """Lay a colour, uniform or per pixel of the patch, over the picture."""
        cover = patch.mask * opacity
        target = self.pixels[patch.rows, patch.columns]
        target *= channels(1 - cover, 4)
        tinted = channels(cover, 3) * np.asarray(colour, np.float32)
        target += cv2.merge([*cv2.split(tinted), cover])

    def moved(self, dx: float, dy: float, angle_deg: float) -> None:
        """Turn the picture about the part's centre (counter-clockwise) and move it by board pixels."""
        n = self.side_px * self.scale
        turn = cv2.getRotationMatrix2D(((n - 1) / 2, (n - 1) / 2), angle_deg, 1)
        turn[:, 2] += (dx * self.scale, dy * self.scale)
        self.pixels = cv2.warpAffine(self.pixels, turn, (n, n), flags=cv2.INTER_LINEAR).astype(np.float32)

    def shown(self) -> Floats:
        """Return the picture at board resolution, (side, side, 4)."""
        return cv2.resize(self.pixels, (self.side_px, self.side_px), interpolation=cv2.INTER_AREA).astype(np.float32)


def channels(mask: Floats, count: int) -> Floats:
    """Return (h, w) as (h, w, count): numpy takes several times as long to spread a mask while it multiplies."""
    return cv2.merge([mask] * count).astype(np.float32, copy=False)


def scaled(colour: Colour, gain: float) -> Colour:
    red, green, blue = colour
    return (gain * red, gain * green, gain * blue)


def rectangle(x: float, y: float, w: float, h: float, corner: float = 0) -> Floats:
    """Return a rectangle around (x, y), its corners rounded by a radius."""
    if corner <= 0:
        return np.array(
            [(x - w / 2, y - h / 2), (x + w / 2, y - h / 2), (x + w / 2, y + h / 2), (x - w / 2, y + h / 2)], "f4"
        )
    corner = min(corner, w / 2, h / 2)
    arc = np.linspace(0, np.pi / 2, 5)
    pieces = []
    for sx, sy, start in ((1, 1, 0), (-1, 1, 1), (-1, -1, 2), (1, -1, 3)):
        centre = (x + sx * (w / 2 - corner), y + sy * (h / 2 - corner))
        angle = arc + start * np.pi / 2
        pieces.append(np.stack([centre[0] + corner * np.cos(angle), centre[1] + corner * np.sin(angle)], 1))
    return np.concatenate(pieces).astype(np.float32)


def disc(x: float, y: float, radius: float, start: float = 0, stop: float = 2 * np.pi) -> Floats:
    angle = np.linspace(start, stop, 40)
    return np.stack([x + radius * np.cos(angle), y + radius * np.sin(angle)], 1).astype(np.float32)


def blob(x: float, y: float, w: float, h: float, rng: np.random.Generator, rough: float = 0.12) -> Floats:
    """Return an irregular rounded drop, as solder leaves it."""
    angle = np.linspace(0, 2 * np.pi, 28, endpoint=False)
    waves = sum(rng.normal(0, rough / k) * np.cos(k * angle + rng.uniform(0, 6.3)) for k in (2, 3, 4))
    radius = 1 + np.asarray(waves)
    square = 1 / np.maximum(np.abs(np.cos(angle)) ** 4 + np.abs(np.sin(angle)) ** 4, 1e-6) ** 0.25
    reach = radius * square
    return np.stack([x + w / 2 * reach * np.cos(angle), y + h / 2 * reach * np.sin(angle)], 1).astype(np.float32)


def slopes(solid: NDArray[np.uint8], edge: float) -> tuple[Floats, Floats, Floats]:
    """Return unit normals of a surface that rises roundly over `edge` pixels from its outline and is flat inside."""
    edge = float(edge)  # numpy scalars would widen the arrays, which OpenCV refuses
    distance = cv2.distanceTransform(solid, cv2.DIST_L2, 3)
    rise = np.clip(distance / max(edge, 1), 0, 1)
    height = cv2.GaussianBlur(max(edge, 1) * np.sqrt(1 - (1 - rise) ** 2), (0, 0), 1)
    nx = -cv2.Sobel(height, cv2.CV_32F, 1, 0, scale=0.125)
    ny = -cv2.Sobel(height, cv2.CV_32F, 0, 1, scale=0.125)
    nz = 1 / np.sqrt(nx * nx + ny * ny + 1)
    return (nx * nz).astype(np.float32), (ny * nz).astype(np.float32), nz.astype(np.float32)


def metal(patch: Patch, colour: Colour, light: Light, edge: float, gloss: float = 1.0) -> Floats:
    """Bright metal under a ring lamp and one directed lamp: flat parts shine, steep ones mirror the dark."""
    nx, ny, nz = slopes(patch.solid, edge)
    facing = np.clip(nx * light.x + ny * light.y + nz * light.z, 0, 1)
    mirrored = np.clip(2 * nz * facing - light.z, 0, 1)
    value = 0.16 + 0.5 * nz**3 + 0.22 * facing + gloss * (0.55 * mirrored**6)
    return np.clip(value[..., None] * np.asarray(colour, np.float32), 0, 1).astype(np.float32)


def plastic(patch: Patch, colour: Colour, light: Light, edge: float, grain: Floats, gloss: float = 0.25) -> Floats:
    """Moulded or ceramic material: matt, faintly grained, brighter on the bevel that faces the lamp."""
    nx, ny, nz = slopes(patch.solid, edge)
    facing = np.clip(nx * light.x + ny * light.y + nz * light.z, 0, 1)
    height, width = facing.shape
    value = 0.62 + 0.5 * facing + 0.035 * grain[:height, :width]
    shine = gloss * np.clip(facing - 0.82, 0, 1) * 1.6
    return np.clip(value[..., None] * np.asarray(colour, np.float32) + shine[..., None], 0, 1).astype(np.float32)
