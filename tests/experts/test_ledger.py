import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from experts.ledger import Ledger, LedgerError
from experts.spec import ExpertId
from tests.daemon.policy.books import check_ledger

NAMES = [ExpertId(name) for name in "abcdefgh"]


def a_ledger(*resident: tuple[str, int], budget_bytes: int = 100) -> Ledger:
    ledger = Ledger("cpu", budget_bytes)
    for name, size_bytes in resident:
        ledger.begin_load(ExpertId(name), size_bytes)
        ledger.finish_load(ExpertId(name))
    return ledger


def test_a_small_victim_is_spared_when_a_later_one_frees_enough_alone():
    ledger = a_ledger(("small", 10), ("big", 90))
    assert ledger.plan_room(80, [ExpertId("small"), ExpertId("big")]) == ("big",)


def test_pinned_and_busy_experts_are_never_planned_for_eviction():
    ledger = a_ledger(("pinned", 50), ("busy", 50))
    ledger.pin(ExpertId("pinned"))
    ledger.use(ExpertId("busy"))
    assert ledger.plan_room(10, ledger.resident) is None
    assert ledger.plan_room(10, ledger.resident, when_idle=True) == ("busy",)


def test_a_loading_expert_owns_its_bytes_but_cannot_run_or_be_evicted():
    ledger = a_ledger()
    ledger.begin_load(ExpertId("a"), 70)
    assert ledger.free_bytes == 30
    assert not ledger.is_ready(ExpertId("a"))
    with pytest.raises(LedgerError, match="cannot run"):
        ledger.use(ExpertId("a"))
    with pytest.raises(LedgerError, match="cannot be evicted"):
        ledger.evict(ExpertId("a"))


class LedgerMachine(RuleBasedStateMachine):
    """Any order of planned steps keeps the account whole, and pinned or busy experts stay."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger("cpu", 100)

    @rule(expert=st.sampled_from(NAMES), size_bytes=st.integers(0, 120))
    def load(self, expert: ExpertId, size_bytes: int) -> None:
        if self.ledger.holds(expert):
            return
        busy = [known for known in self.ledger.resident if not self.ledger.is_evictable(known)]
        plan = self.ledger.plan_room(size_bytes, self.ledger.resident)
        if plan is None:
            evictable = sum(self.ledger.bytes_of(known) for known in self.ledger.resident if known not in busy)
            assert self.ledger.free_bytes + evictable < size_bytes
            return
        self.ledger.begin_load(expert, size_bytes, plan)
        assert all(self.ledger.is_ready(known) for known in busy)

    @precondition(lambda self: self.ledger.loading)
    @rule(data=st.data(), succeeds=st.booleans())
    def end_load(self, data: st.DataObject, succeeds: bool) -> None:
        expert = data.draw(st.sampled_from(self.ledger.loading))
        (self.ledger.finish_load if succeeds else self.ledger.abandon_load)(expert)

    @precondition(lambda self: self.ledger.resident)
    @rule(data=st.data(), use=st.booleans())
    def use_or_release(self, data: st.DataObject, use: bool) -> None:
        expert = data.draw(st.sampled_from(self.ledger.resident))
        if use:
            self.ledger.use(expert)
        elif self.ledger.users(expert):
            self.ledger.release(expert)

    @rule(expert=st.sampled_from(NAMES), pin=st.booleans())
    def pin_or_unpin(self, expert: ExpertId, pin: bool) -> None:
        (self.ledger.pin if pin else self.ledger.unpin)(expert)

    @rule(budget_bytes=st.integers(0, 200))
    def resize(self, budget_bytes: int) -> None:
        if budget_bytes >= self.ledger.used_bytes:
            self.ledger.set_budget(budget_bytes)

    @invariant()
    def the_account_adds_up(self) -> None:
        check_ledger(self.ledger)
        assert len(self.ledger.resident) + len(self.ledger.loading) == sum(map(self.ledger.holds, NAMES))


TestLedgerMachine = LedgerMachine.TestCase
TestLedgerMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
