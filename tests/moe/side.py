"""One mode measured, in a process of its own, so that its memory is its own."""

import re
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from experts.moe.errors import ModelError
from experts.moe.gating import ExpertKey, StepRow
from experts.moe.model.runtime import MoeRuntime
from experts.moe.modes import open_mode
from experts.transfer import SlotMemory
from tests.moe.evaluate import HeldOutPrompt, held_out_prompts, perplexity
from tools.moe.checkpoint import budget_of

#: Tokens of a judged prompt, and those of them that come one at a time.
_JUDGED, _DECODED = 192, 64
#: Figures of a mode with one link; None if it has no such figure.
Figures = dict[str, float | None]


@dataclass(frozen=True, slots=True)
class SideJob:
    """A mode at one budget. `share`: of each layer's experts in memory; `links_ms`: one timing for each, 0 without."""

    checkpoint: Path
    side: str
    share: float
    links_ms: tuple[float, ...]
    device: str
    judged: int  # prompts of each domain for perplexity
    prompt_tokens: int = 128
    new_tokens: int = 32
    options: dict[str, Any] = field(default_factory=dict)


def measure(job: SideJob) -> list[Figures] | str:
    """Return the figures with each link, or the reason why the mode could not be measured."""
    from experts.moe.library import transformers

    _ = transformers().MixtralForCausalLM  # imports come first and do not count as its memory
    timed = held_out_prompts(job.checkpoint, of_domain=1, length=job.prompt_tokens)
    judged = held_out_prompts(job.checkpoint, of_domain=job.judged, length=_JUDGED, mixed=False) if job.judged else []
    try:
        return [_measure(job, link_ms, timed, judged) for link_ms in job.links_ms]
    except ModelError as error:
        return str(error)


def _measure(job: SideJob, link_ms: float, timed: list[HeldOutPrompt], judged: list[HeldOutPrompt]) -> Figures:
    is_first = link_ms == job.links_ms[0]
    memory = PeakMemory(job.device)
    mode, budget_bytes = open_mode(job.side, job.checkpoint, job.options), budget_of(job.checkpoint, job.share)
    runtime = MoeRuntime.open(job.checkpoint, mode, budget_bytes, device=job.device)
    with closing(runtime):
        if link_ms:
            slow_down(runtime, link_ms)
        _decode(runtime, timed[:1], 4)
        figures = _decode(runtime, timed, job.new_tokens)
        # An earlier runtime's memory is not given back to the system, so only the first peak of a process counts.
        figures["peak_mb"] = memory.peak_mb() if is_first else None
        if judged and is_first:
            figures["perplexity"] = perplexity(runtime, judged, decoded=_DECODED).perplexity
    return figures


@torch.no_grad()
def _decode(runtime: MoeRuntime, prompts: Sequence[HeldOutPrompt], new_tokens: int) -> Figures:
    """Time greedy decoding of each prompt in turn (batch 1); each token is read before the next step, on a GPU too."""
    seconds: list[list[float]] = []
    before = runtime.cache.counts.copy()
    for number, prompt in enumerate(prompts):
        ids, past, of_prompt = prompt.ids.to(runtime.model.device)[None], None, list[float]()
        for _ in range(new_tokens):
            began_s = time.perf_counter()
            with runtime.step([StepRow(f"decode-{number}", prompt.task, ids.shape[1])]):
                output = runtime.model(ids, past_key_values=past, use_cache=True, logits_to_keep=1)
            past, ids = output.past_key_values, output.logits[:, -1].argmax(-1, keepdim=True)
            int(ids)
            of_prompt.append(time.perf_counter() - began_s)
        seconds.append(of_prompt)
    counts, times = runtime.cache.counts - before, np.array(seconds)
    ttft, tpot = (1000 * np.percentile(part, [50, 95]) for part in (times[:, 0], times[:, 1:]))
    return {
        "ttft_p50_ms": float(ttft[0]),
        "ttft_p95_ms": float(ttft[1]),
        "tpot_p50_ms": float(tpot[0]),
        "tpot_p95_ms": float(tpot[1]),
        "tokens_per_s": times.size / float(times.sum()),
        "blocking_per_token": counts.blocking / times.size,
        "overlapped_per_token": counts.overlapped / times.size,
        "moved_mb_per_token": counts.bytes_moved / times.size / 1e6,
        "hit_rate": counts.hit_rate,
    }


def slow_down(runtime: MoeRuntime, ms_per_expert: float) -> None:
    """Let every load take `ms_per_expert` at least, as over a slower link; a cache loads one after the other."""
    transfer: Any = runtime.cache._transfer
    fill = transfer.fill

    def slowly(key: ExpertKey, place: SlotMemory) -> None:
        until_s = time.monotonic() + ms_per_expert / 1000
        fill(key, place)
        while (left_s := until_s - time.monotonic()) > 0:  # a sleep may end early
            time.sleep(left_s)

    transfer.fill = slowly


class PeakMemory:
    """Peak memory since its creation beyond the memory at that time: the process's own, or the GPU's."""

    def __init__(self, device: str) -> None:
        self._device = device
        if device != "cpu":
            torch.cuda.reset_peak_memory_stats(device)
            return
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        self._before_kb = _status_kb("VmRSS")

    def peak_mb(self) -> float:
        if self._device != "cpu":
            return torch.cuda.max_memory_allocated(self._device) / 1e6
        return (_status_kb("VmHWM") - self._before_kb) * 1024 / 1e6


def _status_kb(name: str) -> int:
    match = re.search(rf"^{name}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert match, f"Linux reports {name} of every process"
    return int(match[1])
