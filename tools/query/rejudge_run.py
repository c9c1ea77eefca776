"""Stored images judged again as the daemon judges: by its routes, its `judge`, its preprocessing, its slots.

Images of a group that wait for one expert share its load and its batches: each expert is loaded about once for each
step of the chains.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from daemon.storage.image_archive import as_sent
from experts.catalog import Catalog
from experts.errors import ExpertError, ImageError
from experts.spec import Answer, ExpertId, ExpertSpec, resident_in
from experts.vision.infer import infer
from experts.vision.preprocess import Prepared, prepare
from experts.vision.slot import Slot, SlotPool
from routing_rules.routes import Judgement, Routes, Step, guarded, judge
from tools.query.reading import Row

_BATCH = 8


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
    pool: SlotPool | None = None

    def slot_of(spec: ExpertSpec) -> Slot:
        """Replace the loaded network unless it is the same: heads share their backbone."""
        nonlocal pool
        if pool is None or spec.expert not in pool.resident():
            pool = SlotPool("cpu", spec.weights_bytes)
            pool.load(spec)
        return pool.slot(spec.expert)

    for images in groups:
        # None: the rules have no component like this any more.
        firsts = [routes.first_step(image["board_type"], image["component"]) for image in images]
        read = lambda number, spec, images=images: _prepare(folder, images[number], spec)  # noqa: E731
        ends = judge_images(firsts, read, catalog, slot_of, on_end=on_progress)
        yield [{**image, **_new_verdict(end, image["reason"])} for image, end in zip(images, ends, strict=True)]


def _new_verdict(end: Judgement | ImageError | None, guard: str | None) -> dict[str, str | None]:
    if isinstance(end, Judgement):
        would_be, _ = guarded(end.verdict, (guard,) if guard else ())
        return {"would_be": would_be, "would_be_defect": end.defect, "unread": None}
    return {"would_be": "unknown", "would_be_defect": None, "unread": None if end is None else str(end)}


def judge_images(
    firsts: Sequence[Step | None],
    read: Callable[[int, ExpertSpec], Prepared],
    catalog: Catalog,
    slot_of: Callable[[ExpertSpec], Slot],
    *,
    on_answer: Callable[[int, str, Answer], None] = lambda *_: None,
    on_end: Callable[[], None] = lambda: None,
) -> list[Judgement | ImageError | None]:
    """Return each image's judgement by its chain from a first step, None without one, or why it could not be read.

    `read` prepares an image, by its number, for an expert; `slot_of` gives the slot of a network. `on_answer` gets each
    answer, with the image's number and the expert's name.
    """
    ends: list[Judgement | ImageError | None] = [None] * len(firsts)
    waiting: dict[str, list[tuple[int, Step]]] = {}

    def go_on(number: int, step: Step | None) -> None:
        if step is None:
            on_end()
        else:
            waiting.setdefault(step.expert, []).append((number, step))

    for number, step in enumerate(firsts):
        go_on(number, step)
    while waiting:
        expert = max(waiting, key=lambda name: len(waiting[name]))  # chains meet behind the one with the most
        spec, queue = catalog.get(ExpertId(expert)), waiting.pop(expert)
        if spec is None:
            raise ExpertError(ExpertId(expert), "is not in the catalog")
        slot = slot_of(spec.resident)
        for start in range(0, len(queue), _BATCH):
            ready: list[tuple[int, Step, Prepared]] = []
            for number, step in queue[start : start + _BATCH]:
                try:
                    ready.append((number, step, read(number, spec)))
                except ImageError as error:
                    ends[number] = error
                    on_end()
            answers = infer(slot, [prepared for *_, prepared in ready], spec) if ready else []
            for (number, step, prepared), answer in zip(ready, answers, strict=True):
                on_answer(number, expert, answer)
                size, so_far = (prepared.width, prepared.height), ends[number]
                assert not isinstance(so_far, ImageError)
                ends[number] = judgement = judge(step, answer.label, answer.confidence, answer.detections, so_far, size)
                go_on(number, judgement.next)
    return ends


def _prepare(images: Path, image: Row, spec: ExpertSpec) -> Prepared:
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
    return prepare(payload, "image" if shape is None else "raw", shape, spec)
