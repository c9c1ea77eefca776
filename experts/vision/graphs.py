"""CUDA graphs of slots: the kernels of a batch recorded once, then replayed for every expert that passes through.

A slot's weights stay at one address for good, so a recording stays right whichever expert fills the slot. It is made
by the executor that will replay it, on that executor's stream, and replayed only there: what one executor records may
then share scratch memory, because a stream runs one thing after the other. A batch size is recorded when it comes for
the third time; the runs before it warm up what the kernels need. On CPUs, and where recording fails, the network
simply runs.
"""

import functools
import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, Protocol

import structlog
import torch
from torch import nn

Network = Callable[[torch.Tensor], torch.Tensor]

#: Ordinary runs of a batch size by an executor before it is recorded.
WARM_UPS = 2
#: Recordings of one slot at most; further batch sizes run as they are.
MOST_GRAPHS = 16

#: torch documents that one recording at a time may be under way in a process.
_recording = threading.Lock()


class Recorder(Protocol):
    """What one kind of device offers. Called by executors, each within its own stream."""

    def lane(self) -> Hashable:
        """This thread and its stream: who records is who replays."""
        ...

    def record(self, network: Network, images: torch.Tensor) -> Network:
        """A replay of the network for batches shaped like `images`. Raises RuntimeError where that cannot be."""
        ...


@dataclass(slots=True)
class Recordings:
    """How the networks of one layout are recorded; where one fails, none is tried again."""

    recorder: Recorder
    works: bool = True
    _log: Any = field(default_factory=lambda: structlog.get_logger("graphs"), repr=False)

    def record(self, network: Network, images: torch.Tensor) -> Network | None:
        """A replay, or None where this cannot be; that is logged once."""
        with _recording:
            if not self.works:
                return None
            try:
                return self.recorder.record(network, images)
            except RuntimeError as error:
                self.works = False
                self._log.warning("graph_not_recorded", batch=len(images), error=str(error), instead="runs without")
                return None


class GraphedNetwork(nn.Module):
    """The network of one slot, replayed where it was recorded. Executors may share it: each has its own recordings."""

    def __init__(self, network: nn.Module, recordings: Recordings) -> None:
        super().__init__()
        self.network = network
        self._recordings = recordings
        self._seen: dict[tuple[Hashable, torch.Size], int] = {}
        self._replays: dict[tuple[Hashable, torch.Size], Network] = {}

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        key = (self._recordings.recorder.lane(), images.shape)
        replay = self._replays.get(key) or self._recorded(key, images)
        return self.network(images) if replay is None else replay(images)

    def _recorded(self, key: tuple[Hashable, torch.Size], images: torch.Tensor) -> Network | None:
        """The replay, if now is the time to record one."""
        seen = self._seen.get(key, 0)
        if seen < WARM_UPS:
            self._seen[key] = seen + 1
            return None
        if len(self._replays) >= MOST_GRAPHS or not self._recordings.works:
            return None
        replay = self._recordings.record(self.network, images)
        if replay is not None:
            self._replays[key] = replay
        return replay


@dataclass(slots=True)
class _Lane:
    """What everything recorded on one lane shares. `first` keeps the pool alive: torch refuses to record into one
    whose graphs have all gone.
    """

    pool: Any
    first: torch.cuda.CUDAGraph
    inputs: dict[tuple[object, ...], torch.Tensor] = field(default_factory=dict)


class CudaRecorder:
    """CUDA graphs on one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._lanes: dict[Hashable, _Lane] = {}

    def lane(self) -> Hashable:
        # torch hands out a limited number of streams; two threads with the same one must not share inputs.
        return threading.get_ident(), torch.cuda.current_stream(self._device).cuda_stream

    def record(self, network: Network, images: torch.Tensor) -> Network:
        stream = torch.cuda.current_stream(self._device)
        if stream == torch.cuda.default_stream(self._device):
            raise RuntimeError("the default stream cannot be recorded")
        graph = torch.cuda.CUDAGraph()
        name = self.lane()
        lane = self._lanes.get(name) or _Lane(torch.cuda.graph_pool_handle(), graph)
        entry = lane.inputs.setdefault((images.shape, images.stride(), images.dtype), torch.empty_like(images))
        # Loader threads go on allocating and copying meanwhile: only this thread's calls are restricted.
        with torch.cuda.graph(graph, pool=lane.pool, stream=stream, capture_error_mode="thread_local"):
            answer = network(entry)
        self._lanes[name] = lane

        def replay(batch: torch.Tensor) -> torch.Tensor:
            entry.copy_(batch)
            graph.replay()
            # Out of the shared memory, in the order of the stream, before another replay writes there.
            return answer.clone()

        return replay


@functools.cache
def _cuda_recorder(device: torch.device) -> CudaRecorder:
    return CudaRecorder(device)


def recordings_for(device: torch.device) -> Recordings | None:
    """For one layout on a device; None where there are no graphs."""
    return Recordings(_cuda_recorder(device)) if device.type == "cuda" else None
