"""One mode measured in a process of its own, so that its memory is its own: `python -m tests.moe.side JOB REPORT`."""

import re
import sys
import time
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter

from experts.moe.errors import ModelError
from experts.moe.gating import ExpertKey
from experts.moe.model.runtime import MoeRuntime
from experts.transfer import SlotMemory
from tests.moe.evaluate import DecodeTiming, HeldOutPrompt, decode_timing, held_out_prompts, perplexity
from tools.moe.checkpoint import open_runtime

#: Tokens of a judged prompt that come one at a time.
_DECODED = 64


@dataclass(frozen=True, slots=True)
class SideJob:
    """A mode at one budget. `share`: of each layer's experts in memory; `links_ms`: one timing for each, 0 without."""

    checkpoint: Path
    side: str
    share: float
    links_ms: tuple[float, ...]
    device: str
    prompts: int  # of each domain, timed
    prompt_tokens: int
    new_tokens: int
    judged: int  # of each domain, for perplexity; 0 for none
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LinkFigures:
    """Figures of a mode with one link; rates are 0 to 1, None if the mode has no such figure."""

    link_ms: float
    figures: dict[str, float | None]


@dataclass(frozen=True, slots=True)
class SideReport:
    """`error` is the reason why a mode could not be measured."""

    runs: tuple[LinkFigures, ...] = ()
    error: str | None = None


JOB = TypeAdapter(SideJob)
REPORT = TypeAdapter(SideReport)


def measure(job: SideJob) -> SideReport:
    """Measure a mode. Imports come first and do not count as its memory."""
    from experts.moe.library import transformers

    _ = transformers().MixtralForCausalLM
    timed = held_out_prompts(job.checkpoint, of_domain=job.prompts, length=job.prompt_tokens)
    length = 128 + _DECODED
    judged = held_out_prompts(job.checkpoint, of_domain=job.judged, length=length, mixed=False) if job.judged else []
    try:
        return SideReport(tuple(_measure(job, link_ms, timed, judged) for link_ms in job.links_ms))
    except ModelError as error:
        return SideReport(error=str(error))


def _measure(job: SideJob, link_ms: float, timed: list[HeldOutPrompt], judged: list[HeldOutPrompt]) -> LinkFigures:
    is_first = link_ms == job.links_ms[0]
    memory = PeakMemory(job.device)
    runtime = open_runtime(job.checkpoint, job.side, share=job.share, options=job.options, device=job.device)
    with closing(runtime):
        if link_ms:
            slow_down(runtime, link_ms)
        decode_timing(runtime, timed[:1], new_tokens=4)
        timing = decode_timing(runtime, timed, new_tokens=job.new_tokens)
        # An earlier runtime's memory is not given back to the system, so only the first peak of a process counts.
        figures = _figures(timing, memory.peak_mb() if is_first else None)
        if judged and is_first:
            figures["perplexity"] = perplexity(runtime, judged, decoded=_DECODED).perplexity
    return LinkFigures(link_ms, figures)


def _figures(timing: DecodeTiming, peak_mb: float | None) -> dict[str, float | None]:
    tokens = timing.tokens
    return {
        **timing.as_dict(),
        "peak_mb": peak_mb,
        "blocking_per_token": timing.counts.blocking / tokens,
        "overlapped_per_token": timing.counts.overlapped / tokens,
        "decode_blocking_per_token": timing.decode.blocking / len(timing.between_s),
        "moved_mb_per_token": timing.counts.bytes_moved / tokens / 1e6,
        "hit_rate": timing.counts.hit_rate,
        "perplexity": None,
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


if __name__ == "__main__":
    job_file, report_file = map(Path, sys.argv[1:])
    report_file.write_bytes(REPORT.dump_json(measure(JOB.validate_json(job_file.read_bytes()))))
