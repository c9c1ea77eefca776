"""Quotas of one source: limits of each second, answered before an image waits, and changed while the line runs."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from daemon.policy.quota import QuotaLimits, Quotas
from tests.contract.peer import Peer
from tests.daemon.wire.wire_parts import a_line, a_png, an_inspect

PNG = a_png()


def test_without_limits_nothing_waits_and_nothing_is_remembered() -> None:
    quotas = Quotas(QuotaLimits())
    for number in range(1000):
        assert quotas.wait_s("a", 10**9, 0.0) == 0
        quotas.spend(f"a{number}", 10**9, 0.0)
    assert len(quotas) == 0


def test_a_second_s_worth_may_come_at_once_and_then_each_waits_for_its_own_moment() -> None:
    quotas = Quotas(QuotaLimits(images_per_s=10))
    for _ in range(10):
        assert quotas.wait_s("a", 1, 5.0) == 0
        quotas.spend("a", 1, 5.0)
    assert quotas.wait_s("a", 1, 5.0) == pytest.approx(0.1)
    assert quotas.wait_s("b", 1, 5.0) == 0
    assert quotas.wait_s("a", 1, 5.11) == 0
    assert quotas.wait_s("a", 1, 60.0) == 0


def test_an_image_larger_than_a_second_s_bytes_needs_a_full_bucket_and_leaves_a_debt() -> None:
    quotas = Quotas(QuotaLimits(bytes_per_s=1000))
    assert quotas.wait_s("a", 5000, 0.0) == 0
    quotas.spend("a", 5000, 0.0)
    assert quotas.wait_s("a", 1, 0.0) == pytest.approx(4.0, abs=0.01)
    assert quotas.wait_s("a", 5000, 0.0) == pytest.approx(5.0)
    assert quotas.wait_s("a", 5000, 5.01) == 0


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(1, 3000), st.floats(0, 0.5)), max_size=60))
def test_in_any_stretch_no_source_gets_more_than_its_rate_and_one_burst(arrivals: list[tuple[str, int, float]]) -> None:
    quotas = Quotas(QuotaLimits(images_per_s=5, bytes_per_s=2000))
    now_s = 0.0
    taken: dict[str, list[int]] = {"a": [], "b": []}
    for source, size_bytes, later_s in arrivals:
        now_s += later_s
        if quotas.wait_s(source, size_bytes, now_s) == 0:
            quotas.spend(source, size_bytes, now_s)
            taken[source].append(size_bytes)
    for sizes in taken.values():
        assert len(sizes) <= 5 * (now_s + 1) + 1
        assert sum(sizes[:-1]) <= 2000 * (now_s + 1) + 3000


def test_who_invents_sources_shares_one_bucket_once_too_many_are_known() -> None:
    quotas = Quotas(QuotaLimits(images_per_s=1))
    for number in range(4096):
        quotas.spend(f"known-{number}", 1, 0.0)
    taken = 0
    for number in range(50):
        if quotas.wait_s(f"invented-{number}", 1, 0.0) == 0:
            quotas.spend(f"invented-{number}", 1, 0.0)
            taken += 1
    assert taken == 1
    assert len(quotas) <= 4097
    quotas.spend("after a rest", 1, 10.0)
    assert len(quotas) < 4097


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The time by which images are counted: it stands still until a test moves `now_s`."""
    time = SimpleNamespace(now_s=100.0, monotonic=lambda: time.now_s)
    monkeypatch.setattr("daemon.intake.backlog.time", time)
    return time


def test_a_source_beyond_its_quota_hears_busy_with_the_right_wait_and_others_do_not(
    tmp_path: Path, clock: SimpleNamespace
) -> None:
    with a_line(tmp_path, quota=QuotaLimits(images_per_s=2)) as line, Peer(line.tcp) as peer:
        answers = [peer.ask(an_inspect(f"i{n}"), PNG) for n in range(3)]
        assert [answer["type"] for answer in answers] == ["accepted", "accepted", "busy"]
        assert answers[2]["retry_after_ms"] == 500
        assert "quota" in answers[2]["reason"]
        assert peer.ask(an_inspect("o", source="cam-2"), PNG)["type"] == "accepted"
        assert peer.ask(an_inspect("i0"), PNG)["type"] == "duplicate"
        clock.now_s += 0.25
        assert peer.ask(an_inspect("i2"), PNG)["retry_after_ms"] == 250
        clock.now_s += 0.25
        assert peer.ask(an_inspect("i2"), PNG)["type"] == "accepted"


def test_quotas_change_while_the_line_runs(tmp_path: Path, clock: SimpleNamespace) -> None:
    with a_line(tmp_path) as line, Peer(line.tcp) as peer:
        assert {peer.ask(an_inspect(f"i{n}"), PNG)["type"] for n in range(20)} == {"accepted"}
        line.admission.quotas = Quotas(QuotaLimits(bytes_per_s=len(PNG)))
        assert [peer.ask(an_inspect(f"j{n}"), PNG)["type"] for n in range(2)] == ["accepted", "busy"]
        line.admission.quotas = Quotas(QuotaLimits())
        assert {peer.ask(an_inspect(f"k{n}"), PNG)["type"] for n in range(20)} == {"accepted"}
