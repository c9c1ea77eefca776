"""Trains the smallest expert that is good enough for a folder of labelled images, and measures it on images held out.

Tried are, in the order of what they cost in memory and time: a bank of good pictures, a linear head (both on a
backbone), a network whose last block is trained, one with all layers trained. The cheapest is taken that none beats.
"""

import copy
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import torch
from torch import nn

from experts.catalog import add_expert, read_catalog
from experts.drift import histograms
from experts.vision.guards import learn_limits
from experts.vision.heads import BANK, LINEAR, LinearHead, bank_distances, bank_logits, usual_distances
from experts.vision.networks import Backbone
from tools.training import TrainingError, architecture_of, fit, require_expert_id
from tools.training.backbone import BackboneInCatalog, load_backbone
from tools.training.expert_file import Form
from tools.training.fit import SYMMETRIES, Schedule, Variation
from tools.training.head import bank_odds, distance_limit, fit_bank, fit_linear, fit_usual, write_head
from tools.training.held_out import HeldOutAnswers, beats, may_be_beaten
from tools.training.importer import import_model
from tools.training.labelled import LabelledPictures, folds, read_labelled

Kind = Literal["bank", "head", "last-block", "all-layers"]
#: In the order of what they cost.
KINDS: tuple[Kind, ...] = ("bank", "head", "last-block", "all-layers")
#: Parts of the pictures, each held out once; of many pictures only one part is.
_FOLDS, _MANY = 5, 500
#: Varied copies of each picture whose features are computed.
_COPIES = 4
#: How often the last block sees each copy.
_BLOCK_EPOCHS = 4
#: An expert that ranks a defect above a good picture less often than this is of no use.
MIN_AUROC = 0.9
#: Of fewer good or bad pictures a ranking says nothing.
_MIN_RANKED = 10
#: The other label of an expert that has seen good pictures only.
DEFECT = "defect"
_DEFAULT_ARCHITECTURE, _DEFAULT_INPUT_SIZE = "resnet18", 96
#: Images of a batch, and batches, that are timed.
_TIMED = 8


@dataclass(frozen=True, slots=True)
class TrainingPlan:
    """Kinds of experts to try, and how.

    `backbone`, `architecture` and `input_size`: None for those of the catalog's only backbone, or the defaults. `play`
    is in pixels of the pictures. `use_anyway` accepts an expert that is of no use.
    """

    schedule: Schedule = field(default_factory=lambda: Schedule(12))
    threads: int = 1
    architecture: str | None = None
    input_size: int | None = None
    backbone: str | None = None
    kinds: tuple[Kind, ...] = KINDS
    play: float = 0.0
    symmetry: bool = False
    good: str | None = None
    use_anyway: bool = False


@dataclass(frozen=True, slots=True)
class Trial:
    """A kind of expert on pictures held out: milliseconds per image here, bytes that it adds, seconds it took."""

    kind: Kind
    answers: HeldOutAnswers
    temperature: float
    image_ms: float
    bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class ClassifierReport:
    expert: str
    file: Path
    data: LabelledPictures
    chosen: Trial
    trials: tuple[Trial, ...]
    symmetry: str
    notes: tuple[str, ...]


