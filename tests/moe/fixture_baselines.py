"""The baselines on the trained fixture at equal slots: fetches that computing waited for, and what overlapping saves.

make test-moe, or: .venv/bin/python -m pytest -q -s tests/moe/fixture_baselines.py
"""

from pathlib import Path

import pytest

from tools.moe.evaluate import DecodeTiming, decode_timing, held_out_prompts, open_runtime

FIXTURE = Path("build/moe/fixture")
MODES = ["ondemand", "lookahead", "popularity", "prune"]


def measure(mode: str, share: float, link_ms: float | None) -> DecodeTiming:
    prompts = held_out_prompts(FIXTURE, of_domain=1, length=64)
    runtime = open_runtime(FIXTURE, mode, share=share, link_ms=link_ms)
    try:
        timing = decode_timing(runtime, prompts, new_tokens=24)
        runtime.cache.check()
    finally:
        runtime.close()
    return timing


@pytest.mark.parametrize("share", [0.5, 0.25])
def test_looking_ahead_waits_for_fewer_experts_than_loading_on_demand(share: float):
    found = {mode: measure(mode, share, None) for mode in MODES}
    print(f"\n{share} of each layer's experts: decode")
    for mode, timing in found.items():
        counts = timing.decode
        print(
            f"  {mode:10} hits {counts.hit_rate:.3f}, fetches {counts.fetches} (waited for {counts.blocking},"
            f" in time {counts.overlapped}, unused {counts.unused})"
        )
    for mode in ("ondemand", "popularity"):
        counts = found[mode].decode
        assert counts.blocking == counts.misses == counts.fetches
    assert found["prune"].decode.fetches == 0
    assert found["lookahead"].decode.misses < 0.8 * found["ondemand"].decode.misses


def test_waiting_is_measured_where_it_happens():
    """Behind a link of 2 ms an expert, on demand all of a transfer is waiting; with the next one on its way, less."""
    found = {mode: measure(mode, 0.5, 2.0) for mode in ("ondemand", "lookahead", "prune")}
    print("\nlink of 2 ms an expert, half of each layer's experts: decode")
    for mode, timing in found.items():
        counts, table = timing.decode, timing.as_dict()
        print(
            f"  {mode:10} waited {counts.wait_s:.3f} s for {counts.transfer_s:.3f} s of transfers,"
            f" TPOT p50 {table['tpot_p50_ms']:.1f} ms, p95 {table['tpot_p95_ms']:.1f} ms"
        )
    on_demand = found["ondemand"].decode
    assert on_demand.wait_s >= on_demand.transfer_s >= 0.002 * on_demand.fetches
    assert found["prune"].decode.wait_s == 0
