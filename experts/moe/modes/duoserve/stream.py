"""Where predictions are computed while the model computes something else: the third stream (DuoServe-MoE §5.3)."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol, TypeVar

import torch

_Result = TypeVar("_Result")


class PredictionStream(Protocol):
    """Work in the order in which it was given, beside the thread that gives it."""

    def submit(self, work: Callable[[], _Result]) -> "Future[_Result]":
        """Compute `work` later; it may read what the caller's stream has been given so far."""
        ...

    def close(self) -> None:
        """Wait for the work that has begun; the rest is cancelled."""
        ...


def prediction_stream(device: torch.device) -> PredictionStream:
    """A thread for the CPU; a thread that computes on a CUDA stream of its own for a GPU."""
    return CudaStream(device) if device.type == "cuda" else ThreadStream()


class ThreadStream:
    """One thread. torch releases the interpreter's lock while it computes, so that two cores work at the same time."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="moe-predict")

    def submit(self, work: Callable[[], _Result]) -> "Future[_Result]":
        return self._thread.submit(work)

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)


class CudaStream:
    """One thread with a stream of its own: it waits for what the caller's stream computes, and only it waits.

    A prediction ends in a copy to the host, so its thread blocks until its stream has finished; neither the computing
    stream nor the thread that feeds it does.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._thread = ThreadStream()

    def submit(self, work: Callable[[], _Result]) -> "Future[_Result]":
        given = torch.cuda.Event()
        given.record(torch.cuda.current_stream(self._device))

        def later() -> _Result:
            with torch.cuda.stream(self._stream):
                self._stream.wait_event(given)
                return work()

        return self._thread.submit(later)

    def close(self) -> None:
        self._thread.close()
