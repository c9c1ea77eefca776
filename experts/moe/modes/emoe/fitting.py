"""Training eMoE's predictor on a routing trace, and keeping it beside the checkpoint."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import torch
from torch import nn

from experts.moe.modes.emoe.predictor import ExpertPredictor, spreads
from experts.moe.trace import Trace, popularity, popularity_by_task
from experts.moe.weights.prepared import PreparedFiles

PART = "emoe/predictor"


@dataclass(frozen=True, slots=True)
class EmoeRecipe:
    """How the predictor is made and trained; kept beside it, and compared."""

    #: Past prompts that it sees; how many prompts later the predicted one may come at most.
    history: int = 8
    ahead: int = 8
    width: int = 64
    blocks: int = 2
    steps: int = 400
    batch: int = 32
    learning_rate: float = 3e-3
    seed: int = 6


def prompts_of(trace: Trace) -> list[list[int]]:
    """The prompts of each task, in their order."""
    return [torch.nonzero(trace.task == task).flatten().tolist() for task in range(len(trace.tasks))]


def prompt_spreads(trace: Trace) -> torch.Tensor:
    """(P, L, E): how each prompt's tokens spread over the experts."""
    return torch.stack(
        [spreads(trace.index[trace.span(prompt)].unbind(1), trace.experts) for prompt in range(trace.prompts)]
    )


class PromptStream:
    """Prompts of several tasks as they might arrive: tasks drawn alike (§2.1), each task's texts in their order.

    `prompts_of[t]`: numbers of the prompts of task t. Endless; each task begins at a drawn place and goes round.
    """

    def __init__(self, prompts_of: Sequence[Sequence[int]], generator: torch.Generator) -> None:
        self._prompts = [list(prompts) for prompts in prompts_of if len(prompts)]
        self._tasks = [task for task, prompts in enumerate(prompts_of) if len(prompts)]
        self._generator = generator
        self._at = [self._draw(len(prompts)) for prompts in self._prompts]

    def take(self) -> tuple[int, int]:
        """The next prompt's task and number."""
        which = self._draw(len(self._prompts))
        prompts = self._prompts[which]
        self._at[which] = (self._at[which] + 1) % len(prompts)
        return self._tasks[which], prompts[self._at[which]]

    def _draw(self, count: int) -> int:
        return int(torch.randint(count, (1,), generator=self._generator))


def fit_predictor(
    trace: Trace, recipe: EmoeRecipe, say: Callable[[int, float], None] = lambda _, __: None
) -> ExpertPredictor:
    """A predictor of the trace's tasks; the same trace and seed make the same. `say(step, loss)` hears of progress."""
    spread, prompts = prompt_spreads(trace), prompts_of(trace)
    generator = torch.Generator().manual_seed(recipe.seed)
    with torch.random.fork_rng():
        torch.manual_seed(recipe.seed)
        predictor = _new(_prior(trace), recipe).train()
        optimiser = torch.optim.AdamW(predictor.parameters(), lr=recipe.learning_rate, weight_decay=0.01)
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimiser, recipe.learning_rate, total_steps=recipe.steps, cycle_momentum=False
        )
        for step in range(recipe.steps):
            examples = [_example(predictor, spread, prompts, recipe, generator) for _ in range(recipe.batch)]
            past, past_tasks, task, target, hidden = (torch.stack(column) for column in zip(*examples, strict=True))
            loss = -(target * predictor(past, past_tasks, task, target, hidden)).sum(-1).mean()
            loss.backward()
            nn.utils.clip_grad_norm_(predictor.parameters(), 1.0)
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
            schedule.step()
            say(step + 1, loss.item())
    return predictor.eval()


def _example(
    predictor: ExpertPredictor,
    spread: torch.Tensor,
    prompts: Sequence[Sequence[int]],
    recipe: EmoeRecipe,
    generator: torch.Generator,
) -> tuple[torch.Tensor, ...]:
    """A stretch of a stream: its past, and a prompt behind it, its layers seen in a random order or not at all.

    The prompt comes up to `ahead` prompts after the past, as it does when the predictor is asked every few prompts.
    """
    stream = PromptStream(prompts, generator)
    past = [stream.take() for _ in range(recipe.history)]
    for _ in range(int(torch.randint(recipe.ahead, (1,), generator=generator))):
        stream.take()
    task, prompt = stream.take()
    unknown = len(predictor.prior) - 1
    forget = torch.rand(recipe.history + 1, generator=generator) < 0.1
    order = torch.randperm(predictor.layers, generator=generator).tolist()
    seen = predictor.layers * int(torch.randint(2, (1,), generator=generator))
    return (
        spread[[number for _, number in past]],
        torch.tensor([number for number, _ in past]).masked_fill(forget[1:], unknown),
        torch.tensor(unknown if forget[0] else task),
        spread[prompt],
        predictor.order(order, seen)[0],
    )


def is_fitted(prepared: PreparedFiles, trace: Trace, recipe: EmoeRecipe) -> bool:
    """Whether a predictor is there that was made from as much in the same way."""
    return prepared.has(PART) and prepared.load(PART)[1]["made"] == _made(trace, recipe)


def save_predictor(prepared: PreparedFiles, predictor: ExpertPredictor, trace: Trace, recipe: EmoeRecipe) -> None:
    notes = {"made": _made(trace, recipe), "tasks": list(trace.tasks)}
    prepared.save(PART, predictor.state_dict(), notes)


def load_predictor(prepared: PreparedFiles) -> tuple[ExpertPredictor, tuple[str, ...]]:
    """The predictor and the tasks that it knows, by number; one number more is for all others. Raises ModelError."""
    tensors, notes = prepared.load(PART)
    predictor = _new(tensors["prior"], EmoeRecipe(**notes["made"]["recipe"]))
    predictor.load_state_dict(tensors)
    return predictor.eval(), tuple(notes["tasks"])


def _new(prior: torch.Tensor, recipe: EmoeRecipe) -> ExpertPredictor:
    return ExpertPredictor(prior, history=recipe.history, width=recipe.width, blocks=recipe.blocks)


def _prior(trace: Trace) -> torch.Tensor:
    """(tasks + 1, L, E): the last is for requests of unknown task."""
    return torch.cat([popularity_by_task(trace), popularity(trace)[None]])


def _made(trace: Trace, recipe: EmoeRecipe) -> dict[str, object]:
    return {"recipe": asdict(recipe), "prompts": trace.prompts, "tokens": len(trace.token)}
