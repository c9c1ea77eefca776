"""The ground under a part: pads, solder joints good and bad, bridges, and where each of them is."""

from dataclasses import dataclass

import numpy as np

from tools.camera.render.condition import Condition
from tools.camera.render.parts import Pad, PartType
from tools.camera.render.surface import Colour, Floats, Layer, Light, blob, metal, plastic, rectangle

Box = tuple[float, float, float, float]

_SOLDER: Colour = (0.83, 0.85, 0.88)


@dataclass(frozen=True, slots=True)
class SolderMark:
    """Something a solder detector should find; the box (x1, y1, x2, y2) is in pixels around the part's centre."""

    label: str
    box: Box


@dataclass(frozen=True, slots=True)
class BoardScene:
    """Properties that all parts of one board share: lamp, pad finish, and the grain of the surfaces."""

    light: Light
    finish: Colour
    grain: Floats
    rng: np.random.Generator

    def texture(self) -> Floats:
        """Cut grain, at least 450 pixels each way, from a place of its own."""
        y, x = self.rng.integers(0, 60, 2)
        return self.grain[y:, x:]


def draw_ground(layer: Layer, part: PartType, condition: Condition, scene: BoardScene) -> None:
    """Draw the pads, then the solder on them as the part's condition left it."""
    rng, light, scale = scene.rng, scene.light, layer.scale
    pads = layer.fill([rectangle(p.x, p.y, p.w, p.h, 1.5) for p in part.pads])
    dull = 0.5 + 0.05 * scene.texture()[: pads.mask.shape[0], : pads.mask.shape[1], None]
    layer.paint(pads, (np.asarray(scene.finish, np.float32) * (0.3 + dull)).astype(np.float32))
    if condition.kind == "missing" and rng.random() < 0.35:
        return  # the paste was never printed: bare pads
    drops, flat = [], []
    for pad, state, amount in zip(part.pads, condition.joints, condition.solder, strict=True):
        if condition.kind in ("missing", "tombstone"):
            drops.append(blob(pad.x, pad.y, pad.w * 0.9, pad.h * 0.9, rng, 0.04))
        elif state == "joint":
            drops.append(blob(pad.x, pad.y, pad.w * min(amount, 1.05), pad.h * min(amount, 1.05), rng, 0.03))
        elif state == "lifted_lead":
            flat.append(blob(pad.x, pad.y, pad.w * 0.88, pad.h * 0.9, rng, 0.05))
        else:
            _starved(layer, pad, scene)
    if flat:
        sheet = layer.fill(flat)
        layer.paint(sheet, metal(sheet, (0.62, 0.64, 0.66), light, 1.2 * scale, gloss=0.4))
    if drops:
        joints = layer.fill(drops)
        thickness = min(min(p.w, p.h) for p in part.pads)
        layer.paint(joints, metal(joints, _SOLDER, light, 0.5 * thickness * scale))


def _starved(layer: Layer, pad: Pad, scene: BoardScene) -> None:
    """Draw a joint with too little solder: the bare pad shows, tarnished, with a thin smear at the lead."""
    layer.paint(layer.fill([rectangle(pad.x, pad.y, pad.w * 0.96, pad.h * 0.96, 1)]), (0.52, 0.33, 0.17), opacity=0.9)
    w, h = pad.w * scene.rng.uniform(0.25, 0.5), pad.h * scene.rng.uniform(0.25, 0.5)
    x, y = pad.x - pad.out[0] * pad.w * 0.25, pad.y - pad.out[1] * pad.h * 0.25
    smear = layer.fill([blob(x, y, w, h, scene.rng, 0.1)])
    layer.paint(smear, metal(smear, (0.6, 0.6, 0.6), scene.light, layer.scale, gloss=0.3))


def bridge_boxes(part: PartType, condition: Condition, rng: np.random.Generator) -> list[Box]:
    boxes = []
    for first, second in condition.bridges:
        a, b = part.pads[first], part.pads[second]
        if part.family == "chip":
            side = rng.choice([-1, 1]) * part.width * 0.5
            tall = rng.uniform(0.4, 0.55) * part.width
            boxes.append((a.x, side - tall / 2, b.x, side + tall / 2))
            continue
        along = rng.uniform(-0.2, 0.3)
        x, y = (a.x + b.x) / 2 + a.out[0] * a.w * along, (a.y + b.y) / 2 + a.out[1] * a.h * along
        wide = rng.uniform(0.4, 0.75)
        apart_x, apart_y = abs(a.x - b.x), abs(a.y - b.y)
        w = apart_x + 0.5 * a.w if apart_x else a.w * wide
        h = apart_y + 0.5 * a.h if apart_y else a.h * wide
        boxes.append((x - w / 2, y - h / 2, x + w / 2, y + h / 2))
    return boxes


def draw_bridges(layer: Layer, boxes: list[Box], scene: BoardScene) -> None:
    """Draw solder from joint to joint, over the leads, which it covers."""
    for x1, y1, x2, y2 in boxes:
        run = layer.fill([blob((x1 + x2) / 2, (y1 + y2) / 2, x2 - x1, y2 - y1, scene.rng, 0.07)])
        layer.paint(run, metal(run, _SOLDER, scene.light, min(x2 - x1, y2 - y1) * 0.4 * layer.scale, gloss=1.2))


def marks_of(part: PartType, condition: Condition, bridges: list[Box]) -> tuple[SolderMark, ...]:
    """Return the boxes that a solder detector should find on a part in its right place."""
    marks = []
    for pad, state in zip(part.pads, condition.joints, strict=True):
        reach = 0.12 if state == "lifted_lead" else 0  # a lifted lead sticks out beyond its pad
        x1, y1 = pad.x - pad.w / 2, pad.y - pad.h / 2
        x2, y2 = x1 + pad.w, y1 + pad.h
        grow_x, grow_y = pad.out[0] * pad.w * reach, pad.out[1] * pad.h * reach
        box = (x1 + min(grow_x, 0), y1 + min(grow_y, 0), x2 + max(grow_x, 0), y2 + max(grow_y, 0))
        marks.append(SolderMark(state, box))
    return (*marks, *(SolderMark("bridge", box) for box in bridges))


def draw_flux(layer: Layer, part: PartType, scene: BoardScene) -> None:
    """Draw harmless residue around some joints, so that dirt alone is not a defect."""
    if scene.rng.random() > 0.3:
        return
    pad = part.pads[int(scene.rng.integers(len(part.pads)))]
    stain = layer.fill([blob(pad.x, pad.y, pad.w * 2, pad.h * 1.8, scene.rng, 0.2)], soften_px=1.5)
    layer.paint(stain, plastic(stain, (0.75, 0.66, 0.42), scene.light, 3, scene.texture()), opacity=0.22)
