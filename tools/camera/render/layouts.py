"""Board types: which parts lie where. Four products, and panels of parts to train on."""

from dataclasses import dataclass

import numpy as np

from tools.camera.render.parts import PartType, part_types
from tools.camera.render.surface import Colour


@dataclass(frozen=True, slots=True)
class PartPlace:
    """One position of a board type: centre in board pixels, quarter turns counter-clockwise."""

    designator: str
    component: str
    x: int
    y: int
    quarter_turns: int


@dataclass(frozen=True, slots=True)
class BoardType:
    """A product: size, colours, title, positions. `design_seed` fixes its traces and print."""

    name: str
    title: str
    width: int
    height: int
    mask: Colour
    silk: Colour
    finish: Colour
    design_seed: int
    places: tuple[PartPlace, ...]

    def designators(self) -> dict[str, list[str]]:
        named: dict[str, list[str]] = {}
        for place in self.places:
            named.setdefault(place.component, []).append(place.designator)
        return named


@dataclass(frozen=True, slots=True)
class _Rows:
    """`columns` by `rows` equal parts, the first at (x, y)."""

    component: str
    x: int
    y: int
    columns: int = 1
    rows: int = 1
    step: tuple[int, int] = (0, 0)
    turns: int = 0


_GOLD: Colour = (0.86, 0.7, 0.36)
_SILVER: Colour = (0.74, 0.75, 0.77)
_WHITE: Colour = (0.9, 0.91, 0.9)

_CONTROLLER = (
    _Rows("QFP44", 480, 330),
    _Rows("QFP32", 820, 330),
    _Rows("HDR10", 130, 170, 1, 2, (0, 150), 1),
    _Rows("SOIC8", 140, 480),
    _Rows("SOIC16", 700, 590),
    _Rows("CE6", 150, 620),
    _Rows("CE8", 1050, 160),
    _Rows("C0402", 372, 220, 4, 1, (72, 0), 1),
    _Rows("C0402", 740, 220, 3, 1, (72, 0), 1),
    _Rows("R0402", 372, 440, 4, 1, (72, 0)),
    _Rows("R0603", 960, 280, 1, 5, (0, 62)),
    _Rows("C0603", 1050, 280, 1, 5, (0, 62)),
    _Rows("R0603", 270, 540, 3, 2, (84, 70)),
    _Rows("C0805", 280, 690, 3, 1, (96, 0)),
    _Rows("SOT23", 850, 510, 1, 2, (0, 92)),
    _Rows("SOT23-5", 960, 620, 2, 1, (96, 0)),
    _Rows("LED0805", 560, 690, 4, 1, (96, 0)),
    _Rows("R0402", 270, 110, 6, 1, (76, 0), 1),
    _Rows("R0805", 800, 110, 2, 1, (96, 0)),
)
_POWER = (
    _Rows("CE8", 150, 180, 3, 1, (140, 0)),
    _Rows("CE8", 150, 320, 2, 1, (140, 0)),
    _Rows("CE6", 980, 160, 1, 3, (0, 124), 1),
    _Rows("SOIC8", 560, 200, 2, 1, (150, 0)),
    _Rows("SOIC16", 600, 380),
    _Rows("R0805", 130, 450, 4, 2, (96, 74)),
    _Rows("C0805", 560, 500, 3, 2, (96, 72)),
    _Rows("C0805", 850, 160, 1, 4, (0, 90), 1),
    _Rows("SOT23", 420, 330, 1, 1),
    _Rows("SOT23", 860, 540, 2, 1, (92, 0), 2),
    _Rows("R0603", 450, 690, 5, 1, (88, 0)),
    _Rows("C0603", 560, 290, 4, 1, (80, 0)),
    _Rows("HDR10", 160, 660),
    _Rows("LED0805", 1040, 540, 1, 2, (0, 90)),
    _Rows("SOT23-5", 930, 680),
)
_SENSOR = (
    _Rows("QFP32", 430, 290),
    _Rows("SOIC8", 660, 200),
    _Rows("SOIC8", 660, 350),
    _Rows("HDR10", 130, 300, 1, 1, (0, 0), 3),
    _Rows("SOT23-5", 270, 160, 1, 3, (0, 104)),
    _Rows("SOT23", 780, 180, 1, 3, (0, 92)),
    _Rows("R0402", 340, 160, 4, 1, (66, 0), 1),
    _Rows("C0402", 340, 420, 5, 1, (66, 0), 1),
    _Rows("R0603", 250, 500, 6, 1, (84, 0)),
    _Rows("C0603", 250, 570, 6, 1, (84, 0)),
    _Rows("LED0805", 120, 130),
    _Rows("CE6", 140, 500),
    _Rows("C0805", 770, 480, 1, 2, (0, 74)),
)
_DISPLAY = (
    _Rows("QFP44", 330, 300),
    _Rows("SOIC16", 560, 220, 1, 2, (0, 140), 1),
    _Rows("SOIC16", 700, 220, 1, 2, (0, 140), 3),
    _Rows("HDR10", 860, 180, 1, 2, (0, 170), 1),
    _Rows("LED0805", 110, 610, 9, 1, (94, 0)),
    _Rows("R0402", 110, 530, 9, 1, (94, 0), 1),
    _Rows("R0805", 120, 160, 1, 3, (0, 90)),
    _Rows("C0402", 240, 190, 4, 1, (66, 0)),
    _Rows("C0402", 240, 410, 4, 1, (66, 0)),
    _Rows("C0603", 130, 430, 1, 1, (0, 0), 1),
    _Rows("SOT23", 560, 460, 3, 1, (96, 0)),
    _Rows("SOIC8", 870, 470),
)


