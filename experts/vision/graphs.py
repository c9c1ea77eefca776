"""CUDA graphs of slots: the kernels of a batch recorded once, then replayed for every expert that passes through.

A slot's weights stay at one address for good, so a recording stays right whichever expert fills the slot. It is made
by the executor that will replay it, on that executor's stream, and only there is it replayed: everything an executor
records may then share scratch memory, because a stream runs one thing after the other. A batch size is recorded when
it comes for the third time; the runs before warm up what the kernels need. Where nothing is gained (CPUs) or
recording fails, the network simply runs.
"""

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

Network = Callable[[torch.Tensor], torch.Tensor]

#: Ordinary runs of a batch size on an executor's stream before it is recorded.
WARM_UPS = 2
#: Recordings of one slot at most; further batch sizes run as they are.
MOST_GRAPHS = 16


class Recorder(Protocol):
    """What one kind of device offers. Called by executors, each within its own stream."""

    def stream(self) -> int:
        """Which stream this thread computes on."""
        ...

    def record(self, network: Network, images: torch.Tensor) -> Network:
        """A replay of the network for batches shaped like `images`; its answer is valid until the stream's next
        replay. Raises RuntimeError where the network cannot be recorded.
        """
        ...


@dataclass(slots=True)
class Recordings:
    """How networks of one layout are recorded; it is told to all slots of the layout when recording fails."""

    recorder: Recorder
    works: bool = True
    log: Callable[[str], None] = logging.getLogger(__name__).warning
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def record(self, network: Network, images: torch.Tensor) -> Network | None:
        """A replay, or None where this cannot be; that is logged once."""
        with self._lock:  # one recording at a time: the beginning of one waits for the whole device
            if not self.works:
                return None
            try:
                return self.recorder.record(network, images)
            except RuntimeError as error:
                self.works = False
                self.log(f"graph_not_recorded batch={len(images)} error={error}; batches run without graphs")
                return None


class GraphedNetwork(nn.Module):
    """The network of one slot, replayed where that was recorded. Threads may share it: each has its own stream."""

    def __init__(self, network: nn.Module, recordings: Recordings) -> None:
        super().__init__()
        self.network = network
        self._recordings = recordings
        self._seen: dict[tuple[int, torch.Size], int] = {}
        self._replays: dict[tuple[int, torch.Size], Network] = {}

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if not self._recordings.works and not self._replays:
            return self.network(images)
        key = (self._recordings.recorder.stream(), images.shape)
        replay = self._replays.get(key)
        if replay is None:
            replay = self._recorded(key, images)
        return self.network(images) if replay is None else replay(images)

    def _recorded(self, key: tuple[int, torch.Size], images: torch.Tensor) -> Network | None:
        """The replay, if now is the time to record one."""
        seen = self._seen.get(key, 0)
        if seen < WARM_UPS:
            self._seen[key] = seen + 1
            return None
        if len(self._replays) >= MOST_GRAPHS:
            return None
        replay = self._recordings.record(self.network, images)
        if replay is not None:
            self._replays[key] = replay
        return replay


class CudaRecorder:
    """CUDA graphs on one device. Scratch memory and inputs are shared by what is recorded on one stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pools: dict[int, Any] = {}
        self._inputs: dict[tuple[object, ...], torch.Tensor] = {}

    def stream(self) -> int:
        return torch.cuda.current_stream(self._device).cuda_stream

    def record(self, network: Network, images: torch.Tensor) -> Network:
        stream = torch.cuda.current_stream(self._device)
        if stream == torch.cuda.default_stream(self._device):
            raise RuntimeError("the default stream cannot be recorded")
        pool = self._pools.setdefault(stream.cuda_stream, torch.cuda.graph_pool_handle())
        key = (stream.cuda_stream, images.shape, images.dtype, images.stride())
        entry = self._inputs.setdefault(key, torch.empty_like(images))
        entry.copy_(images)
        graph = torch.cuda.CUDAGraph()
        # Loader threads go on allocating and copying meanwhile; only this thread's calls are restricted.
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            answer = network(entry)

        def replay(batch: torch.Tensor) -> torch.Tensor:
            entry.copy_(batch)
            graph.replay()
            # Out of the shared memory, in the order of the stream, before another recording writes there.
            return answer.clone()

        return replay


def recordings_for(device: torch.device) -> Recordings | None:
    """None where graphs do not exist."""
    return Recordings(CudaRecorder(device)) if device.type == "cuda" else None
