"""How good and how fast a model is as it is served: perplexity on held-out text, and time to tokens."""

import math
import random
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from statistics import quantiles
from typing import TYPE_CHECKING, Any

import torch

from experts.moe.cache.link import SlowLink
from experts.moe.cache.metrics import FetchCounts
from experts.moe.errors import ModelError
from experts.moe.gating import StepRow
from experts.moe.weights.prepared import PreparedFiles
from tools.moe.text import HELD_OUT, load_text

if TYPE_CHECKING:
    from experts.moe.arch import MoeArch
    from experts.moe.model.runtime import MoeRuntime


@dataclass(frozen=True, slots=True)
class HeldOutPrompt:
    """A piece of a held-out file. `ids`: (T,) int64."""

    task: str
    ids: torch.Tensor


@dataclass(frozen=True, slots=True)
class TextQuality:
    """Perplexity over all prompts and over each domain's, and what the cache did meanwhile."""

    perplexity: float
    of_domain: dict[str, float]
    tokens: int
    counts: FetchCounts


@dataclass(slots=True)
class DecodeTiming:
    """Seconds to each prompt's first token, and between tokens after it; what the cache did, by phase."""

    first_s: list[float] = field(default_factory=list)
    between_s: list[float] = field(default_factory=list)
    counts: FetchCounts = field(default_factory=FetchCounts)
    decode: FetchCounts = field(default_factory=FetchCounts)
    total_s: float = 0.0

    @property
    def tokens(self) -> int:
        return len(self.first_s) + len(self.between_s)

    def as_dict(self) -> dict[str, float]:
        """Milliseconds and rates for a report."""
        return {
            "ttft_p50_ms": 1000 * percentile(self.first_s, 50),
            "ttft_p95_ms": 1000 * percentile(self.first_s, 95),
            "tpot_p50_ms": 1000 * percentile(self.between_s, 50),
            "tpot_p95_ms": 1000 * percentile(self.between_s, 95),
            "tokens_per_s": self.tokens / self.total_s if self.total_s else 0.0,
        }


def percentile(values: Sequence[float], percent: int) -> float:
    """Interpolated between neighbours; NaN without values."""
    if len(values) < 2:
        return values[0] if values else math.nan
    return quantiles(values, n=100, method="inclusive")[percent - 1]


def held_out_prompts(
    checkpoint: Path, *, of_domain: int, length: int = 256, seed: int = 0, mixed: bool = True
) -> list[HeldOutPrompt]:
    """Prompts of held-out files, as many of each domain: mixed, or one domain after the other.

    Raises ModelError where there is no text yet.
    """
    text = load_text(PreparedFiles(checkpoint), HELD_OUT)
    prompts = [HeldOutPrompt(domain, row) for domain in text.ids for row in text.windows(domain, length, of_domain)]
    if mixed:
        random.Random(seed).shuffle(prompts)
    return prompts


def open_runtime(
    checkpoint: Path,
    mode: str,
    *,
    share: float = 1.0,
    link_ms: float | None = None,
    options: dict[str, Any] | None = None,
    device: str = "cpu",
) -> "MoeRuntime":
    """The model in a mode, with memory for `share` of each layer's experts. Raises ModelError."""
    from experts.moe.model.runtime import MoeRuntime
    from experts.moe.modes import open_mode

    link = SlowLink(link_ms) if link_ms else None
    chosen = open_mode(mode, checkpoint, options or {})
    return MoeRuntime.open(checkpoint, chosen, budget_of(checkpoint, share), device=device, link=link)


def budget_of(checkpoint: Path, share: float) -> int:
    """Bytes of `share` of each layer's experts, whole experts in each layer. Raises ModelError."""
    arch = arch_of(checkpoint)
    return arch.layers * max(1, round(share * arch.experts)) * arch.expert_bytes


def arch_of(checkpoint: Path) -> "MoeArch":
    """What the model is made of. Raises ModelError."""
    from experts.moe.arch import load_config, read_arch
    from experts.moe.weights.checkpoint import read_checkpoint

    config = load_config(checkpoint)
    return read_arch(checkpoint, config, read_checkpoint(checkpoint, config.model_type).dtype)


