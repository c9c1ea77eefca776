"""Trains another version of a classifier with people's decisions, and compares it with the one in service."""

import json
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from shutil import rmtree
from typing import Any

import numpy as np
from numpy.typing import NDArray

from daemon.storage.decided_pictures import Decided, DecidedPicture, decided_pictures, decided_question, learned_files
from daemon.units import utc_text
from experts.catalog import CatalogEntry, add_expert
from experts.durable import replace_durably
from experts.errors import ImageError
from experts.spec import ExpertSpec
from experts.vision.preprocess import prepare
from tools.dataset.write import read_picture
from tools.experts import change
from tools.experts.line import ExpertsLine, entries_in_force
from tools.experts.measure import answers_of, label_folders
from tools.pictures import find_pictures
from tools.query.rejudge import rejudge_line
from tools.query.rows import RowFilters
from tools.terminal.console import CommandError
from tools.terminal.names import file_name
from tools.training.classifier import ClassifierReport, TrainingPlan, train_classifier
from tools.training.held_out import HeldOutAnswers, beats
from tools.training.report import cells, draw_report, figures

#: Pictures that a label needs so that one of them can be held out.
_MIN_OF_LABEL = 2
_MAX_NAME_BYTES = 255


def learn(
    line: ExpertsLine,
    name: str,
    training: Path | None,
    plan: TrainingPlan,
    *,
    since: str | None,
    sample: int | None,
    on_progress: Callable[[float], None],
) -> dict[str, Any]:
    """Train a version, keep it as a candidate, judge stored images again with it; write the report and return it.

    `training` is the folder that the version in service was trained on; without it only decided pictures are used.
    Raises CommandError, TrainingError, EditionError.
    """
    in_service = _in_service(line, name)
    if training is not None and not any(find_pictures(each, 1).files for each in label_folders(training).values()):
        raise CommandError(f"{training}: expected pictures as LABEL/*.png, found none (--with)")
    decided = _decided(line, name, in_service)
    plan = replace(plan, good=plan.good or next(iter(decided.passes), None))
    with tempfile.TemporaryDirectory(prefix="coserve-learn-") as scratch:
        folder, out = Path(scratch, "pictures"), Path(scratch, "experts")
        pictures, left_out = _write_pictures(line, decided, training, folder)
        labels = sorted(path.name for path in folder.glob("*"))
        if len(labels) < 2 or plan.good not in (None, *labels):
            raise CommandError(
                f"two labels at least are needed, one of them {plan.good or 'that passes'}; there are pictures of"
                f" {', '.join(labels) or 'none'}: decide more, or add some with --with"
            )
        out.mkdir()
        _offer_backbone(line, in_service, out / "catalog.yaml")
        report = train_classifier(folder, out, expert=name, plan=plan, on_progress=on_progress)
        compared = _compare(report, pictures, in_service, decided.passes)
        images = sorted(picture.inspection_id for picture in pictures.values())
        origin = f"reviews of {len(images)} images, {images[0]} to {images[-1]}" if images else "no reviews"
        origin += f", and pictures of {training.resolve()}" if training is not None else ""
        version = change.put(line, name, out, f"learned from {len(pictures)} decisions", origin)
        document, *drawings = learned_files(line.config.catalog, name)
        for drawn, place in zip(draw_report(report, out / "reports"), drawings, strict=True):
            place.parent.mkdir(exist_ok=True)
            replace_durably(place, drawn.read_bytes())
    notes = list(report.notes)
    if forgotten := sorted(set(in_service.classes) - set(report.data.labels)):
        without = ", ".join(forgotten)
        notes.append(f"no pictures of {without}: the learned version never answers that; add some with --with")
    filters, versions = RowFilters(since=since), [f"{name}={version}"]
    summary, changes = rejudge_line(line, filters, versions, sample=sample, threads=plan.threads)
    learned = {
        "expert": name,
        "at": utc_text(time.time()),
        "version": version,
        "in_service": in_service.version,
        "pictures": report.data.counts(),
        "images": images,
        "decided": dict(sorted(Counter(picture.label for picture in pictures.values()).items())),
        "left_out": dict(left_out),
        "tried": (tried := figures(report)),
        "table": [cells(row) for row in tried],
        "notes": notes,
        "compared": compared,
        "rejudged": summary,
    }
    replace_durably(document, json.dumps(learned, ensure_ascii=False) + "\n")
    return learned | {"list": changes}


def _in_service(line: ExpertsLine, name: str) -> ExpertSpec:
    spec = line.spec(name)
    if not spec.classes:
        raise CommandError(f"{name} is a backbone: the experts that are heads on it learn")
    if spec.task != "classify":
        how = "coserve dataset export --reviewed --format yolo, then coserve train detector"
        raise CommandError(f"{name} is not a classifier. Detectors learn from boxes: {how}")
    return spec


def _decided(line: ExpertsLine, name: str, in_service: ExpertSpec) -> Decided:
    _, routes = line.in_force()
    if routes is None:
        raise CommandError(f"{line.config.rules}: has mistakes: coserve rules check {line.config.rules}")
    rows = line.in_database(lambda connection: connection.execute(decided_question(name)).all())
    decided = decided_pictures(rows or (), routes, name, in_service.classes)
    if not decided.pictures:
        raise CommandError(
            f"no kept picture of {name} has a person's decision: decide some on the page Review or with"
            " `coserve review`; `retention.sample` keeps passes for it"
        )
    return decided


