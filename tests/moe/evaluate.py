"""Quality and speed of a served model: perplexity on held-out text, and the times of its tokens."""

import math
import random
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from experts.moe.cache.slot_ledger import FetchCounts
from experts.moe.gating import StepRow
from experts.moe.weights.prepared import PreparedFiles
from tests.moe.corpus import DOMAINS, MAX_CHARACTERS, CorpusDocument, collect
from tools.moe.text import TRAIN, encode, load_text, read_tokenizer, save_text

if TYPE_CHECKING:
    from experts.moe.model.runtime import MoeRuntime


#: Text of files that nothing is fitted on.
HELD_OUT = "text/heldout"


@dataclass(frozen=True, slots=True)
class HeldOutPrompt:
    """A piece of a held-out file. `ids`: (T,) int64."""

    task: str
    ids: torch.Tensor


@dataclass(frozen=True, slots=True)
class TextQuality:
    """Perplexity over all prompts and of each domain, and the cache's counts meanwhile."""

    perplexity: float
    of_domain: dict[str, float]
    tokens: int
    counts: FetchCounts


@dataclass(slots=True)
class DecodeTiming:
    """Seconds to each prompt's first token and between later ones; the cache's counts, in total and while decoding."""

    first_s: list[float] = field(default_factory=list)
    between_s: list[float] = field(default_factory=list)
    counts: FetchCounts = field(default_factory=FetchCounts)
    decode: FetchCounts = field(default_factory=FetchCounts)
    total_s: float = 0.0

    @property
    def tokens(self) -> int:
        return len(self.first_s) + len(self.between_s)

    def as_dict(self) -> dict[str, float]:
        """Return milliseconds and rates for a report."""
        return {
            "ttft_p50_ms": _percentile_ms(self.first_s, 50),
            "ttft_p95_ms": _percentile_ms(self.first_s, 95),
            "tpot_p50_ms": _percentile_ms(self.between_s, 50),
            "tpot_p95_ms": _percentile_ms(self.between_s, 95),
            "tokens_per_s": self.tokens / self.total_s if self.total_s else 0.0,
        }


def _percentile_ms(seconds: Sequence[float], percent: int) -> float:
    return 1000 * float(np.percentile(seconds, percent)) if seconds else math.nan


def texts_of(documents: Iterable[CorpusDocument], *, held_out: bool) -> dict[str, list[str]]:
    """Return one side of the corpus, by domain."""
    side = [document for document in documents if document.held_out == held_out]
    return {domain: [document.text for document in side if document.domain == domain] for domain in DOMAINS}


def make_texts(prepared: PreparedFiles, documents: Sequence[CorpusDocument] | None = None) -> None:
    """Write the held-out text of a checkpoint, and its text to train on unless it has one."""
    if prepared.has(HELD_OUT):
        return
    listed, tokenizer = documents or collect(MAX_CHARACTERS), read_tokenizer(prepared.checkpoint)
    save_text(prepared, HELD_OUT, encode(texts_of(listed, held_out=True), tokenizer))
    if not prepared.has(TRAIN):
        save_text(prepared, TRAIN, encode(texts_of(listed, held_out=False), tokenizer))
    prepared.save_json(
        "text/corpus",
        {"files": [[each.domain, each.source, each.sha256, len(each.text), each.held_out] for each in listed]},
    )


def held_out_prompts(
    checkpoint: Path, *, of_domain: int, length: int = 256, seed: int = 0, mixed: bool = True
) -> list[HeldOutPrompt]:
    """Return as many prompts of held-out files of each domain: mixed, or one domain after the other.

    Raises ModelError if there is no text yet.
    """
    text = load_text(PreparedFiles(checkpoint), HELD_OUT)
    prompts = [HeldOutPrompt(domain, row) for domain in text.ids for row in text.windows(domain, length, of_domain)]
    if mixed:
        random.Random(seed).shuffle(prompts)
    return prompts


@torch.no_grad()
def perplexity(runtime: "MoeRuntime", prompts: Iterable[HeldOutPrompt], *, decoded: int = 0) -> TextQuality:
    """Measure perplexity of the prompts' own tokens, one prompt after the other (batch 1).

    A prompt is one prefill, except for its last `decoded` tokens, which come one at a time as in decoding.
    """
    before = runtime.cache.counts.copy()
    losses: dict[str, float] = {}
    tokens: dict[str, int] = {}
    for number, prompt in enumerate(prompts):
        of_prompt = _losses(runtime, prompt, f"evaluate-{number}", decoded)
        losses[prompt.task] = losses.get(prompt.task, 0.0) + float(of_prompt.sum())
        tokens[prompt.task] = tokens.get(prompt.task, 0) + len(of_prompt)
    total = sum(tokens.values())
    return TextQuality(
        perplexity=math.exp(sum(losses.values()) / total),
        of_domain={task: math.exp(losses[task] / tokens[task]) for task in losses},
        tokens=total,
        counts=runtime.cache.counts - before,
    )


def _losses(runtime: "MoeRuntime", prompt: HeldOutPrompt, request: str, decoded: int) -> torch.Tensor:
    """Return the negative log-likelihood of each next token, (T - 1,)."""
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


@torch.no_grad()
def decode_timing(runtime: "MoeRuntime", prompts: Iterable[HeldOutPrompt], *, new_tokens: int = 32) -> DecodeTiming:
    """Time greedy decoding of each prompt in turn (batch 1), and count what the cache does meanwhile.

    Each token is read before the next step begins, on a GPU too.
    """
    metrics, timing = runtime.cache.metrics, DecodeTiming()
    before, decode_before = metrics.counts.copy(), metrics.of_phase["decode"].copy()
    for number, prompt in enumerate(prompts):
        ids = prompt.ids.to(runtime.model.device)[None]
        past = None
        for position in range(new_tokens):
            began_s = time.perf_counter()
            with runtime.step([StepRow(f"decode-{number}", prompt.task, ids.shape[1])]):
                output = runtime.model(ids, past_key_values=past, use_cache=True, logits_to_keep=1)
            token = int(output.logits[0, -1].argmax())
            seconds = time.perf_counter() - began_s
            (timing.between_s if position else timing.first_s).append(seconds)
            timing.total_s += seconds
            past = output.past_key_values
            ids = torch.tensor([[token]], device=ids.device)
    timing.counts = metrics.counts - before
    timing.decode = metrics.of_phase["decode"] - decode_before
    return timing
