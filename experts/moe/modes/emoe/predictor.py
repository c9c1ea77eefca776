"""The predictor of eMoE (§3.2.2): an XLNet from the routing of past prompts to that of the next ones.

An element of its sequence is the distribution of one prompt's tokens over the experts of one layer. Past prompts come
first, then the task of the predicted prompt, then its layers, masked: XLNet learns them in random orders, each from the
past and from the layers before it in the order. So one network predicts in both ways of the paper: all layers at once
from the past prompts (eMoE-A), or one after the other, each also from those before it (eMoE-L).
"""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import nn

from experts.moe.library import transformers

Variant = Literal["all", "layer"]


class ExpertPredictor(nn.Module):
    """Learns the deviation from `prior`, (tasks + 1, L, E): popularity by task and, last, for unknown tasks."""

    prior: torch.Tensor

    def __init__(self, prior: torch.Tensor, *, history: int = 8, width: int = 64, blocks: int = 2) -> None:
        super().__init__()
        tasks, self.layers, self.experts = prior.shape
        self.history = history
        self.width = width
        library = transformers()
        self.body = library.XLNetModel(
            library.XLNetConfig(
                vocab_size=1,
                d_model=width,
                n_layer=blocks,
                n_head=4,
                d_inner=2 * width,
                dropout=0.1,
                pad_token_id=None,
                bos_token_id=None,
                eos_token_id=None,
            )
        )
        self.body.word_embedding = nn.Identity()  # elements come as vectors
        self.content = nn.Linear(self.experts, width)
        self.layer = nn.Embedding(self.layers, width)
        self.task = nn.Embedding(tasks, width)
        self.absent = nn.Parameter(torch.zeros(width))
        # An untrained network predicts the prior.
        self.head = nn.Parameter(torch.zeros(self.layers, width, self.experts))
        self.register_buffer("prior", prior.float())

    def forward(
        self,
        past: torch.Tensor,
        past_tasks: torch.Tensor,
        task: torch.Tensor,
        target: torch.Tensor,
        hidden: torch.Tensor,
    ) -> torch.Tensor:
        """Log-probabilities (B, L, E) of a prompt's layers.

        past: (B, H, L, E), oldest first; past_tasks: (B, H) int64, -1 without a prompt; task: (B,) int64;
        target: (B, L, E), the known layers of the prompt; hidden: (B, L, L) bool, true if layer i may not see layer j.
        """
        batch, length = len(task), self.history * self.layers
        layers = self.layer(torch.arange(self.layers, device=task.device))
        missing = past_tasks < 0
        known = past_tasks.clamp_min(0)
        elements = self.content(self.experts * (past - self.prior[known])) + layers + self.task(known)[:, :, None]
        elements = torch.where(missing[:, :, None, None], self.absent, elements)
        own = self.content(self.experts * (target - self.prior[task])) + layers + self.task(task)[:, None]
        sequence = torch.cat([elements.flatten(1, 2), self.task(task)[:, None], own], dim=1)
        first = length + 1
        mask = torch.zeros(batch, first + self.layers, first + self.layers, device=task.device)
        mask[:, :first, first:] = 1  # the past may not look ahead
        mask[:, first:, first:] = hidden.float()
        where = torch.zeros(batch, self.layers, first + self.layers, device=task.device)
        where[:, :, first:] = torch.eye(self.layers, device=task.device)
        # Attention distinguishes segments; here a segment is a task.
        segments = torch.cat(
            [past_tasks.repeat_interleave(self.layers, 1), task[:, None].expand(-1, 1 + self.layers)], 1
        )
        seen = self.body(
            inputs_embeds=sequence, perm_mask=mask, target_mapping=where, token_type_ids=segments, use_mems=False
        )
        learned = torch.einsum("bld,lde->ble", seen.last_hidden_state, self.head)
        return torch.log_softmax(learned + self.prior[task].clamp_min(1e-4).log(), dim=-1)

    @torch.no_grad()
    def predict(
        self, past: Sequence[tuple[int, torch.Tensor]], tasks: Sequence[int], variant: Variant = "all"
    ) -> torch.Tensor:
        """Predict the next prompts of each task, (tasks, L, E), from `past`: task and (L, E), oldest first."""
        rows, numbers = self._past(past)
        task = torch.tensor(tasks, device=self.head.device)
        rows, numbers = (part.expand(len(tasks), *part.shape) for part in (rows, numbers))
        target = torch.zeros(len(tasks), self.layers, self.experts, device=self.head.device)
        if variant == "all":
            return self(rows, numbers, task, target, self.order(range(self.layers), 0)).exp()
        hidden = self.order(range(self.layers), self.layers)
        for layer in range(self.layers):
            target[:, layer] = self(rows, numbers, task, target, hidden)[:, layer].exp()
        return target

    def _past(self, past: Sequence[tuple[int, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
        rows = torch.zeros(self.history, self.layers, self.experts, device=self.head.device)
        numbers = torch.full((self.history,), -1, device=self.head.device)
        for place, (task, spread) in enumerate(reversed(past[-self.history :]), 1):
            rows[-place] = spread
            numbers[-place] = task
        return rows, numbers

    def order(self, order: Sequence[int], seen: int) -> torch.Tensor:
        """Return `hidden` of `forward`, (1, L, L): each of the first `seen` layers of `order` is seen by later ones."""
        place = torch.empty(self.layers, dtype=torch.long, device=self.head.device)
        place[list(order)] = torch.arange(self.layers, device=self.head.device)
        return ((place[None, :] >= place[:, None]) | (place[None, :] >= seen))[None]
