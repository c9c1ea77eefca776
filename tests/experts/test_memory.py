import gc

import pytest
import torch

from experts import memory
from experts.memory import HostMemory


class Runtime:
    """The calls of CUDA's runtime that memory makes, refusing memory that is registered or not as CUDA does."""

    def __init__(self, code: int = 0) -> None:
        self.registered: dict[int, int] = {}
        self.last_error = 0
        self._code = code

    def cudaHostRegister(self, address: int, size_bytes: int, _flags: int) -> int:  # noqa: N802
        if self._code == 0:
            assert address not in self.registered
            self.registered[address] = size_bytes
        self.last_error = self._code
        return self._code

    def cudaGetLastError(self) -> int:  # noqa: N802
        code, self.last_error = self.last_error, 0
        return code

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        del self.registered[address]
        return 0


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    fake = Runtime()
    monkeypatch.setattr(memory, "_cuda", lambda: fake)
    return fake


def test_pinned_memory_is_pinned_while_it_is_occupied(runtime: Runtime):
    host = HostMemory(10_000, pin=True)
    address = host.array.ctypes.data
    for _ in range(2):
        assert (host.pinned, runtime.registered) == (True, {address: 10_000})
        host.occupy()  # occupied already: nothing to do
        host.vacate()
        assert (host.pinned, runtime.registered) == (False, {})
        host.occupy()
    del host
    gc.collect()
    assert runtime.registered == {}


def test_memory_that_cannot_be_pinned_is_ordinary_memory(monkeypatch: pytest.MonkeyPatch):
    runtime = Runtime(code=2)
    monkeypatch.setattr(memory, "_cuda", lambda: runtime)
    host = HostMemory(10_000, pin=True)
    assert (host.pinned, host.pin_error) == (False, 2)
    assert runtime.last_error == 0, "the next kernel of this thread would be blamed"
    host.array[:] = 3
    host.vacate()
    assert bool((host.tensor == 0).all())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_cuda_takes_the_memory_for_pinned():
    host = HostMemory(3 << 20, pin=True)
    assert host.pinned
    assert host.tensor.is_pinned()
    host.vacate()
    assert not host.tensor.is_pinned()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_after_cuda_refused_memory_the_next_kernel_is_not_blamed():
    host = HostMemory(3 << 20, pin=True)
    host.pinned = False  # so that the same memory is registered twice
    host.occupy()
    assert host.pin_error != 0
    assert torch.ones(4, device="cuda:0").mul_(2).sum().item() == 8
    host.pinned = True
