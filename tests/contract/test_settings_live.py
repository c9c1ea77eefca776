"""A temperature is changed in the catalog and read again: every answer says with which settings it was given."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.contract.client import Line
from tests.lines import a_jpeg
from tests.tools.run_commands import coserve

#: A simulated classifier is .9 sure at the temperature 1, and less at a higher one.
RULES = """\
boards:
  one: {components: {P: [P1]}}
classifiers:
  P: {expert: R0402, pass: [ok, odd, bad], review_below: 0.88}
"""


def judged(line: Line, serial: str) -> dict[str, Any]:
    board = {"type": "one", "serial": serial, "lot": "L1"}
    return line.result(line.send(a_jpeg(1), board=board, designator="P1"))


@pytest.mark.promise(
    "Versions of experts",
    "Every answer names the settings that gave it, such as the temperature, and a change of them is named by "
    "`reload`, log, `explain`, `export` and `experts show`",
)
def test_a_changed_temperature_is_named_by_every_row_message_and_command(tmp_path: Path, experts_folder: Path):
    line = Line(tmp_path / "line", experts_folder, RULES)
    with line.service():
        with line.listener("inspection/") as listener:
            line.wait(lambda: line.status()["state"] == "ready")
            before = judged(line, "S1")
            reload = coserve("reload", "--config", line.config)
            assert "R0402" not in reload.stdout
            line.change_entry("R0402", temperature=1.3)
            answer = line.control("reload")
            after = judged(line, "S2")
            live = [listener.take()[1] for _ in range(2)]
        (then,), (now,) = before["stages"], after["stages"]
        assert (before["verdict"], after["verdict"]) == ("pass", "review")
        assert then["version"] == now["version"]
        assert then["settings"] != now["settings"]
        assert [message["stages"][0]["settings"] for message in live] == [then["settings"], now["settings"]]
        (change,) = answer["changed_experts"]
        assert change == {
            "expert": "R0402",
            "version": now["version"],
            "settings": now["settings"],
            "what": "temperature 1.0 → 1.3",
        }
        logged = next(text for text in line.log().splitlines() if "expert_changed" in text)
        assert "expert=R0402" in logged
        assert "temperature 1.0 → 1.3" in logged
        assert now["settings"] in logged
        served = next(row for row in line.control("experts")["experts"] if row["expert"] == "R0402")
        assert (served["version"], served["settings"]) == (now["version"], now["settings"])
        line.change_entry("R0402", temperature=1.2)
        assert "R0402" in (told := coserve("reload", "--config", line.config).stdout)
        assert "temperature 1.3 → 1.2" in told
        _not_reloaded(line)
        line.change_entry("R0402", temperature=1.3)
        line.control("reload")
        _listed(line, then, now)
    stages = line.rows("SELECT expert_settings FROM stages ORDER BY inspection_id")
    assert stages == [(then["settings"],), (now["settings"],)]
    texts = line.rows("SELECT expert_settings, settings FROM expert_settings ORDER BY first_used_at")
    assert [digest for digest, _ in texts] == [hashlib.sha256(text.encode()).hexdigest()[:12] for _, text in texts]
    assert [json.loads(text)["temperature"] for _, text in texts] == [1.0, 1.3]
    reloads = line.rows("SELECT old, new, note FROM changes WHERE what = 'reload' AND subject = 'settings of R0402'")
    assert reloads[0] == (then["settings"], now["settings"], "temperature 1.0 → 1.3")
    _explained(line, then["settings"], now["settings"])
    _exported(line, tmp_path / "package", {then["settings"]: 1.0, now["settings"]: 1.3})
    filtered = coserve("results", "--expert-settings", then["settings"], "--json", "--config", line.config)
    assert [row["serial"] for row in json.loads(filtered.stdout)] == ["S1"]


def _not_reloaded(line: Line) -> None:
    """A reload that changes nothing says that its note is not kept; one of another file is refused."""
    told = coserve("reload", "--note", "audit", "--config", line.config).stdout
    assert "without a change the note is not kept" in told
    copy = line.folder / "other.yaml"
    copy.write_bytes(line.config.read_bytes())
    refused = coserve("reload", "--config", copy, status=1).stderr
    assert f"was started with {line.config.resolve()}, not {copy}" in refused


def _listed(line: Line, then: dict[str, Any], now: dict[str, Any]) -> None:
    """The commands about experts list the version once with each of its settings."""
    shown = json.loads(coserve("experts", "show", "R0402", "--json", "--config", line.config).stdout)
    assert shown["settings"] == now["settings"] == shown["serving"]["settings"]
    rows = {row["settings"]: row for row in shown["versions"] if row["verdicts"]}
    assert {digest: row["verdicts"] for digest, row in rows.items()} == {then["settings"]: 1, now["settings"]: 1}
    assert [rows[each["settings"]]["state"] for each in (then, now)] == ["kept", "in force"]
    assert rows[then["settings"]]["differs"] == ["temperature 1.0 → 1.3"]


def _explained(line: Line, then: str, now: str) -> None:
    """The settings are those of the answer, not today's; only where both are the same it is said."""
    words = coserve("explain", "S1", "P1", "--config", line.config).stdout
    assert "with other settings (then → today): temperature 1.0 → 1.3" in words
    assert f"settings {then}: input_size 64, temperature 1.0" in words
    assert "with the same settings" not in words
    words = coserve("explain", "S2", "P1", "--config", line.config).stdout
    assert "it is in force today, with the same settings" in words
    assert f"settings {now}: input_size 64, temperature 1.3" in words


def _exported(line: Line, package: Path, temperatures: dict[str, float]) -> None:
    """Beside the answers stands the temperature that gave them."""
    coserve("export", "--lot", "L1", "--out", package, "--with-weights", "--config", line.config)
    rows = [json.loads(text) for text in (package / "rows" / "stages.jsonl").read_text(encoding="utf-8").splitlines()]
    texts = (package / "rows" / "expert_settings.jsonl").read_text(encoding="utf-8").splitlines()
    settings = {row["expert_settings"]: json.loads(row["settings"]) for row in map(json.loads, texts)}
    assert {digest: values["temperature"] for digest, values in settings.items()} == temperatures
    catalog = yaml.safe_load((package / "experts" / "catalog.yaml").read_text(encoding="utf-8"))["experts"]
    for row in rows:
        entry = catalog[f"R0402 {row['expert_version']}+{row['expert_settings']}"]
        assert entry["temperature"] == temperatures[row["expert_settings"]]
        assert (package / "experts" / entry["file"]).is_file()