def require_decoder(checkpoint: Path) -> None:
    """Raise ModelError for a model whose text is not continued but answered by a decoder of its own."""
    arch = arch_of(checkpoint)
    if arch.encoder_layers:
        message = f"{arch.family} has an encoder and a decoder; traces and benchmarks are for models that continue text"
        raise ModelError(checkpoint, message)


@torch.no_grad()
def perplexity(runtime: "MoeRuntime", prompts: Iterable[HeldOutPrompt], *, decoded: int = 0) -> TextQuality:
    """Perplexity of the prompts' own tokens, one prompt after the other (batch 1).

    A prompt is one prefill, but for its last `decoded` tokens, which come one at a time as in decoding.
    """
    before = runtime.cache.metrics.counts.copy()
    loss: dict[str, float] = {}
    count: dict[str, int] = {}
    for number, prompt in enumerate(prompts):
        spent = _losses(runtime, prompt, f"evaluate-{number}", decoded)
        loss[prompt.task] = loss.get(prompt.task, 0.0) + float(spent.sum())
        count[prompt.task] = count.get(prompt.task, 0) + len(spent)
    tokens = sum(count.values())
    return TextQuality(
        perplexity=math.exp(sum(loss.values()) / tokens),
        of_domain={task: math.exp(loss[task] / count[task]) for task in loss},
        tokens=tokens,
        counts=runtime.cache.metrics.counts - before,
    )


def _losses(runtime: "MoeRuntime", prompt: HeldOutPrompt, request: str, decoded: int) -> torch.Tensor:
    """(T - 1,) natural logarithms, negated, of what the model gave to each next token."""
    ids = prompt.ids.to(runtime.model.device)[None]
    prefill = ids.shape[1] - decoded
    logits: list[torch.Tensor] = []
    past = None
    for begin, end in [(0, prefill), *((at, at + 1) for at in range(prefill, ids.shape[1]))]:
        with runtime.step([StepRow(request, prompt.task, end - begin)]):
            output = runtime.model(ids[:, begin:end], past_key_values=past, use_cache=decoded > 0)
        past = output.past_key_values if decoded else None
        logits.append(output.logits[0].float())
    return torch.nn.functional.cross_entropy(torch.cat(logits)[:-1], ids[0, 1:], reduction="none").cpu()


def decode_timing(runtime: "MoeRuntime", prompts: Iterable[HeldOutPrompt], *, new_tokens: int = 32) -> DecodeTiming:
    """Greedy decoding of each prompt in turn (batch 1), with what the cache did meanwhile."""
    metrics = runtime.cache.metrics
    before, decode_before = metrics.counts.copy(), metrics.of_phase["decode"].copy()
    timing = greedy(runtime.model, prompts, new_tokens, lambda row: runtime.step([row]))
    timing.counts = metrics.counts - before
    timing.decode = metrics.of_phase["decode"] - decode_before
    return timing


@torch.no_grad()
def greedy(
    model: Any, prompts: Iterable[HeldOutPrompt], new_tokens: int, step: Callable[[StepRow], Any] | None = None
) -> DecodeTiming:
    """Times of any model's tokens; each is read before the next step begins, on a GPU too."""
    timing = DecodeTiming()
    for number, prompt in enumerate(prompts):
        ids = prompt.ids.to(model.device)[None]
        past = None
        for position in range(new_tokens):
            began = time.perf_counter()
            with step(StepRow(f"decode-{number}", prompt.task, ids.shape[1])) if step else nullcontext():
                output = model(ids, past_key_values=past, use_cache=True, logits_to_keep=1)
            token = int(output.logits[0, -1].argmax())
            spent = time.perf_counter() - began
            (timing.between_s if position else timing.first_s).append(spent)
            timing.total_s += spent
            past = output.past_key_values
            ids = torch.tensor([[token]], device=ids.device)
    return timing
