"""The bodies of parts: chips, LEDs, moulded packages with their leads, cans and headers, as a camera sees them."""

import numpy as np

from tools.camera.render.condition import BodyLook, Condition
from tools.camera.render.parts import PartType
from tools.camera.render.solder import BoardScene
from tools.camera.render.surface import Colour, Layer, disc, metal, plastic, rectangle, scaled

_TIN: Colour = (0.8, 0.81, 0.84)
_PRINT: Colour = (0.87, 0.88, 0.88)


def draw_body(layer: Layer, part: PartType, condition: Condition, scene: BoardScene) -> None:
    """Draw everything of the part that moves with it; nothing if the part is missing."""
    if condition.kind == "missing":
        return
    if condition.kind == "tombstone":
        _standing(layer, part, condition.look, scene)
        return
    _BODIES[condition.look.body](layer, part, condition, scene)


def _chip(layer: Layer, part: PartType, condition: Condition, scene: BoardScene) -> None:
    """Ceramic between two tinned caps; a resistor is dark and marked, a capacitor plain and rounder."""
    look = condition.look
    length, width, scale = part.length * look.size, part.width * look.size, layer.scale
    cap = length * (0.17 if look.body == "resistor" else 0.22)
    ends = layer.fill([rectangle(s * (length - cap) / 2, 0, cap, width, 1.6) for s in (-1, 1)])
    layer.paint(ends, metal(ends, _TIN, scene.light, 2.2 * scale))
    core = layer.fill([rectangle(0, 0, length - 2 * cap + 0.6, width, 0.6)])
    bevel = 1.2 if look.body == "resistor" else 3.0
    layer.paint(core, plastic(core, look.colour, scene.light, bevel * scale, scene.texture()))
    if look.body == "resistor":
        glaze = layer.fill([rectangle(0, 0, length - 2 * cap - 2, width - 3, 0.8)])
        layer.paint(glaze, (0.05, 0.05, 0.06), opacity=0.45)
        if look.marking:
            words = layer.text(look.marking, (0, 0), width * 0.5, 0.9, 180 if scene.rng.random() < 0.5 else 0)
            layer.paint(words, _PRINT, opacity=0.9)
    elif look.body == "tantalum":
        layer.paint(layer.fill([rectangle(-length * 0.2, 0, length * 0.1, width)]), (0.35, 0.16, 0.1))


def _led(layer: Layer, part: PartType, condition: Condition, scene: BoardScene) -> None:
    """White carrier, phosphor lens, green mark at the cathode."""
    length, width, scale = part.length, part.width, layer.scale
    ends = layer.fill([rectangle(s * (length - 8) / 2, 0, 8, width, 1) for s in (-1, 1)])
    layer.paint(ends, metal(ends, (0.86, 0.8, 0.6), scene.light, 1.5 * scale))
    carrier = layer.fill([rectangle(0, 0, length - 13, width, 1)])
    layer.paint(carrier, plastic(carrier, (0.86, 0.85, 0.8), scene.light, 1.5 * scale, scene.texture()))
    lens = layer.fill([rectangle(1, 0, length - 21, width - 5, 5)])
    layer.paint(lens, plastic(lens, condition.look.colour, scene.light, 6 * scale, scene.texture(), gloss=0.9))
    layer.paint(layer.fill([rectangle(1, 0, 5, 5)]), scaled(condition.look.colour, 0.72), opacity=0.6)
    corner = (-length / 2 + 7.5, -width / 2 + 0.5)
    mark = layer.fill([[corner, (corner[0] + 8, corner[1]), (corner[0], corner[1] + width - 1)]])
    layer.paint(mark, (0.14, 0.48, 0.24), opacity=0.95)


def _leads(layer: Layer, part: PartType, condition: Condition, scene: BoardScene) -> None:
    """Draw gull wings to the pads: lifted ones bent and longer with a shadow, ones with too little solder dull."""
    flat, dull, raised, shadows = [], [], [], []
    for pad, state in zip(part.pads, condition.joints, strict=True):
        ox, oy = pad.out
        inner = (part.width if oy else part.length) / 2 - 1
        tip = abs(pad.y if oy else pad.x) + (pad.h if oy else pad.w) * 0.22
        aside, half = 0.0, part.lead_px / 2
        if state == "lifted_lead":
            aside = scene.rng.choice([-1, 1]) * scene.rng.uniform(0.45, 0.75) * part.lead_px
            tip += (pad.h if oy else pad.w) * 0.3
        across = pad.x if oy else pad.y
        root, end = across, across + aside
        path = [(root - half, inner), (root + half, inner), (end + half, tip), (end - half, tip)]
        outline = [(a, oy * r) if oy else (ox * r, a) for a, r in path]
        if state == "lifted_lead":
            raised.append(outline)
            shadows.append([(x + 1.6 + abs(oy) * 0.8, y + 1.6 + abs(ox) * 0.8) for x, y in outline])
        else:
            (dull if state == "insufficient" else flat).append(outline)
    for outlines, colour, edge, gloss in (
        (flat, (0.74, 0.75, 0.78), 1.3, 0.8),
        (dull, (0.46, 0.38, 0.31), 1.3, 0.2),
        (raised, (0.98, 0.98, 1.0), 1.6, 1.4),
    ):
        if outlines is raised and raised:
            layer.paint(layer.fill(shadows, soften_px=0.6), (0.02, 0.02, 0.02), opacity=0.85)
        if outlines:
            patch = layer.fill(outlines)
            layer.paint(patch, metal(patch, colour, scene.light, edge * layer.scale, gloss=gloss))


