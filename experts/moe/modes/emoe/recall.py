"""How good the predictor is, beside the simpler ways to name the experts of prompts to come."""

import torch

from experts.moe.modes.emoe.fitting import PromptStream, prompt_spreads, prompts_of
from experts.moe.modes.emoe.predictor import ExpertPredictor
from experts.moe.trace import Trace


@torch.no_grad()
def recalls(
    predictor: ExpertPredictor, trace: Trace, period: int, experts: int, *, prompts: int = 400, seed: int = 0
) -> dict[str, float]:
    """Share of a stream's routing (tokens and their k choices) that falls on the `experts` named for each layer.

    Named every `period` prompts, from what was before, for each prompt of the period by its task. `popularity`: those
    of all training; `popularity of the task`; `last prompt`: those of the last prompt before the period; `emoe-A` and
    `emoe-L`: the predictor, all layers at once or one after the other.
    """
    spread = prompt_spreads(trace)
    stream = PromptStream(prompts_of(trace), torch.Generator().manual_seed(seed))
    past = [stream.take() for _ in range(predictor.history)]
    tasks = list(range(len(trace.tasks)))
    got: dict[str, float] = {}
    for _ in range(prompts // period):
        seen = [(task, spread[number]) for task, number in past]
        every, last = predictor.prior[-1], seen[-1][1]
        ways = {
            "popularity": every.expand(len(tasks), -1, -1),
            "popularity of the task": predictor.prior[tasks],
            "last prompt": last.expand(len(tasks), -1, -1),
            "emoe-A": predictor.predict(seen, tasks, "all"),
            "emoe-L": predictor.predict(seen, tasks, "layer"),
        }
        coming = [stream.take() for _ in range(period)]
        for name, guess in ways.items():
            named = guess.topk(experts, dim=-1).indices
            caught = sum(float(spread[number].gather(1, named[task]).sum(1).mean()) for task, number in coming)
            got[name] = got.get(name, 0.0) + caught
        past = (past + coming)[-predictor.history :]
    return {name: caught / (prompts // period * period) for name, caught in got.items()}
