"""Stored images through rules and experts once more, exactly as the daemon judges: its routes, its `judge`, its
preprocessing, its slots. Images that wait for one expert share its load and its batches, so that each expert is loaded
about once for each step of the chains, however many images there are.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from experts.catalog import Catalog
from experts.errors import ExpertError, ImageError
from experts.slot import Slot, SlotPool
from experts.spec import ExpertId
from experts.vision.infer import infer
from experts.vision.preprocess import Prepared, prepare
from routing_rules.routes import Judgement, Routes, Step, judge
from tools.query.rejudge.choose import Stored
from tools.query.rejudge.picture import PictureError, read_picture

BATCH = 8
#: Several experts stay loaded while their images alternate along chains, as long as they fit.
_POOL_BYTES = 300_000_000


@dataclass(frozen=True, slots=True)
class Rejudged:
    """What would become of one image. `unread` says why its picture could not be judged; it then has no verdict."""

    image: Stored
    verdict: str
    defect: str | None
    reason: str | None = None
    unread: str | None = None

    @property
    def is_changed(self) -> bool:
        was = (self.image.verdict, self.image.defect)
        return self.unread is None and (self.verdict, self.defect) != was


def memory_bytes(catalog: Catalog) -> int:
    """What experts take at most: as many as fit a pool, and always the largest."""
    sizes = [spec.weights_bytes for spec in catalog.values()]
    return max([min(sum(sizes), _POOL_BYTES), *sizes], default=1)


def rejudge(
    images: Sequence[Stored],
    routes: Routes,
    catalog: Catalog,
    folder: Path,
    on_done: Callable[[int], None] = lambda _: None,
) -> list[Rejudged]:
    """A verdict for each of `images`, in their order; `folder` is the line's `images`.

    `on_done` hears how many more are finished. Raises ExpertError where an expert cannot be loaded.
    """
    run = _Run(routes, catalog, folder, on_done)
    for image in images:
        run.begin(image)
    run.to_the_end()
    return [run.ended[image.inspection_id] for image in images]


class _Run:
    """Images by the step that they wait for."""

    def __init__(self, routes: Routes, catalog: Catalog, folder: Path, on_done: Callable[[int], None]) -> None:
        self._routes, self._catalog, self._folder, self._on_done = routes, catalog, folder, on_done
        self._waiting: dict[str, deque[tuple[Stored, Step, Judgement | None]]] = {}
        self._pool = SlotPool("cpu", memory_bytes(catalog))
        self._loaded: deque[ExpertId] = deque()
        self.ended: dict[int, Rejudged] = {}

    def begin(self, image: Stored) -> None:
        step = self._routes.first_step(image.board_type, image.component)
        if step is None:
            self._end(Rejudged(image, "unknown", None, "rules_changed"))
        else:
            self._wait(image, step, None)

    def to_the_end(self) -> None:
        """The expert that most images wait for comes first: chains meet behind it."""
        while self._waiting:
            expert = max(self._waiting, key=lambda name: len(self._waiting[name]))
            queue = self._waiting.pop(expert)
            slot = self._slot(ExpertId(expert))
            while queue:
                self._batch(slot, [queue.popleft() for _ in range(min(BATCH, len(queue)))])

    def _batch(self, slot: Slot, waiting: Sequence[tuple[Stored, Step, Judgement | None]]) -> None:
        ready: list[tuple[Stored, Step, Judgement | None, Prepared]] = []
        for image, step, so_far in waiting:
            try:
                payload, encoding, shape = read_picture(self._folder, image.image_path, image.image_sha256)
                ready.append((image, step, so_far, prepare(payload, encoding, shape, slot.spec)))
            except (ImageError, PictureError) as error:
                self._end(Rejudged(image, "unknown", None, "bad_image", unread=str(error)))
        if not ready:
            return
        answers = infer(slot, [prepared for *_, prepared in ready])
        for (image, step, so_far, prepared), answer in zip(ready, answers, strict=True):
            size = (prepared.placement.width, prepared.placement.height)
            found = judge(step, answer.label, answer.confidence, answer.detections, so_far, size)
            if found.next is None:
                self._end(Rejudged(image, found.verdict, found.defect))
            else:
                self._wait(image, found.next, found)

    def _wait(self, image: Stored, step: Step, so_far: Judgement | None) -> None:
        self._waiting.setdefault(step.expert, deque()).append((image, step, so_far))

    def _end(self, found: Rejudged) -> None:
        self.ended[found.image.inspection_id] = found
        self._on_done(1)

    def _slot(self, expert: ExpertId) -> Slot:
        """The expert's slot; those used longest ago make room."""
        if expert not in self._loaded:
            spec = self._catalog.get(expert)
            if spec is None:
                raise ExpertError(expert, "is not in the catalog")
            while self._loaded and self._pool.used_bytes + spec.weights_bytes > self._pool.budget_bytes:
                self._pool.unload(self._loaded.popleft())
            self._pool.load(spec)
        else:
            self._loaded.remove(expert)
        self._loaded.append(expert)
        return self._pool.slot(expert)
