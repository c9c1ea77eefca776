"""Heads: what follows a backbone's features, for one component type. Small: all of a line's stay in host memory.

A *linear* head gives a score per label. A *bank* knows only good pictures: an image is as unusual as its patch that is
farthest from their nearest patch at the same position (PatchCore, arXiv 2106.08265), since parts are centred.
"""

import hashlib
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from experts.errors import ExpertError, WeightsError
from experts.spec import Answer, ExpertId, ExpertSpec
from experts.weights import Entry, check_digest, describe_os_error, open_weights, read_header_from

#: A head's kind, in its file's header.
LINEAR, BANK = "linear", "bank"
#: Files of heads are read as a whole; a larger one is cut off, and fails the check of its digest.
_MAX_HEAD_BYTES = 64 << 20
#: How long a head waits, once, while another is read. Its batch must not hang with the disk: all heads would then count
#: as hung, and their backbone would not be used again.
_PATIENCE_S = 10.0
#: Places of a map whose patches decide whether a picture is unlike training.
_FARTHEST = 4


class Heads:
    """The heads of one layout's backbones, by expert: read and checked at first use, then kept."""

    def __init__(self) -> None:
        self._heads: dict[ExpertId, tuple[ExpertSpec, Head]] = {}
        self._lock = threading.Lock()
        #: Set by a thread that waited for the lock in vain; the thread that held it clears this when its read ends.
        self._is_stuck = False

    def get(self, spec: ExpertSpec, backbone: ExpertSpec) -> "Head":
        """Return the head of `spec` for the features of `backbone`. Raises ExpertError."""
        if spec.backbone != backbone:
            raise ExpertError(
                spec.expert, f"belongs to another backbone than {backbone.name}, which is loaded; reload the catalog"
            )
        known = self._heads.get(spec.expert)
        if known is not None and known[0] == spec:
            return known[1]
        if not self._lock.acquire(timeout=0.0 if self._is_stuck else _PATIENCE_S):  # one executor reads at a time
            self._is_stuck = True
            raise ExpertError(spec.expert, "is not loaded: the disk does not answer; check the disk", spec.file)
        try:
            known = self._heads.get(spec.expert)
            if known is None or known[0] != spec:
                known = self._heads[spec.expert] = spec, read_head(spec)
        finally:
            self._is_stuck = False
            self._lock.release()
        return known[1]

    def answers(
        self, features: torch.Tensor, experts: Sequence[ExpertSpec], backbone: ExpertSpec
    ) -> list[Answer | ExpertError]:
        """Return each image's answer to its features (B, F), or why its head has none; empty for a backbone."""
        answers: list[Answer | ExpertError] = [Answer(None, None)] * len(experts)
        rows: dict[int, list[int]] = {}
        for row, spec in enumerate(experts):
            rows.setdefault(id(spec), []).append(row)
        for mine in rows.values():
            spec = experts[mine[0]]
            if spec == backbone:
                continue
            try:
                head = self.get(spec, backbone)
                logits, is_strange = head.logits(features[mine]), head.are_unlike(features[mine], spec)
            except ExpertError as error:
                found: Sequence[Answer | ExpertError] = [error] * len(mine)
            except RuntimeError as error:  # tensors of another size than the features
                text = f"cannot judge the features of {backbone.name}: {error}; train it again"
                found = [ExpertError(spec.expert, text, spec.file)] * len(mine)
            else:
                found = [
                    replace(answer, guards=("unlike_training",)) if strange else answer
                    for answer, strange in zip(classify_answers(logits, spec), is_strange, strict=True)
                ]
            for row, answer in zip(mine, found, strict=True):
                answers[row] = answer
        return answers


def probabilities(logits: torch.Tensor, spec: ExpertSpec) -> NDArray[np.float32]:
    """(B, head rows) logits to (B, classes): padding rows cut off, softmax of logits / temperature."""
    return (logits[:, : len(spec.classes)].float() / spec.temperature).softmax(1).numpy()


def classify_answers(logits: torch.Tensor, spec: ExpertSpec) -> list[Answer]:
    """Return the surest label of each row of logits (B, head rows)."""
    return [Answer(spec.classes[int(row.argmax())], float(row.max())) for row in probabilities(logits, spec)]


@dataclass(frozen=True, slots=True)
class LinearHead:
    """weight: (classes, F'), for the first F' features, those of a ResNet's last layer; bias: (classes,).

    usual: (2, places, C), for each place of a map the mean of good pictures' patches there, and one over their spread;
    None in older files.
    """

    weight: torch.Tensor
    bias: torch.Tensor
    usual: torch.Tensor | None = None

    def logits(self, features: torch.Tensor) -> torch.Tensor:
        return functional.linear(features[:, : self.weight.shape[1]], self.weight, self.bias)

    def are_unlike(self, features: torch.Tensor, spec: ExpertSpec) -> list[bool]:
        """Return True for each picture that is farther from the good ones than any in training."""
        limit = None if spec.pictures is None else spec.pictures.distance
        if limit is None or self.usual is None:
            return [False] * len(features)
        return (~(usual_distances(features, self.usual) <= limit)).tolist()


