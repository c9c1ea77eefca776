"""Probability that an image uses an expert (CoServe §4.5): from the rules, the results, or a sample run."""

from collections import Counter
from pathlib import Path

from sqlalchemy import func, select

from daemon.line.line import Line
from daemon.storage.database.connections import StoreError, open_for_reading
from daemon.storage.database.schema import inspections, stages
from experts.spec import ExpertId
from experts.vision.infer import infer
from experts.vision.preprocess import prepare
from experts.vision.slot import LayoutShelf, SlotPool
from routing_rules.routes import Judgement, Step, judge
from tools.camera.layout import SUFFIXES


class UsageError(Exception):
    """Usage cannot be counted; the text says why and what to do."""


def usage_of(source: str, line: Line, device: str, shelf: LayoutShelf) -> dict[ExpertId, float]:
    """Probability by expert, most used first: from `database`, or from a folder of sample images.

    `rules` gives nothing: the daemon reads that out of the rules itself, which may change after the profile was made.
    Raises UsageError.
    """
    if source == "rules":
        return {}
    if source == "database":
        usage = counted_in_database(line.config.database)
    else:
        usage = counted_on_sample(Path(source), line, device, shelf)
    shares = {expert: usage.get(expert, 0.0) for expert in line.catalog}
    return dict(sorted(shares.items(), key=lambda item: (-item[1], item[0])))


def counted_in_database(url: str) -> dict[str, float]:
    """Stages per finished inspection, by expert. Raises UsageError."""
    count = func.count()
    try:
        engine = open_for_reading(url)
    except StoreError as error:
        raise UsageError(str(error)) from error
    try:
        with engine.connect() as connection:
            rows = connection.execute(select(stages.c.expert, count).group_by(stages.c.expert)).all()
            images = connection.execute(select(count).where(inspections.c.verdict.is_not(None))).scalar() or 0
    finally:
        engine.dispose()
    if not rows or not images:
        raise UsageError(f"{url} has no finished inspection: run the line first, or take --usage rules")
    return {expert: min(1.0, uses / images) for expert, uses in rows}


def counted_on_sample(folder: Path, line: Line, device: str, shelf: LayoutShelf) -> dict[str, float]:
    """Return uses per image, as rules and answers route `folder/BOARD_TYPE/SERIAL/DESIGNATOR.COMPONENT.png`.

    The experts run, one image at a time, each loaded once: images wait until their next expert's turn.
    Raises UsageError, and ExpertError for an expert that cannot run.
    """
    waiting: dict[str, list[tuple[Path, Step, Judgement | None]]] = {}
    images = 0
    for file in sorted(folder.glob("*/*/*.*")):
        if file.suffix.lower() not in SUFFIXES or "." not in file.stem:
            continue
        step = line.routes.first_step(file.parent.parent.name, file.stem.split(".", 1)[1])
        if step is not None:
            images += 1
            waiting.setdefault(step.expert, []).append((file, step, None))
    if not images:
        raise UsageError(
            f"{folder} holds no image that the rules know: expected BOARD_TYPE/SERIAL/DESIGNATOR.COMPONENT.png"
        )
    uses: Counter[str] = Counter()
    while waiting:
        expert = max(waiting, key=lambda name: len(waiting[name]))
        batch = waiting.pop(expert)
        uses[expert] += len(batch)
        spec = line.catalog[ExpertId(expert)]
        pool = SlotPool(device, spec.resident.weights_bytes, shelf)
        pool.load(spec.resident)
        for file, step, so_far in batch:
            ready = prepare(file.read_bytes(), "image", None, spec)
            (answer,) = infer(pool.slot(spec.resident.expert), [ready], spec)
            size = (ready.placement.width, ready.placement.height)
            verdict = judge(step, answer.label, answer.confidence, answer.detections, so_far, size)
            if verdict.next is not None:
                waiting.setdefault(verdict.next.expert, []).append((file, verdict.next, verdict))
    return {expert: count / images for expert, count in uses.items()}
