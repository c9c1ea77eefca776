"""Training eMoE's predictor on a routing trace, and measuring how sensitive tasks are to wrong routing (§2.2.3)."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import islice

import torch
from torch import nn

from experts.moe.errors import ModelError
from experts.moe.gating import Routing
from experts.moe.model.mode import FitProgress, Mode, TrainingWindows
from experts.moe.model.runtime import MoeRuntime, read_model
from experts.moe.modes.emoe.predictor import ExpertPredictor
from experts.moe.trace import Trace, load_trace, popularity, popularity_by_task, shares
from experts.moe.weights.prepared import TRAIN, PreparedFiles

PREDICTOR = "emoe/predictor"
SENSITIVITY = "emoe/sensitivity"
#: Training text for the sensitivity of each task: tokens of a window, and windows.
_WINDOW_TOKENS, _WINDOWS = 256, 24
#: Weight of a layer that costs no accuracy.
_MIN_WEIGHT = 0.01


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


def fit(prepared: PreparedFiles, windows: TrainingWindows, progress: FitProgress) -> None:
    trace, recipe = load_trace(prepared, TRAIN), EmoeRecipe()
    if prepared.is_made(PREDICTOR, provenance(trace, recipe)):
        progress(f"{PREDICTOR}, there already", 1, 1)
    else:
        save_predictor(prepared, fit_predictor(trace, recipe, partial(progress, PREDICTOR)), trace, recipe)
    measure_sensitivity(prepared, windows(_WINDOW_TOKENS, _WINDOWS), progress)


# The predictor


def prompt_stream(prompts_of: Sequence[Sequence[int]], generator: torch.Generator) -> Iterator[tuple[int, int]]:
    """Yield prompts (task, number) without end: tasks drawn alike (§2.1), each one's in order from a random start."""

    def draw(count: int) -> int:
        return int(torch.randint(count, (1,), generator=generator))

    tasks = [(task, prompts) for task, prompts in enumerate(prompts_of) if prompts]
    at = [draw(len(prompts)) for _, prompts in tasks]
    while True:
        which = draw(len(tasks))
        task, prompts = tasks[which]
        at[which] = (at[which] + 1) % len(prompts)
        yield task, prompts[at[which]]


def fit_predictor(
    trace: Trace, recipe: EmoeRecipe, report: Callable[[int, int, str], None] = lambda *_: None
) -> ExpertPredictor:
    """Train a predictor of the trace's tasks, reproducibly; `report` gets steps done, steps in all, a note."""
    spans = [trace.index[trace.span(prompt)] for prompt in range(trace.prompts)]
    #: Shares of each prompt's tokens at the experts, (P, L, E), and the prompts of each task.
    spread = torch.stack([shares(index.unbind(1), trace.experts) for index in spans])
    prompts = [torch.nonzero(trace.task == task).flatten().tolist() for task in range(len(trace.tasks))]
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
    stream = prompt_stream(prompts, generator)
    past = [*islice(stream, recipe.history)]
    for _ in range(int(torch.randint(recipe.ahead, (1,), generator=generator))):
        next(stream)
    task, prompt = next(stream)
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
    prepared.save(PREDICTOR, predictor.state_dict(), {"made": provenance(trace, recipe), "tasks": list(trace.tasks)})


def load_predictor(prepared: PreparedFiles) -> tuple[ExpertPredictor, tuple[str, ...]]:
    """Load the predictor and its tasks by number; one more number is for all other tasks. Raises ModelError."""
    tensors, notes = prepared.load(PREDICTOR)
    predictor = _new(tensors["prior"], EmoeRecipe(**notes["made"]["recipe"]))
    predictor.load_state_dict(tensors)
    return predictor.eval(), tuple(notes["tasks"])


def _new(prior: torch.Tensor, recipe: EmoeRecipe) -> ExpertPredictor:
    return ExpertPredictor(prior, history=recipe.history, width=recipe.width, blocks=recipe.blocks)


def provenance(trace: Trace, recipe: EmoeRecipe) -> dict[str, object]:
    """Return the origin of a predictor: one of another origin is trained again."""
    return {"recipe": asdict(recipe), "prompts": trace.prompts, "tokens": len(trace.token)}


# Sensitivity


class WrongRouting(Mode):
    """Sends every token in the layer `wrong` to random experts, with the weights of the chosen ones."""

    lossless = False

    def restart(self, wrong: int | None) -> None:
        """Route this layer wrongly from now on, with the same draws each time; None for none."""
        self._wrong = wrong
        self._generator = torch.Generator().manual_seed(0)

    def route(self, routing: Routing) -> Routing:
        if routing.layer != self._wrong:
            return routing
        tokens, experts = routing.logits.shape
        drawn = torch.rand(tokens, experts, generator=self._generator).topk(routing.index.shape[1]).indices
        drawn = drawn.to(routing.index.device)
        return replace(routing, index=torch.where(routing.index < experts, drawn, routing.index))


def measure_sensitivity(prepared: PreparedFiles, windows: Mapping[str, torch.Tensor], progress: FitProgress) -> None:
    """Measure the accuracy of each task, as it is and with one layer after the other routed wrongly.

    (The paper routes more and more layers wrongly, from input to output.) Accuracy is the share of next tokens that the
    model finds. Each pass is saved as it ends, and none is repeated.
    """
    mode, (_, arch, _) = WrongRouting(), read_model(prepared.checkpoint)
    shapes = {task: list(rows.shape) for task, rows in windows.items()}
    accuracy: dict[str, dict[str, float]] = {}
    with suppress(ModelError):
        _, stored = prepared.load(SENSITIVITY)
        accuracy = stored["accuracy"] if stored["windows"] == shapes else {}
    passes = [(task, layer) for task in windows for layer in (None, *range(arch.layers))]
    budget_bytes = len(arch.expert_keys) * arch.expert_bytes
    with closing(MoeRuntime.open(prepared.checkpoint, mode, budget_bytes)) as runtime:
        for number, (task, layer) in enumerate(passes, 1):
            of_task = accuracy.setdefault(task, {})
            if _name(layer) not in of_task:
                mode.restart(layer)
                of_task[_name(layer)] = _accuracy(runtime, windows[task])
                prepared.save(SENSITIVITY, {}, {"windows": shapes, "layers": arch.layers, "accuracy": accuracy})
            progress(SENSITIVITY, number, len(passes))


def _name(layer: int | None) -> str:
    return "" if layer is None else str(layer)


@torch.no_grad()
def _accuracy(runtime: MoeRuntime, windows: torch.Tensor) -> float:
    right = 0
    for batch in windows.split(8):
        ids = batch.to(runtime.model.device)
        best = runtime.model(ids, use_cache=False).logits[:, :-1].argmax(-1)
        right += int((best == ids[:, 1:]).sum())
    return right / (len(windows) * (windows.shape[1] - 1))


def load_sensitivity(prepared: PreparedFiles) -> dict[str | None, tuple[float, ...]]:
    """Return s of Eq. 2 for each task and layer, graded (the paper: 0 or 1): the share of accuracy that is lost."""
    weights: dict[str | None, tuple[float, ...]] = {}
    with prepared.reading(SENSITIVITY) as (_, stored):
        for task, accuracy in stored["accuracy"].items():
            left = [accuracy[_name(layer)] / max(accuracy[_name(None)], 1e-9) for layer in range(stored["layers"])]
            weights[task] = tuple(max(_MIN_WEIGHT, 1.0 - share) for share in left)
    return weights
