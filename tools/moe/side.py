"""One side in a process of its own, so that its memory is its own: `python -m tools.moe.side JOB REPORT`."""

import re
import sys
from pathlib import Path
from typing import Any

import torch

from experts.moe.errors import ModelError
from tools.moe.evaluate import (
    DecodeTiming,
    HeldOutPrompt,
    decode_timing,
    held_out_prompts,
    open_runtime,
    perplexity,
)
from tools.moe.job import ACCELERATE, JOB, REPORT, Job, Report, Run

_DECODED = 64  # tokens of a judged prompt that come one at a time


def measure(job: Job) -> Report:
    """Imports come first and are not counted as the side's memory."""
    from experts.moe.library import transformers

    _ = transformers().MixtralForCausalLM
    timed = held_out_prompts(job.checkpoint, of_domain=job.prompts, length=job.prompt_tokens)
    length = 128 + _DECODED
    judged = held_out_prompts(job.checkpoint, of_domain=job.judged, length=length, mixed=False) if job.judged else []
    try:
        if job.side == ACCELERATE:
            from tools.moe.peer import measure_accelerate

            return Report((Run(0.0, measure_accelerate(job, timed) | {"perplexity": None}),))
        return Report(tuple(_measure(job, link_ms, timed, judged) for link_ms in job.links_ms))
    except ModelError as error:
        return Report(error=str(error))


def _measure(job: Job, link_ms: float, timed: list[HeldOutPrompt], judged: list[HeldOutPrompt]) -> Run:
    memory = Memory(job.device)
    runtime = open_runtime(
        job.checkpoint,
        job.side,
        share=job.share,
        link_ms=link_ms or None,
        options=dict(job.options),
        device=job.device,
    )
    try:
        decode_timing(runtime, timed[:1], new_tokens=4)
        timing = decode_timing(runtime, timed, new_tokens=job.new_tokens)
        # What an earlier runtime of this process freed is not given back to the system: its peak is the first one's.
        figures = _figures(timing, memory.peak_mb() if link_ms == job.links_ms[0] else None)
        hits = runtime.cache.metrics.predictions.total()
        if hits.tokens:
            figures |= {"all_predicted": hits.all_rate, "any_predicted": hits.any_rate}
        if judged and link_ms == job.links_ms[0]:
            figures["perplexity"] = perplexity(runtime, judged, decoded=_DECODED).perplexity
    finally:
        runtime.close()
    return Run(link_ms, figures)


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
        "all_predicted": None,
        "any_predicted": None,
        "perplexity": None,
    }


class Memory:
    """The most memory that was resident since now, beyond what was there: the process's own, or the GPU's."""

    def __init__(self, device: str) -> None:
        self._device = device
        if device != "cpu":
            torch.cuda.reset_peak_memory_stats(device)
            return
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        self._before_kb = _status_kb("VmRSS")

    def peak_mb(self) -> float:
        if self._device != "cpu":
            return torch.cuda.max_memory_allocated(self._device) / 1e6
        return (_status_kb("VmHWM") - self._before_kb) * 1024 / 1e6


def _status_kb(name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found, f"Linux tells {name} of every process"
    return int(found[1])


def main(job_file: str, report_file: str) -> None:
    """Read the job, measure, write what was found."""
    job: Any = JOB.validate_json(Path(job_file).read_bytes())
    Path(report_file).write_bytes(REPORT.dump_json(measure(job)))


if __name__ == "__main__":
    main(*sys.argv[1:])
