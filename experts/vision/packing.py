"""CPU networks whose convolutions get weights in the blocks that oneDNN's kernels read.

Otherwise oneDNN rearranges the weights for every batch: a fifth of a single image's time. Packing takes as long as two
or three batches save, so it waits for the third batch after a load: an expert that comes and goes is not packed.
Answers are the same to the bit. The blocks depend on the processor, the input's sides and the executor's threads, and
take up to 2 % more memory than the file says.
"""

import ctypes
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from experts.vision.networks import FusedConvolution

#: Batches since a load that run as they are, before the weights are packed.
BATCHES_BEFORE = 2
#: Seconds for which an executor waits for the others' batches before it packs. If one of them takes longer, it may
#: hang: the next try is only after this many batches with plain weights.
_PATIENCE_S, _LATER_BATCHES = 5.0, 1000
_LIBC: Any = ctypes.CDLL(None)


class PackingNetwork(nn.Module):
    """The network of one slot. `discard(weights)` gives back the memory of weights whose packed copy is in use.

    Executors may share it. No batch runs while the weights are being packed, nor when a load calls `forget`.
    """

    def __init__(self, network: nn.Module, discard: Callable[[torch.Tensor], None]) -> None:
        super().__init__()
        self.network = network
        self._discard = discard
        self._convolutions = [part for part in network.modules() if isinstance(part, FusedConvolution)]
        self._idle = threading.Condition()
        self._running = 0
        self._batches = 0

    def forget(self) -> None:
        """Give packed weights back: the slot is to hold others."""
        was_packed = any(part.packed is not None for part in self._convolutions)
        for part in self._convolutions:
            part.packed = None
        self._batches = 0
        if was_packed:
            _LIBC.malloc_trim(0)  # else glibc keeps them for the executor that packed, and each keeps as many

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        with self._idle:
            self._batches += 1
            if self._batches > BATCHES_BEFORE:
                first = self._convolutions[0]
                if not self._idle.wait_for(lambda: first.packed is not None or not self._running, _PATIENCE_S):
                    self._batches = -_LATER_BATCHES
                elif first.packed is None:
                    self._pack()
            self._running += 1
        try:
            return self.network(images)
        finally:
            with self._idle:
                self._running -= 1
                self._idle.notify_all()

    def _pack(self) -> None:
        try:
            for part in self._convolutions:
                if part.input_shape is not None:
                    part.pack()
                    self._discard(part.weight)
        except RuntimeError:  # no memory is left: the others stay plain
            self._batches = -_LATER_BATCHES