def board_types() -> dict[str, BoardType]:
    """Return the four products of the demo line by name."""
    boards = (
        _board("controller", "CTRL-44 REV C", (1180, 800), (0.05, 0.29, 0.16), _GOLD, 11, _CONTROLLER),
        _board("power-supply", "PSU-60W REV B", (1120, 780), (0.06, 0.15, 0.36), _SILVER, 12, _POWER),
        _board("sensor-node", "SENSE-3 REV A", (880, 680), (0.4, 0.05, 0.07), _GOLD, 13, _SENSOR),
        _board("display-driver", "LCD-DRV REV D", (980, 700), (0.075, 0.08, 0.085), _GOLD, 14, _DISPLAY),
    )
    return {board.name: board for board in boards}


def training_panel(components: list[str], design_seed: int) -> BoardType:
    """Make a panel that carries the named components on a grid, in a look of its own."""
    rng = np.random.default_rng([77, design_seed])
    library = part_types()
    columns = max(1, round(np.sqrt(len(components))))
    rows = -(-len(components) // columns)
    pitch = 16 + max(library[name].crop_px for name in components)
    masks = [board.mask for board in board_types().values()]
    mask = np.clip(np.asarray(masks[int(rng.integers(len(masks)))]) + rng.uniform(-0.04, 0.05, 3), 0.02, 1)
    places = []
    for index, name in enumerate(components):
        x = 70 + pitch // 2 + index % columns * pitch + int(rng.integers(-4, 5))
        y = 70 + pitch // 2 + index // columns * pitch + int(rng.integers(-4, 5))
        places.append(PartPlace(f"{library[name].prefix}{index + 1}", name, x, y, int(rng.integers(4))))
    return BoardType(
        name="training-panel",
        title=f"PANEL {design_seed}",
        width=140 + columns * pitch,
        height=140 + rows * pitch,
        mask=(float(mask[0]), float(mask[1]), float(mask[2])),
        silk=_WHITE,
        finish=_GOLD if rng.random() < 0.6 else _SILVER,
        design_seed=1000 + design_seed,
        places=tuple(places),
    )


def _board(
    name: str, title: str, size: tuple[int, int], mask: Colour, finish: Colour, seed: int, blocks: tuple[_Rows, ...]
) -> BoardType:
    library, numbers, places = part_types(), dict[str, int](), list[PartPlace]()
    for block in blocks:
        part: PartType = library[block.component]
        for row in range(block.rows):
            for column in range(block.columns):
                numbers[part.prefix] = numbers.get(part.prefix, 0) + 1
                x, y = block.x + column * block.step[0], block.y + row * block.step[1]
                places.append(PartPlace(f"{part.prefix}{numbers[part.prefix]}", block.component, x, y, block.turns))
    return BoardType(name, title, *size, mask, _WHITE, finish, seed, tuple(places))
