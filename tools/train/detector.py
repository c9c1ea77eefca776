"""Training a YOLO detector within minutes that the user grants: one small loop around ultralytics' model and loss.

Ultralytics' own trainer thinks in epochs, keeps a core for data loaders and validates as it goes; on two cores and a
budget in minutes more steps fit into a plain loop. Model and loss are theirs, unchanged. What an image is comes from a
*sampler*, so photographs, a renderer, and defects drawn on real boards all train through the same loop.
"""

import copy
import math
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import cv2
import numpy as np
import torch
import yaml
from numpy.typing import NDArray
from torch import nn

from experts.catalog import CatalogFile, add_to_catalog, resolve
from experts.catalog_edit import read
from experts.drift import histograms
from experts.errors import ImageError
from experts.slot import SlotPool
from experts.spec import ExpertId, ExpertSpec
from experts.vision.architectures import ARCHITECTURES, YOLO_STRIDE_PIXELS
from experts.vision.decode import decode
from experts.vision.infer import infer
from experts.vision.networks import build_original
from experts.vision.preprocess import LETTERBOX_GREY, fit, place, prepare
from tools.deeppcb.measure import Found, average_precisions, choose_threshold, count, mean_average_precision
from tools.importer import Form, ImportRefusedError, import_detector

Image = NDArray[np.uint8]
#: One training example: (S, S) or (S, S, 3) uint8 RGB, and (n, 5) float32 rows of x1 y1 x2 y2 class in its pixels.
Sample = tuple[Image, NDArray[np.float32]]
Sampler = Callable[[np.random.Generator], Sample]

#: AdamW as for fine-grained targets: decay on matrices only, a short second moment for a short training.
_WEIGHT_DECAY, _BETAS, _MAX_GRADIENT = 0.02, (0.9, 0.99), 10.0
_WARM_UP_STEPS, _WARM_UP_SHARE = 300, 0.05
_LAST_LEARNING_RATE = 0.01
_EMA_DECAY = 0.999
#: Where ultralytics' two-headed loss thinks in epochs, the training counts as this many.
_EPOCHS = 100
_SECONDS_BETWEEN_CHECKPOINTS = 60.0


class TrainingError(Exception):
    """The training cannot be started, or went wrong; the text says what to do."""


@dataclass(frozen=True, slots=True)
class Effort:
    """How long to train, and how. Either `minutes` of the clock or a number of `steps` (then runs repeat exactly).

    `closing_share` is the last part of the training, in which the closing sampler is asked instead.
    """

    minutes: float | None = None
    steps: int | None = None
    batch: int = 16
    learning_rate: float = 2e-3
    seed: int = 0
    threads: int = 2
    closing_share: float = 0.15

    def __post_init__(self) -> None:
        if (self.minutes is None) == (self.steps is None):
            raise TrainingError("say how long to train: either minutes or steps")

    def share(self, step: int, spent_s: float) -> float:
        """How much of the training is over, 0 to 1."""
        done = step / self.steps if self.steps is not None else spent_s / (cast("float", self.minutes) * 60)
        return min(done, 1.0)


@dataclass(frozen=True, slots=True)
class Progress:
    """After a step: how many there were, the share of the training that is over, the smoothed loss of one image."""

    step: int
    share: float
    loss: float
    spent_s: float


OnProgress = Callable[[Progress], None]


def fit_detector(
    sampler: Sampler,
    classes: Sequence[str],
    architecture: str,
    input_size: int,
    effort: Effort,
    *,
    closing: Sampler | None = None,
    checkpoint: Path | None = None,
    on_progress: OnProgress | None = None,
) -> nn.Module:
    """An ultralytics DetectionModel trained on what `sampler` gives: averaged weights, evaluation mode.

    `closing` replaces the sampler towards the end: examples as they will be, after examples as varied as can be. With
    `checkpoint` the state goes into that file every minute, and a training that finds it there goes on from it.
    Raises TrainingError.
    """
    known = ARCHITECTURES.get(architecture)
    if known is None or known.task != "detect":
        raise TrainingError(f"{architecture!r} is no detector; known are yolov5n … yolo26x")
    if input_size % YOLO_STRIDE_PIXELS:
        raise TrainingError(f"an input of {input_size} pixels is not a multiple of {YOLO_STRIDE_PIXELS}")
    with limited_threads(effort.threads):
        torch.manual_seed(effort.seed)
        model = _new_model(build_original(known, len(classes)), classes)
        run = _Run(model, sampler, closing or sampler, input_size, effort)
        identity = f"{architecture} {input_size} {' '.join(classes)}"
        if checkpoint is not None and checkpoint.exists():
            run.restore(checkpoint, identity)
        saved_s = run.spent_s
        for progress in run.steps():
            if on_progress is not None:
                on_progress(progress)
            if checkpoint is not None and progress.spent_s - saved_s > _SECONDS_BETWEEN_CHECKPOINTS:
                run.save(checkpoint, identity)
                saved_s = progress.spent_s
        if checkpoint is not None:
            run.save(checkpoint, identity)
    return run.average


