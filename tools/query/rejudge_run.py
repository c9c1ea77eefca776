"""Stored images judged again as the daemon judges: by its routes, its `judge`, its preprocessing, its slots.

Images of a group that wait for one expert share its load and its batches: each expert is loaded about once for each
step of the chains.
"""

import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from daemon.storage.image_archive import as_sent
from experts.catalog import Catalog
from experts.errors import ExpertError, ImageError
from experts.spec import ExpertId, ExpertSpec, resident_in
from experts.vision.infer import infer
from experts.vision.preprocess import Prepared, prepare
from experts.vision.slot import Slot, SlotPool
from routing_rules.routes import Judgement, Routes, Step, judge
from tools.query.reading import StoredImage

_BATCH = 8
#: Several experts stay loaded while their images alternate along chains, as long as they fit.
_POOL_BYTES = 300_000_000

#: An image, the step that it waits for, and the judgement of the steps before.
_Waiting = tuple[StoredImage, Step, Judgement | None]


class StoredPictureError(Exception):
    """A picture's file is deleted or changed; the text says which."""


@dataclass(frozen=True, slots=True)
class RejudgedImage:
    """The new verdict of one image; without one, `unread` says why its picture could not be judged."""

    stored: StoredImage
    verdict: str
    defect: str | None
    unread: str | None = None

    @property
    def is_changed(self) -> bool:
        return self.unread is None and (self.verdict, self.defect) != (self.stored.verdict, self.stored.defect)


def memory_bytes(catalog: Catalog) -> int:
    """Return the most memory that experts take: as many as fit a pool, and always the largest."""
    sizes = [spec.weights_bytes for spec in resident_in(catalog).values()]
    return max([min(sum(sizes), _POOL_BYTES), *sizes], default=1)


def rejudge(
    groups: Iterable[Sequence[StoredImage]],
    routes: Routes,
    catalog: Catalog,
    folder: Path,
    on_progress: Callable[[], None] = lambda: None,
) -> Iterator[list[RejudgedImage]]:
    """Yield the verdicts of each group's images, of the line's `folder`; ExpertError if an expert cannot be loaded."""
    run = _RejudgeRun(routes, catalog, folder, on_progress)
    for images in groups:
        for image in images:
            run.begin(image)
        run.finish()
        yield [run.finished.pop(image.inspection_id) for image in images]


class _RejudgeRun:
    def __init__(self, routes: Routes, catalog: Catalog, folder: Path, on_progress: Callable[[], None]) -> None:
        self._routes, self._catalog, self._folder, self._on_progress = routes, catalog, folder, on_progress
        self._waiting: dict[str, deque[_Waiting]] = {}
        self._pool = SlotPool("cpu", memory_bytes(catalog))
        self._loaded: deque[ExpertId] = deque()
        self.finished: dict[int, RejudgedImage] = {}

    def begin(self, image: StoredImage) -> None:
        step = self._routes.first_step(image.board_type, image.component)
        if step is None:  # the rules have no component like this any more
            self._end(RejudgedImage(image, "unknown", None))
        else:
            self._wait(image, step, None)

    def finish(self) -> None:
        """Judge by expert, the one with the most images first, since chains meet behind it."""
        while self._waiting:
            expert = max(self._waiting, key=lambda name: len(self._waiting[name]))
            queue = self._waiting.pop(expert)
            spec = self._spec(ExpertId(expert))
            slot = self._slot(spec.resident)
            while queue:
                self._judge_batch(slot, spec, [queue.popleft() for _ in range(min(_BATCH, len(queue)))])

    def _judge_batch(self, slot: Slot, spec: ExpertSpec, batch: Sequence[_Waiting]) -> None:
        ready: list[tuple[_Waiting, Prepared]] = []
        for waiting in batch:
            try:
                ready.append((waiting, _prepare(self._folder, waiting[0], slot)))
            except (ImageError, StoredPictureError) as error:
                self._end(RejudgedImage(waiting[0], "unknown", None, unread=str(error)))
        if not ready:
            return
        answers = infer(slot, [prepared for _, prepared in ready], spec)
        for ((image, step, so_far), prepared), answer in zip(ready, answers, strict=True):
            size = (prepared.placement.width, prepared.placement.height)
            judgement = judge(step, answer.label, answer.confidence, answer.detections, so_far, size)
            if judgement.next is None:
                self._end(RejudgedImage(image, judgement.verdict, judgement.defect))
            else:
                self._wait(image, judgement.next, judgement)

    def _wait(self, image: StoredImage, step: Step, so_far: Judgement | None) -> None:
        self._waiting.setdefault(step.expert, deque()).append((image, step, so_far))

    def _end(self, image: RejudgedImage) -> None:
        self.finished[image.stored.inspection_id] = image
        self._on_progress()

    def _spec(self, expert: ExpertId) -> ExpertSpec:
        spec = self._catalog.get(expert)
        if spec is None:
            raise ExpertError(expert, "is not in the catalog")
        return spec

    def _slot(self, spec: ExpertSpec) -> Slot:
        """Return the slot of a network, making room by least recent use."""
        expert = spec.expert
        if expert not in self._loaded:
            while self._loaded and self._pool.used_bytes + spec.weights_bytes > self._pool.budget_bytes:
                self._pool.unload(self._loaded.popleft())
            self._pool.load(spec)
        else:
            self._loaded.remove(expert)
        self._loaded.append(expert)
        return self._pool.slot(expert)


def _prepare(images: Path, image: StoredImage, slot: Slot) -> Prepared:
    """Preprocess the payload that the camera sent. Raises StoredPictureError, ImageError."""
    file = images.parent / image.image_path
    if not file.resolve().is_relative_to(images.resolve()):
        raise StoredPictureError(f"{image.image_path} lies outside {images}")
    try:
        content = file.read_bytes()
    except OSError as error:
        raise StoredPictureError(f"{file}: {error.strerror or error}") from error
    try:
        payload, shape = as_sent(content, file.suffix)
    except ValueError as error:
        raise StoredPictureError(f"{file}: its header is damaged") from error
    if hashlib.sha256(payload).hexdigest() != image.image_sha256:
        raise StoredPictureError(f"{file}: is not what the camera sent (its sha256 differs)")
    return prepare(payload, "image" if shape is None else "raw", shape, slot.spec)
