"""Routing traces: which experts each token of a text went to, with what weight. Predictors are fitted on them.

A trace is taken with every expert in memory, teacher-forced: tokens are the text's own. Routing of a token depends on
what stands before it only, so the first tokens of a prompt count as prefill and the others as decode steps.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from experts.moe.errors import ModelError
from experts.moe.weights.prepared import PreparedFiles


@dataclass(frozen=True, slots=True)
class Trace:
    """N tokens of P prompts through L layers, k experts a token."""

    index: torch.Tensor  # (N, L, k) int16, best first
    weight: torch.Tensor  # (N, L, k) float16
    token: torch.Tensor  # (N,) int32, ids of the text
    decode: torch.Tensor  # (N,) bool, false where the token belongs to the prefill
    start: torch.Tensor  # (P + 1,) int64, first token of each prompt, and N
    task: torch.Tensor  # (P,) int16, into `tasks`
    tasks: tuple[str, ...]  # domains of the text
    experts: int  # of a layer

    @property
    def prompts(self) -> int:
        return len(self.start) - 1

    @property
    def layers(self) -> int:
        return self.index.shape[1]

    def span(self, prompt: int) -> slice:
        """The tokens of one prompt."""
        return slice(int(self.start[prompt]), int(self.start[prompt + 1]))

    def token_tasks(self) -> torch.Tensor:
        """(N,) int64, the task of each token."""
        return self.task.long().repeat_interleave(self.start.diff())


def save_trace(prepared: PreparedFiles, name: str, trace: Trace) -> None:
    """Write a trace beside its checkpoint; `name` is TRAIN or HELD_OUT of experts.moe.weights.prepared."""
    tensors = {
        "index": trace.index.to(torch.int16),
        "weight": trace.weight.to(torch.float16),
        "token": trace.token.to(torch.int32),
        "decode": trace.decode.to(torch.uint8),
        "start": trace.start.to(torch.int64),
        "task": trace.task.to(torch.int16),
    }
    prepared.save(name, tensors, {"tasks": list(trace.tasks), "experts": trace.experts})


def load_trace(prepared: PreparedFiles, name: str) -> Trace:
    """Read what `save_trace` wrote. Raises ModelError where it is missing, broken or of other weights."""
    tensors, notes = prepared.load(name)
    try:
        return Trace(
            index=tensors["index"],
            weight=tensors["weight"],
            token=tensors["token"],
            decode=tensors["decode"].bool(),
            start=tensors["start"],
            task=tensors["task"],
            tasks=tuple(notes["tasks"]),
            experts=int(notes["experts"]),
        )
    except KeyError as missing:
        raise ModelError(prepared.path(name), f"is no trace: {missing} is not in it") from missing


def join_traces(traces: Sequence[Trace]) -> Trace:
    """One trace of several of the same model, in their order; tasks keep their names."""
    tasks = tuple(dict.fromkeys(task for each in traces for task in each.tasks))
    numbers = [torch.tensor([tasks.index(task) for task in each.tasks])[each.task.long()] for each in traces]
    lengths = torch.cat([each.start.diff() for each in traces])
    return Trace(
        index=torch.cat([each.index for each in traces]),
        weight=torch.cat([each.weight for each in traces]),
        token=torch.cat([each.token for each in traces]),
        decode=torch.cat([each.decode for each in traces]),
        start=torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]),
        task=torch.cat(numbers).to(torch.int16),
        tasks=tasks,
        experts=traces[0].experts,
    )


def popularity(trace: Trace) -> torch.Tensor:
    """(L, E) float32: the share of a layer's routed tokens that went to each expert; each row sums to 1."""
    return torch.stack([_share(trace.index[:, layer], trace.experts) for layer in range(trace.layers)])


def popularity_by_task(trace: Trace) -> torch.Tensor:
    """(tasks, L, E) float32: `popularity` of each task's tokens alone; zeros for a task without tokens."""
    of_token = trace.token_tasks()
    rows = [
        torch.stack([_share(trace.index[of_token == task, layer], trace.experts) for layer in range(trace.layers)])
        for task in range(len(trace.tasks))
    ]
    return torch.stack(rows)


def save_popularity(prepared: PreparedFiles, trace: Trace) -> None:
    """Write both of the training trace, where modes that start from popularity find them."""
    tensors = {"popularity": popularity(trace), "by_task": popularity_by_task(trace)}
    prepared.save("popularity", tensors, {"tasks": list(trace.tasks)})


def load_popularity(prepared: PreparedFiles) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """(L, E) over all tasks, and the same of each task by name. Raises ModelError as `PreparedFiles.load` does."""
    tensors, notes = prepared.load("popularity")
    tasks: list[Any] = notes["tasks"]
    return tensors["popularity"], dict(zip(tasks, tensors["by_task"], strict=True))


def _share(index: torch.Tensor, experts: int) -> torch.Tensor:
    counts = torch.bincount(index.flatten().long(), minlength=experts)[:experts].float()
    return counts / counts.sum().clamp(min=1.0)
