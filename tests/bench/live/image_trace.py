"""The images that every side of the live benchmark inspects: component types with their experts, and an order."""

import itertools
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import yaml

BOARD_TYPE = "bench"
#: The two labels of every classifier; an image that goes on to a detector has the first.
LABELS = ("ok", "defect")
#: Share of the images of a chained component that go on to its detector.
PASS_RATE = 0.8
#: Placements of one board per component type, about: the list that the board-order trace repeats.
_PLACEMENTS_PER_TYPE = 2
#: Images that arrive at once in bursty arrivals.
_BURST_IMAGES = 50
_ARRIVALS_SEED = 23

ImageOrder = Literal["skewed", "board"]
ORDERS: tuple[ImageOrder, ...] = ("skewed", "board")
Arrivals = Literal["poisson", "bursty"]


@dataclass(frozen=True, slots=True)
class ComponentType:
    """A component type: its classifier, the detector behind it, and the share of the images that show it."""

    classifier: str
    detector: str | None
    usage: float


@dataclass(frozen=True, slots=True)
class TraceImage:
    """One image. `goes_on`: its classifier passes it (a seeded coin decides); `arrives_s` counts from the start."""

    classifier: str
    detector: str | None
    picture: int
    goes_on: bool
    arrives_s: float = 0.0

    @property
    def experts(self) -> tuple[str, ...]:
        """The experts that see this image, in their order."""
        return (self.classifier, self.detector) if self.detector and self.goes_on else (self.classifier,)


@dataclass(frozen=True, slots=True)
class ImageTrace:
    """The images in their order. Policies know the component types and the pass rate, never which image goes on."""

    order: ImageOrder
    types: tuple[ComponentType, ...]
    images: tuple[TraceImage, ...]

    def rules(self) -> str:
        """Return routing rules for these component types; their quantities tell policies the usage."""
        classifiers: dict[str, dict[str, object]] = {}
        detectors: dict[str, dict[str, object]] = {}
        for each in self.types:
            rule: dict[str, object] = {"expert": each.classifier, "pass": [LABELS[0]], "review_below": 0.0}
            if each.detector:
                rule |= {"then": each.detector, "pass_rate": PASS_RATE}
                detectors[each.detector] = {"expert": each.detector, "fail_on": {LABELS[1]: 0.5}}
            classifiers[each.classifier] = rule
        quantities = {each.classifier: max(1, round(each.usage * 100_000)) for each in self.types}
        boards = {BOARD_TYPE: {"components": quantities}}
        return yaml.safe_dump({"boards": boards, "classifiers": classifiers, "detectors": detectors}, sort_keys=False)

    def visits(self) -> Counter[str]:
        """Count the images that each expert sees."""
        return Counter(expert for image in self.images for expert in image.experts)

    def usage(self) -> dict[str, float]:
        """Return the share of the images that need each expert, as the component types promise."""
        shares: dict[str, float] = {each.classifier: each.usage for each in self.types}
        for each in self.types:
            if each.detector:
                shares[each.detector] = shares.get(each.detector, 0.0) + each.usage * PASS_RATE
        return shares

    def arriving(self, rate_per_s: float, arrivals: Arrivals) -> "ImageTrace":
        """Return the same images at `rate_per_s`: one by one, or a board's worth at once."""
        times_s = arrival_times_s(rate_per_s, arrivals, _ARRIVALS_SEED)
        return replace(self, images=tuple(replace(image, arrives_s=next(times_s)) for image in self.images))


def arrival_times_s(rate_per_s: float, arrivals: Arrivals, seed: int) -> Iterator[float]:
    """Yield the seconds at which images arrive, without end: one by one, or a board's worth at once."""
    dice = random.Random(seed)
    now_s = 0.0
    for number in itertools.count():
        if arrivals == "poisson":
            now_s += dice.expovariate(rate_per_s)
        elif number and number % _BURST_IMAGES == 0:
            now_s += dice.expovariate(rate_per_s / _BURST_IMAGES)
        yield now_s


def make_types(classifiers: Sequence[str], detectors: Sequence[str]) -> tuple[ComponentType, ...]:
    """Return types whose usage falls as 1 / rank: a tenth of 60 gets half of the images. Every other has a detector."""
    total = sum(1.0 / rank for rank in range(1, len(classifiers) + 1))
    return tuple(
        ComponentType(
            name,
            detectors[number // 2 % len(detectors)] if detectors and number % 2 == 0 else None,
            1.0 / (number + 1) / total,
        )
        for number, name in enumerate(classifiers)
    )


def make_trace(types: Sequence[ComponentType], order: ImageOrder, count: int, pictures: int, seed: int) -> ImageTrace:
    """Return `count` images, all waiting from the start.

    "skewed": component types drawn one by one by usage. "board": one placement list, repeated board after board;
    quantities follow usage, every type is on the board, neighbours are seldom alike.
    """
    dice = random.Random(seed)
    if order == "skewed":
        drawn = dice.choices(types, [each.usage for each in types], k=count)
    else:
        placements = [
            each for each in types for _ in range(max(1, round(each.usage * _PLACEMENTS_PER_TYPE * len(types))))
        ]
        dice.shuffle(placements)
        drawn = [placements[number % len(placements)] for number in range(count)]
    images = [
        TraceImage(each.classifier, each.detector, dice.randrange(pictures), dice.random() < PASS_RATE)
        for each in drawn
    ]
    return ImageTrace(order, tuple(types), tuple(images))
