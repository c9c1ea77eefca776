"""Training eMoE's predictor on a routing trace, and measuring the sensitivity of tasks."""

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import partial

import torch
from torch import nn

from experts.moe.model.mode import FitInputs
from experts.moe.model.runtime import MoeRuntime, read_model
from experts.moe.modes.emoe import sensitivity
from experts.moe.modes.emoe.predictor import ExpertPredictor
from experts.moe.trace import Trace, load_trace, popularity, popularity_by_task, shares
from experts.moe.weights.prepared import TRAIN, PreparedFiles

PART = "emoe/predictor"
#: Training text for the sensitivity of each task: tokens of a window, and windows.
_WINDOW_TOKENS, _WINDOWS = 256, 24


@dataclass(frozen=True, slots=True)
class EmoeRecipe:
    """Settings of the predictor and its training; stored with it, and compared to tell whether to train again."""

    #: Past prompts in the predictor's input; maximum distance of the predicted prompt from them.
    history: int = 8
    ahead: int = 8
    width: int = 64
    blocks: int = 2
    steps: int = 400
    batch: int = 32
    learning_rate: float = 3e-3
    seed: int = 6


def fit(inputs: FitInputs) -> None:
    """Train the predictor, and measure the sensitivity of tasks on training text."""
    prepared, recipe = inputs.prepared, EmoeRecipe()
    trace = load_trace(prepared, TRAIN)
    if prepared.is_made(PART, provenance(trace, recipe)):
        inputs.progress(f"{PART}, there already", 1, 1)
    else:
        save_predictor(prepared, fit_predictor(trace, recipe, partial(inputs.progress, PART)), trace, recipe)
    _measure_sensitivity(inputs)


def _measure_sensitivity(inputs: FitInputs) -> None:
    _, arch, _ = read_model(inputs.prepared.checkpoint)
    windows = inputs.training_windows(_WINDOW_TOKENS, _WINDOWS)
    mode = sensitivity.WrongRouting()
    budget_bytes = len(arch.expert_keys) * arch.expert_bytes
    with closing(MoeRuntime.open(inputs.prepared.checkpoint, mode, budget_bytes)) as runtime:
        sensitivity.measure(runtime, mode, windows, inputs.prepared, partial(inputs.progress, sensitivity.PART))


def prompts_of(trace: Trace) -> list[list[int]]:
    return [torch.nonzero(trace.task == task).flatten().tolist() for task in range(len(trace.tasks))]


def prompt_spreads(trace: Trace) -> torch.Tensor:
    """Return the shares of each prompt's tokens at the experts, (P, L, E)."""
    return torch.stack(
        [shares(trace.index[trace.span(prompt)].unbind(1), trace.experts) for prompt in range(trace.prompts)]
    )


class PromptStream:
    """An endless stream of prompts: tasks drawn alike (§2.1), each task's `prompts_of` in order from a random start."""

    def __init__(self, prompts_of: Sequence[Sequence[int]], generator: torch.Generator) -> None:
        self._prompts = [list(prompts) for prompts in prompts_of if len(prompts)]
        self._tasks = [task for task, prompts in enumerate(prompts_of) if len(prompts)]
        self._generator = generator
        self._at = [self._draw(len(prompts)) for prompts in self._prompts]

    def take(self) -> tuple[int, int]:
        """Return the next prompt's task and number."""
        which = self._draw(len(self._prompts))
        prompts = self._prompts[which]
        self._at[which] = (self._at[which] + 1) % len(prompts)
        return self._tasks[which], prompts[self._at[which]]

    def _draw(self, count: int) -> int:
        return int(torch.randint(count, (1,), generator=self._generator))


def fit_predictor(
    trace: Trace, recipe: EmoeRecipe, report: Callable[[int, int, str], None] = lambda *_: None
) -> ExpertPredictor:
    """Train a predictor of the trace's tasks, reproducibly; `report` gets steps done, steps in all, a note."""
    spread, prompts = prompt_spreads(trace), prompts_of(trace)
    generator = torch.Generator().manual_seed(recipe.seed)
    with torch.random.fork_rng():
        torch.manual_seed(recipe.seed)
        prior = torch.cat([popularity_by_task(trace), popularity(trace)[None]])  # last: requests of unknown task
        predictor = _new(prior, recipe).train()
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
            report(step + 1, recipe.steps, f", loss {loss.item():.3f}")
    return predictor.eval()


def _example(
    predictor: ExpertPredictor,
    spread: torch.Tensor,
    prompts: Sequence[Sequence[int]],
    recipe: EmoeRecipe,
    generator: torch.Generator,
) -> tuple[torch.Tensor, ...]:
    """Draw a past of a stream, and a later prompt whose layers are seen in a random order or not at all.

    The prompt comes up to `ahead` prompts after the past: in serving, too, the predictor runs every few prompts.
    """
    stream = PromptStream(prompts, generator)
    past = [stream.take() for _ in range(recipe.history)]
    for _ in range(int(torch.randint(recipe.ahead, (1,), generator=generator))):
        stream.take()
    task, prompt = stream.take()
    unknown = len(predictor.prior) - 1
    forget = torch.rand(recipe.history + 1, generator=generator) < 0.1
    order = torch.randperm(predictor.layers, generator=generator).tolist()
    count = predictor.layers * int(torch.randint(2, (1,), generator=generator))
    return (
        spread[[number for _, number in past]],
        torch.tensor([number for number, _ in past]).masked_fill(forget[1:], unknown),
        torch.tensor(unknown if forget[0] else task),
        spread[prompt],
        predictor.order(order, count)[0],
    )


def save_predictor(prepared: PreparedFiles, predictor: ExpertPredictor, trace: Trace, recipe: EmoeRecipe) -> None:
    prepared.save(PART, predictor.state_dict(), {"made": provenance(trace, recipe), "tasks": list(trace.tasks)})


def load_predictor(prepared: PreparedFiles) -> tuple[ExpertPredictor, tuple[str, ...]]:
    """Load the predictor and its tasks by number; one more number is for all other tasks. Raises ModelError."""
    tensors, notes = prepared.load(PART)
    predictor = _new(tensors["prior"], EmoeRecipe(**notes["made"]["recipe"]))
    predictor.load_state_dict(tensors)
    return predictor.eval(), tuple(notes["tasks"])


def _new(prior: torch.Tensor, recipe: EmoeRecipe) -> ExpertPredictor:
    return ExpertPredictor(prior, history=recipe.history, width=recipe.width, blocks=recipe.blocks)


def provenance(trace: Trace, recipe: EmoeRecipe) -> dict[str, object]:
    """Return the origin of a predictor: one of another origin is trained again."""
    return {"recipe": asdict(recipe), "prompts": trace.prompts, "tokens": len(trace.token)}
