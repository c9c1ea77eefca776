"""The files for Prometheus and Grafana, by Prometheus' own checker, against what a running line really tells."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests import ROOT
from tests.contract.client import RULES, Line, running

FILES = ROOT / "systemd" / "monitoring"
#: What a line has that has neither sensors, nor children, nor consumers: the family is told, without a series.
NAME = re.compile(r"\b(coserve_[a-z0-9_]+|process_[a-z0-9_]+)\b")
SUFFIXES = ("_bucket", "_count", "_sum")

pytestmark = pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool: make system-tools")


def promtool(*arguments: str, stdin: str | None = None) -> tuple[int, str]:
    done = subprocess.run(
        ["promtool", *arguments], input=stdin, capture_output=True, text=True, timeout=120, check=False
    )
    return done.returncode, done.stdout + done.stderr


@pytest.fixture(scope="module")
def line(tmp_path_factory: pytest.TempPathFactory, experts_folder: Path) -> Iterator[Line]:
    folder = tmp_path_factory.mktemp("monitored")
    with running(
        folder / "line", experts_folder, rules=RULES.replace("quick: {time_limit: 1500ms", "quick: {time_limit: 400ms")
    ) as line:
        work(line)
        yield line


def work(line: Line) -> None:
    """Verdicts of every kind, a board that closes, a duplicate, refusals, chains of two steps."""
    for number in range(12):
        line.send(board={"type": "free", "serial": f"S{number}"}, source=f"cam-{number}")
    line.send(component="V")
    line.send(component="F", board={"type": "named", "serial": "N1"}, designator="F1")
    line.send(deadline_ms=1)
    line.send(board={"type": "quick", "serial": "Q1"}, designator="P1")
    with line.peer() as peer:
        peer.ask(line.inspect(), b"no image")
        peer.ask(line.inspect(component="nothing", board={"type": "named", "serial": "N1"}), b"")
    line.boards("Q1")
    line.idle()


@pytest.fixture(scope="module")
def scrape(line: Line) -> str:
    return line.control("metrics")["text"]


@pytest.fixture(scope="module")
def families(scrape: str) -> dict[str, str]:
    """Return the type of each scraped metric; a histogram's series have their own names too."""
    types = dict(re.findall(r"^# TYPE (\S+) (\S+)$", scrape, re.MULTILINE))
    return types | {name + suffix: kind for name, kind in types.items() if kind == "histogram" for suffix in SUFFIXES}


def test_promtool_finds_nothing_to_say_about_a_real_scrape(scrape: str) -> None:
    assert promtool("check", "metrics", stdin=scrape) == (0, "")


def test_the_numbers_are_those_of_what_was_sent(scrape: str) -> None:
    def value(series: str) -> float:
        match = re.search(rf"^{re.escape(series)} (\S+)$", scrape, re.MULTILINE)
        assert match is not None, series
        return float(match[1])

    assert value("coserve_images_accepted_total") == 16
    assert value('coserve_intake_answers_total{type="accepted"}') == 16
    assert value('coserve_intake_rejects_total{code="bad_image"}') == 1
    assert value('coserve_intake_rejects_total{code="unknown_component"}') == 1
    assert value('coserve_verdicts_total{reason="",verdict="review"}') == 1
    assert value('coserve_verdicts_total{reason="",verdict="fail"}') == 1
    assert value('coserve_verdicts_total{reason="deadline",verdict="unknown"}') == 1
    assert value('coserve_boards_total{reason="time_limit",verdict="unknown"}') == 1
    assert value("coserve_acceptance_seconds_count") == 16
    assert value("coserve_verdict_latency_seconds_count") == 16
    assert value('coserve_stage_queued_seconds_count{architecture="yolo11n",device="cpu",step="1"}') == 1
    assert value('coserve_batch_images_sum{architecture="resnet18",device="cpu",step="0"}') == 15
    assert value('coserve_state{state="ready"}') == 1
    assert value("coserve_ready") == 1
    assert value("coserve_backlog_images") == 0
    assert value('coserve_expert_memory_budget_bytes{device="cpu"}') == 150e6
    assert 0 < value('coserve_expert_memory_used_bytes{device="cpu"}') <= 150e6
    assert value("coserve_last_seq") == 17
    assert value('coserve_disk_free_bytes{place="journal"}') > 0


def test_the_example_configuration_and_the_rules_are_as_promtool_wants_them() -> None:
    assert promtool("check", "config", str(FILES / "prometheus.yaml"))[0] == 0
    status, output = promtool("check", "rules", str(FILES / "coserve.rules.yaml"))
    assert status == 0, output
    assert "FAILED" not in output


@pytest.mark.promise("Access, pages and reviews", "Each alert is raised by its cause and by nothing else")
def test_each_alert_is_raised_by_what_it_is_for_and_by_nothing_else() -> None:
    status, output = promtool("test", "rules", str(FILES / "coserve.rules.test.yaml"))
    assert status == 0, output
    tests = yaml.safe_load((FILES / "coserve.rules.test.yaml").read_text(encoding="utf-8"))["tests"]
    raised = {(case["alertname"], bool(case["exp_alerts"])) for test in tests for case in test["alert_rule_test"]}
    assert raised == {(alert["alert"], is_raised) for alert in alerts() for is_raised in (True, False)}


def alerts() -> list[dict[str, Any]]:
    groups = yaml.safe_load((FILES / "coserve.rules.yaml").read_text(encoding="utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


def dashboard() -> dict[str, Any]:
    return json.loads((FILES / "grafana.json").read_text(encoding="utf-8"))


def expressions() -> list[tuple[str, str]]:
    panels = [
        (panel["title"], target["expr"]) for panel in dashboard()["panels"] for target in panel.get("targets", ())
    ]
    return panels + [(annotation["name"], annotation["expr"]) for annotation in dashboard()["annotations"]["list"]]


def test_every_expression_of_the_grafana_dashboard_is_one_and_asks_for_what_there_is(
    tmp_path: Path, families: dict[str, str]
) -> None:
    rules = [
        {"record": f"panel:{number}", "expr": text.replace("$__rate_interval", "1m").replace("$line", ".*")}
        for number, (_, text) in enumerate(expressions())
    ]
    file = tmp_path / "panels.yaml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}), encoding="utf-8")
    status, output = promtool("check", "rules", str(file))
    assert status == 0, output
    for title, text in expressions():
        assert "$" not in text.replace("$__rate_interval", "").replace("$line", ""), title
        names = set(NAME.findall(text))
        assert names, title
        assert names <= set(families), title
