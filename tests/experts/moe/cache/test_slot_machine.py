"""Property test of the slot cache: whatever is served, prefetched and resized, the books hold and every load ends."""

import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from experts.moe.cache.slots import SlotCache
from experts.moe.cache.weight_transfer import WeightTransfer
from experts.moe.errors import ModelError
from experts.moe.gating import ExpertKey
from experts.moe.policy.eviction import KeepChosen, LayeredLru
from experts.transfer import transfer_for
from tests.experts.moe.cache.shelf import EXPERT_BYTES, Shelf, ShelfArch, number

ARCH = ShelfArch(layers=2, experts=6)
LAYERS = st.integers(0, ARCH.layers - 1)
EXPERTS = st.lists(st.integers(0, ARCH.experts - 1), min_size=1, unique=True)
BUDGETS = st.integers(EXPERT_BYTES, 14 * EXPERT_BYTES)


class SlotMachine(RuleBasedStateMachine):
    """Between two experts of a layer that is being served, everything else may happen.

    Rules ask for themselves whether a layer is being served: a layer ends early where a load fails, which is a
    matter of time, and Hypothesis must draw the same in each run.
    """

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.shelf = Shelf(Path(self.folder.name), ARCH)
        self.whole = self.shelf.file.read_bytes()
        self.serving = None
        self.yielded = None
        self.was_cut = False

    @initialize(budget=BUDGETS, popular=st.booleans())
    def open(self, budget: int, popular: bool) -> None:
        policy = KeepChosen() if popular else LayeredLru(ARCH.layers)
        policy.chosen = frozenset((layer, expert) for layer in range(ARCH.layers) for expert in range(3))
        self.cache = SlotCache(self.shelf, budget, policy, WeightTransfer(self.shelf, transfer_for("cpu")))

    @rule(layer=LAYERS, experts=EXPERTS, ahead=st.booleans())
    def begin_layer(self, layer: int, experts: list[int], ahead: bool) -> None:
        if self.serving is not None:
            return
        self.left = sorted(experts)
        self.layer = layer
        self.serving = self.cache.serve(layer, experts, ahead=ahead)
        self.next_expert()

    @rule()
    def next_expert(self) -> None:
        if self.serving is None:
            return
        try:
            expert, weights = next(self.serving)
        except StopIteration:
            assert not self.left
            self.serving = self.yielded = None
        except ModelError:
            assert self.was_cut
            self.serving = self.yielded = None
        else:
            assert expert == self.left.pop(0)
            self.yielded = (100 * self.layer + expert, weights)

    @rule()
    def break_off(self) -> None:
        if self.serving is None:
            return
        self.serving.close()
        self.serving = self.yielded = None

    @rule(layer=LAYERS, experts=EXPERTS)
    def prefetch(self, layer: int, experts: list[int]) -> None:
        self.cache.prefetch([ExpertKey(layer, expert) for expert in experts])

    @rule(layer=LAYERS)
    def cancel(self, layer: int) -> None:
        self.cache.cancel(layer)

    @rule(layer=LAYERS, guard=st.booleans())
    def look(self, layer: int, guard: bool) -> None:
        residents = self.cache.resident(layer, guard=guard)
        assert list(residents) == sorted(set(residents))

    @rule(budget=BUDGETS)
    def resize_between_layers(self, budget: int) -> None:
        if self.serving is not None:
            return
        self.cache.begin_step()
        self.cache.resize(budget)
        assert self.cache.allocated_bytes <= budget

    @rule(experts=st.integers(0, ARCH.layers * ARCH.experts))
    def cut_the_file(self, experts: int) -> None:
        self.was_cut = True
        self.replace_file(self.whole[: experts * EXPERT_BYTES])

    @rule()
    def restore_the_file(self) -> None:
        self.replace_file(self.whole)

    def replace_file(self, content: bytes) -> None:
        """At once: a load that is under way finds the one or the other, and never a file that is being written."""
        copy = self.shelf.file.with_suffix(".other")
        copy.write_bytes(content)
        copy.replace(self.shelf.file)

    @rule()
    def wait_for_loads(self) -> None:
        """Every prefetch ends: loaded, refused, withdrawn or failed."""
        if self.serving is not None:
            return
        self.cache.begin_step()
        self.cache.quiesce()
        assert self.cache.pending() == ()

    @invariant()
    def the_books_hold(self) -> None:
        self.cache.check()

    @invariant()
    def what_runs_is_there(self) -> None:
        if self.yielded is not None:
            expected, weights = self.yielded
            assert number(weights) == expected

    def teardown(self) -> None:
        if self.serving is not None:
            self.serving.close()
        self.cache.close()
        self.folder.cleanup()


TestSlotMachine = SlotMachine.TestCase
TestSlotMachine.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