def train_classifier(
    folder: Path, out: Path, *, expert: str, plan: TrainingPlan, on_progress: fit.OnProgress = lambda _: None
) -> ClassifierReport:
    """Train on `folder/LABEL/*.png`, and add the best expert to the catalog of `out`. Raises TrainingError.

    Labels with few images count as much as those with many.
    """
    require_expert_id(expert)
    if out.exists() and not out.is_dir():
        raise TrainingError(f"{out}: is a file; name a folder for the experts with --out")
    present = read_catalog(out / "catalog.yaml").get(expert)
    if present is not None and not present.classes:
        raise TrainingError(f"{expert} is a backbone of {out / 'catalog.yaml'}: name the expert otherwise, with --id")
    known = load_backbone(out / "catalog.yaml", plan.backbone)
    architecture, input_size = _network_of(plan, known)
    torch.set_num_threads(plan.threads)
    torch.manual_seed(plan.schedule.seed)
    data, warnings = read_labelled(folder, input_size, min_labels=1 if known else 2, good=plan.good)
    study = _Study(data, plan, known, architecture, on_progress)
    kinds = study.possible_kinds()
    if plan.symmetry:
        study.test_symmetry()
    trials: list[Trial] = []
    for kind in kinds:
        trials.append(study.trial(kind))
        if data.good is not None and len(data.labels) > 1 and not may_be_beaten(trials[-1].answers):
            break
    chosen = _choose(trials)
    auroc = chosen.answers.auroc
    is_ranked = min(chosen.answers.escapes.of, chosen.answers.false_calls.of) >= _MIN_RANKED
    if auroc is not None and auroc < MIN_AUROC and is_ranked and not plan.use_anyway:
        raise TrainingError(
            f"{folder}: the best that these pictures give, a {chosen.kind}, ranks defects above good pictures in"
            f" only {auroc:.0%} of the pairs: under {MIN_AUROC:.0%} it is of no use, and nothing was written. More"
            " or larger pictures, or a backbone of this line's parts, help; --use-anyway takes it all the same"
        )
    entry = study.write(chosen, out, expert)
    add_expert(out / "catalog.yaml", expert, entry)
    on_progress(1.0)
    notes = (*warnings, *study.notes)
    return ClassifierReport(expert, out / entry["file"], data, chosen, tuple(trials), study.vary.symmetry, notes)


def _network_of(plan: TrainingPlan, known: BackboneInCatalog | None) -> tuple[str, int]:
    if known is not None:
        entry = known.entry
        for option, asked, has in (
            ("--architecture", plan.architecture, entry.architecture),
            ("--input-size", plan.input_size, entry.input_size),
        ):
            if asked not in (None, has):
                raise TrainingError(f"{option} {asked}: the backbone {known.name} has {has}; leave {option} away")
        return entry.architecture, entry.input_size
    architecture = architecture_of(plan.architecture or _DEFAULT_ARCHITECTURE, "classify")
    return architecture.name, plan.input_size or _DEFAULT_INPUT_SIZE


def _choose(trials: Sequence[Trial]) -> Trial:
    """Return the cheapest that no other beats beyond chance; a useless one only if there is no better."""
    useful = [trial for trial in trials if trial.answers.auroc is None or trial.answers.auroc >= MIN_AUROC]
    rest = useful or [max(trials, key=lambda trial: trial.answers.auroc or 0.0)]
    return next(trial for trial in rest if not any(beats(other.answers, trial.answers) for other in rest))