def _write_pictures(
    line: ExpertsLine, decided: Decided, training: Path | None, folder: Path
) -> tuple[Mapping[str, DecidedPicture], Counter[str]]:
    """Write pictures as `folder/LABEL/NUMBER-SERIAL.png`; return decided ones by file name, and counts of others.

    Of the same picture the newest decision counts. It has no version if an older answer or `training` has it too: the
    version in service may have learned from it. Pictures left out are counted by reason.
    """
    written: dict[str, DecidedPicture] = {}
    left_out, names = Counter(decided.left_out), dict[bytes, str]()
    for picture in decided.pictures:
        if "/" in picture.label or picture.label.startswith(".") or len(picture.label.encode()) > _MAX_NAME_BYTES:
            left_out[f"no folder can be named as its label, {picture.label}"] += 1
            continue
        try:  # a copy, for retention goes on deleting
            content, suffix, *_ = read_picture(line.config.images.parent / picture.image_path)
        except (ImageError, FileNotFoundError) as error:
            left_out[error.reason if isinstance(error, ImageError) else "retention has deleted it"] += 1
            continue
        name = f"{picture.inspection_id}-{file_name(picture.serial)}{suffix}"
        newer = names.setdefault(sha256(content).digest(), name)
        if newer == name and name not in written:
            (folder / picture.label).mkdir(parents=True, exist_ok=True)
            (folder / picture.label / name).write_bytes(content)
            written[name] = picture
        elif picture.inspection_id != written[newer].inspection_id:
            left_out["a newer one is the same"] += 1
            written[newer] = replace(written[newer], version="")
    labelled = label_folders(training) if training is not None else {}
    for label, source in ((label, file) for label, place in labelled.items() for file in find_pictures(place, 1).files):
        same = names.get(sha256(source.read_bytes()).digest(), source.name)
        if same in written:  # the newest decision counts
            written[same] = replace(written[same], version="")
        else:
            (folder / label).mkdir(parents=True, exist_ok=True)
            (folder / label / source.name).symlink_to(source.resolve())
    for label in list(folder.glob("*")):
        if len(files := list(label.iterdir())) < _MIN_OF_LABEL:
            left_out[f"the only one that is {label.name}"] += len(files)
            rmtree(label)
    return {name: each for name, each in written.items() if (folder / each.label / name).exists()}, left_out


def _offer_backbone(line: ExpertsLine, in_service: ExpertSpec, catalog: Path) -> None:
    """Write the backbone of the version in service, else the line's last one, into `catalog`."""
    own, entries = in_service.backbone, entries_in_force(line.experts())
    backbones = [
        (name, each)
        for name, each in entries.items()
        if not each.classes and (own is None or each.sha256 == own.sha256)
    ]
    if own is not None and not backbones:  # the line has a newer one, and this head has kept its own
        head = entries[in_service.name]
        form = {key: getattr(head, key) for key in ("architecture", "input_size", "normalisation")}
        backbones = [(own.name, CatalogEntry(**form, file=str(own.file), sha256=own.sha256))]
    for name, entry in backbones[-1:]:
        add_expert(catalog, name, dict(entry.moved_from(line.folder.root)))


def _compare(
    report: ClassifierReport, pictures: Mapping[str, DecidedPicture], in_service: ExpertSpec, passes: Sequence[str]
) -> dict[str, Any] | None:
    """Return escapes and false calls of both versions on held-out pictures that the one in service has answered.

    It was not trained on these. None if there are none.
    """
    answers, data = report.chosen.answers, report.data
    new = [
        place
        for place, row in enumerate(answers.rows)
        if (picture := pictures.get(data.files[row].name)) is not None and picture.version == in_service.version
    ]
    if data.good is None or not new:
        return None
    good = [number for number, label in enumerate(data.labels) if label in passes or number == data.good]
    targets, rows_of = (~np.isin(answers.targets[new], good)).astype(np.int64), answers.rows[new]
    learned = HeldOutAnswers(_passing(answers.shares[new][:, good].sum(1)), targets, 0, rows_of)
    images = [prepare(data.files[row].read_bytes(), "image", None, in_service) for row in rows_of]
    said = [answer.label in (*passes, data.labels[data.good]) for answer in answers_of(in_service, images)]
    before = HeldOutAnswers(_passing(np.array(said, np.float32)), targets, 0, rows_of)
    says = (
        "The learned version makes fewer mistakes, more than chance explains"
        if beats(learned, before)
        else "The version in service makes fewer mistakes, more than chance explains: keep it"
        if beats(before, learned)
        else "These pictures show no difference that chance does not explain"
    )
    rows = {"in_service": before, "learned": learned}
    return {
        **{who: {"escapes": str(of.escapes), "false_calls": str(of.false_calls)} for who, of in rows.items()},
        "says": f"{says}. People look mostly at what the version in service failed or was unsure of, so its mistakes"
        " are more frequent here than in all images",
    }


def _passing(share: NDArray[np.float32]) -> NDArray[np.float32]:
    return np.column_stack((share, 1 - share))
