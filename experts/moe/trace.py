"""Routing traces: the experts and weights of each token of a text, and predictions by counting them.

A trace is taken with every expert in memory, teacher-forced: tokens are the text's own.

Shapes: N tokens, L layers, E experts, k a token.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from experts.moe.weights.prepared import PreparedFiles


@dataclass(frozen=True, slots=True)
class Trace:
    """N tokens of P prompts through L layers, k experts a token."""

    index: torch.Tensor  # (N, L, k) int16, best first
    weight: torch.Tensor  # (N, L, k) float16
    token: torch.Tensor  # (N,) integers, ids of the text
    start: torch.Tensor  # (P + 1,) int64, first token of each prompt, and N
    task: torch.Tensor  # (P,) int64, into `tasks`
    tasks: tuple[str, ...]  # domains of the text
    experts: int  # of a layer

    @property
    def prompts(self) -> int:
        return len(self.start) - 1

    @property
    def layers(self) -> int:
        return self.index.shape[1]

    def span(self, prompt: int) -> slice:
        return slice(int(self.start[prompt]), int(self.start[prompt + 1]))


_COLUMNS = ("index", "weight", "token", "start", "task")


def save_trace(prepared: PreparedFiles, name: str, trace: Trace) -> None:
    """Write a trace beside its checkpoint; `name`: TRAIN of experts.moe.weights.prepared."""
    tensors = {column: getattr(trace, column) for column in _COLUMNS}
    prepared.save(name, tensors, {"tasks": list(trace.tasks), "experts": trace.experts})


def load_trace(prepared: PreparedFiles, name: str) -> Trace:
    """Read a trace. Raises ModelError if it is missing, broken or of other weights."""
    with prepared.reading(name) as (tensors, notes):
        columns = {column: tensors[column] for column in _COLUMNS}
        return Trace(**columns, tasks=tuple(notes["tasks"]), experts=int(notes["experts"]))


def shares(index: Sequence[torch.Tensor], experts: int) -> torch.Tensor:
    """Return the shares of tokens by expert, (L, E) float32, rows summing to 1. `index`: (N, k) for each layer."""
    counts = torch.stack([torch.bincount(layer.flatten().long(), minlength=experts)[:experts] for layer in index])
    return counts / counts.sum(dim=1, keepdim=True).float().clamp_min(1.0)


def popularity(trace: Trace) -> torch.Tensor:
    """Return each expert's share of its layer's routed tokens, (L, E) float32; each row sums to 1."""
    return shares(trace.index.unbind(1), trace.experts)


def popularity_by_task(trace: Trace) -> torch.Tensor:
    """Return `popularity` of each task's tokens, (tasks, L, E) float32; zeros for a task without tokens."""
    of_token = trace.task.long().repeat_interleave(trace.start.diff())
    tasks = range(len(trace.tasks))
    return torch.stack([shares(trace.index[of_token == task].unbind(1), trace.experts) for task in tasks])


def save_popularity(prepared: PreparedFiles, trace: Trace) -> None:
    prepared.save("popularity", {"popularity": popularity(trace)})


def load_popularity(prepared: PreparedFiles) -> torch.Tensor:
    """Return `popularity` of the trace, (L, E). Raises ModelError as `PreparedFiles.load`."""
    return prepared.load("popularity")[0]["popularity"]


def affinity(trace: Trace, before: int, layer: int) -> torch.Tensor:
    """Return how tokens with expert i of layer `before` spread over the experts of `layer`: (E, E) float32, row i.

    Each row sums to 1 (DuoServe-MoE Eq. 3, there for neighbours); the row of an expert that no token chose is the
    layer's popularity.
    """
    index = trace.index.long()
    pairs = index[:, before, :, None] * trace.experts + index[:, layer, None, :]
    counts = torch.bincount(pairs.flatten(), minlength=trace.experts**2).view(trace.experts, trace.experts)
    totals = counts.sum(1, keepdim=True)
    return torch.where(totals > 0, counts / totals.clamp(min=1), popularity(trace)[layer])
