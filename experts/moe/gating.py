"""What passes between the model, its mode and whoever watches: one step, its rows, and one layer's routing."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch


class ExpertKey(NamedTuple):
    """One expert of a model. `layer` counts the model's mixture-of-experts layers from 0, dense ones left out."""

    layer: int
    expert: int


class ExpertWeights(NamedTuple):
    """Views of one slot. `gate_up` is (2I, H), the gate's rows first; (I, H) where the family has no gated experts.

    `down` is (H, I).
    """

    gate_up: torch.Tensor
    down: torch.Tensor


@dataclass(frozen=True, slots=True)
class StepRow:
    """One sequence of a step. `tokens` counts its positions in the step, padding included."""

    request: str
    task: str | None
    tokens: int


@dataclass(frozen=True, slots=True)
class ForwardStep:
    """One forward of the model. Prefill means that nothing came before, not that there is more than one token.

    Tokens of a step's routings lie row after row: row 0 has the first `rows[0].tokens` of them.
    """

    number: int
    phase: Literal["prefill", "decode"]
    rows: tuple[StepRow, ...]

    @property
    def tokens(self) -> int:
        return sum(row.tokens for row in self.rows)


@dataclass(frozen=True, slots=True)
class Routing:
    """What one layer's gate said of one step's tokens; T tokens, E experts, k of them for each token.

    An index may also be the sentinel E: nothing is computed for it and its weight does not count. An index above E is
    an expert that only the mode knows (a united expert, say), and computed from the weights that the mode gives.
    """

    layer: int
    #: (T, H): what the gate saw and the experts will see.
    hidden: torch.Tensor
    #: (T, E) before the softmax, nothing masked.
    logits: torch.Tensor
    #: (T, k) int64, best first.
    index: torch.Tensor
    #: (T, k): what each expert's output is multiplied by.
    weight: torch.Tensor

    def wanted(self) -> tuple[int, ...]:
        """The distinct experts of this layer, ascending, the sentinel left out."""
        sentinel = self.logits.shape[-1]
        # A set of Python numbers: for one token five times as fast as Tensor.unique, for a prompt no slower.
        return tuple(sorted(set(self.index.flatten().tolist()) - {sentinel}))


#: What a mode gives a layer to compute with: experts in ascending order, each valid until the next one is asked for.
ExpertIterator = Iterator[tuple[int, ExpertWeights]]
