"""Experts on their way to a GPU: every kernel reads the expert that it was given, in whatever order streams run."""

import random
from pathlib import Path

import pytest

from experts.moe.cache.slots import SlotCache
from experts.moe.cache.weight_transfer import DeviceWeightTransfer, PinnedTier
from experts.moe.errors import ModelError
from experts.moe.gating import ExpertKey
from experts.moe.policy.eviction import LayeredLru
from experts.transfer import HostTransfer, StagedTransfer
from tests.experts.lanes import LateLane
from tests.experts.moe.cache.shelf import EXPERT_BYTES, Shelf, ShelfArch, number
from tests.experts.moe.model.streams import RandomStreams

ARCH = ShelfArch(layers=2, experts=8)


def a_device(folder: Path, seed: int, *, slots: int = 5, ram_experts: int = 3):
    shelf = Shelf(folder, ARCH)
    streams = RandomStreams(seed)
    tier = PinnedTier(shelf, ram_experts * EXPERT_BYTES, HostTransfer())
    carrier = DeviceWeightTransfer(shelf, StagedTransfer("cpu", LateLane), tier, streams)
    return SlotCache(shelf, slots * EXPERT_BYTES, LayeredLru(ARCH.layers), carrier), shelf, streams, tier


@pytest.mark.parametrize("seed", range(25))
def test_every_kernel_reads_its_own_expert_whatever_the_streams_do(tmp_path: Path, seed: int):
    cache, _, streams, _ = a_device(tmp_path, seed, ram_experts=2 + seed % 4)
    draw = random.Random(seed)
    read: list[tuple[int, int]] = []
    for _ in range(12):
        layer = draw.randrange(ARCH.layers)
        experts = draw.sample(range(ARCH.experts), draw.randint(1, 7))
        for expert, weights in cache.serve(layer, experts, ahead=draw.random() < 0.5):
            expected = 100 * layer + expert
            streams.launch(lambda weights=weights, expected=expected: read.append((expected, number(weights))))
            if draw.random() < 0.3:
                cache.prefetch([ExpertKey(1 - layer, draw.randrange(ARCH.experts))])
        if draw.random() < 0.3:
            cache.resize(draw.randint(1, 9) * EXPERT_BYTES)
    cache.quiesce()
    streams.finish()
    cache.check()
    assert read
    assert all(expected == actual for expected, actual in read)
    cache.close()


def test_host_memory_takes_the_expert_used_longest_ago_for_the_next(tmp_path: Path):
    cache, shelf, _, tier = a_device(tmp_path, 0, slots=1, ram_experts=2)
    for expert in (0, 1, 0, 2, 0):
        for _ in cache.serve(0, [expert], ahead=False):
            pass
    assert [key.expert for key in shelf.order] == [0, 1, 2]
    assert len(tier._pages) == 2
    cache.close()


def test_a_read_that_fails_leaves_no_page_that_counts_as_read(tmp_path: Path):
    cache, shelf, _, tier = a_device(tmp_path, 0)
    whole = shelf.file.read_bytes()
    shelf.file.write_bytes(whole[:100])
    with pytest.raises(ModelError, match=r"0\.1 cannot be read"):
        list(cache.serve(0, [1], ahead=False))
    assert not tier._pages
    shelf.file.write_bytes(whole)
    assert [expert for expert, _ in cache.serve(0, [1], ahead=False)] == [1]
    cache.close()