def _new_model(model: nn.Module, classes: Sequence[str]) -> nn.Module:
    from ultralytics.cfg import get_cfg

    detector = cast("Any", model)
    detector.args = get_cfg(overrides={"epochs": _EPOCHS})  # the loss reads its gains from here
    detector.names = dict(enumerate(classes))
    return detector.to(memory_format=torch.channels_last).train()


@contextmanager
def limited_threads(count: int) -> Iterator[None]:
    """`count` threads for torch; OpenCV's own would only fight for the same cores."""
    torch_threads, opencv_threads = torch.get_num_threads(), cv2.getNumThreads()
    torch.set_num_threads(count)
    cv2.setNumThreads(1)
    try:
        yield
    finally:
        torch.set_num_threads(torch_threads)
        cv2.setNumThreads(opencv_threads)


class _Run:
    """The state of one training; `steps` carries it on."""

    def __init__(self, model: nn.Module, sampler: Sampler, closing: Sampler, input_size: int, effort: Effort) -> None:
        self.model = model
        self.average = copy.deepcopy(model).eval().requires_grad_(False)
        self.spent_s = 0.0
        self._step, self._loss = 0, 0.0
        self._sampler, self._closing, self._input_size, self._effort = sampler, closing, input_size, effort
        self._random = np.random.default_rng(effort.seed)
        matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
        vectors = [parameter for parameter in model.parameters() if parameter.ndim <= 1]
        groups = [{"params": matrices, "weight_decay": _WEIGHT_DECAY}, {"params": vectors, "weight_decay": 0.0}]
        self._optimizer = torch.optim.AdamW(groups, lr=effort.learning_rate, betas=_BETAS)

    def steps(self) -> Iterator[Progress]:
        """Train until the effort is spent; time that the caller takes between steps is not counted."""
        while (share := self._effort.share(self._step, self.spent_s)) < 1:
            begin_s = time.perf_counter()
            for group in self._optimizer.param_groups:
                group["lr"] = self._learning_rate(share)
            loss = self._train_once(self._closing if share > 1 - self._effort.closing_share else self._sampler)
            if not math.isfinite(loss):
                raise TrainingError(f"the loss is {loss} at step {self._step}; train with a lower learning rate")
            self._loss = loss if self._step == 0 else 0.98 * self._loss + 0.02 * loss
            self._step += 1
            self._follow()
            self._shift_heads(share)
            self.spent_s += time.perf_counter() - begin_s
            yield Progress(self._step, self._effort.share(self._step, self.spent_s), self._loss, self.spent_s)

    def save(self, file: Path, identity: str) -> None:
        """At once and complete, so that a training that is killed while it saves still has the last one."""
        state = {
            "identity": identity,
            "model": self.average.state_dict(),
            "training": self.model.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "random": self._random.bit_generator.state,
            "step": self._step,
            "loss": self._loss,
            "spent_s": self.spent_s,
        }
        temporary = file.with_name(f".{file.name}.{os.getpid()}.tmp")
        file.parent.mkdir(parents=True, exist_ok=True)
        try:
            torch.save(state, temporary)
            temporary.replace(file)
        finally:
            temporary.unlink(missing_ok=True)

    def restore(self, file: Path, identity: str) -> None:
        try:
            state: Any = torch.load(file, map_location="cpu", weights_only=True)
            found = state["identity"]
        except Exception as error:  # the restricted unpickler lets through whatever damaged bytes cause
            raise TrainingError(f"{file}: is no checkpoint of this training; move it away to begin anew") from error
        if found != identity:
            raise TrainingError(f"{file}: is of another training ({found}); move it away to begin anew")
        self.average.load_state_dict(state["model"])
        self.model.load_state_dict(state["training"])
        self._optimizer.load_state_dict(state["optimizer"])
        self._random.bit_generator.state = state["random"]
        self._step, self._loss, self.spent_s = state["step"], state["loss"], state["spent_s"]

    def _learning_rate(self, share: float) -> float:
        """Linear warm-up over 300 steps, less in short trainings, then half a cosine down to a hundredth."""
        warm_up = min(1.0, max((self._step + 1) / _WARM_UP_STEPS, share / _WARM_UP_SHARE))
        cosine = 0.5 * (1 + math.cos(math.pi * share))
        return self._effort.learning_rate * warm_up * (_LAST_LEARNING_RATE + (1 - _LAST_LEARNING_RATE) * cosine)

    def _train_once(self, sampler: Sampler) -> float:
        """One step; returns the loss of one image."""
        samples = [sampler(self._random) for _ in range(self._effort.batch)]
        loss = cast("Any", self.model).loss(collate(samples, self._input_size))[0].sum()
        self._optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), _MAX_GRADIENT)
        self._optimizer.step()
        return float(loss.detach()) / len(samples)

    def _shift_heads(self, share: float) -> None:
        """YOLO26 learns with two heads; its loss moves from the one to the other as the training goes on."""
        criterion = cast("Any", self.model).criterion
        while hasattr(criterion, "updates") and criterion.updates < int(share * _EPOCHS):
            criterion.update()

    @torch.no_grad()
    def _follow(self) -> None:
        """The average follows the trained weights: quickly at first, then over some thousand steps."""
        keep = min(_EMA_DECAY, (1 + self._step) / (10 + self._step))
        trained = self.model.state_dict()
        for name, value in self.average.state_dict().items():
            if value.dtype.is_floating_point:
                value.mul_(keep).add_(trained[name], alpha=1 - keep)
            else:
                value.copy_(trained[name])


