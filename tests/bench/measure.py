"""What one image, one batch and one byte cost on this machine: `python -m tests.bench.measure QUESTION ANSWER`."""

import mmap
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np
import torch
from pydantic import TypeAdapter

from daemon.policy.matrix import Performance
from daemon.records import JournalKey
from daemon.storage.journal import Journal
from experts.reading import DirectReader
from experts.slot import SlotPool
from experts.spec import ArchitectureId, ExpertSpec
from experts.vision.infer import infer
from experts.vision.preprocess import prepare
from tests.bench.job import PACED_BYTES_PER_S
from tests.bench.stock import read_stock

#: Each batch size is measured for about so long, and at least so often.
_SECONDS = 1.2
_LEAST_BATCHES = 3
#: A larger batch must save this share of the time per image.
_WORTH = 0.03
_READ_FILES = 6


@dataclass(frozen=True, slots=True)
class Question:
    """`keys` are pictures in `journal`. Executors compute at the same time, as they do in a run."""

    catalog: Path
    journal: Path
    keys: tuple[JournalKey, ...]
    executors: int
    threads: int
    batches: tuple[int, ...] = (1, 2, 4, 8, 16)


@dataclass(frozen=True, slots=True)
class Machine:
    """`rows` for an executor while the others compute too; `disk_s` in them is of the cold disk.

    `residuals` are the least-squares fits' root mean squares in seconds, by architecture; `read_method` says whether
    reads went past the page cache.
    """

    rows: tuple[Performance, ...]
    residuals: dict[str, float]
    cold_bytes_per_s: float
    read_method: str

    def bytes_per_s(self, disk: str) -> float:
        return self.cold_bytes_per_s if disk == "cold" else min(PACED_BYTES_PER_S, self.cold_bytes_per_s)


QUESTION = TypeAdapter(Question)
MACHINE = TypeAdapter(Machine)


def measure(question: Question) -> Machine:
    """One architecture after the other: least squares of seconds over the images of a batch (CoServe §4.5)."""
    specs = read_stock(question.catalog)
    bytes_per_s, method = _read_cold(list(specs.values()))
    rows: list[Performance] = []
    residuals: dict[str, float] = {}
    for layout, spec in {spec.layout: spec for spec in specs.values()}.items():
        seconds = {size: _batch_s(question, spec, size) for size in question.batches}
        k_s, b_s, residuals[layout] = fit(seconds)
        each_s = {size: seconds[size] / size for size in seconds}
        best = next(size for size in each_s if each_s[size] <= min(each_s.values()) * (1.0 + _WORTH))
        rows.append(
            Performance(
                device="cpu",
                architecture=ArchitectureId(layout),
                k_s=k_s,
                b_s=b_s,
                max_batch=best,
                disk_s=spec.weights_bytes / bytes_per_s,
            )
        )
    return Machine(tuple(rows), residuals, bytes_per_s, method)


def fit(seconds: Mapping[int, float]) -> tuple[float, float, float]:
    """K, B and the root mean square residual, in seconds, of seconds by batch size; B is never below 0."""
    sizes, times_s = np.array(list(seconds), float), np.array(list(seconds.values()))
    (k_s, b_s), *_ = np.linalg.lstsq(np.stack([sizes, np.ones_like(sizes)], 1), times_s)
    if b_s < 0.0:
        k_s, b_s = sizes @ times_s / (sizes @ sizes), 0.0
    return float(k_s), float(b_s), float(np.sqrt(np.mean((k_s * sizes + b_s - times_s) ** 2)))


def _batch_s(question: Question, spec: ExpertSpec, size: int) -> float:
    """Median seconds of a batch: read, decode, prepare, network, answer; every executor at once."""
    journal = Journal(question.journal)
    begin, seconds = threading.Barrier(question.executors), [[] for _ in range(question.executors)]

    def work(number: int) -> None:
        torch.set_num_threads(max(1, question.threads // question.executors))
        pool = SlotPool("cpu", spec.weights_bytes)
        pool.load(spec)
        slot = pool.slot(spec.expert)
        keys = [question.keys[n % len(question.keys)] for n in range(size)]
        infer(slot, [prepare(journal.read(key), "image", None, spec) for key in keys])
        begin.wait()
        until_s = time.perf_counter() + _SECONDS
        while time.perf_counter() < until_s or len(seconds[number]) < _LEAST_BATCHES:
            began_s = time.perf_counter()
            infer(slot, [prepare(journal.read(key), "image", None, spec) for key in keys])
            seconds[number].append(time.perf_counter() - began_s)

    _together(question.executors, work)
    return median(each for mine in seconds for each in mine)


def _together(count: int, work: Callable[[int], None]) -> None:
    workers = [threading.Thread(target=work, args=(number,)) for number in range(count)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()


def _read_cold(specs: Sequence[ExpertSpec]) -> tuple[float, str]:
    """Bytes per second of whole files into memory that is there, and how they were read."""
    reader = DirectReader()
    rates: list[float] = []
    for spec in specs[:_READ_FILES]:
        size = spec.file.stat().st_size
        with mmap.mmap(-1, size) as memory, memoryview(memory) as view:
            view[:: mmap.PAGESIZE] = bytes(len(view[:: mmap.PAGESIZE]))  # pages exist, as a slot's do
            descriptor = reader.open(spec.file)
            try:
                began_s = time.perf_counter()
                reader.read(descriptor, view, 0)
                rates.append(size / (time.perf_counter() - began_s))
            finally:
                os.close(descriptor)
    return median(rates), reader.method


def main(question_file: str, answer_file: str) -> None:
    """Read the question, measure, write the answer."""
    question = QUESTION.validate_json(Path(question_file).read_bytes())
    Path(answer_file).write_bytes(MACHINE.dump_json(measure(question)))


if __name__ == "__main__":
    main(*sys.argv[1:])
