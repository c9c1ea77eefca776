"""Counters are told even where the line cannot be looked at."""

from daemon.monitor.metrics import Gauges, Metrics


def test_a_look_that_fails_costs_the_gauges_and_no_counter() -> None:
    metrics = Metrics()

    def look() -> dict[str, object]:
        raise RuntimeError("the line is just beginning")

    metrics.registry.register(Gauges(look))
    metrics.reviewed("fail")
    assert 'coserve_reviews_total{verdict="fail"} 1.0' in metrics.exposition()