def collate(samples: Sequence[Sample], size: int) -> dict[str, torch.Tensor]:
    """A batch as ultralytics' loss takes it: `img` (B, 3, S, S) in 0..1, boxes as centre and size in 0..1."""
    images = [image if image.ndim == 3 else np.repeat(image[:, :, None], 3, axis=2) for image, _ in samples]
    if any(image.shape != (size, size, 3) for image in images):
        shapes = sorted({image.shape for image in images})
        raise TrainingError(f"the sampler gave images of {shapes}; the input is {size} x {size}")
    pixels = torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).float().div_(255)
    owners = np.concatenate([np.full(len(boxes), index, np.float32) for index, (_, boxes) in enumerate(samples)])
    rows = torch.from_numpy(np.concatenate([boxes for _, boxes in samples]).astype(np.float32).reshape(-1, 5))
    centres, sizes = (rows[:, :2] + rows[:, 2:4]) / 2, rows[:, 2:4] - rows[:, :2]
    return {
        "img": pixels.contiguous(memory_format=torch.channels_last),
        "batch_idx": torch.from_numpy(owners),
        "cls": rows[:, 4:],
        "bboxes": torch.cat((centres, sizes), 1) / size,
    }


@dataclass(frozen=True, slots=True)
class Photograph:
    """A labelled image file; boxes are (n, 5) float32 rows of x1 y1 x2 y2 class, in fractions of the image."""

    file: Path
    boxes: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class YoloData:
    """A data set as ultralytics lays it out, read; `held_out` is its `val`."""

    classes: tuple[str, ...]
    train: tuple[Photograph, ...]
    held_out: tuple[Photograph, ...]


_IMAGE_SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".tif", ".tiff"})


