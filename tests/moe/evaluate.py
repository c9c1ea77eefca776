"""Quality and speed of a served model: perplexity on held-out text, and the times of its tokens."""

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from experts.moe.cache.slot_ledger import FetchCounts
from experts.moe.gating import StepRow
from experts.moe.weights.prepared import PreparedFiles
from tests.moe.corpus import DOMAINS, MAX_CHARACTERS, CorpusDocument, collect
from tools.moe.trace import TRAIN, encode, load_text, read_tokenizer, save_text

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
    """Perplexity over all prompts and of each domain; the cache's counts meanwhile, and in decoding steps."""

    perplexity: float
    of_domain: dict[str, float]
    counts: FetchCounts
    decoding: FetchCounts


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
    before, decoding = runtime.cache.counts.copy(), FetchCounts()
    losses: dict[str, list[torch.Tensor]] = {}
    for number, prompt in enumerate(prompts):
        ids = prompt.ids.to(runtime.model.device)[None]
        prefill, past, logits = ids.shape[1] - decoded, None, list[torch.Tensor]()
        for begin, end in [(0, prefill), *((at, at + 1) for at in range(prefill, ids.shape[1]))]:
            at_begin = runtime.cache.counts.copy()
            with runtime.step([StepRow(f"evaluate-{number}", prompt.task, end - begin)]):
                output = runtime.model(ids[:, begin:end], past_key_values=past, use_cache=decoded > 0)
            past = output.past_key_values if decoded else None
            logits.append(output.logits[0].float())
            if begin:
                decoding += runtime.cache.counts - at_begin
        of_prompt = torch.nn.functional.cross_entropy(torch.cat(logits)[:-1], ids[0, 1:], reduction="none")
        losses.setdefault(prompt.task, []).append(of_prompt.cpu())
    return TextQuality(
        perplexity=float(torch.cat([loss for of_task in losses.values() for loss in of_task]).mean().exp()),
        of_domain={task: float(torch.cat(of_task).mean().exp()) for task, of_task in losses.items()},
        counts=runtime.cache.counts - before,
        decoding=decoding,
    )