def _ic(layer: Layer, part: PartType, condition: Condition, scene: BoardScene) -> None:
    """A moulded package: leads, bevelled body, pin-1 dimple at the bottom left, lasered marking."""
    _leads(layer, part, condition, scene)
    look, scale = condition.look, layer.scale
    length, width = part.length, part.width
    body = layer.fill([rectangle(0, 0, length, width, 1.2)])
    layer.paint(body, plastic(body, look.colour, scene.light, 2.6 * scale, scene.texture()))
    if part.family != "sot23":
        inset = min(length, width) * 0.14
        dimple = layer.fill([disc(-length / 2 + inset, width / 2 - inset, min(length, width) * 0.06 + 1)])
        layer.paint(dimple, metal(dimple, scaled(look.colour, 1.5), scene.light, 3 * scale, gloss=0.2))
        if part.family == "soic":
            stripe = layer.fill([rectangle(-length / 2 + 2.6, 0, 2.2, width - 3)])
            layer.paint(stripe, scaled(look.colour, 1.7), opacity=0.7)
    lines = look.marking.split("|")
    height = min(width * 0.5, 0.74 * (width - 8) / len(lines), 1.25 * length / max(map(len, lines)))
    for k, words in enumerate(lines):
        y = (k - (len(lines) - 1) / 2) * height * 1.35
        layer.paint(layer.text(words, (2 if len(lines) > 1 else 0, y), height * 0.8, 0.75), (0.72, 0.72, 0.7), 0.75)


def _can(layer: Layer, part: PartType, condition: Condition, scene: BoardScene) -> None:
    """An electrolytic: plastic base with two cut corners at the plus side, aluminium can, dark segment at minus."""
    base, scale, look = part.length, layer.scale, condition.look
    half, cut = base / 2, base * 0.2
    legs = layer.fill([rectangle(s * (half + 1), 0, 9, part.lead_px, 1) for s in (-1, 1)])
    layer.paint(legs, metal(legs, _TIN, scene.light, 1.5 * scale))
    outline = [
        (-half, -half),
        (half - cut, -half),
        (half, cut - half),
        (half, half - cut),
        (half - cut, half),
        (-half, half),
    ]
    foot = layer.fill([outline])
    layer.paint(foot, plastic(foot, (0.12, 0.12, 0.13), scene.light, 2.5 * scale, scene.texture()))
    radius = base * 0.475
    can = layer.fill([disc(0, 0, radius)])
    layer.paint(can, metal(can, (0.78, 0.79, 0.81), scene.light, radius * 0.16 * scale, gloss=0.7))
    top = layer.fill([disc(0, 0, radius * 0.87)])
    brushed = 0.68 + 0.05 * np.tanh(scene.texture()[: top.mask.shape[0], : top.mask.shape[1], None])
    layer.paint(top, np.repeat(brushed, 3, axis=2).astype(np.float32), opacity=0.85)
    layer.paint(layer.fill([disc(0, 0, radius * 0.87, np.pi * 0.68, np.pi * 1.32)]), look.colour, opacity=0.95)
    for k, words in enumerate(look.marking.split("|")):
        patch = layer.text(words, (base * 0.1, (k - 0.5) * base * 0.22), base * 0.15, 1.0)
        layer.paint(patch, (0.12, 0.12, 0.16), opacity=0.9)


def _header(layer: Layer, part: PartType, condition: Condition, scene: BoardScene) -> None:
    """A shrouded pin header: box, cavity, two rows of gold pins, key notch and arrow on pin 1's side."""
    _leads(layer, part, condition, scene)
    length, width, scale, colour = part.length, part.width, layer.scale, condition.look.colour
    box = layer.fill([rectangle(0, 0, length, width, 1.5)])
    layer.paint(box, plastic(box, colour, scene.light, 3 * scale, scene.texture()))
    cavity = layer.fill([rectangle(0, 0, length - 13, width - 13, 1), rectangle(0, width / 2 - 5, 17, 13)])
    layer.paint(cavity, plastic(cavity, scaled(colour, 0.45), scene.light, 1, scene.texture()))
    layer.paint(layer.fill([rectangle(0, -(width / 2 - 8), length - 13, 4)], soften_px=1), (0, 0, 0), opacity=0.4)
    gold = layer.fill([rectangle(p.x * 0.93, p.out[1] * 9, 5, 5, 0.8) for p in part.pads])
    layer.paint(gold, metal(gold, (0.95, 0.8, 0.42), scene.light, 2 * scale))
    x, y = part.pads[0].x, width / 2 - 0.5
    arrow = layer.fill([[(x - 4, y), (x + 4, y), (x, y - 5.5)]])
    red, green, blue = (min(1.0, c * 0.35 + 0.5) for c in colour)
    layer.paint(arrow, (red, green, blue), opacity=0.85)


def _standing(layer: Layer, part: PartType, look: BodyLook, scene: BoardScene) -> None:
    """A tombstone: the chip stands on one pad, its other cap faces the camera."""
    side = float(scene.rng.choice([-1, 1]))
    scale, width = layer.scale, part.width
    flank, cap = part.thickness * scene.rng.uniform(0.5, 0.9), part.thickness * scene.rng.uniform(0.75, 1.0)
    x = side * (part.length / 2 - 1)
    body = layer.fill([rectangle(x - side * flank / 2, 0, flank, width, 0.5)])
    layer.paint(body, plastic(body, look.colour, scene.light, 1.5 * scale, scene.texture()))
    top = layer.fill([rectangle(x + side * cap / 2, 0, cap, width, 1.5)])
    layer.paint(top, metal(top, (0.9, 0.9, 0.92), scene.light, 2 * scale, gloss=1.2))


_BODIES = {
    "resistor": _chip,
    "capacitor": _chip,
    "tantalum": _chip,
    "led": _led,
    "ic": _ic,
    "can": _can,
    "header": _header,
}