def read_yolo_data(file: Path) -> YoloData:
    """The data set of a YAML file with `path`, `train`, `val` and `names`. Raises TrainingError, naming file and line.

    Labels lie where ultralytics looks for them: `labels` in place of the last `images` in a path, suffix `.txt`.
    An image without a label file has nothing on it.
    """
    try:
        document: Any = yaml.safe_load(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise TrainingError(f"{file}: cannot be read ({error.strerror})") from error
    except yaml.YAMLError as error:
        raise TrainingError(f"{file}: is not YAML ({error})") from error
    missing = {"train", "val", "names"} - set(document if isinstance(document, Mapping) else ())
    if missing:
        raise TrainingError(f"{file}: has no {', '.join(sorted(missing))}; expected path, train, val and names")
    names = document["names"]
    classes = tuple(str(names[key]) for key in sorted(names)) if isinstance(names, Mapping) else tuple(map(str, names))
    root = file.parent / str(document.get("path") or ".")
    train, held_out = (_photographs(document[part], root, f"{file}: {part}", len(classes)) for part in ("train", "val"))
    if not any(len(photograph.boxes) for photograph in train):
        raise TrainingError(f"{file}: no image of train has a label; expected .txt files in a folder named labels")
    return YoloData(classes, train, held_out)


def _photographs(entry: Any, root: Path, where: str, classes: int) -> tuple[Photograph, ...]:
    """Of a folder of images, a .txt with a path per line, or a list of such."""
    files: list[Path] = []
    for name in entry if isinstance(entry, list) else [entry]:
        place_ = root / str(name)
        if place_.is_dir():
            files += sorted(found for found in place_.rglob("*") if found.suffix.lower() in _IMAGE_SUFFIXES)
        elif place_.is_file() and place_.suffix == ".txt":
            lines = place_.read_text(encoding="utf-8").splitlines()
            files += [place_.parent / line.strip() for line in lines if line.strip()]
        else:
            raise TrainingError(f"{where}: {place_} is neither a folder of images nor a .txt that lists them")
    if not files:
        raise TrainingError(f"{where}: holds no image ({', '.join(sorted(_IMAGE_SUFFIXES))})")
    return tuple(Photograph(image, _read_labels(_label_file(image, where), classes)) for image in files)


def _label_file(image: Path, where: str) -> Path:
    parts = list(image.parts)
    if "images" not in parts[:-1]:
        raise TrainingError(f"{where}: {image} lies in no folder named images, so its labels cannot be found")
    index = len(parts) - 2 - parts[-2::-1].index("images")
    labels = Path(*parts[:index], "labels")
    if not labels.is_dir():
        raise TrainingError(f"{where}: there is no folder {labels} with the labels of {Path(*parts[: index + 1])}")
    return labels.joinpath(*parts[index + 1 :]).with_suffix(".txt")


def _read_labels(file: Path, classes: int) -> NDArray[np.float32]:
    """Lines `class x y width height`, or `class x1 y1 x2 y2 …` of an outline, in fractions of the image."""
    rows: list[tuple[float, ...]] = []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines() if file.exists() else (), 1):
        if not line.strip():
            continue
        try:
            kind, *values = (float(word) for word in line.split())
        except ValueError:
            kind, values = -1.0, []
        outline = len(values) >= 6 and len(values) % 2 == 0
        if not (len(values) == 4 or outline) or kind not in range(classes):
            expected = f"expected `class x y width height` with a class from 0 to {classes - 1}"
            raise TrainingError(f"{file}:{number}: {expected}, not {line!r}")
        if not all(-0.01 <= value <= 1.01 for value in values):
            raise TrainingError(f"{file}:{number}: expected fractions of the image, 0 to 1, not {line!r}")
        x, y, *size = values
        corners = (x - size[0] / 2, y - size[1] / 2, x + size[0] / 2, y + size[1] / 2)
        if outline:
            corners = (min(values[::2]), min(values[1::2]), max(values[::2]), max(values[1::2]))
        rows.append((*(min(max(corner, 0.0), 1.0) for corner in corners), kind))
    return np.array(rows, np.float32).reshape(-1, 5)


