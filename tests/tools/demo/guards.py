"""`python -m tests.tools.demo.guards [BOARDS PICTURES]`: what the shipped experts' guards stop, and what they cost."""

import sys
import time
import timeit
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import numpy as np
import torch

from daemon.line.line import Line, load_line
from experts.vision.guards import picture_figures
from experts.vision.infer import infer
from experts.vision.preprocess import fit
from experts.vision.slot import SlotPool
from tools.camera.render import board_types, part_types, render_board
from tools.demo.judge import PartToJudge, judge_parts, loaded_pool
from tools.demo.line import make_line

#: No training, threshold, demo or measured board has these seeds.
FIRST_SEED = 800_000
#: Unchanged parts: bodies and leads that mirror onto themselves (of five of them only the lettering or a dot tells),
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


def cost(line: Line, pool: SlotPool) -> tuple[float, float]:
    """Return milliseconds of a head's image in a batch of eight on one thread without guards, and those of guards."""
    torch.set_num_threads(1)
    spec = next(spec for spec in line.catalog.values() if spec.backbone is not None)
    slot, unguarded = pool.slot(spec.resident.expert), replace(spec, pictures=None)
    board = render_board(next(iter(board_types())), FIRST_SEED, 0.0)
    images = [fit(part.pixels, spec.task, spec.input_size) for part in board.placements[:8]]
    stacked, head = np.stack([image.pixels for image in images]), slot.layout.heads.get(spec, spec.resident)
    with torch.inference_mode():
        features = slot.module(torch.rand(8, 3, spec.input_size, spec.input_size))

    def least_ms(work: Callable[[], object]) -> float:
        return min(timeit.repeat(work, timer=time.thread_time, repeat=40, number=1)) * 1e3 / len(images)

    guards = least_ms(lambda: (picture_figures(stacked), head.are_unlike(features, spec)))
    return least_ms(lambda: infer(slot, images, unguarded)), guards


def main(boards: int = 200, pictures: int = 12) -> None:
    with TemporaryDirectory() as folder:
        line = load_line(make_line(Path(folder)))
        pool = loaded_pool(line.catalog)
        image_ms, guards_ms = cost(line, pool)
        print(f"an image {image_ms:.3f} ms, its guards {guards_ms:.4f} ms: {guards_ms / image_ms:.2%}")
        found = measure(line, pool, boards, pictures)
    print(f"{found.guarded} of {found.good} good parts reviewed for a guard alone: {found.guarded / found.good:.3%}")
    print(f"spoilt pictures that do not pass: {found.share():.1%}")
    for (component, way), count in sorted(found.passed.items()):
        symmetric = " (symmetric)" if component in SYMMETRIC.get(way, ()) else ""
        print(f"  {component}, {way}: {count} of {found.tried[component, way]} pass{symmetric}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
