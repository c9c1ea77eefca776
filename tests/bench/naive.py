"""The naive side: whoever has an image loads the model for it, asks it, and drops it."""

import itertools
import threading
import time
from collections.abc import Iterator

import torch

from daemon.storage.journal import Journal
from experts.spec import ExpertId, ExpertSpec
from experts.vision.preprocess import prepare
from tests.bench.disks import reader_of
from tests.bench.job import Job, Run
from tests.bench.ordinary import OrdinaryFiles, answer
from tests.bench.stock import read_stock


class _Naive:
    def __init__(self, job: Job) -> None:
        self.job = job
        self.specs = read_stock(job.catalog)
        self.files = OrdinaryFiles(reader_of(job.disk))
        self.journal = Journal(job.journal)
        self.numbers: Iterator[int] = iter(range(len(job.trace.asks)))
        self.ended: list[tuple[float, float]] = []
        self.loaded_bytes: list[int] = []
        self.failed: list[BaseException] = []
        self._lock = threading.Lock()
        self.began_s = time.monotonic()

    def work(self) -> None:
        torch.set_num_threads(max(1, self.job.threads // self.job.executors))
        try:
            while time.monotonic() - self.began_s < self.job.limit_s:
                with self._lock:
                    number = next(self.numbers, None)
                if number is None:
                    return
                self._serve(number)
        except BaseException as error:  # noqa: BLE001  the run has failed; its caller says so
            self.failed.append(error)

    def _serve(self, number: int) -> None:
        ask = self.job.trace.asks[number]
        payload = self.journal.read(self.job.key(ask.picture, goes_on=ask.goes_on))
        wait_s = None
        for expert in itertools.chain([ask.classifier], [ask.detector] if ask.detector and ask.goes_on else []):
            spec: ExpertSpec = self.specs[ExpertId(expert)]
            model = self.files.model(spec)
            self.loaded_bytes.append(spec.weights_bytes)
            wait_s = time.monotonic() - self.began_s if wait_s is None else wait_s
            answer(model, spec, [prepare(payload, "image", None, spec)])
        self.ended.append((wait_s or 0.0, time.monotonic() - self.began_s))


def run_naive(job: Job) -> Run:
    """A worker per executor, images in their order."""
    naive = _Naive(job)
    workers = [threading.Thread(target=naive.work, name=f"naive {number}") for number in range(job.executors)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if naive.failed:
        raise naive.failed[0]
    return Run(
        side=job.side,
        images=len(naive.ended),
        seconds=time.monotonic() - naive.began_s,
        stopped=len(naive.ended) < len(job.trace.asks),
        loads=len(naive.loaded_bytes),
        loaded_bytes=sum(naive.loaded_bytes),
        waits_s=tuple(wait_s for wait_s, _ in naive.ended),
        latencies_s=tuple(latency_s for _, latency_s in naive.ended),
    )