@dataclass(frozen=True, slots=True)
class PhotographSampler:
    """Labelled photographs as a detector's inputs: letterboxed as in the running line; with `jitter` also moved,
    scaled (0.6 to 1.4), mirrored left to right, and in another light.
    """

    photographs: Sequence[Photograph]
    size: int
    jitter: bool
    #: Decoded images, shared by samplers of the same photographs; as many as fit `cache_bytes`.
    cache: dict[Path, Image] = field(default_factory=dict)
    cache_bytes: int = 2 * 2**30

    def __call__(self, rng: np.random.Generator) -> Sample:
        photograph = self.photographs[int(rng.integers(len(self.photographs)))]
        image = self._image(photograph.file)
        height, width = image.shape[:2]
        boxes = photograph.boxes * np.array([width, height, width, height, 1], np.float32)
        if not self.jitter:
            fitted = fit(image, "detect", self.size)
            to = fitted.placement
            gains = np.array([to.gain_x, to.gain_y, to.gain_x, to.gain_y, 1], np.float32)
            return fitted.pixels, boxes * gains + np.array([to.left, to.top, to.left, to.top, 0], np.float32)
        gain = place(width, height, "detect", self.size).gain_x * rng.uniform(0.6, 1.4)
        left, top = (rng.random() * (self.size - gain * side) for side in (width, height))
        # OpenCV counts from the centres of pixels, boxes from their corners.
        matrix = np.array([[gain, 0, left + gain / 2 - 0.5], [0, gain, top + gain / 2 - 0.5]])
        grey = (LETTERBOX_GREY,) * 3
        pixels = np.asarray(cv2.warpAffine(image, matrix, (self.size, self.size), borderValue=grey), np.uint8)
        moved = boxes * np.array([gain] * 4 + [1], np.float32) + np.array([left, top, left, top, 0], np.float32)
        return _mirrored(_relit(pixels, rng), _visible(moved, self.size), rng)

    def _image(self, file: Path) -> Image:
        if file in self.cache:
            return self.cache[file]
        try:
            image = decode(file.read_bytes(), "image")
        except (OSError, ImageError) as error:
            raise TrainingError(f"{file}: {error}; take it out of the data set") from error
        if sum(known.nbytes for known in self.cache.values()) + image.nbytes <= self.cache_bytes:
            self.cache[file] = image
        return image


def _visible(boxes: NDArray[np.float32], size: int) -> NDArray[np.float32]:
    """Boxes cut at the square's edges; those of which less than a third is left are gone."""
    cut = boxes.copy()
    cut[:, :4] = cut[:, :4].clip(0, size)
    left, whole = ((rows[:, 2] - rows[:, 0]) * (rows[:, 3] - rows[:, 1]) for rows in (cut, boxes))
    return cut[(left >= whole / 3) & (left >= 4)]


def _relit(pixels: Image, rng: np.random.Generator) -> Image:
    gains = rng.uniform(0.8, 1.2) * rng.uniform(0.95, 1.05, 3)
    return np.clip(pixels * gains + rng.uniform(-15, 15), 0, 255).astype(np.uint8)


def _mirrored(pixels: Image, boxes: NDArray[np.float32], rng: np.random.Generator) -> Sample:
    if rng.random() < 0.5:
        pixels = np.ascontiguousarray(pixels[:, ::-1])
        boxes[:, [0, 2]] = pixels.shape[1] - boxes[:, [2, 0]]
    return pixels, boxes


@dataclass(frozen=True, slots=True)
class TrainReport:
    """A trained expert, and how good it is on images that it was not trained on (IoU of a hit above .5).

    Precision, recall and F are at `threshold`, the confidence at which F is best on these images.
    """

    expert: str
    file: Path
    catalog: Path
    steps: int
    minutes: float
    held_out_images: int
    threshold: float
    precision: float
    recall: float
    f_score: float
    map50: float


