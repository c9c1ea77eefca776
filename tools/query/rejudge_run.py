"""Stored images judged again as the daemon judges: by its routes, its `judge`, its preprocessing, its slots.

Images of a group that wait for one expert share its load and its batches: each expert is loaded about once for each
step of the chains.
"""

import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from daemon.storage.image_archive import as_sent
from experts.catalog import Catalog
from experts.errors import ExpertError, ImageError
from experts.spec import ExpertId, ExpertSpec, resident_in
from experts.vision.infer import infer
from experts.vision.preprocess import Prepared, prepare
from experts.vision.slot import Slot, SlotPool
from routing_rules.routes import Judgement, Routes, Step, judge
from tools.query.reading import Row

_BATCH = 8

#: An image, the step that it waits for, and the judgement of the steps before.
_Waiting = tuple[Row, Step, Judgement | None]


def memory_bytes(catalog: Catalog) -> int:
    """Return the most memory that experts take: they are loaded one at a time."""
    return max((spec.weights_bytes for spec in resident_in(catalog).values()), default=1)


def rejudge(
    groups: Iterable[Sequence[Row]],
    routes: Routes,
    catalog: Catalog,
    folder: Path,
    on_progress: Callable[[], None] = lambda: None,
) -> Iterator[list[Row]]:
    """Yield each group's images, of the line's `folder`, with their new verdict: `would_be`, `would_be_defect`.

    `unread` says why a picture could not be judged, else it is None. ExpertError if an expert cannot be loaded.
    """
    run = _RejudgeRun(routes, catalog, folder, on_progress)
    for images in groups:
        for image in images:
            run.begin(image)
        run.finish()
        yield [run.finished.pop(image["inspection_id"]) for image in images]


class _RejudgeRun:
    def __init__(self, routes: Routes, catalog: Catalog, folder: Path, on_progress: Callable[[], None]) -> None:
        self._routes, self._catalog, self._folder, self._on_progress = routes, catalog, folder, on_progress
        self._waiting: dict[str, deque[_Waiting]] = {}
        self._pool: SlotPool | None = None
        self.finished: dict[int, Row] = {}

    def begin(self, image: Row) -> None:
        # None: the rules have no component like this any more.
        self._wait(image, self._routes.first_step(image["board_type"], image["component"]), None)

    def finish(self) -> None:
        """Judge by expert, the one with the most images first, since chains meet behind it."""
        while self._waiting:
            expert = max(self._waiting, key=lambda name: len(self._waiting[name]))
            queue, spec = self._waiting.pop(expert), self._catalog.get(ExpertId(expert))
            if spec is None:
                raise ExpertError(ExpertId(expert), "is not in the catalog")
            slot = self._slot(spec.resident)
            while queue:
                self._judge_batch(slot, spec, [queue.popleft() for _ in range(min(_BATCH, len(queue)))])

    def _slot(self, spec: ExpertSpec) -> Slot:
        """Replace the loaded network unless it is the same: heads share their backbone."""
        if self._pool is None or spec.expert not in self._pool.resident():
            self._pool = SlotPool("cpu", spec.weights_bytes)
            self._pool.load(spec)
        return self._pool.slot(spec.expert)

    def _judge_batch(self, slot: Slot, spec: ExpertSpec, batch: Sequence[_Waiting]) -> None:
        ready: list[tuple[_Waiting, Prepared]] = []
        for waiting in batch:
            try:
                ready.append((waiting, _prepare(self._folder, waiting[0], slot)))
            except ImageError as error:
                self._end(waiting[0], "unknown", None, unread=str(error))
        answers = infer(slot, [prepared for _, prepared in ready], spec) if ready else []
        for ((image, step, so_far), prepared), answer in zip(ready, answers, strict=True):
            size = (prepared.placement.width, prepared.placement.height)
            judgement = judge(step, answer.label, answer.confidence, answer.detections, so_far, size)
            self._wait(image, judgement.next, judgement)

    def _wait(self, image: Row, step: Step | None, so_far: Judgement | None) -> None:
        """Let an image wait for the expert of its next step; without one it has its verdict."""
        if step is not None:
            self._waiting.setdefault(step.expert, deque()).append((image, step, so_far))
        elif so_far is None:
            self._end(image, "unknown", None)
        else:
            self._end(image, so_far.verdict, so_far.defect)

    def _end(self, image: Row, verdict: str, defect: str | None, unread: str | None = None) -> None:
        new = {"would_be": verdict, "would_be_defect": defect, "unread": unread}
        self.finished[image["inspection_id"]] = {**image, **new}
        self._on_progress()


def _prepare(images: Path, image: Row, slot: Slot) -> Prepared:
    """Preprocess the payload that the camera sent. Raises ImageError."""
    file = images.parent / image["image_path"]
    if not file.resolve().is_relative_to(images.resolve()):
        raise ImageError(f"{image['image_path']} lies outside {images}")
    try:
        payload, shape = as_sent(file.read_bytes(), file.suffix)
    except OSError as error:
        raise ImageError(f"{file}: {error.strerror or error}") from error
    except ValueError as error:
        raise ImageError(f"{file}: its header is damaged") from error
    if hashlib.sha256(payload).hexdigest() != image["image_sha256"]:
        raise ImageError(f"{file}: is not what the camera sent (its sha256 differs)")
    return prepare(payload, "image" if shape is None else "raw", shape, slot.spec)
