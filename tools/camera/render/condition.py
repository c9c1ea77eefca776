"""The state of one part on the line: placed well, or one kind of defect, with all its numbers."""

from dataclasses import dataclass, replace
from typing import Literal, TypeVar

import numpy as np

from tools.camera.render.parts import PLACEMENT_DEFECTS, PartType
from tools.camera.render.surface import Colour

_T = TypeVar("_T")

JointState = Literal["joint", "insufficient", "lifted_lead"]
Body = Literal["resistor", "capacitor", "tantalum", "led", "ic", "can", "header"]

_TAN: Colour = (0.64, 0.5, 0.36)
_BLACK: Colour = (0.14, 0.14, 0.15)
_SHROUD: Colour = (0.13, 0.13, 0.14)


@dataclass(frozen=True, slots=True)
class BodyLook:
    """The body that lies on the board: its kind, colour, marking, and size against the right one."""

    body: Body
    colour: Colour
    marking: str
    size: float = 1.0


@dataclass(frozen=True, slots=True)
class Condition:
    """One part as it came out of the oven. `joints` and `solder` have one entry per pad of the part."""

    kind: str
    look: BodyLook
    dx: float
    dy: float
    angle_deg: float
    quarter_turns: int
    joints: tuple[JointState, ...]
    solder: tuple[float, ...]
    bridges: tuple[tuple[int, int], ...]


def right_look(part: PartType) -> BodyLook:
    match part.family:
        case "chip" if part.name.startswith("R"):
            return BodyLook("resistor", _BLACK, part.marking)
        case "chip":
            return BodyLook("capacitor", _TAN, "")
        case "led":
            return BodyLook("led", (0.93, 0.86, 0.42), "")
        case "electrolytic":
            return BodyLook("can", (0.16, 0.16, 0.19), part.marking)
        case "connector":
            return BodyLook("header", _SHROUD, "")
        case _:
            return BodyLook("ic", (0.17, 0.17, 0.18), part.marking)


def wrong_look(part: PartType, rng: np.random.Generator) -> BodyLook:
    right = right_look(part)
    match right.body:
        case "resistor":
            usual = BodyLook("capacitor", _TAN, "")
            smaller = replace(right, size=0.72)
            marked = replace(right, marking=str(rng.choice(["R00", "681", "225"])))
            return _one_of([usual, smaller, marked if part.marking else usual], rng)
        case "capacitor":
            usual = BodyLook("resistor", _BLACK, "" if part.length < 30 else "103")
            return _one_of([usual, replace(right, size=0.72), BodyLook("tantalum", (0.86, 0.68, 0.25), "")], rng)
        case "led":
            return replace(right, colour=_one_of([(0.8, 0.22, 0.18), (0.25, 0.62, 0.3), (0.9, 0.93, 0.95)], rng))
        case "can":
            colour = _one_of([(0.2, 0.28, 0.62), (0.5, 0.2, 0.2), (0.18, 0.45, 0.3)], rng)
            return replace(right, colour=colour, marking=str(rng.choice(["47|50V", "10|63V", "330|6.3"])))
        case "header":
            return replace(right, colour=_one_of([(0.86, 0.83, 0.74), (0.2, 0.3, 0.58)], rng))
        case _:
            marking = _one_of(["ST|L4931", "8M2C", "ALT-1|VE|X9"] if part.length > 40 else ["K", "2TY", "III"], rng)
            return replace(right, marking=marking, colour=_one_of([(0.24, 0.2, 0.17), (0.1, 0.1, 0.11)], rng))


def make_condition(part: PartType, kind: str, rng: np.random.Generator) -> Condition:
    """Draw the numbers of a good part (`ok`) or of one with the given defect."""
    count = len(part.pads)
    condition = Condition(
        kind=kind,
        look=right_look(part),
        dx=float(np.clip(rng.normal(0, 0.4), -1, 1) * 0.2 * part.shift_px[0]),
        dy=float(np.clip(rng.normal(0, 0.4), -1, 1) * 0.2 * part.shift_px[0]),
        angle_deg=float(np.clip(rng.normal(0, 0.4), -1, 1) * 0.2 * part.skew_deg[0]),
        quarter_turns=0,
        joints=("joint",) * count,
        solder=tuple(float(v) for v in rng.uniform(0.82, 1.15) + rng.uniform(-0.07, 0.07, count)),
        bridges=(),
    )
    if kind == "ok" or kind in ("missing", "tombstone"):
        return condition
    if kind in PLACEMENT_DEFECTS:
        return _misplace(part, condition, rng)
    return _spoil_solder(part, condition, rng)


def _misplace(part: PartType, condition: Condition, rng: np.random.Generator) -> Condition:
    match condition.kind:
        case "shifted":
            reach, angle = rng.uniform(*part.shift_px), rng.uniform(0, 2 * np.pi)
            return replace(condition, dx=float(reach * np.cos(angle)), dy=float(reach * np.sin(angle)))
        case "rotated":
            return replace(condition, angle_deg=float(rng.uniform(*part.skew_deg) * rng.choice([-1, 1])))
        case "reversed":
            turns = int(rng.integers(1, 4)) if part.family == "qfp" else 2
            return replace(condition, quarter_turns=turns)
        case _:
            return replace(condition, look=wrong_look(part, rng))


def _spoil_solder(part: PartType, condition: Condition, rng: np.random.Generator) -> Condition:
    if condition.kind == "bridge":
        return replace(condition, bridges=tuple(_neighbours(part, rng, 1 + int(rng.random() < 0.2))))
    joints: list[JointState] = list(condition.joints)
    most = 2 if len(joints) > 4 and rng.random() < 0.3 else 1
    for index in rng.choice(len(joints), most, replace=False):
        joints[int(index)] = "insufficient" if condition.kind == "insufficient" else "lifted_lead"
    return replace(condition, joints=tuple(joints))


def _neighbours(part: PartType, rng: np.random.Generator, count: int) -> list[tuple[int, int]]:
    """Return pairs of adjacent pads that solder could join."""
    pads = part.pads
    if part.family == "chip":
        return [(0, 1)]
    pairs = []
    for i, a in enumerate(pads):
        same = [(abs(a.x - b.x) + abs(a.y - b.y), j) for j, b in enumerate(pads) if j > i and a.out == b.out]
        if same:
            pairs.append((i, min(same)[1]))
    return [pairs[int(k)] for k in rng.choice(len(pairs), min(count, len(pairs)), replace=False)]


def _one_of(choices: list[_T], rng: np.random.Generator) -> _T:
    return choices[int(rng.integers(len(choices)))]