def train_detector(
    data: Path,
    architecture: str,
    input_size: int,
    out: Path,
    *,
    expert: str,
    effort: Effort,
    on_progress: OnProgress | None = None,
) -> TrainReport:
    """Train on a YOLO data set, make the network an expert of `out/catalog.yaml`, and measure it on the set's `val`.

    A training that was interrupted goes on where it was when it is started again. Raises TrainingError.
    """
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}", expert):
        # The import would say so too, but only after the minutes of training.
        raise TrainingError(f"{expert!r} is no expert id; use letters, digits and . _ : -")
    found = read_yolo_data(data)
    out.mkdir(parents=True, exist_ok=True)
    checkpoint = out / f".{expert}.training"
    jittered = PhotographSampler(found.train, input_size, jitter=True)
    steady = replace(jittered, jitter=False)
    last = Progress(0, 0.0, 0.0, 0.0)

    def follow(progress: Progress) -> None:
        nonlocal last
        last = progress
        if on_progress is not None:
            on_progress(progress)

    model = fit_detector(
        jittered,
        found.classes,
        architecture,
        input_size,
        effort,
        closing=steady,
        checkpoint=checkpoint,
        on_progress=follow,
    )
    with limited_threads(effort.threads):
        try:
            spec = add_detector(model, architecture, found.classes, input_size, out, expert=expert, origin=data.name)
        except ImportRefusedError as error:
            raise TrainingError(f"{error}; the training itself is kept in {checkpoint}") from error
        checkpoint.unlink(missing_ok=True)
        return _report(spec, found.held_out, last, out / "catalog.yaml")


def add_detector(
    model: nn.Module,
    architecture: str,
    classes: Sequence[str],
    input_size: int,
    out: Path,
    *,
    expert: str,
    origin: str,
) -> ExpertSpec:
    """A trained model as an expert of `out/catalog.yaml`."""
    form = Form(origin=f"trained on {origin}")
    report = import_detector(model, architecture, input_size, out, expert=expert, classes=classes, form=form)
    add_to_catalog(out / "catalog.yaml", expert, report.entry)
    catalog, _ = resolve(CatalogFile.model_validate({"experts": {expert: report.entry}}), out)
    return catalog[ExpertId(expert)]


def find_boxes(spec: ExpertSpec, payloads: Sequence[bytes], floor: float = 0.01) -> list[Found]:
    """What a detector finds on encoded images, through a slot and as the daemon prepares them; boxes above `floor`."""
    pool = SlotPool("cpu", spec.weights_bytes)
    pool.load(replace(spec, confidence_floor=floor))
    slot = pool.slot(spec.expert)
    found: list[Found] = []
    for payload in payloads:
        boxes = infer(slot, [prepare(payload, "image", None, spec)])[0].detections
        found.append(
            Found(
                np.array([box.box for box in boxes], np.float32).reshape(-1, 4),
                np.array([spec.classes.index(box.label) for box in boxes], np.int64),
                np.array([box.confidence for box in boxes], np.float32),
            )
        )
    return found


def _report(spec: ExpertSpec, held_out: Sequence[Photograph], last: Progress, catalog: Path) -> TrainReport:
    payloads = [photograph.file.read_bytes() for photograph in held_out]
    truths: list[NDArray[np.float32]] = []
    for photograph, payload in zip(held_out, payloads, strict=True):
        height, width = decode(payload, "image").shape[:2]
        truths.append(photograph.boxes * np.array([width, height, width, height, 1], np.float32))
    found = find_boxes(spec, payloads)
    add_to_catalog(catalog, spec.expert, _entry(catalog, spec.expert) | {"confidences": _confidences(spec, found)})
    threshold = choose_threshold(found, truths, 0.5)
    counts = count(found, truths, threshold, 0.5)
    return TrainReport(
        expert=spec.expert,
        file=spec.file,
        catalog=catalog,
        steps=last.step,
        minutes=last.spent_s / 60,
        held_out_images=len(held_out),
        threshold=threshold,
        precision=counts.precision,
        recall=counts.recall,
        f_score=counts.f_score,
        map50=mean_average_precision(average_precisions(found, truths, len(spec.classes), 0.5)),
    )


def _confidences(spec: ExpertSpec, found: Sequence[Found]) -> dict[str, tuple[int, ...]]:
    """Of each image's surest box, as far as it will be answered: that is what a detector's answer is counted by."""
    surest = [(one.classes[place], one.confidences[place]) for one in found for place in one.confidences.argsort()[-1:]]
    kept = [(kind, confidence) for kind, confidence in surest if confidence >= spec.confidence_floor]
    return histograms((spec.classes[kind], float(confidence)) for kind, confidence in kept)


def _entry(catalog: Path, expert: str) -> dict[str, Any]:
    return CatalogFile.model_validate(read(catalog.read_text(encoding="utf-8"))).experts[expert].model_dump(mode="json")