class _Study:
    """One folder's pictures through all kinds of experts."""

    def __init__(
        self,
        data: LabelledPictures,
        plan: TrainingPlan,
        known: BackboneInCatalog | None,
        architecture: str,
        on_progress: fit.OnProgress,
    ) -> None:
        self._data, self._plan, self._known, self._architecture = data, plan, known, architecture
        self._classes = len(data.labels)
        self._on_progress, self._done = on_progress, 0.0
        self._input_size = data.pictures.shape[1]
        self.vary = Variation(plan.play * self._input_size / data.side)
        self.notes: list[str] = []
        self._network, seen = known.network() if known is not None else (None, frozenset())
        #: Pictures that the backbone learned from tell nothing about experts on it.
        self._is_new = np.array([digest not in seen for digest in data.digests])
        if not self._is_new.all():
            self.notes.append(
                f"the backbone learned from {int((~self._is_new).sum())} of these {len(self._is_new)} pictures: experts"
                " are measured on the others"
            )
        masks = list(folds(data, _FOLDS, np.random.default_rng(plan.schedule.seed)))
        masks = [mask for mask in masks if mask.any() and set(data.targets[~mask]) == set(data.targets)]
        if not masks:
            raise TrainingError(
                f"{data.files[0].parent.parent}: all pictures of a label are of one board, so none can be held out:"
                " add some of another board, or name the files otherwise than SERIAL.DESIGNATOR.png"
            )
        masks = masks if len(data.targets) < _MANY else masks[:1]
        #: Each with the pictures that are held out, and those of them that are answered.
        self._folds = [(mask, np.nonzero(mask & self._is_new)[0]) for mask in masks if (mask & self._is_new).any()]
        self._everything = np.ones(len(data.targets), bool)
        self._features: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}

    def possible_kinds(self) -> list[Kind]:
        """Return what can be tried, and note why the rest cannot. Raises TrainingError if nothing can."""
        data, asked = self._data, self._plan.kinds
        has_bad = self._classes > 1
        if not has_bad and data.good is None:
            raise TrainingError(
                f"only the label {data.labels[0]}: name it ok, or say with --good that it passes, to teach from good"
                " pictures alone; or add a folder of defective ones"
            )
        reasons: dict[Kind, str] = {}
        if self._network is None:
            no_backbone = "there is no backbone in the catalog: `coserve train backbone FOLDERS…` makes one"
            reasons = {"bank": no_backbone, "head": no_backbone, "last-block": no_backbone}
        elif data.good is None:
            reasons["bank"] = "no label is named ok: --good says which one passes"
        elif self._classes > 2:
            reasons["bank"] = "it tells good from defective only, and there are more than two labels"
        if not has_bad:
            reasons |= dict.fromkeys(KINDS[1:], "there are good pictures only")
        self.notes += [f"{kind} was not tried: {reasons[kind]}" for kind in asked if kind in reasons]
        kinds: list[Kind] = [kind for kind in KINDS if kind in asked and kind not in reasons]
        if not kinds:
            raise TrainingError(f"nothing can be tried: {'; '.join(f'{kind}: {reasons[kind]}' for kind in asked)}")
        return kinds

    def test_symmetry(self) -> None:
        """Choose the symmetry with which a head makes the fewest mistakes; without any if none helps."""
        if self._network is None or self._classes < 2:
            raise TrainingError(
                "--symmetry is tested with a head on a backbone: `coserve train backbone FOLDERS…` first"
            )
        mistakes: dict[str, int] = {}
        for symmetry in SYMMETRIES:
            self.vary = Variation(self.vary.play, symmetry)
            mistakes[symmetry] = int((~self._answers(self._held_out("head"))[0].right).sum())
        best = min(mistakes, key=lambda symmetry: mistakes[symmetry])
        self.vary = Variation(self.vary.play, best)
        listed = ", ".join(f"{count} mistakes with {name}" for name, count in mistakes.items())
        self.notes.append(f"symmetry {best}: a head makes {listed}")

    def trial(self, kind: Kind) -> Trial:
        begin_s = time.perf_counter()
        answers, temperature = self._answers(self._held_out(kind))
        seconds = time.perf_counter() - begin_s
        self._advance()
        return Trial(kind, answers, temperature, self._image_ms, self._bytes(kind), seconds)

    def write(self, trial: Trial, out: Path, expert: str) -> dict[str, Any]:
        """Train on all pictures, write the weights, and return the catalog's entry. Raises TrainingError."""
        labels, limits = list(self._data.labels), learn_limits(self._data.pictures)
        origin = f"trained on {len(self._data.targets)} pictures"
        if trial.kind in ("bank", "head"):
            assert self._known is not None
            tensors = self._whole_head if trial.kind == "head" else self._whole_bank
            if self._classes == 1:
                labels.append(DEFECT)
            kind = BANK if trial.kind == "bank" else LINEAR
            if kind == LINEAR:
                usual = self._usual(self._everything)
                tensors, limits = tensors | {"usual": usual}, replace(limits, distance=self._usual_distance(usual))
            entry = write_head(kind, tensors, self._known.entry, labels, out, expert=expert, origin=origin)
        else:
            network = self._fitted(trial.kind, self._everything)
            form, images = Form(origin=origin), list(self._data.pictures[:8])
            entry = import_model(
                network, self._architecture, labels, self._input_size, out, expert=expert, images=images, form=form
            ).entry
        best = trial.answers.shares.argmax(1)
        shares = trial.answers.shares.max(1).tolist()
        confidences = histograms((labels[label], share) for label, share in zip(best.tolist(), shares, strict=True))
        return entry | {"temperature": trial.temperature, "confidences": confidences, "pictures": asdict(limits)}

    def _answers(self, held_out: tuple[torch.Tensor, np.ndarray]) -> tuple[HeldOutAnswers, float]:
        logits, places = held_out
        targets = self._data.targets[places]
        temperature = fit.calibrate(logits, targets) if self._classes > 1 and len(places) else 1.0
        shares = (logits / temperature).softmax(1).numpy()
        return HeldOutAnswers(shares, targets, self._data.good, places), temperature

    def _held_out(self, kind: Kind) -> tuple[torch.Tensor, np.ndarray]:
        """Return the logits of the pictures that were held out, and their places among all."""
        if not self._folds:
            return torch.zeros(0, max(self._classes, 2)), np.zeros(0, np.int64)
        places = np.concatenate([mine for _, mine in self._folds])
        if kind == "bank":
            centre, spread, _ = bank_odds(self._held_out_distances, self._is_bad(places), self._bad).tolist()
            return bank_logits(self._held_out_distances, centre, spread, self._bad), places
        parts: list[torch.Tensor] = []
        for mask, mine in self._folds:
            if kind == "head":
                tensors = self._linear(~mask)
                parts.append(LinearHead(tensors["weight"], tensors["bias"]).logits(self._of_pictures()[1][mine]))
            else:
                parts.append(fit.logits_of(self._fitted(kind, ~mask), self._data.pictures[mine]))
            self._advance()
        return torch.cat(parts), places

    # Heads

    def _of_pictures(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return features of varied copies (copies, N, F), and of the pictures as they are (N, F)."""
        if self.vary.symmetry not in self._features:
            backbone = Backbone(copy.deepcopy(cast("nn.Module", self._network))).eval()
            rng = np.random.default_rng(self._plan.schedule.seed)
            copies = [fit.features_of(backbone, self._data.pictures, self.vary, rng) for _ in range(_COPIES)]
            self._features[self.vary.symmetry] = torch.stack(copies), fit.logits_of(backbone, self._data.pictures)
        return self._features[self.vary.symmetry]

    def _linear(self, chosen: np.ndarray) -> dict[str, torch.Tensor]:
        copies, _ = self._of_pictures()
        rows = torch.from_numpy(np.nonzero(chosen)[0])
        features = copies[:, rows, : self._last_features].flatten(0, 1)
        targets = torch.from_numpy(self._data.targets)[rows].repeat(len(copies))
        return fit_linear(features, targets, self._classes)

    def _bank(self, chosen: np.ndarray) -> dict[str, torch.Tensor]:
        copies, _ = self._of_pictures()
        rows = torch.from_numpy(np.nonzero(chosen & (self._data.targets == self._data.good))[0])
        return fit_bank(copies[:, rows].flatten(0, 1), self._last_features // 2)

    @cached_property
    def _held_out_distances(self) -> torch.Tensor:
        parts: list[torch.Tensor] = []
        for mask, mine in self._folds:
            features = self._of_pictures()[1][torch.from_numpy(mine)]
            parts.append(bank_distances(features, **self._bank(~mask)))
            self._advance()
        return torch.cat(parts)

    def _usual(self, chosen: np.ndarray) -> torch.Tensor:
        rows = torch.from_numpy(np.nonzero(chosen & self._is_good)[0])
        return fit_usual(self._of_pictures()[0][:, rows].flatten(0, 1), self._last_features // 2)

    def _usual_distance(self, usual: torch.Tensor) -> float:
        """Return the limit of distances, by good pictures that were held out, or by all if none was."""
        pictures, good = self._of_pictures()[1], self._is_good
        parts = [usual_distances(pictures[mine[good[mine]]], self._usual(~mask)) for mask, mine in self._folds]
        return distance_limit(torch.cat(parts if any(map(len, parts)) else [usual_distances(pictures[good], usual)]))

    @property
    def _is_good(self) -> np.ndarray:
        return self._everything if self._data.good is None else self._data.targets == self._data.good

    @cached_property
    def _whole_head(self) -> dict[str, torch.Tensor]:
        return self._linear(self._everything)

    @cached_property
    def _whole_bank(self) -> dict[str, torch.Tensor]:
        """A bank of all good pictures, calibrated on those held out, or on all if none was."""
        tensors = self._bank(self._everything)
        if self._folds:
            distances, places = self._held_out_distances, np.concatenate([mine for _, mine in self._folds])
        else:
            distances, places = bank_distances(self._of_pictures()[1], **tensors), np.arange(len(self._everything))
        return tensors | {"odds": bank_odds(distances, self._is_bad(places), self._bad)}

    @property
    def _last_features(self) -> int:
        return int(cast("Any", self._network).fc.in_features)

    @property
    def _bad(self) -> int:
        """Return the number of the label that is not good, of two."""
        return 1 if self._data.good == 0 else 0

    def _is_bad(self, places: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(self._data.targets[places] != self._data.good)

    # Whole networks

    def _fitted(self, kind: Kind, chosen: np.ndarray) -> nn.Module:
        schedule, rows = self._plan.schedule, np.nonzero(chosen)[0]
        rows = rows[_balanced(self._data.targets[rows], np.random.default_rng(schedule.seed))]
        pictures, targets = self._data.pictures[rows], self._data.targets[rows]
        torch.manual_seed(schedule.seed)
        if self._network is None:
            network = fit.new_network(self._architecture, self._classes)
        else:
            network = copy.deepcopy(self._network)
            network.fc = nn.Linear(self._last_features, self._classes)
        if kind == "all-layers":
            return fit.fit_network(network, pictures, targets, schedule, vary=self.vary)
        rng = np.random.default_rng(schedule.seed)
        features = torch.cat([fit.early_features(network, pictures, rng, self.vary) for _ in range(_COPIES)])
        block = Schedule(_BLOCK_EPOCHS, schedule.batch, schedule.learning_rate / 2, seed=schedule.seed)
        return fit.fit_last_block(network, features, np.tile(targets, _COPIES), block)

    # Cost

    @cached_property
    def _whole_network(self) -> nn.Module:
        return self._network or fit.new_network(self._architecture, self._classes).eval()

    @cached_property
    def _image_ms(self) -> float:
        """The milliseconds of an image in a batch of eight; heads add too little to show."""
        batch = np.resize(self._data.pictures, (_TIMED, *self._data.pictures.shape[1:]))
        times_s: list[float] = []
        for _ in range(_TIMED):
            begin_s = time.perf_counter()
            fit.logits_of(self._whole_network, batch)
            times_s.append(time.perf_counter() - begin_s)
        return min(times_s) * 1e3 / _TIMED

    def _bytes(self, kind: Kind) -> int:
        """Return the bytes that one more expert of this kind adds to a line."""
        if kind in ("last-block", "all-layers"):
            return sum(parameter.numel() for parameter in self._whole_network.parameters()) * 4
        tensors = self._whole_head if kind == "head" else self._whole_bank
        return sum(tensor.nbytes for tensor in tensors.values())

    def _advance(self) -> None:
        """Move the bar; how many kinds will be tried is not known before."""
        self._done += (1 - self._done) / (2 * _FOLDS)
        self._on_progress(self._done)


def _balanced(targets: fit.Targets, rng: np.random.Generator) -> np.ndarray:
    """Return rows that repeat pictures of rare labels, so that each label is seen as often as the most frequent."""
    counts = Counter(targets.tolist())
    largest = max(counts.values())
    parts = [np.resize(rng.permutation(np.nonzero(targets == target)[0]), largest) for target in sorted(counts)]
    return np.concatenate(parts)
