"""`python -m tests.tools.demo.guards`: what the guards of the shipped experts stop, and what they cost.

Good boards that no training and no threshold saw; then parts of these with their picture spoilt in five ways.
"""

import argparse
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import numpy as np
import torch

from daemon.line.line import Line, load_line
from experts.vision.guards import picture_figures
from experts.vision.infer import infer
from experts.vision.preprocess import Image, fit
from experts.vision.slot import SlotPool
from tools.camera.render import board_types, part_types, render_board
from tools.demo.judge import PartToJudge, judge_parts, loaded_pool
from tools.demo.line import make_line

#: No training, threshold, demo or measured board has these seeds.
FIRST_SEED = 800_000
WAYS = ("noise", "half black", "mirrored", "turned", "another part")
#: What stays itself: bodies and leads that mirror onto themselves (of five of them only the lettering or a dot tells),
#: and chips without polarity, whose resistors are placed either way round.
_CHIPS = ("C0402", "C0603", "C0805", "R0402", "R0603", "R0805")
SYMMETRIC = {"mirrored": (*_CHIPS, "HDR10", "SOT23", "SOT23-5"), "turned": _CHIPS}


class Stopped(NamedTuple):
    """Good parts, and how many of them a guard alone stops; spoilt ones that pass, by component and way."""

    good: int
    guarded: int
    passed: Counter[tuple[str, str]]
    tried: Counter[tuple[str, str]]

    @property
    def combinations(self) -> list[tuple[str, str]]:
        return [pair for pair in self.tried if pair[0] not in SYMMETRIC.get(pair[1], ())]

    @property
    def stopped(self) -> list[tuple[str, str]]:
        """Return components and ways of which most pictures do not pass."""
        return [pair for pair in self.combinations if 2 * self.passed[pair] < self.tried[pair]]

    @property
    def share_stopped(self) -> float:
        passed, tried = (sum(counts[pair] for pair in self.combinations) for counts in (self.passed, self.tried))
        return 1 - passed / tried


def measure(line: Line, pool: SlotPool, boards: int, pictures: int) -> Stopped:
    """Judge `boards` good boards, and `pictures` of each component spoilt in each way."""
    kinds, kept = list(board_types()), dict[str, list[PartToJudge]]()
    good = guarded = 0
    for number in range(boards):
        kind = kinds[number % len(kinds)]
        placements = render_board(kind, FIRST_SEED + number, 0.0).placements
        parts = [PartToJudge(kind, each.component, each.pixels) for each in placements]
        verdicts = judge_parts(line.routes, line.catalog, pool, parts)
        good, guarded = good + len(parts), guarded + sum(guard is not None for _, guard in verdicts)
        for part in parts:
            kept.setdefault(part.component, []).append(part)
    kept = {name: kept[name][:pictures] for name in part_types()}
    spoilt = list(_spoilt(kept))
    verdicts = judge_parts(line.routes, line.catalog, pool, [part for part, _ in spoilt])
    pairs = [(part.component, way) for part, way in spoilt]
    passed = Counter(pair for pair, (verdict, _) in zip(pairs, verdicts, strict=True) if verdict == "pass")
    return Stopped(good, guarded, passed, Counter(pairs))


def _spoilt(kept: dict[str, list[PartToJudge]]) -> Iterator[tuple[PartToJudge, str]]:
    rng, names = np.random.default_rng(0), list(kept)
    for place, (name, parts) in enumerate(kept.items()):
        for number, part in enumerate(parts):
            others = kept[names[(place + 1 + number % (len(names) - 1)) % len(names)]]
            pictures = _spoilt_pictures(part.pixels, others[number % len(others)].pixels, rng)
            for way, pixels in zip(WAYS, pictures, strict=True):
                yield part._replace(component=name, pixels=np.ascontiguousarray(pixels)), way


def _spoilt_pictures(pixels: Image, other: Image, rng: np.random.Generator) -> tuple[Image, ...]:
    half = pixels.copy()
    half[len(half) // 2 :] = 0
    return rng.integers(0, 256, pixels.shape, dtype=np.uint8), half, pixels[:, ::-1], pixels[::-1, ::-1], other


def cost(line: Line, pool: SlotPool) -> tuple[float, float]:
    """Return milliseconds of an image in a batch of eight on one thread: in its head, and of that in the guards."""
    torch.set_num_threads(1)
    spec = next(spec for spec in line.catalog.values() if spec.backbone is not None)
    slot, unguarded = pool.slot(spec.resident.expert), replace(spec, pictures=None)
    board = render_board(next(iter(board_types())), FIRST_SEED, 0.0)
    images = [fit(part.pixels, spec.task, spec.input_size) for part in board.placements[:8]]
    stacked = np.stack([image.pixels for image in images])
    head = slot.layout.heads.get(spec, spec.resident)
    features = torch.randn(len(images), 9728)

    def least_ms(work: object) -> float:
        times = []
        for _ in range(40):
            begin = time.thread_time()
            work()  # type: ignore[operator]
            times.append(time.thread_time() - begin)
        return min(times) * 1e3 / len(images)

    guards = least_ms(lambda: (picture_figures(stacked), head.are_unlike(features, spec)))
    return least_ms(lambda: infer(slot, images, unguarded)), guards


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--boards", type=int, default=200)
    parser.add_argument("--pictures", type=int, default=12)
    asked = parser.parse_args()
    with TemporaryDirectory() as folder:
        line = load_line(make_line(Path(folder)))
        pool = loaded_pool(line.catalog)
        found, (image_ms, guards_ms) = measure(line, pool, asked.boards, asked.pictures), cost(line, pool)
    print(f"{found.guarded} of {found.good} good parts reviewed for a guard alone: {found.guarded / found.good:.3%}")
    print(
        f"{len(found.stopped)} of {len(found.combinations)} parts and ways stopped; pictures {found.share_stopped:.1%}"
    )
    for pair in sorted(found.tried):
        if found.passed[pair]:
            note = "" if pair in found.combinations else "  (symmetric)"
            print(f"  {pair[0]:8} {pair[1]:12} {found.passed[pair]} of {found.tried[pair]} pass{note}")
    print(f"an image {image_ms:.3f} ms, guards {guards_ms:.4f} ms: {guards_ms / image_ms:.2%}")


if __name__ == "__main__":
    main()
