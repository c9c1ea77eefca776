"""CUDA graphs of slots: the kernels of a batch recorded once, then replayed for every expert that passes through.

A slot's weights stay at one address as long as the slot has its memory, so a recording fits any expert that fills it. A
slot that gives its memory back forgets its recordings first. The executor that will replay a recording makes it, on its
own stream; its recordings may share scratch memory, because a stream runs one thing after the other. A batch size is
recorded when it comes for the third time; the runs before it warm up its kernels. On CPUs, if recording fails, and once
an executor's recordings have used up their bytes, the network simply runs.
"""

import threading
from collections.abc import Callable, Hashable, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import structlog
import torch
from torch import nn

Network = Callable[[torch.Tensor], torch.Tensor]

#: Ordinary runs of a batch size by an executor before it is recorded.
WARM_UPS = 2
#: Recordings of one slot; further batch sizes run as they are.
MAX_GRAPHS = 16

#: torch documents that one recording at a time may be under way in a process.
_recording = threading.Lock()


@dataclass(slots=True)
class Recordings:
    """Recordings of the networks of one layout; after one failure, recording is not tried again.

    An executor whose recordings, of all layouts, hold `limit_bytes` or more records nothing further.
    """

    recorder: "CudaRecorder"
    limit_bytes: int | None = None
    works: bool = True
    _log: Any = field(default_factory=lambda: structlog.get_logger("graphs"), repr=False)

    def record(self, network: Network, images: torch.Tensor) -> Network | None:
        """Return a replay; None at the limit, or if recording fails, which is logged once."""
        with _recording:
            is_full = self.limit_bytes is not None and self.recorder.used_bytes() >= self.limit_bytes
            if is_full or not self.works:
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
        self._runs: dict[tuple[Hashable, torch.Size], int] = {}
        self._replays: dict[tuple[Hashable, torch.Size], Network] = {}

    def forget(self) -> None:
        """Drop every recording, since the weights leave their address. No thread may be running this network."""
        self._replays.clear()
        self._runs.clear()

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        key = (self._recordings.recorder.lane(), images.shape)
        replay = self._replays.get(key) or self._recorded(key, images)
        return self.network(images) if replay is None else replay(images)

    def _recorded(self, key: tuple[Hashable, torch.Size], images: torch.Tensor) -> Network | None:
        """Return a new replay, None while it is too early to record one."""
        runs = self._runs.get(key, 0)
        if runs < WARM_UPS:
            self._runs[key] = runs + 1
            return None
        if len(self._replays) >= MAX_GRAPHS or not self._recordings.works:
            return None
        replay = self._recordings.record(self.network, images)
        if replay is not None:
            self._replays[key] = replay
        return replay


@dataclass(eq=False, slots=True, weakref_slot=True)
class GraphStream:
    """Memory shared by all recordings of one thread on one stream: scratch memory, and an input of each shape.

    `first` keeps the pool alive: torch refuses to record into one whose graphs have all gone. `pool_bytes` are the
    pool's, `graph_bytes` what CUDA itself holds for each recording.
    """

    pool: Any = None
    first: Any = None
    pool_bytes: int = 0
    graph_bytes: MutableMapping[Network, int] = field(default_factory=WeakKeyDictionary[Network, int])
    inputs: dict[tuple[object, ...], torch.Tensor] = field(default_factory=dict)


class CudaRecorder:
    """CUDA graphs on one device. Called by executors, each within its own stream.

    Each thread has its own lanes, since torch hands out few streams and two threads with the same one must not share
    inputs. A lane ends with its thread, or with the last network recorded on it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._own = threading.local()

    def lane(self) -> GraphStream:
        """Return the lane of this thread and its stream; recordings are replayed on their own lane only."""
        return self.lane_of(torch.cuda.current_stream(self._device).cuda_stream)

    def lane_of(self, stream: int) -> GraphStream:
        return vars(self._own).setdefault(f"stream {stream}", GraphStream())

    def used_bytes(self) -> int:
        """Return the device's bytes held by this thread's recordings on its stream."""
        lane = self.lane()
        return lane.pool_bytes + sum(lane.graph_bytes.values())

    def record(self, network: Network, images: torch.Tensor) -> Network:
        """Return a replay for batches shaped like `images`. Raises RuntimeError if recording fails."""
        stream = torch.cuda.current_stream(self._device)
        if stream == torch.cuda.default_stream(self._device):
            raise RuntimeError("the default stream cannot be recorded")
        graph, lane = torch.cuda.CUDAGraph(), self.lane()
        pool = torch.cuda.graph_pool_handle() if lane.first is None else lane.pool
        form = (images.shape, images.stride(), images.dtype)
        entry = lane.inputs[form] if form in lane.inputs else torch.empty_like(images)
        before_bytes = self._untracked_bytes()
        # Loader threads go on allocating and copying meanwhile: only this thread's calls are restricted.
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            answer = network(entry)
        lane.pool, lane.first = pool, lane.first or graph
        lane.inputs[form] = entry

        def replay(batch: torch.Tensor) -> torch.Tensor:
            entry.copy_(batch)
            graph.replay()
            # Out of the shared memory, in the order of the stream, before another replay writes there.
            return answer.clone()

        lane.graph_bytes[replay] = max(0, self._untracked_bytes() - before_bytes)
        segments = torch.cuda.memory_snapshot()
        lane.pool_bytes = sum(each["total_size"] for each in segments if tuple(each["segment_pool_id"]) == tuple(pool))
        return replay

    def _untracked_bytes(self) -> int:
        """Return the device's used bytes that torch's allocator does not have."""
        while True:  # loader threads allocate meanwhile
            reserved_bytes = torch.cuda.memory_reserved(self._device)
            free_bytes, total_bytes = torch.cuda.mem_get_info(self._device)
            if torch.cuda.memory_reserved(self._device) == reserved_bytes:
                return total_bytes - free_bytes - reserved_bytes


@dataclass(slots=True)
class Recorders:
    """One recorder for each device. Layouts that share them share an executor's scratch memory, too.

    `limits` are the bytes of a device that the recordings of one executor may hold.
    """

    make: Callable[[torch.device], CudaRecorder | None] = lambda device: (
        CudaRecorder(device) if device.type == "cuda" else None
    )
    limits: Mapping[torch.device, int] = field(default_factory=dict[torch.device, int])
    _made: dict[torch.device, CudaRecorder | None] = field(default_factory=dict)

    def recordings(self, device: torch.device) -> Recordings | None:
        """Return the recordings of one layout on a device, None if the device has no graphs."""
        recorder = self._made.setdefault(device, self.make(device))  # one wins if two threads ask at once
        return None if recorder is None else Recordings(recorder, self.limits.get(device))