@dataclass(frozen=True, slots=True)
class BankHead:
    """bank: (places, N, C), for each place of a map the patches of good pictures there, divided by `scale` (C,).

    At the distance `centre` an image is as likely good as not; its log odds grow by 1 with each `spread` beyond. `bad`
    is the number of the label, of two, that is not good.
    """

    bank: torch.Tensor
    scale: torch.Tensor
    centre: float
    spread: float
    bad: int

    def logits(self, features: torch.Tensor) -> torch.Tensor:
        return bank_logits(bank_distances(features, self.bank, self.scale), self.centre, self.spread, self.bad)

    def are_unlike(self, features: torch.Tensor, _spec: ExpertSpec) -> list[bool]:
        """Return False for each: by its logits, a picture far from good ones is not good."""
        return [False] * len(features)


#: Its `logits` are (B, classes) scores of (B, F) features.
Head = LinearHead | BankHead


def usual_distances(features: torch.Tensor, usual: torch.Tensor) -> torch.Tensor:
    """Return (B,): how far patches are from usual ones (LinearHead), in spreads, at each image's farthest places."""
    mean, weight = usual[:, :, None]
    squares = ((patches_of(features, *usual.shape[1:]) - mean) * weight).square_().mean(2)
    return squares.topk(min(_FARTHEST, len(squares)), 0).values.mean(0).sqrt_()


def bank_distances(features: torch.Tensor, bank: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return (B,): the distance of each image's patch that is farthest from the nearest good one."""
    patches = patches_of(features, *bank.shape[::2]) / scale
    return torch.cdist(patches, bank).amin(2).amax(0)


def bank_logits(distances: torch.Tensor, centre: float, spread: float, bad: int) -> torch.Tensor:
    """Return (B, 2) scores of distances (B,), as BankHead says."""
    scores = (distances - centre) / spread
    pair = (torch.zeros_like(scores), scores)
    return torch.stack(pair if bad else pair[::-1], 1)


def patches_of(features: torch.Tensor, places: int, channels: int) -> torch.Tensor:
    """Return the map at the end of (B, F) features as (places, B, channels)."""
    return features[:, -places * channels :].view(-1, channels, places).permute(2, 0, 1)


def read_head(spec: ExpertSpec) -> Head:
    """Read a head's file and check its bytes. Raises ExpertError."""
    try:
        with open_weights(spec.file) as file:
            header = read_header_from(file.fileno(), spec.file)
            content = file.read(_MAX_HEAD_BYTES)
        check_digest(hashlib.sha256(content).hexdigest(), spec)
        tensors = {entry.name: _tensor(content, header.data_start, entry) for entry in header.entries}
        return _head(header.metadata, tensors, spec)
    except WeightsError as error:
        raise ExpertError(spec.expert, error.message, spec.file) from error
    except ValueError as error:
        message = f"holds numbers of a kind that heads do not have ({error}); train the expert again"
        raise ExpertError(spec.expert, message, spec.file) from error
    except OSError as error:
        raise ExpertError(spec.expert, describe_os_error(error), spec.file) from error


def _tensor(content: bytes, start: int, entry: Entry) -> torch.Tensor:
    if entry.dtype != "F32":
        raise ValueError(entry.dtype)
    stored = torch.frombuffer(bytearray(content[start + entry.begin : start + entry.end]), dtype=torch.uint8)
    return stored.view(torch.float32).view(entry.shape)


def _head(metadata: Mapping[str, str], tensors: Mapping[str, torch.Tensor], spec: ExpertSpec) -> Head:
    if not all(bool(tensor.isfinite().all()) for tensor in tensors.values()):
        raise WeightsError(spec.file, "holds weights that are not finite numbers; train the expert again")
    match metadata.get("head"), tensors:
        case "linear", {"weight": weight, "bias": bias} if weight.shape[:1] == bias.shape == (len(spec.classes),):
            usual = tensors.get("usual")
            has_usual = usual is not None and usual.dim() == 3 and len(usual) == 2
            if not has_usual and spec.pictures is not None and spec.pictures.distance is not None:
                raise WeightsError(spec.file, "lacks the features that `pictures` compares with; train it again")
            return LinearHead(weight, bias, usual if has_usual else None)
        case "bank", {"bank": bank, "scale": scale, "odds": odds} if (
            bank.dim() == 3 and scale.shape == bank.shape[2:] and odds.shape == (3,) and len(spec.classes) == 2
        ):
            centre, spread, bad = odds.tolist()
            if spread <= 0 or bad not in (0, 1):
                raise WeightsError(spec.file, "holds an impossible calibration; train the expert again")
            return BankHead(bank, scale, centre, spread, int(bad))
        case _:
            raise WeightsError(spec.file, f"holds a head of an unknown kind ({metadata.get('head')}); train it again")
