"""What the guards of the shipped experts stop."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from daemon.line.line import Line
from experts.vision.slot import SlotPool
from tools.camera.render import board_types, part_types, render_board
from tools.demo.judge import PartToJudge, judge_parts

#: No training, threshold, demo or measured board has these seeds.
FIRST_SEED = 800_000
#: What stays itself: bodies and leads that mirror onto themselves (of five of them only the lettering or a dot tells),
#: and chips without polarity, whose resistors are placed either way round.
_CHIPS = ("C0402", "C0603", "C0805", "R0402", "R0603", "R0805")
SYMMETRIC = {"mirrored": (*_CHIPS, "HDR10", "SOT23", "SOT23-5"), "turned": _CHIPS}


class Stopped(NamedTuple):
    """Good parts, and how many of them a guard alone stops; spoilt ones that pass, and all, by component and way."""

    good: int
    guarded: int
    passed: Counter[tuple[str, str]]
    tried: Counter[tuple[str, str]]

    def share(self) -> float:
        """Return the share of spoilt pictures that do not pass, without symmetric parts."""
        pairs = [pair for pair in self.tried if pair[0] not in SYMMETRIC.get(pair[1], ())]
        return 1 - sum(self.passed[pair] for pair in pairs) / sum(self.tried[pair] for pair in pairs)


def measure(line: Line, pool: SlotPool, boards: int, pictures: int) -> Stopped:
    """Judge `boards` good boards, and `pictures` of each component spoilt in each way."""
    kinds, kept = list(board_types()), {name: list[PartToJudge]() for name in part_types()}
    good = guarded = 0
    for number in range(boards):
        kind = kinds[number % len(kinds)]
        placements = render_board(kind, FIRST_SEED + number, 0.0).placements
        parts = [PartToJudge(kind, each.component, each.pixels) for each in placements]
        verdicts = judge_parts(line.routes, line.catalog, pool, parts)
        good, guarded = good + len(parts), guarded + sum(guard is not None for _, guard in verdicts)
        for part in parts:
            kept[part.component] += [part] * (len(kept[part.component]) < pictures)
    spoilt = list(_spoilt(kept))
    verdicts = judge_parts(line.routes, line.catalog, pool, [part for part, _ in spoilt])
    pairs = [(part.component, way) for part, way in spoilt]
    passed = Counter(pair for pair, (verdict, _) in zip(pairs, verdicts, strict=True) if verdict == "pass")
    return Stopped(good, guarded, passed, Counter(pairs))


def _spoilt(kept: Mapping[str, Sequence[PartToJudge]]) -> Iterator[tuple[PartToJudge, str]]:
    rng, names = np.random.default_rng(0), list(kept)
    for place, parts in enumerate(kept.values()):
        for number, part in enumerate(parts):
            pixels, half = part.pixels, part.pixels.copy()
            half[len(half) // 2 :] = 0
            other = kept[names[(place + 1 + number % (len(names) - 1)) % len(names)]][0].pixels
            pictures = {
                "noise": rng.integers(0, 256, pixels.shape, np.uint8),
                "half black": half,
                "mirrored": pixels[:, ::-1],
                "turned": pixels[::-1, ::-1],
                "another part": other,
            }
            for way, picture in pictures.items():
                yield part._replace(pixels=np.ascontiguousarray(picture)), way
